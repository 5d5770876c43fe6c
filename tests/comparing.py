"""When recordings are compared with their steps, set by a test: never, so that all calls are replays, or at every call."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

from onecard.static.run import rechecked


@contextmanager
def compared(due: Callable[[int], int]) -> Iterator[None]:
    """Recordings that are made inside are compared next at ``due(call)``."""
    with patch.object(rechecked, "next_check", due):
        yield


def never(call: int) -> int:
    return 1 << 62


def each(call: int) -> int:
    return call + 1


def each_other(call: int) -> int:
    """Replays between: 3, 5, 7, ..."""
    return call + 1 + call % 2


def replays_only() -> AbstractContextManager[None]:
    """Inside, no call of a recording is compared."""
    return compared(never)
