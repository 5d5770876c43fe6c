"""The decorator: a test function that runs on real ranks."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, NoReturn

from onecard.testing._job import RAW
from onecard.testing._report import RankError
from onecard.testing._run import run_ranks


def multirank(
    nproc: int, *, timeout: float = 60.0, backend: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a test function run on `nproc` ranks, each a process in one process group (see `run_ranks`).

    Parameters and fixtures of the test are evaluated once, in the test process, and copied to every rank. A failure
    is that of the rank that failed first. `timeout` is in seconds, `backend` a name for `init_process_group`. Called
    by hand the test returns the list of what its ranks returned, or None if that is all None; it raises RankError,
    or inside pytest, pytest's own failure with the same text.

    Example::

        @multirank(2)
        @pytest.mark.parametrize("size", [1, 5])
        def test_sum(size):
            x = torch.ones(size)
            dist.all_reduce(x)
            assert_close(x, torch.full((size,), 2.0))
    """
    if not isinstance(nproc, int) or nproc < 1:
        raise TypeError(f"multirank takes the number of ranks, got {nproc!r}: write @multirank(2)")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> list[Any] | None:
            try:
                values = run_ranks(function, nproc, *args, timeout=timeout, backend=backend, **kwargs)
            except RankError as error:
                failure = error
            else:
                return None if all(value is None for value in values) else values
            _fail(failure)  # outside of `except`, or pytest would show the error twice

        setattr(wrapper, RAW, function)
        return wrapper

    return decorate


def _fail(error: RankError) -> NoReturn:
    if "PYTEST_CURRENT_TEST" not in os.environ:
        raise error
    import pytest

    pytest.fail(str(error), pytrace=False)  # what the rank said is the trace; the harness' own says nothing
