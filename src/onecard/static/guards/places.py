"""Where the tensors of a step are in the program: what was alive before it, and what it has changed."""

from __future__ import annotations

import gc
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from onecard._torch import names as _torch
from onecard.static.guards import frozen
from onecard.static.guards.hooked import own_parameters
from onecard.static.step import refusals
from onecard.static.step.facts import takes_gradients
from onecard.static.step.step import Where
from onecard.tensor.deferred.calls import storage_of
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.spec import Spec


class Before:
    """All tensors that are alive before a step, without keeping any of them alive.

    Attributes:
        alive: by identity.
        gradients: for each leaf, its gradient's identity or 0; ``owners``: the other way; ``begun``: those that are leaves
            with gradients since the step only.
        holders: by the identity of a local part, the identities of the distributed tensors that had it, parameters first.
        locals: of each distributed tensor, its local part's identity and its spec.
        groups: the numbers of all optimizers; ``states``: for each of them, the states of each parameter, by name
            with their values, if they are no tensors.
        still: of each module, and of each optimizer's groups, what a recording takes for granted; ``buffers``: of each module,
            the identities of its buffers by name.
        others: what is alive of the types that ``also`` wants, until somebody takes it: one look at all objects serves both.
    """

    def __init__(self, also: frozen.Kinds | None = None) -> None:
        self.alive: dict[int, TensorWeakRef] = {}
        self.gradients: dict[int, int] = {}
        self.owners: dict[int, int] = {}
        self.begun: set[int] = set()
        self.holders: dict[int, list[int]] = {}
        self.locals: dict[int, tuple[int, Spec]] = {}
        self.groups: list[tuple[Optimizer, list[dict[str, Any]]]] = []
        self.states: dict[int, dict[int, dict[Any, Any]]] = {}
        self.still: dict[int, Any] = {}
        self.buffers: dict[int, dict[str, int]] = {}
        found: list[Tensor] = []
        ours, self.others = alive(_is_held, also or _none)
        for x in ours:
            if isinstance(x, Tensor):
                found.append(x)
            elif isinstance(x, Optimizer):
                self.groups.append((x, [numbers_of(group) for group in x.param_groups]))
                self.still[id(x)] = [options_of(group) for group in x.param_groups]
                self.states[id(x)] = {
                    id(p): plain_states(held) for p, held in x.state.items() if isinstance(held, dict)
                }
            else:
                self.still[id(x)] = values_of(x)
                self.buffers[id(x)] = {name: id(buffer) for name, buffer in x._buffers.items()}
        for x in found:
            self.alive[id(x)] = TensorWeakRef(x)
            if takes_gradients(x):
                grad = _torch.gradient(x)
                self.gradients[id(x)] = 0 if grad is None else id(grad)
                if grad is not None:  # made for Python only now, if it is a plain one
                    self.owners[id(grad)] = id(x)
                    self.alive[id(grad)] = TensorWeakRef(grad)
                    self._hold(grad)
            self._hold(x)

    def _hold(self, x: Tensor) -> None:
        if isinstance(x, DistTensor) and hasattr(x, "_local"):
            known = self.holders.setdefault(id(x._local), [])
            known.insert(0 if isinstance(x, nn.Parameter) else len(known), id(x))
            self.locals[id(x)] = (id(x._local), x._spec)

    def had(self, x: Tensor) -> bool:
        """Whether a tensor was there."""
        found = self.alive.get(id(x))
        return found is not None and found() is x

    def begins(self, x: Any) -> None:
        """A tensor that was there may take gradients by now, which it did not: its own is one that the step leaves."""
        if isinstance(x, Tensor) and self.had(x) and takes_gradients(x) and id(x) not in self.gradients:
            self.gradients[id(x)] = 0
            self.begun.add(id(x))

    def gradients_now(self) -> list[Tensor | None]:
        """What leaves that were there have as gradients by now, without being seen to look: who reads one has it summed."""
        with _torch.as_it_is():
            return [_torch.gradient(x) for key in self.gradients if (x := self.alive[key]()) is not None]

    def still_is(self, x: Any, was: int) -> bool:
        """Whether this is what had that identity before, which something new may have by now."""
        return id(x) == was and (x is None or self.had(x))

    def moved(self) -> Iterator[DistTensor]:
        """Distributed tensors that have another local part, or lie otherwise, than before."""
        for key, (local, spec) in self.locals.items():
            x: Any = self.alive[key]()
            if x is not None and (
                not self.still_is(x._local, local) or x._spec.with_hint(()) is not spec.with_hint(())
            ):
                yield x


