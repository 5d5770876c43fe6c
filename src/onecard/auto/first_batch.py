"""A loader's first batch, read for its shapes: whoever reads the loader then gets the same batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_DEEP = 5  # a loader, its batch sampler, that one's sampler, its data, and what wraps one of them
_MANY = 2000  # objects that are looked through
_PLAIN = (int, float, str, bool, type(None))


def first_batch(loader: Any, once: Callable[[], Exception]) -> Any:
    """The first batch. Random numbers, torch's, Python's and NumPy's own, and what the loader itself counts are as they were.

    Args:
        once: makes the error for what can be read only once.

    Example:
        >>> first_batch([[1, 2], [3, 4]], ValueError)
        [1, 2]
    """
    with as_it_was(loader):
        batches = iter(loader)
        if batches is loader:
            raise once()
        return next(batches)


@contextmanager
def as_it_was(loader: Any) -> Iterator[None]:
    """Inside, a loader may be read."""
    back = [*_restores(loader)]
    try:
        yield
    finally:
        for restore in back:
            restore()


def _restores(loader: Any) -> Iterator[Callable[[], Any]]:
    """What puts each source of random numbers back, and each plain value of the objects that a loader is made of."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield from (partial(torch.set_rng_state, states[0]), partial(random.setstate, states[1]))
    yield partial(np.random.set_state, states[2])
    seen, wanted = dict[int, Any](), [(loader, 0)]
    while wanted and len(seen) < _MANY:
        x, depth = wanted.pop()
        if id(x) in seen or isinstance(x, (Tensor, np.ndarray, nn.Module, type, *_PLAIN)):
            continue
        seen[id(x)] = x
        if (restore := _source(x)) is not None:
            yield restore
        elif depth < _DEEP and isinstance(held := getattr(x, "__dict__", None), dict):
            plain = {key: value for key, value in held.items() if isinstance(value, _PLAIN)}
            yield partial(held.update, plain)
            wanted += [(value, depth + 1) for value in held.values()]


def _source(x: Any) -> Callable[[], Any] | None:
    """What puts a source of random numbers back; None if it is none."""
    if isinstance(x, torch.Generator):
        state = x.get_state()
        return lambda: x.set_state(state)
    if isinstance(x, random.Random):
        held = x.getstate()
        return lambda: x.setstate(held)
    if isinstance(x, np.random.RandomState):
        numbers = x.get_state()
        return lambda: x.set_state(numbers)
    if isinstance(x, np.random.Generator):
        bits, inner = x.bit_generator, x.bit_generator.state
        return lambda: setattr(bits, "state", inner)
    return None
