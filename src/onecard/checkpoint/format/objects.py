"""What stands in a state besides tensors and numbers: modules, optimizers, and all that has a state dict of its own.

An optimizer's state dict counts its parameters; the counts mean nothing to another grouping of them, or to a part of the
model. In a checkpoint states go by their parameters' names, and groups list names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onecard.checkpoint.format.portions import (
    LAST,
    Portion,
    Spread,
    SpreadNames,
    StateValue,
    entries,
    entries_of,
    has_stages,
    own,
    parameters,
    part_of,
    unfolded,
)
from onecard.checkpoint.format.tree import StateOf, join
from onecard.comm.agree.sparse_check import is_plain
from onecard.comm.world import world
from onecard.tensor import DistTensor
from onecard.tensor.staged import is_staged
from onecard.train.zero.resume import is_like

# What is in a module's state dict and is no parameter; the names of torch's own layers.
_BUFFER = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked|_extra_state)$")


class Names:
    """The names of the parameters in a state: of its modules, or of what looks like a module's state dict.

    An optimizer's parameters go by their names in the module that has them; those of several modules that have equal names,
    with the module's own place before them. What else is in the state does not matter.
    """

    def __init__(self, state: Any) -> None:
        self.modules = list(_modules(state, ""))  # which are kept: or an id might be given to another object
        self._named: dict[
            Any, list[tuple[str, StateValue]]
        ] = {}  # by itself or by its memory: (place, entry) in each module
        for place, params in self.modules:
            for entry in params:
                for key in keys_of(entry.value):
                    self._named.setdefault(key, []).append((place, entry))

    def entry(self, param: Tensor) -> StateValue:
        """A parameter as the module that has it; by itself, if none does."""
        found = self._found(param)
        return (
            found[0][1]
            if found
            else StateValue("", param, part_of(param), said=is_staged(param) or part_of(param) is not None)
        )

    def entries_of(self, names: Sequence[str]) -> list[StateValue | None]:
        """The parameters of the first module that has all of some names."""
        for _, params in self.modules:
            inside = {entry.name: entry for entry in params}
            if all(name in inside for name in names):
                return [inside[name] for name in names]
        return [None] * len(names)

    def of_optimizer(self, optimizer: Optimizer, saved: Sequence[Sequence[Any]] = ()) -> list[str]:
        """A name for each parameter of an optimizer, in its order.

        ``saved``: the names of each group in a checkpoint, which may know them by others: those that fit best.
        """
        groups = optimizer.param_groups
        found = [[(place, e.name) for place, e in self._found(p)] for group in groups for p in group["params"]]
        counts = [str(i) for i in range(len(found))]
        given = _given_names(groups) or counts
        firsts = [names[0] if names else ("", given[i]) for i, names in enumerate(found)]
        schemes = [[name for _, name in firsts], [join(place, name) for place, name in firsts], given]
        for place, _ in self.modules:
            inside = [dict(names).get(place) for names in found]
            schemes.append([name for name in inside if name is not None])
        return _fitting(schemes, counts, [len(group["params"]) for group in groups], saved)

    def of_state_dict(self, state: Mapping[str, Any], saved: Sequence[Sequence[Any]] = ()) -> list[str]:
        """A name for each parameter of an optimizer's state dict; its count, where nothing says more."""
        groups = state["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        counts, schemes = [str(i) for i in range(sum(sizes))], [self._first_names(_given_names(groups))]
        # Made of module.parameters(), as most are: one group, in the order of the module.
        for _, params in self.modules if len(groups) == 1 else ():
            distinct = list({keys_of(entry.value)[-1]: entry for entry in reversed(params)}.values())[::-1]
            if len(distinct) == len(counts) and _fits(state["state"], [entry.value for entry in distinct]):
                schemes.append([entry.name for entry in distinct])
        if not schemes[0] and not saved and len({tuple(names) for names in schemes[1:]}) > 1:
            return counts  # those of several modules would do
        return _fitting(schemes, counts, sizes, saved)

    def _first_names(self, names: list[str]) -> list[str]:
        """Names of tied parameters as those that they have first, which another stage may have."""
        known = [
            self.entry(e.value).name if e is not None else name
            for name, e in zip(names, self.entries_of(names), strict=True)
        ]
        return known if len(set(known)) == len(names) else names

    def _found(self, param: Tensor) -> list[tuple[str, StateValue]]:
        return next((self._named[key] for key in keys_of(param) if key in self._named), [])


def _fitting(
    schemes: Sequence[list[str]], counts: list[str], sizes: list[int], saved: Sequence[Sequence[Any]]
) -> list[str]:
    """The first names that are complete and distinct, or of those the ones that a checkpoint knows best."""
    good = [names for names in schemes if len(names) == len(set(names)) == len(counts)]
    known = {str(name) for group in saved for name in group}
    if [len(group) for group in saved] == sizes:
        good.append(counts)  # as torch goes by them
    return max(good or [counts], key=lambda names: len(known.intersection(names)))


def keys_of(x: Tensor) -> list[Any]:
    """What tells a tensor from others: itself, and its memory (a state dict has other tensors over the same)."""
    local = x._local if isinstance(x, DistTensor) else x
    if local.device.type == "meta" or not is_plain(local):
        return [id(x)]
    layout = x._spec.layout if isinstance(x, DistTensor) else None
    memory = (
        local.untyped_storage()._cdata,
        local.storage_offset(),
        tuple(x.shape),
        local.stride(),
        x.dtype,
        local.is_conj(),  # a view of the same memory, of other values
        local.is_neg(),
        id(layout),
    )
    return [id(x), memory]


def _given_names(groups: Any) -> list[str]:
    if not all("param_names" in group for group in groups):
        return []
    return [name for group in groups for name in group["param_names"]]


def _fits(states: Mapping[Any, Any], params: list[Tensor]) -> bool:
    for number, state in states.items():
        moments = [v for v in state.values() if isinstance(v, Tensor) and v.dim()] if isinstance(state, Mapping) else []
        if (
            not isinstance(number, int)
            or number >= len(params)
            or any(m.dim() == params[number].dim() and m.shape != params[number].shape for m in moments)
        ):
            return False
    return True


def _modules(state: Any, place: str) -> Iterator[tuple[str, list[StateValue]]]:
    """(place, parameters) of the modules in a state, and of dicts of tensors, which may be their state dicts."""
    if isinstance(state, nn.Module):
        yield place, parameters(state)
    elif isinstance(state, Mapping):
        if any(isinstance(value, Tensor) for value in state.values()) and all(isinstance(key, str) for key in state):
            yield place, [e for e in entries_of(state) if isinstance(e.value, Tensor) and not _BUFFER.search(e.name)]
        for key, value in state.items():
            yield from _modules(value, join(place, key))
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from _modules(value, join(place, i))


def is_optimizer(value: Any) -> bool:
    """Whether a value is an optimizer whose ``state_dict`` is that of torch's; others are objects that have a state."""
    if not isinstance(value, Optimizer):
        return False
    own = type(value).state_dict
    return own.__module__.startswith(("torch.", "onecard.")) or is_optimizer_state(value.state_dict())


def is_optimizer_state(value: Any) -> bool:
    """Whether a dict is what an optimizer's ``state_dict`` returns."""
    return (
        isinstance(value, Mapping)
        and {"state", "param_groups"} <= set(value)
        and isinstance(value["param_groups"], list)
        and all(isinstance(group, Mapping) and "params" in group for group in value["param_groups"])
        and all(isinstance(i, int) for group in value["param_groups"] for i in group["params"])
    )


def has_state(value: Any) -> bool:
    """Whether an object has a state dict, and takes one."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def unfold(value: Any, names: Names) -> Any:
    """A state with its objects as plain dicts, lists, tensors and numbers."""
    if isinstance(value, nn.Module):
        return unfolded(entries(value))
    if is_optimizer(value):
        params = [names.entry(p) for group in value.param_groups for p in group["params"]]
        return StateOf(value, _with_parts(by_name(value.state_dict(), names.of_optimizer(value)), params))
    if isinstance(value, torch.Generator):
        return {"generator": value.get_state()}
    if is_optimizer_state(value):
        found = names.of_state_dict(value)
        return _with_parts(by_name(value, found), names.entries_of(found))
    if isinstance(value, dict) and type(value).__name__ != "Counter":
        noted = entries_of(value) if any(isinstance(item, Tensor) for item in value.values()) else []
        if any(entry.said for entry in noted):
            return unfolded(noted)
        return {key: unfold(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = [unfold(item, names) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, Tensor | dict) and has_state(value):
        state = value.state_dict()
        if is_of_each_rank(value) and world.get_world_size() > 1:
            return own(state)
        found = unfold(state, names)
        return StateOf(value, found) if isinstance(value, LRScheduler) else found
    return value


def is_of_each_rank(value: Any) -> bool:
    """Whether an object's state may be another one on each rank: a random state."""
    return getattr(value, "of_each_rank", None) is not None


def _with_parts(state: dict[str, Any], params: Sequence[StateValue | None]) -> dict[str, Any]:
    """An optimizer's state by names, whose tensors are parts as their parameters are."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    entry_of = dict(zip(names, params, strict=True))
    if not any(entry is not None and entry.said for entry in params):
        return state
    states = {name: _portions(each, entry_of.get(name)) for name, each in state["state"].items()}
    if not has_stages(entry for entry in params if entry is not None):
        return {**state, "state": states}
    order = {name: LAST if entry is None else entry.order for name, entry in entry_of.items()}
    groups = [{**g, "params": SpreadNames((n, order[n]) for n in g["params"])} for g in state["param_groups"]]
    spread = Spread((name, each, order.get(name, LAST)) for name, each in states.items())
    return {**state, "state": spread, "param_groups": groups}


def _portions(state: Any, entry: StateValue | None) -> Any:
    """A parameter's states: those of its shape are parts as it is."""
    if entry is None or not isinstance(state, Mapping):
        return state
    made = dict(state)
    for key, value in state.items():
        if isinstance(value, Tensor):
            part = part_of(value) or (entry.part if is_like(entry.value, key, value) else None)
            # A loaded state is a new tensor where it is here: its parameter says that others may not have it.
            said = entry.staged or is_staged(value) or is_staged(entry.value)
            made[key] = Portion(value, part) if part is not None or said else value
    return made


def by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state dict with names in the places of its counts, but where they are these.

    States are in the order of the parameters: in a pipeline each rank has made its own stage's first.
    """
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    place = {number: i for i, number in enumerate(numbers)}
    states = dict(sorted(state["state"].items(), key=lambda item: place.get(item[0], len(place))))
    state = {**state, "state": states}
    if names == [str(number) for number in numbers]:
        return state
    name_of = dict(zip(numbers, names, strict=True))
    groups = [
        {**{k: v for k, v in group.items() if k != "param_names"}, "params": [name_of[i] for i in group["params"]]}
        for group in state["param_groups"]
    ]
    states = {name_of.get(number, number): value for number, value in state["state"].items()}
    return {**state, "state": states, "param_groups": groups}


def is_filled(value: Any) -> bool:
    """Whether there is something in a value that is loaded into, instead of being replaced."""
    if isinstance(value, dict):
        return any(map(is_filled, value.values()))
    if isinstance(value, list | tuple):
        return any(map(is_filled, value))
    return isinstance(value, Tensor | torch.Generator) or has_state(value)


def load_extra(module: nn.Module, values: dict[str, Any]) -> None:
    """Give modules their saved extra states."""
    for key, value in values.items():
        place, _, name = key.rpartition(".")
        if name == "_extra_state":
            module.get_submodule(place).set_extra_state(value)
