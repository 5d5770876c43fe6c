"""What a deferred model has not made yet, while a step that a pipeline divides is looked at: without memory, as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from onecard.static.guards.before import alive
from onecard.static.guards.frozen import kinds_of
from onecard.tensor.deferred.calls import is_any
from onecard.train.unmade import Unmade, UnmadePart, closed, looking, make, wait


@contextmanager
def left_unmade() -> Iterator[None]:
    """Inside, no tensor of a deferred model is made for who looks at it; behind it, those that still are not made are again."""
    if not is_any():
        yield
        return
    modules, parts = alive(_MODULES, _PARTS)
    wait(modules)
    for part in parts:
        part.opened()
    before, looking.here = looking.here, True
    try:
        yield
    finally:
        looking.here = before
        for part in parts:
            closed(part)


def make_all() -> None:
    """Make all that is not made yet: a step that is recorded as it runs computes with it."""
    if is_any():
        tensors, parts = alive(_PLAIN, _PARTS)
        for x in (*tensors, *(part._local for part in parts)):
            make(x)


_MODULES, _PARTS, _PLAIN = map(kinds_of, (nn.Module, UnmadePart, Unmade))
