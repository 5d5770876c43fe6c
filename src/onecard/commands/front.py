"""What all commands share: how words are read, what is said when something cannot be, and the exit status.

The status is 0 if all is well, 1 if the answer is no, 2 if there is no answer. Answers go to standard output, everything else to
standard error.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import tyro

from onecard.comm.base.record import _NOT_USERS
from onecard.errors import OnecardError, PlanError, ProofError
from onecard.launch.rehearsal.rehearse import RehearsalError

FINE, NO, CANNOT = 0, 1, 2
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
"""An option without a value and without a ``--no_`` form."""
Kind = TypeVar("Kind")
_TORCHS_OWN = ("_subclasses", "_ops.py", "_stats.py", "_python_dispatch.py", "overrides.py")
"""Parts of torch that are on the stack only because a program runs without devices."""


def parsed(kind: type[Kind], argv: Sequence[str], name: str) -> Kind:
    """A command's words as its dataclass. The process ends for ``--help`` (status 0) and for words that cannot be (2).

    tyro says what is wrong in a box of several lines; here it is one line, as all that commands refuse.
    """
    written = io.StringIO()
    try:
        with redirect_stderr(written):
            return tyro.cli(kind, args=list(argv), prog=f"onecard {name}", use_underscores=True)
    except SystemExit as end:
        if end.code != CANNOT:
            sys.stderr.write(written.getvalue())
            raise
        why = no_number(kind, argv) or in_a_line(written.getvalue()).rstrip(".")
        raise SystemExit(refuse(name, f"{why}. All options: onecard {name} --help")) from None


def no_number(kind: Any, argv: Sequence[str]) -> str:
    """The option that wants a number and has none; "" where there is no such option.

    >>> from onecard.commands.prove import Asked
    >>> no_number(Asked, ["train.py", "--world", "two"]), no_number(Asked, ["train.py", "--world", "2"])
    ('--world two: want a whole number', '')
    """
    words, wanted = [part for word in argv for part in word.split("=", 1)], _numbers(kind)
    for word, value in pairwise(words):
        number = wanted.get(word.removeprefix("--").replace("-", "_")) if word.startswith("--") else None
        if number is not None:
            try:
                number(value)
            except ValueError:
                return f"{word} {value}: want a {'whole ' * (number is int)}number"
    return ""


def _numbers(kind: Any) -> dict[str, type]:
    """The options of a command that are one number, with its type."""
    found: dict[str, type] = {}
    for name, hint in get_type_hints(kind).items():
        types = {*get_args(hint)} - {type(None)} or {hint}
        if len(types) == 1 and (one := types.pop()) in (int, float):
            found[name] = one
        elif is_dataclass(hint):
            found |= _numbers(hint)
    return found


def in_a_line(box: str) -> str:
    """What tyro says in a box: without the frame, the title, and what --help says better.

    >>> in_a_line("Unrecognized\\n ------\\n  Unrecognized options: a,\\n  b\\n ------\\n  For full helptext, run x --help\\n")
    'unrecognized options: a, b'
    """
    parts: list[list[str]] = [[]]
    for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines():
        text = line.strip(" │")
        if text.startswith("╭") or not text.strip("─-╰╯"):  # a frame, with the title or without; a rule
            parts.append([])
        else:
            parts[-1].append(text)
    said = (" ".join(part) for part in parts[1:] if part)
    text = "; ".join(
        part.replace("Perhaps you meant:", "perhaps")
        for part in said
        if not part.startswith(("For full helptext", "Argument helptext"))
    )
    return (text[:1].lower() + text[1:]) or " ".join(box.split())


def answered(name: str, act: Callable[[], int]) -> int:
    """The exit status of a command; what it raises is said, a script's own error with the script's own traceback.

    Example:
        >>> answered("simulate", lambda: 0)
        0
    """
    try:
        return act()
    except (RehearsalError, ProofError) as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, OnecardError):
            sys.stderr.write(scripts_traceback(error.__cause__))
        return refuse(name, error)
    except (OnecardError, ImportError) as error:
        return refuse(name, error)
    except OSError as error:
        return refuse(name, f"{error.filename}: {error.strerror}" if error.filename else error)


def refuse(name: str, why: object) -> int:
    """Says what cannot be; the exit status for it."""
    print(f"onecard {name}: {why}", file=sys.stderr)
    return CANNOT


def divided(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our words, and those behind ``--``, which are the script's.

    >>> divided(["train.py", "--world", "8", "--", "--lr", "1"])
    (['train.py', '--world', '8'], ['--lr', '1'])
    """
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def check_script(script: Path) -> None:
    """
    Raises:
        PlanError: it is no file.
    """
    if not script.is_file():
        kind = "is a folder, not a script" if script.is_dir() else "does not exist"
        raise PlanError(f"{script} {kind}; looked in {os.getcwd()}")


def check_rank(world: int, rank: int) -> None:
    """
    Raises:
        PlanError: there is no such rank.
    """
    if world < 1:
        raise PlanError(f"--world {world}: want a number from 1")
    if not 0 <= rank < world:
        raise PlanError(f"--rank {rank} of --world {world}: ranks go from 0 below it")


def check_output(option: str, path: Path | None) -> None:
    """Whether a file can be written there; asked before anything runs that takes long.

    Raises:
        PlanError: there is no such folder, or it is one.
    """
    if path is not None and not path.parent.is_dir():
        raise PlanError(f"--{option} {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise PlanError(f"--{option} {path} is a folder; name a file in it")


def check_least(least: int, **given: float | None) -> None:
    """
    Raises:
        PlanError: an option's number is below ``least``.
    """
    for name, number in given.items():
        if number is not None and number < least:
            raise PlanError(f"--{name} {number:g}: want {least} or more")


def print_json(data: Any) -> None:
    """An answer for programs."""
    print(json.dumps(data, indent=1))


def scripts_traceback(fault: BaseException) -> str:
    """A traceback as Python would print it, had the script run by itself."""
    text = traceback.TracebackException.from_exception(fault)
    each: traceback.TracebackException | None = text
    while each is not None:
        each.stack = traceback.StackSummary.from_list([frame for frame in each.stack if not _ours(frame.filename)])
        each = each.__cause__ or each.__context__
    return "".join(text.format())


def _ours(file: str) -> bool:
    if "runpy" in file:
        return True
    parts = Path(file).parts
    return file.startswith(_NOT_USERS) and ("torch" not in parts or any(part in _TORCHS_OWN for part in parts))
