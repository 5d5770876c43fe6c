"""The command `onecard`."""

from __future__ import annotations

import atexit
import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

from onecard.commands.listed import COMMANDS, GROUPS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns the exit status: 0 all is well, 1 the answer is no, 2 there is no answer.

    >>> main(["--help"])  # doctest: +ELLIPSIS
    usage: onecard COMMAND ...
    ...
    0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:  # as of git, cargo, pip
        arguments = [*arguments[1:2], "--help"]
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


def process() -> None:
    """The command as a process of its own, which ends with its exit status."""
    ended = list[int]()
    atexit.register(_leave, ended)  # the first to be registered is the last to run
    ended.append(main())
    sys.exit(ended[0])


def _leave(ended: Sequence[int]) -> None:
    """A script that runs on pretended devices leaves torch a thread for each of them. One that only begins while Python takes the
    process down ends in an abort (torch 2.15: "Invalid thread pool"): so the process is left as it is.
    """
    if ended and "onecard.launch.rehearsal.stage" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended[0])


_OF_OTHERS = ("train", "launch", "torchrun", "start", "exec")


def _unknown(word: str) -> str:
    """What is said of a word that is no command, with the nearest that is one.

    >>> _unknown("estimat")
    "there is no command 'estimat'; did you mean estimate? All of them: onecard --help"
    """
    near = difflib.get_close_matches(word, [*COMMANDS, *_OF_OTHERS], 1, 0.6)
    near = ["run" if name in _OF_OTHERS else name for name in near]
    if word.endswith(".py"):
        return f"there is no command {word!r}; to run a script: onecard run {word}"
    meant = f"; did you mean {near[0]}?" if near else "."
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