def holders(values: Sequence[Any]) -> dict[int, int]:
    """For tensors that lie in another one's memory the number of that one: parameters of ZeRO beside a module's own."""
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for i, x in enumerate(values):
        if isinstance(x, Tensor) and x.layout is torch.strided and x.numel():
            start = x.storage_offset() * x.itemsize
            length = (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.itemsize
            spans.setdefault(storage_of(x), []).append((int(start), int(start + length), i))
    found = dict[int, int]()
    for sharing in spans.values():
        start, end, holder = max(sharing, key=lambda span: (span[1] - span[0], -span[2]))
        found |= {i: holder for a, b, i in sharing if i != holder and start <= a and b <= end}
    return found


def alive(*wanted: frozen.Kinds) -> list[list[Any]]:
    """For each question, a function of a module, what is alive of the types that it wants.

    There are hundreds of thousands of objects: it is one look, and each type is asked once.
    """
    listed = gc.get_objects()
    there = frozen.of_kinds(listed, lambda kind: any(wants(kind) for wants in wanted))
    seen = {*map(id, there)}  # what is thawed is listed again
    hidden = [[x for x in more if id(x) not in seen] for more in frozen.those(listed, wanted)]
    return [frozen.of_kinds(there, wants) + more for wants, more in zip(wanted, hidden, strict=True)]


def _is_held(kind: type) -> bool:
    return issubclass(kind, (Tensor, Optimizer, nn.Module))


def _none(kind: type) -> bool:
    return False


def plain_states(held: dict[Any, Any]) -> dict[Any, Any]:
    """An optimizer's states of one parameter: names, and values of those that are numbers of Python."""
    return {k: v if isinstance(v, bool | int | float | str) else None for k, v in held.items()}


def numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers of an optimizer's group of parameters: floats, and tuples of them."""

    def counts(value: Any) -> bool:
        return isinstance(value, float) or (
            isinstance(value, tuple | list) and all(isinstance(v, float) for v in value)
        )

    return {k: v for k, v in group.items() if k != "params" and counts(v)}


STILL = (bool, int, float, str, type(None))
"""Of values of these types a recording takes what they were: they are compared before each replay."""


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """What else an optimizer's group holds besides parameters and numbers that may change."""
    numbers = numbers_of(group)
    return {k: v for k, v in group.items() if k not in numbers and isinstance(v, STILL)}


SETTLED = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
    types.FunctionType, types.BuiltinFunctionType, type,
)  # fmt: skip
"""So of values of these types that torch's own modules hold, and of tuples: strides of a convolution, an activation."""


def values_of(module: nn.Module) -> dict[str, Any]:
    """The plain values that a module holds itself."""
    kinds = (*STILL, *SETTLED) if type(module).__module__.startswith("torch.") else STILL
    return {k: v for k, v in vars(module).items() if not k.startswith("_") and _is_plain(v, kinds)}


def _is_plain(value: Any, kinds: tuple[type, ...]) -> bool:
    if type(value) is tuple:
        return all(_is_plain(v, kinds) for v in value)
    return isinstance(value, kinds)


def still_before(before: Before, roots: Sequence[tuple[str, Any]]) -> dict[Any, Any]:
    """Of each module and each optimizer's group: what it held before the step, which may have counted there."""
    facts: dict[Any, Any] = {}
    for name, root in roots:
        if isinstance(root, nn.Module):
            for path, module in root.named_modules():
                had = before.buffers.get(id(module), {})
                if lost := [n for n, x in module._buffers.items() if n in had and not before.still_is(x, had[n])]:
                    facts[f"{name}.{path}" if path else name, "replaced"] = lost[0]
                if id(module) in before.still:
                    facts[f"{name}.{path}" if path else name, "still"] = before.still[id(module)]
        elif isinstance(root, Optimizer):
            facts |= {(name, i, "options"): held for i, held in enumerate(before.still.get(id(root), ()))}
    return facts


def changed_itself(before: Before, roots: Sequence[tuple[str, Any]]) -> bool:
    """Whether a module's plain values are others than before the step."""
    modules = [module for _, root in roots if isinstance(root, nn.Module) for module in root.modules()]
    stills = [(vars(module), before.still.get(id(module), {})) for module in modules]
    return any(name not in now or now[name] != value for now, still in stills for name, value in still.items())


