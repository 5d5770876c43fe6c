"""What is loaded into: a walk over the state that was given, which finds for each tensor the one in the checkpoint.

Nothing is read yet. The walk gives a list of wants, each a place in memory and a name, what is missing and what is left over,
and what has to be done when all is read. Structures in the checkpoint that the state has no place for are made anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecard.checkpoint.format import tree
from onecard.checkpoint.format.objects import (
    Names,
    has_state,
    is_filled,
    is_of_each_rank,
    is_optimizer,
    is_optimizer_state,
    keys_of,
    load_extra,
)  # fmt: skip
from onecard.checkpoint.format.portions import GRID, StateValue, entries, entries_of, has_stages, mine, own
from onecard.checkpoint.reader.changes import Change
from onecard.checkpoint.reader.groups import by_text, check_kind, group_names, members, options_of, taker_of
from onecard.checkpoint.reader.schedules import GroupOrders
from onecard.checkpoint.reader.virtual import Virtual
from onecard.comm.world import world
from onecard.errors import CheckpointError
from onecard.train.judged import taken_whole
from onecard.train.shard import Shard
from onecard.train.zero.resume import place_for

Done = Callable[[], None]
_NOTHING: Any = object()


class Want(NamedTuple):
    """A tensor to fill; ``part``: what of the saved one, None for all of it."""

    name: str
    target: Any
    part: Shard | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the saved tensor."""
        return tuple(self.target.shape if self.part is None else self.part.shape)


