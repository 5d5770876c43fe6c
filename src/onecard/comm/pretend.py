"""A world of many ranks in one process, in which nothing is sent: to see what a program would do, without devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from onecard import _torch
from onecard.comm import place

rehearsing = False  # meta tensors stand for values that nobody needs, not for values that are still to be made


@contextmanager
def rehearse() -> Iterator[None]:
    """Inside, meta tensors are laid out as they are: only shapes are computed."""
    global rehearsing
    before, rehearsing = rehearsing, True
    try:
        yield
    finally:
        rehearsing = before


@contextmanager
def pretend_world(size: int, rank: int = 0) -> Iterator[None]:
    """Be one of ``size`` ranks inside the block, unless a process group is there already.

    Messages have no effect, so values are meaningless; shapes, layouts and messages are those of that rank. What is
    decided inside (programs, groups) is dropped at its end: this process may be another rank of the real world.

    Example:
        >>> from onecard.comm import get_world_size
        >>> with pretend_world(8):
        ...     get_world_size()
        8
    """
    if dist.is_initialized():
        yield
        return
    with place.nothing_decided(), _torch.fake_group(size, rank):
        yield


def pretending() -> bool:
    """Whether messages have no effect here, so that values mean nothing."""
    return dist.is_initialized() and dist.get_backend() == "fake"
