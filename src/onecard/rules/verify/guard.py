"""guard: run the proof so that a kernel that ends the process is named. Some do not check the shapes they get."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable

import torch

Note = Callable[[str], None]


def guarded(work: Callable[[Note], int]) -> tuple[int, str]:
    """Run ``work`` in a child process.

    Args:
        work: is given a function that notes what it is about to do; returns an exit status.

    Returns:
        Its exit status, and "" or, if a signal ended it, which signal and the last note.
    """
    if not hasattr(os, "fork"):
        return work(lambda words: None), ""
    board = mmap.mmap(-1, 4096)  # shared with the child, and still there when it is gone
    child = forked(lambda: work(lambda words: _write(board, words)))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status >= 0:
        return status, ""
    return 128 - status, f"{signal.Signals(-status).name} in {bytes(board).rstrip(bytes(1)).decode()}"


def forked(work: Callable[[], int]) -> int:
    """Start a copy of this process that does the work and ends with its status; the copy's number.

    It ends without what a program has put down for its end.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, of threads: NumPy's, which are idle
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        # A fork's pool of threads is made anew by who asks for it first. Where autograd's threads of several devices do so at
        # once, one finds none, and ends the process ("Invalid thread pool"). Nobody else is here yet.
        torch.set_num_threads(torch.get_num_threads())
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _write(board: mmap.mmap, words: str) -> None:
    board[:] = words.encode()[:4096].ljust(4096, bytes(1))