@dataclass(slots=True)
class StateWalk:
    """One walk over a state.

    Attributes:
        tensors: what the checkpoint has, by name.
        wants: the tensors to fill, in the order of the walk.
        missing: what the checkpoint does not have, with the tensor that it would fill.
        last: what to do when the tensors are filled.
    """

    tensors: Mapping[str, Virtual]
    names: Names
    changes: Sequence[Change] = ()
    wants: list[Want] = field(default_factory=list)
    missing: list[tuple[str, Any]] = field(default_factory=list)
    last: list[Done] = field(default_factory=list)
    scopes: list[str] = field(default_factory=list)  # beginnings of names: what is there must have a place in the state
    stages: list[str] = field(default_factory=list)  # those of them of which other ranks fill the rest
    states: list[str] = field(default_factory=list)  # of optimizers, where a parameter may have none
    strays: list[str] = field(default_factory=list)  # parameters that saved optimizers have, and these do not
    flat: bool = False  # the state itself is a dict of tensors, so that nothing may be beside them
    groups: GroupOrders = field(default_factory=GroupOrders)
    made_of: list[str] = field(default_factory=list)  # places of the saved state that were made anew, all that is below

    def value(self, target: Any, node: Any, path: str) -> Any:
        """What takes the place of a value of the state: itself, filled, or another one."""
        if isinstance(target, Tensor):
            return self._tensor(target, node, path)
        if isinstance(target, nn.Module):
            return self._module(target, node, path)
        if is_optimizer(target):
            return self._optimizer(target, node, path)
        if isinstance(target, torch.Generator):
            return self._later(target, lambda made: target.set_state(made["generator"]), node, path)
        if is_optimizer_state(target):
            return self._optimizer_state(target, node, path)
        if not isinstance(target, dict | list | tuple) and has_state(target):
            if is_of_each_rank(target):
                return self._each(target, node, path)
            take = taker_of(target, node, path)
            return self._later(target, lambda made: take(self.groups.follow(target, made)), node, path)
        if isinstance(target, dict) and target:
            return self._dict(target, node, path)
        if isinstance(target, list | tuple) and any(map(is_filled, target)):
            return self._list(target, node, path)
        if node is _NOTHING:
            self._lacks(path)
            return target
        return self.made(node, path)

    def made(self, node: Any, path: str) -> Any:
        """A value of the checkpoint for which there is no place yet: its tensors whole, on the CPU."""

        self.made_of.append(path)

        def give(name: str) -> Tensor:
            if name not in self.tensors:
                self._lacks(name)
                return torch.empty(0, device="cpu")
            found = self.tensors[name]
            new = torch.empty(found.shape, dtype=found.dtype, device="cpu")
            self.want(name, new)
            return new

        try:
            return tree.decode(node, give)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as fault:
            raise CheckpointError(
                f"the index says of {path!r} what no checkpoint has: {type(fault).__name__}: {fault}"
            ) from None

    def want(self, name: str, into: Any, part: Shard | None = None) -> None:
        """Note a tensor to fill."""
        self.wants.append(Want(name, into, part))

    def _lacks(self, path: str, target: Any = None) -> None:
        self.missing.append((path, target))

    def _tensor(self, target: Tensor, node: Any, path: str, part: Shard | None = None) -> Any:
        name = path if path in self.tensors else tree.tensor_name(node)
        if name is None or name not in self.tensors:
            self._lacks(path, target)
            return target
        self.want(name, target, part)
        return target

    def _module(self, target: nn.Module, node: Any, path: str) -> Any:
        below = tree.children(node) or {}
        found, others = entries(target), {}
        for entry in found:
            where = tree.join(path, entry.name)
            if isinstance(entry.value, Tensor):
                self._tensor(entry.value, below.get(entry.name), where, entry.part)
            elif entry.name not in below:
                self._lacks(where)
            elif entry.name == entry.key:
                others[entry.key] = self.made(below[entry.name], where)
        self._leave(path, has_stages(found))
        if others:
            self.last.append(lambda: load_extra(target, others))
        return target

    def _dict(self, target: dict[Any, Any], node: Any, path: str) -> Any:
        below = tree.children(node) or {}
        noted = entries_of(target) if any(isinstance(value, Tensor) for value in target.values()) else []
        if any(entry.said for entry in noted):
            return self._noted(target, noted, below, path)
        self.groups.note_dict(path, target)
        for key, value in list(target.items()):
            made = self.value(value, below.get(key, _NOTHING), tree.join(path, key))
            if made is not value:
                self.last.append(partial(target.__setitem__, key, made))
        if path:
            self._leave(path)
        elif any(isinstance(value, Tensor) for value in target.values()):
            self.flat = True
        return target

    def _noted(self, target: dict[Any, Any], noted: list[StateValue], below: Mapping[Any, Any], path: str) -> Any:
        """A state dict of a module of which each rank has a part."""
        for entry in noted:
            where = tree.join(path, entry.name)
            if isinstance(entry.value, Tensor):
                self._tensor(entry.value, below.get(entry.name), where, entry.part)
            elif entry.name == entry.key:
                made = self.value(entry.value, below.get(entry.name, _NOTHING), where)
                self.last.append(partial(target.__setitem__, entry.key, made))
        self._leave(path, has_stages(noted))
        return target

    def _list(self, target: Any, node: Any, path: str) -> Any:
        below = tree.children(node) or {}
        made = [self.value(item, below.get(i, _NOTHING), tree.join(path, i)) for i, item in enumerate(target)]
        self._leave(path)
        if isinstance(target, list):
            self.last.append(lambda: target.__setitem__(slice(None), made))
            return target
        return target._make(made) if hasattr(target, "_make") else tuple(made)

    def _later(self, target: Any, load: Callable[[Any], Any], node: Any, path: str) -> Any:
        if node is _NOTHING:
            self._lacks(path)
        else:
            made = self.made(node, path)
            self.last.append(lambda: load(made))
        return target

    def _each(self, target: Any, node: Any, path: str) -> Any:
        """What may be each rank's own: the rows of as many ranks, laid out as they were; or what all had alike."""
        saved = {str(key): item for key, item in (tree.children(node) or {}).items()}
        before, now = tree.decode(saved.get(GRID), str), own({}).get(GRID)
        names = [
            name for item in saved.values() if (name := tree.tensor_name(item)) is not None and name in self.tensors
        ]
        rows = {self.tensors[name].shape[0] for name in names if len(self.tensors[name].shape) > 1}
        size = world.get_world_size()
        if (rows and (rows != {size} or before != now)) or (before != now and target.of_each_rank == "always"):
            kinds = [f"laid out as {grid}" if grid else "laid out by nobody" for grid in (before, now)]
            raise CheckpointError(
                f"{path!r} has a random state of each of {max(rows, default=1)} ranks, {kinds[0]}; this job has {size}, "
                f"{kinds[1]}. Which rank draws what is a matter of both: leave {path!r} out of the state, and seed anew"
            )
        return self._later(target, lambda made: target.load_state_dict(mine(made, world.get_rank())), node, path)

    def _leave(self, path: str, stages: bool = False) -> None:
        """What the checkpoint has below a path and nobody has asked for is left over; of ``stages``, if no rank has."""
        (self.stages if stages else self.scopes).append(f"{path}." if path else "")

    def left_over(self, node: Any) -> tuple[list[str], list[str]]:
        """What of the saved state has no place in what is filled, though its neighbours have; and what may have one elsewhere."""
        found = self._left_over(node)
        stages = tuple(self.stages)
        return [n for n in found if not _of(n).startswith(stages)], [n for n in found if _of(n).startswith(stages)]

    def _left_over(self, node: Any) -> list[str]:
        wanted = {want.name for want in self.wants}
        read = {self.tensors[n].views for n in wanted & self.tensors.keys()} - {()}  # a tied weight has other names
        scopes, made = (*self.scopes, *self.stages), {*self.made_of}
        parts = tuple(f"{key}." for key, item in (tree.children(node) or {}).items() if tree.children(item) is not None)

        def asked(name: str) -> bool:
            return name.startswith(scopes) or (self.flat and not name.startswith(parts))

        found = sorted(n for n, x in self.tensors.items() if not (n in wanted or x.views in read) and asked(n))
        for path, item in tree.values(node):
            above = (path[:i] for i, letter in enumerate(path) if letter == ".")
            empty = tree.children(item) is not None
            if empty and (f"{path}." in scopes or f"{path}.".startswith(tuple(self.states))):
                continue  # it was looked through, and there was nothing in it
            if asked(path) and path not in made and made.isdisjoint(above):
                found.append(path)
        return found + [name for name in self.strays if not any(x.startswith(_of(name)) for x in found)]

    def lacking(self) -> list[str]:
        """Names that the checkpoint does not have, but for those of memory that is filled under another name."""
        filled = {keys_of(want.target)[-1] for want in self.wants}
        return [name for name, target in self.missing if target is None or keys_of(target)[-1] not in filled]

    # -- optimizers

    def _optimizer(self, target: Optimizer, node: Any, path: str) -> Any:
        if node is _NOTHING:
            self._lacks(path)
            return target
        names = self.names.of_optimizer(target, group_names(node, path, self.changes, target))
        check_kind(target, node, path)
        params = [p for group in target.param_groups for p in group["params"]]
        own = target.state_dict()
        below = tree.children(node) or {}
        saved = by_text(below.get("state"))
        states, whole = dict[int, Any](), {*map(id, taken_whole(target))}
        for number, (name, param) in enumerate(zip(names, params, strict=True)):
            state = self._state(saved.get(name, _NOTHING), tree.join(path, f"state.{name}"), target, param, whole)
            if state is not None:
                states[number] = state
        groups = self._groups(target, own["param_groups"], dict(enumerate(names)), below.get("param_groups"), path)
        self.states.append(tree.join(path, "state."))
        more = {k: self.made(v, tree.join(path, k)) for k, v in below.items() if k not in ("state", "param_groups")}
        self._leave(path, has_stages(self.names.entry(p) for p in params))
        self.last.append(lambda: target.load_state_dict({**own, **more, "state": states, "param_groups": groups}))
        return target

    def _state(self, node: Any, path: str, optimizer: Optimizer, param: Any, whole: set[int]) -> Any:
        """A parameter's states: each in the layout that the optimizer gives it, in the memory of the one that is there."""
        if (below := self._below(node, path)) is None:
            return None
        there = optimizer.state.get(param, {})
        made = {}
        for key, item in below.items():
            name = tree.join(path, key)
            if tree.tensor_name(item) is None or name not in self.tensors:
                made[key] = self.made(item, name)
                continue
            found = self.tensors[name]
            part = None if id(param) in whole else self.names.entry(param).part
            if part is None or found.shape != tuple(part.shape):
                made[key] = place_for(optimizer, key, param, there.get(key), found.shape, found.dtype)
                self.want(name, made[key])
            else:
                made[key] = place_for(optimizer, key, param, there.get(key), param.shape, found.dtype)
                self.want(name, made[key], part)
        return made

    def _below(self, node: Any, path: str) -> dict[Any, Any] | None:
        """What the checkpoint has of a parameter's states; None: it had none."""
        if node is not _NOTHING and (below := tree.children(node)) is not None:
            return below
        prefix = f"{path}."  # its name is another one now: what has been joined or cut has tensors only
        names = [n for n in self.tensors if n.startswith(prefix)]
        return {n[len(prefix) :]: {tree.KIND: "tensor", "name": n} for n in names} or None

    def _groups(self, target: Any, own: list[Any], names: Mapping[int, str], node: Any, path: str) -> list[Any]:
        """The options of each of the optimizer's groups, from the saved group that its parameters were in."""
        if node is None:
            self._lacks(tree.join(path, "param_groups"))
        saved = self.made(node, tree.join(path, "param_groups")) if node is not None else []
        in_groups = members(saved, path, self.changes)
        group_of = {name: i for i, group in enumerate(in_groups) for name in group}
        known = set(names.values())
        self.strays += [f"{path}: parameter {name}" for name in group_of if name not in known]
        made, order = [], []
        for number, group in enumerate(own):
            mine = [names[i] for i in group["params"]]
            found = {group_of[name] for name in mine if name in group_of}
            if not found and mine and saved:
                self._lacks(tree.join(path, f"param_groups of {mine[0]}"))
            options = options_of(saved, found, f"{path}: group {number}", mine)
            made.append({**group, **options, "params": group["params"]})
            order.append(min(found, default=None))
        self.groups.note(target, order, len(saved))
        return made

    def _optimizer_state(self, target: dict[str, Any], node: Any, path: str) -> Any:
        """An optimizer's state dict: filled where it has states, else made whole."""
        if node is _NOTHING or tree.children(node) is None:
            return self._dict(target, node, path)
        names = self.names.of_state_dict(target, group_names(node, path, self.changes, target))
        params = dict(zip(names, self.names.entries_of(names), strict=True))
        numbers = [n for group in target["param_groups"] for n in group["params"]]
        below = tree.children(node) or {}
        saved = by_text(below.get("state"))
        self.states.append(tree.join(path, "state."))
        for number, name in zip(numbers, names, strict=True):
            where = tree.join(path, f"state.{name}")
            below_it = self._below(saved.get(name, _NOTHING), where)
            if below_it is None:  # as load_state_dict does
                self.last.append(partial(target["state"].pop, number, None))
                continue
            state = self._in_place(target["state"].get(number, {}), below_it, where, params[name])
            self.last.append(partial(target["state"].__setitem__, number, state))
        groups = self._groups(
            target, target["param_groups"], dict(zip(numbers, names, strict=True)), below.get("param_groups"), path
        )
        for key in below:
            if key not in ("state", "param_groups"):
                self.last.append(partial(target.__setitem__, key, self.made(below[key], tree.join(path, key))))
        self._leave(path, has_stages(entry for entry in params.values() if entry is not None))
        self.last.append(lambda: target.__setitem__("param_groups", groups))
        return target

    def _in_place(self, there: Any, below: Mapping[Any, Any], path: str, param: StateValue | None) -> Any:
        """A parameter's states, as the checkpoint has them: in the memory of those that are there."""
        made = {}
        for key, item in below.items():
            where, mine = tree.join(path, key), there.get(key)
            part = param.part if param is not None else None
            cut = part is not None and where in self.tensors and self.tensors[where].shape == tuple(part.shape)
            if cut and mine is None:
                mine = torch.empty(param.value.shape, dtype=self.tensors[where].dtype, device="cpu")  # type: ignore[union-attr]
            if isinstance(mine, Tensor):
                made[key] = self._tensor(mine, item, where, part if cut else None)
            else:
                made[key] = self.made(item, where)
        return made


def _of(left: str) -> str:
    """Where it is saved."""
    path, stray, name = left.partition(": parameter ")
    return tree.join(path, f"state.{name}.") if stray else left


NOTHING = _NOTHING
