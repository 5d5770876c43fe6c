"""What all commands share: how words are read, what is said when something cannot be, and the exit status.

The status is 0 if all is well, 1 if the answer is no, 2 if there is no answer. Answers go to standard output, everything else to
standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
    """A command's words as its dataclass. tyro ends the process for ``--help`` (status 0) and for unknown words (2)."""
    return tyro.cli(kind, args=list(argv), prog=f"onecard {name}", use_underscores=True)


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
