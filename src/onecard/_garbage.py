"""Python's garbage collector, seldom: where graphs are made and let go by the hundred thousand nodes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = 200_000
"""Objects that are made, beyond those that are gone, before the collector looks at the young ones."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Inside, the collector comes after ``SELDOM`` new objects, not after hundreds.

    Each node of a graph lies in a cycle with it, so that only the collector frees graphs; and it goes through all objects of the
    process for that, once a quarter of them is new.

    Example:
        >>> before = gc.get_threshold()
        >>> with seldom_collected():
        ...     gc.get_threshold()[0]
        200000
        >>> gc.get_threshold() == before
        True
    """
    before = gc.get_threshold()
    ours = (max(SELDOM, before[0]), *before[1:])
    if not before[0]:  # it is switched off
        yield
        return
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:  # else the program has said something of its own
            gc.set_threshold(*before)
