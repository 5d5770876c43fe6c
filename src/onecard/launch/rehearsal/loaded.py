"""``torch.load`` in a rehearsal: states of random numbers, counters and indices have data, weights and moments have none.

torch's own gives nothing data where tensors are made without; ``torch.set_rng_state`` of such a state fails, and so does
``p.data = loaded``. So the file is read as ever, mapped where it can be, and what needs no data gives it up.
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import Any

from torch import Tensor, nn

from onecard import recorded
from onecard._torch import fakes
from onecard._torch.names import no_fakes, tree_map
from onecard.launch.rehearsal.values import has_data, holds_others


def load_by(real: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.load`` by way of another one, which may have a file elsewhere."""

    def load(f: Any, map_location: Any = None, *rest: Any, **given: Any) -> Any:
        return _converted(lambda place, **more: real(f, place, *rest, **given, **more), f, map_location, given)

    return load


def _converted(read: Callable[..., Any], f: Any, map_location: Any, given: dict[str, Any]) -> Any:
    def place(storage: Any, saved: str) -> Any:
        return storage  # on the CPU, where it was read, as all that is rehearsed

    with no_fakes(), recorded.unrecorded():
        value = _read(read, place, isinstance(f, str | PathLike) and "mmap" not in given)
    modules: list[nn.Module] = []

    def convert(x: Any) -> Any:
        if isinstance(x, nn.Module):
            modules.append(x)
        return _without(x) if isinstance(x, Tensor) else x

    value = tree_map(convert, value)
    parts = [part for module in modules for part in module.modules()]
    tables: list[dict[str, Any]] = [table for part in parts for table in (part._parameters, part._buffers)]
    for held in tables:
        held.update({name: _without(x) for name, x in held.items() if x is not None})
    return value


def _read(read: Callable[..., Any], place: Callable[..., Any], mapped: bool) -> Any:
    if mapped:
        try:
            return read(place, mmap=True)
        except (RuntimeError, ValueError):  # an old format, which cannot be mapped; whatever else it is fails again
            pass
    return read(place)


def _without(x: Tensor) -> Tensor:
    if holds_others(type(x)) or fakes.is_fake(x):
        return x
    return x if has_data(x) else fakes.as_fake(x)
