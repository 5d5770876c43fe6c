"""The command `onecard`."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

GROUPS: dict[str, dict[str, str]] = {
    "train": {
        "run": "run a training script on several ranks; --auto: one written for one card",
    },
    "before it runs": {
        "plan": "the best way to run a program or a model on so many ranks, and why not the others",
        "estimate": "what a step of an unchanged program takes, run without devices",
        "explain": "every message of a program's step, with the line that needs it; --forbid: a check",
        "simulate": "what a step of a job takes, from a model's sizes and a plan",
        "prove": "whether a program computes on several ranks what it does on one card, and where not",
        "draw": "a program's step, or a pipeline's schedule, as a picture",
    },
    "beside it": {
        "audit": "read another library's configuration: what is wrong with it, what it takes",
        "convert": "checkpoints from and to other formats",
        "doctor": "what this machine can do, what is slow or broken, and the repair",
        "completion": "the words of these commands for your shell's Tab key",
    },
}
"""Each command with what it is for; its module is ``onecard.commands.NAME``, loaded when it is called."""

COMMANDS: dict[str, str] = {name: about for group in GROUPS.values() for name, about in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit status: 0 all is well, 1 the answer is no, 2 there is no answer.

    >>> main(["--help"])  # doctest: +ELLIPSIS
    usage: onecard COMMAND ...
    ...
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in ([], ["-h"], ["--help"]):
        print(help_text())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"onecard {_version()}")
        return 0
    if arguments[0] not in COMMANDS:
        print(f"onecard: {_unknown(arguments[0])}", file=sys.stderr)
        return 2
    try:
        return int(import_module(f"onecard.commands.{arguments[0]}").main(arguments[1:]))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe has gone, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141


def _unknown(word: str) -> str:
    """What is said of a word that is no command, with the nearest that is one.

    >>> _unknown("estimat")
    "there is no command 'estimat'; did you mean estimate? All of them: onecard --help"
    """
    near = difflib.get_close_matches(word, COMMANDS, 2, 0.6)
    if word.endswith(".py"):
        return f"there is no command {word!r}; to run a script: onecard run {word}"
    meant = f"; did you mean {' or '.join(near)}?" if near else "."
    return f"there is no command {word!r}{meant} All of them: onecard --help"


def help_text() -> str:
    """What ``onecard --help`` prints."""
    groups = "\n\n".join(
        f"{title}:\n" + "\n".join(f"  {name:<10} {about}" for name, about in group.items())
        for title, group in GROUPS.items()
    )
    return (
        "usage: onecard COMMAND ...\n\nTrain on any mesh what was written for one card.\n\n"
        f"{groups}\n\noptions:\n  --help     show this; `onecard COMMAND --help` for a command\n"
        "  --version  show the version\n\nexit status: 0 all is well, 1 the answer is no, 2 there is no answer"
    )


def _version() -> str:
    try:
        return metadata.version("onecard")
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"
