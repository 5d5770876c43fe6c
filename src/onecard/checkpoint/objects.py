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

from onecard.checkpoint.tree import join
from onecard.tensor import DistTensor

# What is in a module's state dict and is no parameter; the names of torch's own layers.
_BUFFER = re.compile(r"(^|\.)(running_mean|running_var|num_batches_tracked|_extra_state)$")


class Names:
    """The names of the parameters in a state: of its modules, or of what looks like a module's state dict.

    An optimizer's parameters go by their names in the module that has them; those of several modules that have equal names,
    with the module's own place before them. What else is in the state does not matter.
    """

    def __init__(self, state: Any) -> None:
        self.modules = list(_modules(state, ""))
        self._named: dict[Any, list[tuple[str, str]]] = {}  # by itself or by its memory: (place, name) in each module
        self._alive: list[Any] = []  # or an id might be given to another object
        for place, params in self.modules:
            for name, param in params:
                for key in keys_of(param):
                    self._named.setdefault(key, []).append((place, name))
                self._alive.append(param)

    def of_optimizer(self, optimizer: Optimizer, saved: Sequence[Sequence[Any]] = ()) -> list[str]:
        """A name for each parameter of an optimizer, in its order.

        ``saved``: the names of each group in a checkpoint, which may know them by others: those that fit best.
        """
        groups = optimizer.param_groups
        found = [self._places(p) for group in groups for p in group["params"]]
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
        counts, schemes = [str(i) for i in range(sum(sizes))], [_given_names(groups)]
        # Made of module.parameters(), as most are: one group, in the order of the module.
        for _, params in self.modules if len(groups) == 1 else ():
            distinct = list({keys_of(p)[-1]: name for name, p in reversed(params)}.values())[::-1]
            if len(distinct) == len(counts) and _fits(state["state"], [dict(params)[n] for n in distinct]):
                schemes.append(distinct)
        if not schemes[0] and not saved and len({tuple(names) for names in schemes[1:]}) > 1:
            return counts  # those of several modules would do
        return _fitting(schemes, counts, sizes, saved)

    def _places(self, param: Tensor) -> list[tuple[str, str]]:
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
    if local.device.type == "meta" or type(local) not in (Tensor, nn.Parameter):
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


def _modules(state: Any, place: str) -> Iterator[tuple[str, list[tuple[str, Tensor]]]]:
    """(place, named parameters) of the modules in a state, and of dicts of tensors, which may be their state dicts."""
    if isinstance(state, nn.Module):
        yield place, list(state.named_parameters(remove_duplicate=False))
    elif isinstance(state, Mapping):
        tensors = [(str(k), v) for k, v in state.items() if isinstance(v, Tensor) and not _BUFFER.search(str(k))]
        if tensors and all(isinstance(k, str) for k in state):
            yield place, tensors
        for key, value in state.items():
            yield from _modules(value, join(place, key))
    elif isinstance(state, list | tuple):
        for i, value in enumerate(state):
            yield from _modules(value, join(place, i))


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
        return dict(value.state_dict(keep_vars=True))  # without: a copy, where `detach` has to gather
    if isinstance(value, Optimizer):
        return by_name(value.state_dict(), names.of_optimizer(value))
    if isinstance(value, torch.Generator):
        return {"generator": value.get_state()}
    if is_optimizer_state(value):
        return by_name(value, names.of_state_dict(value))
    if isinstance(value, dict) and type(value).__name__ != "Counter":
        return {key: unfold(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = [unfold(item, names) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, Tensor | dict) and has_state(value):
        return unfold(value.state_dict(), names)
    return value


def by_name(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """An optimizer's state dict with names in the places of its counts; itself, if they are these."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    if names == [str(number) for number in numbers]:
        return dict(state)
    name_of = dict(zip(numbers, names, strict=True))
    groups = [
        {**{k: v for k, v in group.items() if k != "param_names"}, "params": [name_of[i] for i in group["params"]]}
        for group in state["param_groups"]
    ]
    states = {name_of.get(number, number): value for number, value in state["state"].items()}
    return {**state, "state": states, "param_groups": groups}
