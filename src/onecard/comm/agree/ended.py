"""What Gloo ends a process for, in words.

Gloo compares the size of what comes with that of what is waited for in a thread of its own. If more comes, because the ranks call
different collectives, its fault there ends the process by a signal before Python hears of it. Here it ends with an error that
says what this rank was about to send; the others, whose connections close, find these words and name both calls.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from onecard.comm.agree import clock
from onecard.comm.base import record
from onecard.comm.base.state import Kept
from onecard.comm.world import world
from onecard.errors import CommunicationError

_watching: Kept[list[Any]] = Kept(list)
_Handler = ctypes.CFUNCTYPE(None)


def watch() -> None:
    """Be asked before a fault of C++ that nobody catches ends this process; once. Nothing where C++ has another library."""
    if _watching.here or sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libstdc++.so.6")
        place = library["_ZSt13set_terminatePFvvE"]  # std::set_terminate
        place.restype, place.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        library.__cxa_current_exception_type.restype = ctypes.c_void_p
        before: list[Callable[[], None]] = []
        handler = _Handler(lambda: _asked(library, before[0]))
        _watching.here.append(handler)
        before.append(_Handler(place(ctypes.cast(handler, ctypes.c_void_p))))


def _asked(library: Any, before: Callable[[], None]) -> None:
    """Another's fault is another's matter."""
    try:
        if _type(library).startswith(b"N4gloo"):
            _end()
    finally:
        before()


def _type(library: Any) -> bytes:
    """The name of the fault's class, as C++ writes it: behind a pointer in its type_info."""
    info = library.__cxa_current_exception_type()
    return (ctypes.c_char_p.from_address(info + ctypes.sizeof(ctypes.c_void_p)).value or b"") if info else b""


def _end() -> None:
    with suppress(BaseException):
        sys.excepthook(CommunicationError, error(), None)
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(1)


def error() -> CommunicationError:
    """What this rank knows: its own message. It is left for the others, too."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    line = record.user_line(frame) if frame is not None else "?"
    latest = clock.latest.here
    mine = latest.tell(line) if latest is not None and latest.last else f"at {line}"
    return CommunicationError(
        f"ranks are out of step: rank {world.get_rank()} was sent more than it waits for (Gloo ends a process for it)\n"
        f"  rank {world.get_rank()}: {mine}\n"
        "Another rank is at another call, and names it in its own error. To see the operator, tensor and line of each rank, "
        "run it once with ONECARD_CHECK=1"
    )
