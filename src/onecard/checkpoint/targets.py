"""What is loaded into: a walk over the state that was given, which finds for each tensor the one in the checkpoint.

Nothing is read yet. The walk gives a list of wants, each a place in memory and a name, what is missing and what is left over,
and what has to be done when all is read. Structures in the checkpoint that the state has no place for are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecard.checkpoint import tree
from onecard.checkpoint.changes import Change, follow
from onecard.checkpoint.objects import Names, by_name, has_state, is_optimizer_state
from onecard.checkpoint.virtual import Virtual
from onecard.errors import CheckpointError
from onecard.parallel.resume import place_for

Done = Callable[[], None]
_NOTHING: Any = object()


@dataclass(slots=True)
class Walk:
    """One walk over a state.

    Attributes:
        tensors: what the checkpoint has, by name.
        wants: (name, the tensor to fill) in the order of the walk.
        missing, unused: names without a tensor in the checkpoint, and without a place in the state.
        last: what to do when the tensors are filled.
    """

    tensors: Mapping[str, Virtual]
    names: Names
    changes: Sequence[Change] = ()
    wants: list[tuple[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)
    last: list[Done] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)  # names of the wants before ``left``
    left: int = 0

    def value(self, target: Any, node: Any, path: str) -> Any:
        """What takes the place of a value of the state: itself, filled, or another one."""
        if isinstance(target, Tensor):
            return self._tensor(target, node, path)
        if isinstance(target, nn.Module):
            return self._module(target, node, path)
        if isinstance(target, Optimizer):
            return self._optimizer(target, node, path)
        if isinstance(target, torch.Generator):
            return self._later(target, lambda made: target.set_state(made["generator"]), node, path)
        if is_optimizer_state(target):
            return self._optimizer_state(target, node, path)
        if not isinstance(target, dict | list | tuple) and has_state(target):
            return self._later(target, target.load_state_dict, node, path)
        if isinstance(target, dict) and target:
            return self._dict(target, node, path)
        if isinstance(target, list | tuple) and target and self._alike(target, node):
            items = tree.children(node) or {}
            made = [self.value(item, items[i], tree.join(path, i)) for i, item in enumerate(target)]
            return self._again(target, made)
        if node is _NOTHING:
            self.missing.append(path)
            return target
        return self.made(node, path)

    def made(self, node: Any, path: str) -> Any:
        """A value of the checkpoint for which there is no place yet: its tensors whole, on the CPU."""

        def give(name: str) -> Tensor:
            if name not in self.tensors:
                self.missing.append(name)
                return torch.empty(0)
            found = self.tensors[name]
            new = torch.empty(found.shape, dtype=found.dtype)
            self.want(name, new)
            return new

        try:
            return tree.decode(node, give)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as fault:
            raise CheckpointError(
                f"the index says of {path!r} what no checkpoint has: {type(fault).__name__}: {fault}"
            ) from None

    def want(self, name: str, into: Any) -> None:
        """Note a tensor to fill."""
        self.wants.append((name, into))
        self.unused.discard(name)

    def _tensor(self, target: Tensor, node: Any, path: str) -> Any:
        name = path if path in self.tensors else tree.tensor_name(node)
        if name is None or name not in self.tensors:
            self.missing.append(path)
            return target
        self.want(name, target)
        return target

    def _module(self, target: nn.Module, node: Any, path: str) -> Any:
        below = tree.children(node) or {}
        others = {}
        for key, value in target.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                self._tensor(value, below.get(key), tree.join(path, key))
            elif key in below:
                others[key] = self.made(below[key], tree.join(path, key))
            else:
                self.missing.append(tree.join(path, key))
        self._leave(path)
        if others:
            self.last.append(lambda: _load_extra(target, others))
        return target

    def _dict(self, target: dict[Any, Any], node: Any, path: str) -> Any:
        below = tree.children(node) or {}
        for key, value in list(target.items()):
            made = self.value(value, below.get(key, _NOTHING), tree.join(path, key))
            if made is not value:
                self.last.append(partial(target.__setitem__, key, made))
        if path:
            self._leave(path)
        return target

    def _alike(self, target: Any, node: Any) -> bool:
        below = tree.children(node)
        return below is not None and len(below) == len(target)

    def _again(self, target: Any, made: list[Any]) -> Any:
        if isinstance(target, list):
            self.last.append(lambda: target.__setitem__(slice(None), made))
            return target
        return tuple(made)

    def _later(self, target: Any, load: Callable[[Any], Any], node: Any, path: str) -> Any:
        if node is _NOTHING:
            self.missing.append(path)
        else:
            made = self.made(node, path)
            self.last.append(lambda: load(made))
        return target

    def _leave(self, path: str) -> None:
        """What the checkpoint has below a path and nobody has asked for is left over."""
        prefix = f"{path}." if path else ""
        wanted = {name for name, _ in self.wants[self.left :]}
        self.unused |= {name for name in self.tensors if name.startswith(prefix)} - wanted - self.seen
        self.seen |= wanted
        self.left = len(self.wants)

    # -- optimizers

    def _optimizer(self, target: Optimizer, node: Any, path: str) -> Any:
        if node is _NOTHING:
            self.missing.append(path)
            return target
        names = self.names.of_optimizer(target)
        params = [p for group in target.param_groups for p in group["params"]]
        own = target.state_dict()
        below = tree.children(node) or {}
        saved = tree.children(below.get("state")) or {}
        states: dict[int, Any] = {}
        for number, (name, param) in enumerate(zip(names, params, strict=True)):
            state = self._state(saved.get(name, _NOTHING), tree.join(path, f"state.{name}"), target, param)
            if state is not None:
                states[number] = state
        groups = self._groups(own["param_groups"], names, below.get("param_groups"), path)
        more = {k: self.made(v, tree.join(path, k)) for k, v in below.items() if k not in ("state", "param_groups")}
        self._leave(path)
        self.last.append(lambda: target.load_state_dict({**own, **more, "state": states, "param_groups": groups}))
        return target

    def _state(self, node: Any, path: str, optimizer: Optimizer, param: Any) -> dict[str, Any] | None:
        """A parameter's states: each in the layout that the optimizer gives it, in the memory of the one that is there."""
        below = tree.children(node) if node is not _NOTHING else None
        if below is None:  # its name is another one now: what has been joined or cut has tensors only
            prefix = f"{path}."
            below = {n[len(prefix) :]: {tree.KIND: "tensor", "name": n} for n in self.tensors if n.startswith(prefix)}
            if not below:
                return None
        there = optimizer.state.get(param, {})
        made = {}
        for key, item in below.items():
            name = tree.join(path, key)
            if tree.tensor_name(item) is None or name not in self.tensors:
                made[key] = self.made(item, name)
                continue
            found = self.tensors[name]
            made[key] = place_for(optimizer, key, param, there.get(key), found.shape, found.dtype)
            self.want(name, made[key])
        return made

    def _groups(self, own: list[Any], names: list[str], node: Any, path: str) -> list[Any]:
        """The options of each of the optimizer's groups, from the saved group that its parameters were in."""
        saved = self.made(node, tree.join(path, "param_groups")) if node is not None else []
        start = tree.join(path, "state.")
        group_of = {
            new.removeprefix(start): i
            for i, group in enumerate(saved)
            for name in group["params"]
            for new in follow(self.changes, f"{start}{name}")
        }
        made = []
        for number, group in enumerate(own):
            mine = [names[i] for i in group["params"]]
            found = {group_of[name] for name in mine if name in group_of}
            if len(found) > 1:
                raise CheckpointError(
                    f"{path}: group {number} of the optimizer has parameters of the saved groups {sorted(found)}, whose options "
                    f"differ: {mine[:3]}... Make the groups as they were, or split this one"
                )
            if not found and mine and saved:
                self.missing.append(tree.join(path, f"param_groups of {mine[0]}"))
            options = {k: v for k, v in saved[found.pop()].items() if k != "params"} if found else {}
            made.append({**group, **options, "params": group["params"]})
        return made

    def _optimizer_state(self, target: dict[str, Any], node: Any, path: str) -> Any:
        """An optimizer's state dict: filled where it has states, else made whole."""
        found = self.names.of_state_dict(target)
        if node is _NOTHING or found is None:
            return self._dict(target, node, path)
        named = by_name(target, found)
        numbers = [n for group in target["param_groups"] for n in group["params"]]
        below = tree.children(node) or {}
        saved = tree.children(below.get("state")) or {}
        for number, name in zip(numbers, found, strict=True):
            if name in saved:
                where = tree.join(path, f"state.{name}")
                state = self.value(named["state"].get(name), saved[name], where)
                self.last.append(partial(target["state"].__setitem__, number, state))
        groups = self._groups(target["param_groups"], found, below.get("param_groups"), path)
        self._leave(path)
        self.last.append(lambda: target.__setitem__("param_groups", groups))
        return target


def _load_extra(module: nn.Module, values: dict[str, Any]) -> None:
    for key, value in values.items():
        place, _, name = key.rpartition(".")
        if name == "_extra_state":
            module.get_submodule(place).set_extra_state(value)


NOTHING = _NOTHING
