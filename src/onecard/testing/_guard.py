"""The missing `if __name__ == "__main__":` of a script. Its ranks import the script, and would start ranks again.

Left to itself, multiprocessing refuses that with a traceback of some fifty lines from every rank.
"""

from __future__ import annotations

import linecache
import multiprocessing
import os
import sys
from types import FrameType

from onecard.testing._job import RankReport
from onecard.testing._report import Death

RANK_NAME = "onecard-rank"
"""How the names of rank processes begin. A process has its name before it imports the script."""

EXIT_CODE = 89  # any number that nobody else uses: the one word that such a rank can say to its parent


def leave_if_importing() -> None:
    """Ends this process, without a word, if it is a rank that is still importing the script."""
    process = multiprocessing.current_process()
    # The attribute by which multiprocessing itself tells; without it its own error would come, long but true.
    if process.name.startswith(RANK_NAME) and getattr(process, "_inheriting", False):
        os._exit(EXIT_CODE)  # an exception would be printed by each rank, or caught by the script


def is_missing(end: RankReport | Death) -> bool:
    """Tells, from how a rank ended, whether it would have started ranks itself."""
    return isinstance(end, Death) and not end.arrived and end.exitcode == EXIT_CODE


def explain() -> str:
    """The error for the user whose script, on the stack of this thread, starts ranks without the guard."""
    frame = _script(sys._getframe())
    if frame is None:  # run_ranks was called in another thread
        place, call = "the script", "..."
    else:
        file = frame.f_code.co_filename
        place = f"{os.path.basename(file)}, line {frame.f_lineno},"
        call = _statement(linecache.getline(file, frame.f_lineno).strip())
    return (
        f"{place} starts ranks at its top level. Ranks are new processes, and each imports this script first: "
        "it reaches the same line and would start ranks again. Let only the first process run it:\n\n"
        f'    if __name__ == "__main__":\n        {call}'
    )


def _statement(line: str) -> str:
    """The line, marked if it is only the first one of a statement."""
    try:
        compile(line, "", "exec")
    except SyntaxError:
        return f"{line} ..."
    return line or "..."


def _script(frame: FrameType | None) -> FrameType | None:
    """The frame of the script's top level."""
    while frame is not None and (frame.f_code.co_name, frame.f_globals.get("__name__")) != ("<module>", "__main__"):
        frame = frame.f_back
    return frame
