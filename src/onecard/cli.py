"""The command `onecard`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, metadata

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("onecard.commands.run", "run a training script on several ranks; --auto: one written for one card"),
    "audit": ("onecard.commands.audit", "read another library's configuration: what is wrong with it, what it takes"),
    "simulate": ("onecard.commands.simulate", "what a step of a job takes, from a model's sizes and a plan"),
    "prove": (
        "onecard.commands.prove",
        "whether a program computes on several ranks what it does on one card, and where not",
    ),
    "estimate": ("onecard.commands.estimate", "what a step of an unchanged program takes, run without devices"),
}
"""For each the module whose ``main`` takes its arguments and gives the exit status: loaded when it is called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit status.

    >>> main(["--help"])  # doctest: +ELLIPSIS
    usage: onecard COMMAND ...
    ...
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"onecard {_version()}")
        return 0
    if arguments[0] not in COMMANDS:
        print(f"onecard: there is no command {arguments[0]!r}\n{_help()}", file=sys.stderr)
        return 2
    return int(import_module(COMMANDS[arguments[0]][0]).main(arguments[1:]))


def _help() -> str:
    commands = "\n".join(f"  {name:<9} {about}" for name, (_, about) in COMMANDS.items())
    return (
        "usage: onecard COMMAND ...\n\nTrain on any mesh what was written for one card.\n\n"
        f"commands:\n{commands}\n\noptions:\n  --help     show this; `onecard COMMAND --help` for a command\n"
        "  --version  show the version"
    )


def _version() -> str:
    try:
        return metadata.version("onecard")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"
