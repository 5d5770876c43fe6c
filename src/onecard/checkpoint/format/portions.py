"""What is larger than what a rank has of it, though its tensors are plain: cut parameters, and the stages of a model.

The manual level makes such; it says here what each is (``known``). In a checkpoint they are whole, under the names of one card,
so that any other degree finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from onecard.tensor.staged import is_elsewhere, is_staged
from onecard.train.shard import Shard, held

LAST = 1 << 30  # the order of what follows a pipeline's layers


class Notes(Protocol):
    """What is noted on a module's state dict of the tensors in it."""

    @property
    def parts(self) -> Mapping[str, Shard]:
        """What those are that are parts."""

    def names(self, key: str) -> list[tuple[str, int]] | None:
        """The names that one card has for a name of a stage, each with its order; None for what all ranks have."""


@dataclass(frozen=True)
class Knowledge:
    """What a layer above says of state dicts (None: nothing)."""

    notes: Callable[[Mapping[str, Any]], Notes | None]
    grid: Callable[[], dict[str, int]]  # how the ranks are laid out


known: list[Knowledge] = []


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """A tensor of a state of which each rank says itself what it has. ``part``: None for all of it."""

    tensor: Tensor
    part: Shard | None


@dataclass(frozen=True, slots=True, eq=False)
class Own:
    """A tensor of which each rank may have its own: one row for each rank, if they differ."""

    tensor: Tensor


GRID = "grid"  # beside such tensors: how the ranks were laid out


def own(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an object whose tensors may be each rank's own (``of_each_rank``)."""
    grid = next((found for knowledge in known if (found := knowledge.grid())), None)
    made = {key: Own(value) if isinstance(value, Tensor) else value for key, value in state.items()}
    return made if grid is None else {**made, GRID: grid}


def mine(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """What of it a rank has."""
    # Copies: torch reads a random state from the beginning of its memory, whatever the view.
    rows = {k: v[rank].clone() if isinstance(v, Tensor) and v.dim() > 1 else v for k, v in state.items()}
    return {key: value for key, value in rows.items() if key != GRID}


class Spread(dict[str, Any]):
    """Items of which other ranks have others. ``order``: of each key, as one card has them."""

    def __init__(self, items: Iterable[tuple[str, Any, int]] = ()) -> None:
        self.order: dict[str, int] = {}
        for key, value, order in items:
            self[key], self.order[key] = value, order


class SpreadNames(list[str]):
    """Names of which other ranks have others, with the order of each."""

    def __init__(self, items: Iterable[tuple[str, int]] = ()) -> None:
        found = list(items)
        super().__init__(name for name, _ in found)
        self.order = [order for _, order in found]


@dataclass(frozen=True, slots=True, eq=False)
class StateValue:
    """A value in a module's state, under its name on one card.

    Attributes:
        part: what the tensor is a part of; None: it is whole.
        order: its place among those of all stages; ``staged``: other ranks may not have it.
        key: its name here.
        said: whether each rank says itself what it has of it.
    """

    name: str
    value: Any
    part: Shard | None = None
    order: int = -1
    staged: bool = False
    key: str = ""
    said: bool = False

    def portion(self) -> Any:
        """The value, as a state has it."""
        return Portion(self.value, self.part) if isinstance(self.value, Tensor) and self.said else self.value


def part_of(x: Tensor) -> Shard | None:
    """What a tensor is a part of; of one that only other stages of a pipeline have, nothing of it."""
    if is_elsewhere(x):
        return Shard(tuple(x.shape), 0)
    what = held(x)
    return None if what.is_all() else what


def entries(module: nn.Module) -> list[StateValue]:
    """What is in a module's state, under the names that it has on one card."""
    state = module.state_dict(keep_vars=True)  # without: a copy, where `detach` has to gather
    return _named(state, state, dict(module.named_parameters(remove_duplicate=False)))


def parameters(module: nn.Module) -> list[StateValue]:
    """Its parameters, tied ones under each of their names."""
    params = dict(module.named_parameters(remove_duplicate=False))
    return _named(params, module.state_dict(keep_vars=True) if known else {}, params)


def entries_of(state: Mapping[str, Any]) -> list[StateValue]:
    """What is in a dict of tensors, which may be what a module's ``state_dict`` returned."""
    return _named(state, state, {})


def _named(values: Mapping[str, Any], state: Mapping[str, Any], params: Mapping[str, Tensor]) -> list[StateValue]:
    notes = next((said for knowledge in known if (said := knowledge.notes(state)) is not None), None)
    found: dict[str, StateValue] = {}
    outside, cut = -1, any(map(is_staged, values.values()))
    for key, value in values.items():
        part = part_of(params.get(key, value)) if isinstance(value, Tensor) else None
        if part is None and notes is not None:
            part = notes.parts.get(key)
        names = notes.names(key) if notes is not None else None
        if names is None:
            found[key] = StateValue(key, value, part, outside, key=key, said=cut or part is not None)
            continue
        outside = LAST
        for name, order in names:
            found.setdefault(name, StateValue(name, value, part, order, True, key, True))
    return list(found.values())


def has_stages(found: Iterable[StateValue]) -> bool:
    """Whether there is something that other ranks may not have."""
    return any(entry.staged for entry in found)


def unfolded(found: list[StateValue]) -> dict[str, Any]:
    """A module's state as a plain dict."""
    if has_stages(found):
        return Spread((entry.name, entry.portion(), entry.order) for entry in found)
    return {entry.name: entry.portion() for entry in found}


def encoded(value: Spread, encode: Callable[[str, Any], Any]) -> Iterator[list[Any]]:
    """A spread dict for JSON."""
    for key, item in value.items():
        yield [key, value.order[key], encode(key, item)]
