"""Which parameters, buffers and layers the modules of a program have, and which of them are None.

A forward asks for them by name, or for all that there are: one that comes later changes what it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import is_not
from typing import Any

from torch import nn
from torch.optim import Optimizer

_there = partial(is_not, None)


def absent_of(module: nn.Module) -> list[str]:
    """The names of a module's parameters, buffers and layers that are None."""
    return [name for _, entries in _of(module) for name, x in dict.items(entries) if x is None]


def same_entries(fits: Any, modules: Sequence[tuple[str, nn.Module]]) -> None:
    """There are as many as there were, and those that were None are still.

    Args:
        fits: the lines that ask (``Fits``); ``modules``: with their names.
    """
    held = [(f"{kind} of {name}", entries) for name, module in modules for kind, entries in _of(module)]
    entries = [x for _, x in held]
    counts = fits.fact("how many entries", tuple(map(len, entries)))
    absent = fits.fact("absent", _none_in(entries))
    if len(counts) != len(entries):
        fits.miss(fits.code("True"), "the modules of the program")
        return
    if counts:
        words = partial(_changed, held, counts)
        fits.miss(fits.code("tuple(map(len, {})) != {}", fits.slot(entries), fits.slot(counts)), words)
    _still_none(fits, held, absent)


def same_states(fits: Any, optimizer: Optimizer, name: str) -> None:
    """What was None in the states of an optimizer is so still."""
    held = [(f"states of {name}", x) for x in optimizer.state.values() if isinstance(x, dict)]
    absent = fits.fact((name, "absent"), _none_in([x for _, x in held]))
    if absent and absent[-1][0] < len(held):  # others than there were are seen elsewhere
        _still_none(fits, held, absent)


def _none_in(entries: Sequence[dict[str, Any]]) -> list[tuple[int, str]]:
    return [(i, key) for i, x in enumerate(entries) for key, y in dict.items(x) if y is None]


def _still_none(fits: Any, held: Sequence[tuple[str, Any]], absent: Sequence[tuple[int, str]]) -> None:
    if absent:
        where, keys = [held[i][1] for i, _ in absent], [key for _, key in absent]
        now = fits.code("map({}, {}, {})", fits.slot(dict.get), fits.slot(where), fits.slot(keys))
        found = fits.code("any(map({}, {}))", fits.slot(_there), now)
        fits.miss(found, partial(_come, held, absent))


def _of(module: nn.Module) -> tuple[tuple[str, dict[str, Any]], ...]:
    return ("parameters", module._parameters), ("buffers", module._buffers), ("layers", module._modules)


def _changed(held: Sequence[tuple[str, Any]], counts: Sequence[int]) -> str:
    for (words, entries), count in zip(held, counts, strict=True):
        if len(entries) != count:
            return f"the {words}: there were {count}, and are {len(entries)}"
    return ""


def _come(held: Sequence[tuple[str, Any]], absent: Sequence[tuple[int, str]]) -> str:
    return next(
        (f"{key!r} in the {held[i][0]}, which was None" for i, key in absent if held[i][1].get(key) is not None), ""
    )
