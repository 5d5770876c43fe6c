"""Sleeping on a word of shared memory and waking those who sleep there: Linux futexes, by ctypes.

ctypes releases the GIL around the system call, so other threads of a waiting rank run on.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import threading
from collections.abc import Callable

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = _NUMBERS.get(platform.machine())
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF

NAP = 0.1
"""Seconds that `wait` sleeps at most; then the caller looks whether the ranks it waits for still live."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_nap = _Timespec(0, int(NAP * 1e9))
_NAP = ctypes.addressof(_nap)


def _system_call() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux") or _NUMBER is None:
        return None
    call = ctypes.CDLL(None).syscall
    call.argtypes = [
        *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p),
        *(ctypes.c_void_p, ctypes.c_uint32),
    ]
    return call


_call = _system_call()


def available() -> bool:
    """Whether this system has futexes that we know how to call."""
    return _call is not None


def wait(address: int, value: int, seconds: float = NAP) -> None:
    """Sleep until somebody wakes this word, unless it is no longer `value`; at most `seconds`, or `NAP` if less.

    May return early (a signal, another wake): the caller looks at what it waits for, in a loop.
    """
    if seconds >= NAP:
        _call(_NUMBER, address, _WAIT, value, _NAP, None, 0)  # type: ignore[misc]
    elif seconds > 0:
        short = _Timespec(0, int(seconds * 1e9))
        _call(_NUMBER, address, _WAIT, value, ctypes.addressof(short), None, 0)  # type: ignore[misc]


def wake(address: int) -> None:
    """Wake everybody who sleeps on this word."""
    _call(_NUMBER, address, _WAKE, _ALL, None, None, 0)  # type: ignore[misc]


def make_fence() -> Callable[[], None]:
    """A full memory fence: no load or store moves across a call of it. Each thread, or lock, needs one of its own.

    Python has no fences, but releasing a lock is at least a store-release and taking it at least a load-acquire,
    and a release followed by an acquire keeps its order everywhere; on x86 both are locked instructions.
    """
    lock = threading.Lock()
    lock.acquire()
    release, acquire = lock.release, lock.acquire

    def fence() -> None:
        release()
        acquire()

    return fence