class Places:
    """Finds the place of a tensor below the roots: arguments, modules, optimizers, and tensors that stand alone."""

    def __init__(self, roots: Sequence[tuple[str, Any]], arguments: Sequence[Any], names: Sequence[str]) -> None:
        self.roots, self.names = list(roots), list(names)
        self._found: dict[int, Where] = {}
        self._gradients: dict[int, Where] = {}
        for i, x in enumerate(arguments):
            if isinstance(x, Tensor):
                self._found.setdefault(id(x), ("argument", i))
        for modules in (
            True,
            False,
        ):  # a parameter is called by its name in the module, not by its number in the optimizer
            for r, (_, root) in enumerate(self.roots):
                for where, x in members(r, root) if isinstance(root, nn.Module) is modules else ():
                    known = self._found.setdefault(id(x), where)
                    if known[0] == "argument" and where[0] != "object":
                        raise refusals.argument_of_the_program(self.name(known), self.name(where))

    def gradients_of(self, before: Before) -> None:
        """Learn which tensors were gradients before the step."""
        for grad, leaf in before.owners.items():
            if leaf in self._found:
                self._gradients[grad] = ("gradient", self._found[leaf])

    def __call__(self, key: int, x: Any) -> Where:
        """The place of a tensor with this identity; one that has none is a root of its own."""
        where = self._found.get(key) or self._gradients.get(key)
        if where is None:
            where = self._found[key] = ("object", len(self.roots))
            self.roots.append((f"{_NAMELESS}{len(self.roots)}", x))
        return where

    def in_order(self, keys: Iterable[int]) -> list[int]:
        """Identities, by their places: Python lists what is alive in another order at each call, and on each rank."""
        order = {where: i for i, where in enumerate(self._found.values())}

        def at(key: int) -> int:
            where: Any = self._gradients[key][1] if key in self._gradients else self._found.get(key)
            return order.get(where, len(order))

        return sorted(keys, key=at)

    def rank(self, key: int) -> int:
        """Which of several tensors is called by its name: of a module or an optimizer, an argument, a gradient, another one."""
        kind = (self._found.get(key) or self._gradients.get(key) or ("object",))[0]
        return {"argument": 1, "gradient": 2, "object": 3}.get(kind, 0)

    def was_gradient(self, key: int) -> bool:
        """Whether this is the identity of a gradient before the step."""
        return key in self._gradients

    def knows(self, x: Any) -> bool:
        """Whether a tensor has a place already."""
        return id(x) in self._found

    def name(self, where: Where) -> str:
        """A place in words."""
        kind, *rest = where
        if kind == "argument":
            return self.names[rest[0]]
        if kind == "gradient":
            return f"{self.name(rest[0])}.grad"
        root = self.roots[rest[0]][0]
        if kind in ("parameter", "buffer"):
            return f"{root}.{rest[1]}"
        if kind in ("member", "state"):
            _, group, i, *key = rest
            owner = self.roots[rest[0]][1].param_groups[group]["params"][i]
            known = self._found.get(id(owner), ("member",))
            name = self.name(known) if known[0] in ("parameter", "argument", "object") else f"{root}[{group}][{i}]"
            return f"{key[0]} of {name}" if key else name
        if kind == "group":
            _, group, key, i = rest
            return f"{root}.param_groups[{group}][{key!r}]" + ("" if i is None else f"[{i}]")
        return root


_NAMELESS = "a tensor "


def is_nameless(root: str) -> bool:
    """Whether a root is a tensor that no name of the program leads to."""
    return root.startswith(_NAMELESS)


def named_parameters(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All below a module, by torch's names, also of a wrapper that gives them other ones; each once."""
    seen = set()
    for path, module in root.named_modules():
        for name, x in own_parameters(module).items():
            if x is not None and id(x) not in seen:
                seen.add(id(x))
                yield f"{path}.{name}" if path else name, x


def members(r: int, root: Any) -> Iterator[tuple[Where, Tensor]]:
    """The tensors of a module or an optimizer, with their places."""
    if isinstance(root, nn.Module):
        yield from ((("parameter", r, name), x) for name, x in named_parameters(root))
        yield from ((("buffer", r, name), x) for name, x in nn.Module.named_buffers(root))
    elif isinstance(root, Optimizer):
        for g, group in enumerate(root.param_groups):
            for i, x in enumerate(group["params"]):
                yield ("member", r, g, i), x
                for key, value in root.state.get(x, {}).items():
                    if isinstance(value, Tensor):
                        yield ("state", r, g, i, key), value
            for key, value in group.items():
                if isinstance(value, Tensor):
                    yield ("group", r, g, key, None), value
    elif isinstance(root, Tensor):
        yield ("object", r), root


def at(where: Where, roots: Sequence[Any], leaves: Sequence[Any]) -> Any:
    """The object at a place."""
    kind, *rest = where
    if kind == "argument":
        return leaves[rest[0]]
    if kind == "gradient":
        return _torch.gradient(at(rest[0], roots, leaves))
    root = roots[rest[0]]
    if kind in ("parameter", "buffer"):
        module, name = module_at(root, rest[1])
        return (own_parameters(module) if kind == "parameter" else module._buffers)[name]
    if kind == "member":
        return optimizer_at(root).param_groups[rest[1]]["params"][rest[2]]
    if kind == "state":
        return root.state[optimizer_at(root).param_groups[rest[1]]["params"][rest[2]]][rest[3]]
    if kind == "group":
        value = optimizer_at(root).param_groups[rest[1]][rest[2]]
        return value if rest[3] is None else value[rest[3]]
    if kind != "object":
        raise KeyError(kind)
    return root


def module_at(root: Any, name: str) -> tuple[nn.Module, str]:
    """The module of a parameter or buffer, and its last name. The way there leads through modules only, never attributes.

    Raises:
        KeyError: there is no such module.
    """
    *path, last = name.split(".")
    for part in path:
        root = root._modules[part] if isinstance(root, nn.Module) else None
    if not isinstance(root, nn.Module):
        raise KeyError(name)
    return root, last


def optimizer_at(root: Any) -> Optimizer:
    """A root that is an optimizer.

    Raises:
        KeyError: it is none.
    """
    if not isinstance(root, Optimizer):
        raise KeyError("optimizer")
    return root


Finder = Callable[[int, Any], Where]
