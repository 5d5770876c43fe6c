"""What a function reaches by name: modules and optimizers, and plain values that it reads and that may change between steps."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_STILL = (bool, int, float, str, type(None))
_DEPTH = 4  # functions that call functions


class Reached:
    """What a function's code names.

    Attributes:
        roots: modules and optimizers, by the names that they have there.
        values: (name, how to read it, what it was) of plain values in closures, globals and objects.
        tree: the form of the arguments.
    """

    def __init__(self) -> None:
        self.roots: list[tuple[str, Any]] = []
        self.values: list[tuple[str, Any, Any, Any]] = []
        self.tree: Any = None
        self._seen: set[int] = set()

    def unchanged(self) -> bool:
        """Whether the plain values are what they were."""
        for _, holder, key, value in self.values:
            now = holder.get(key) if key is not None else holder.cell_contents
            if _differs(now, value):
                return False
        return True

    def difference(self) -> str:
        """Which of them is not, in words."""
        for name, holder, key, value in self.values:
            now = holder.get(key) if key is not None else holder.cell_contents
            if _differs(now, value):
                if isinstance(value, Tensor):
                    return f"{name}, which the step reads, is another tensor; pass it as an argument"
                return f"{name}, which the step reads, was {value!r} and is {now!r}; pass it as an argument (a float may change)"
        return ""

    def take(self, name: str, value: Any, holder: Any, key: Any, depth: int) -> None:
        """Note one thing that a name stands for."""
        if isinstance(value, _STILL):
            self.values.append((name, holder, key, value))
        elif isinstance(value, Tensor):
            self.roots.append((name, value))
            self.values.append((name, holder, key, value))
        elif id(value) in self._seen or isinstance(value, type | types.ModuleType):
            return
        elif isinstance(value, nn.Module | Optimizer):
            self._seen.add(id(value))
            self.roots.append((name, value))
        elif isinstance(value, types.FunctionType | types.MethodType):
            self._seen.add(id(value))
            if depth:
                self.function(value, depth - 1)
        elif isinstance(value, list | tuple) and len(value) <= 64:
            self._seen.add(id(value))
            for i, part in enumerate(value):
                if isinstance(part, nn.Module | Optimizer):
                    self.take(f"{name}[{i}]", part, None, None, depth)
                elif isinstance(part, Tensor):
                    self.roots.append((f"{name}[{i}]", part))
        elif hasattr(value, "__dict__") and not type(value).__module__.startswith("torch."):
            self._seen.add(id(value))
            for k, part in vars(value).items():
                if isinstance(part, (*_STILL, Tensor, nn.Module, Optimizer)):
                    self.take(f"{name}.{k}", part, vars(value), k, depth)

    def function(self, fn: Any, depth: int) -> None:
        """Note what a function's closure, globals and ``self`` hold."""
        if isinstance(fn, types.MethodType):
            self.take("self", fn.__self__, None, None, depth)
            fn = fn.__func__
        if not isinstance(fn, types.FunctionType) or (fn.__module__ or "").split(".")[0] in ("torch", "onecard"):
            return
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            try:
                self.take(name, cell.cell_contents, cell, None, depth)
            except ValueError:  # an empty cell
                continue
        for name in _named(fn.__code__):
            if name in fn.__globals__:
                self.take(name, fn.__globals__[name], fn.__globals__, name, depth)


def _differs(now: Any, before: Any) -> bool:
    return now is not before and (isinstance(before, Tensor) or type(now) is not type(before) or now != before)


def _named(code: types.CodeType) -> Iterator[str]:
    yield from dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant)


def reached(fn: Any, leaves: Sequence[Any]) -> Reached:
    """What a function reaches, and the modules and optimizers among its arguments."""
    found = Reached()
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, nn.Module | Optimizer):
            found.take(f"argument{i}", leaf, None, None, 0)
    if isinstance(fn, nn.Module):
        found.take("model", fn, None, None, 0)
        found.function(fn.forward, _DEPTH)
    else:
        found.function(fn, _DEPTH)
    return found
