"""spawn: a function on several ranks of this host, from a program of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onecard.testing._run import run_ranks


def spawn(func: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, timeout: float = 3600.0) -> list[Any]:
    """Run ``func(*args)`` on several ranks of this host, and return what they return.

    Call it below ``if __name__ == "__main__":``, with a function of the top level of a module; in a notebook with one of a cell,
    which is sent with what it uses of other cells (``pip install cloudpickle``). Programs of many ranks, logs and restarts:
    ``onecard run``.

    Raises:
        RankError: a rank failed; its traceback is shown, and all are ended.
        ValueError: the ranks cannot find the function.
        TypeError: an argument cannot be sent to them.

    Source: ``paddle.distributed.spawn``.
    """
    return run_ranks(func, nprocs, *args, timeout=timeout)
