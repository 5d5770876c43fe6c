"""Whether this Python tells what a program looks up: its instructions and the order of a trace change with each version.

A few lookups of each kind are run once in a process, and looked for among what was noted. Where one is not found, a recording
would believe a value for ever; so there are none.
"""

from __future__ import annotations

import functools
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

from onecard.errors import RecordingError
from onecard.static.guards.ran import Ran

_PROGRAM = Path(__file__).with_name("probe_program.py")
WANTED = frozenset(
    (
        "SCALE",
        "CELL",
        "CELL.by",
        "CELL.inner",
        "CELL.inner[0]",
        "ITEMS['key']",
        "ITEMS['counted']",
        "CAPTURED",
        "captured",
    )
    + (
        "captured.by",
        "CELL.method",
        "super().of_base",
        "self.of_class",
        "flag.by",
        "FLAGS",
        "helper",
        "MORE",
        "CELL.compared",
    )
    + ("CELL.matched", "CELL.named")
)


@functools.lru_cache(maxsize=1)
def unseen() -> frozenset[str]:
    """Lookups that this Python makes and that were not noted; none where recordings can be believed."""
    loader = SourceFileLoader("onecards_probe", str(_PROGRAM))  # under a name that is none of ours, as a program's own
    program = types.ModuleType(loader.name)
    loader.exec_module(program)
    step = program.step
    functions = [x for x in vars(program).values() if isinstance(x, types.FunctionType)]
    ran = Ran(step, (), lambda tensor: False, lambda root: None, functions)
    with ran.watching():
        step()
    return WANTED - {guard.name for guard in ran.seen.guards}


def check() -> None:
    """
    Raises:
        RecordingError: this Python does not tell what a program looks up.
    """
    if unseen():
        raise RecordingError(
            f"Python {sys.version.split()[0]} does not tell what a step looks up ({', '.join(sorted(unseen()))}), so that a "
            "recording could repeat old values; recordings are known to work on Python 3.11 to 3.14. Call the step as it is, or "
            "take one of these, or a newer onecard"
        )
