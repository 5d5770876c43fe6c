"""Where the tensors of a step are in the program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from onecard._torch import names as _torch
from onecard.static.guards.before import Before
from onecard.static.guards.hooked import stands_for_another
from onecard.static.step import refusals
from onecard.static.step.step import BESIDE, Where
from onecard.train import unreduced
from onecard.train.own_parameters import named_parameters, own_parameters


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
        for leaf, known in before.unreduced.items():
            for kind in ("kept", "wide"):
                if leaf in self._found and known[kind]:
                    self._gradients[known[kind]] = (kind, self._found[leaf])

    def states_of(self, before: Before) -> None:
        """Learn which tensors were states before the step, which it may have replaced (``state["m"] = 0.9 * state["m"]``)."""
        for (r, g, i), param in self._parameters():
            for key, who in before.kept.get(id(self.roots[r][1]), {}).get(id(param), {}).items():
                is_new = self._found.get(who, ("object",))[0] == "object"
                if is_new and who in before.alive and before.alive[who]() is not None:
                    self._found[who] = ("state", r, g, i, key)

    def __call__(self, key: int, x: Any) -> Where:
        """The place of a tensor with this identity; one that has none is a root of its own."""
        where = self._found.get(key) or self._gradients.get(key)
        if where is None:
            where = self._found[key] = ("object", len(self.roots))
            self.roots.append((f"{_NAMELESS}{len(self.roots)}", x))
        return where

    def in_order(self, keys: Iterable[int]) -> list[int]:
        """Identities, by their places: Python lists what is alive in another order at each call, and on each rank."""
        order: dict[Any, int] = {where: i for i, where in enumerate(self._found.values())}
        at = {key: self._gradients[key][1] if key in self._gradients else self._found.get(key) for key in keys}
        return sorted(at, key=lambda key: order.get(at[key], len(order)))

    def owners(self) -> dict[Where, Where]:
        """By optimizer, group and number, the places of parameters that have one."""
        return {at: self._found[id(p)] for at, p in self._parameters() if id(p) in self._found}

    def _parameters(self) -> Iterator[tuple[tuple[int, int, int], Any]]:
        for r, (_, root) in enumerate(self.roots):
            for g, group in enumerate(root.param_groups if isinstance(root, Optimizer) else ()):
                yield from (((r, g, i), p) for i, p in enumerate(group["params"]))

    def rank(self, key: int) -> int:
        """Which of several tensors is called by its name: of a module or an optimizer, an argument, a gradient, another one."""
        kind = (self._found.get(key) or self._gradients.get(key) or ("object",))[0]
        return {"argument": 1, **dict.fromkeys(BESIDE, 2), "object": 3}.get(kind, 0)

    def holder_of(self, local: Tensor, before: Before) -> int | None:
        """The distributed tensor that had this part: one that the program has a name for, before aliases of it (a copy that
        stands for a view keeps one), of which nobody knows how long they live. A gradient in whose place the step has put
        another tensor is gone, and has its place all the same."""
        held = before.holders.get(id(local), ())
        had = [key for key in held if before.alive[key]() is not None or key in self._gradients]
        return min(had, key=self.rank, default=None)

    def knows(self, x: Any) -> bool:
        """Whether a tensor has a place already."""
        return id(x) in self._found

    def name(self, where: Where) -> str:
        """A place in words."""
        kind, *rest = where
        if kind == "argument":
            return self.names[rest[0]]
        if kind == "trained":
            return self.name(rest[0])
        if kind in BESIDE:
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


def members(r: int, root: Any) -> Iterator[tuple[Where, Tensor]]:
    """The tensors of a module or an optimizer, with their places."""
    if isinstance(root, nn.Module):
        named: list[tuple[Where, Any]] = [(("parameter", r, name), x) for name, x in named_parameters(root)]
        yield from named
        yield from ((("trained", where), x.stands_for) for where, x in named if stands_for_another(x))
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
    if kind == "trained":
        return at(rest[0], roots, leaves).stands_for
    if kind in BESIDE:
        return getattr(unreduced.of(at(rest[0], roots, leaves)), kind)
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
