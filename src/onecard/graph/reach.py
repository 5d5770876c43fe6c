"""What a function reaches by name: modules and optimizers, and plain values that it reads and that may change between steps."""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_STILL = (bool, int, float, str, type(None))
_DEPTH = 4  # functions that call functions


class Reached:
    """What a function's code names.

    Attributes:
        roots: modules and optimizers, by the names that they have there.
        values: (name, how to read it, what it was) of plain values in closures, globals, containers and objects; of other
            objects, which may not be exchanged. ``lengths``: (name, container, how long it was).
        named: names of attributes in the code of all functions that were found; of objects only those in ``names`` are looked
            at, so that what else they hold (a progress bar's count) may change.
    """

    def __init__(self, names: frozenset[str] = frozenset()) -> None:
        self.roots: list[tuple[str, Any]] = []
        self.values: list[tuple[str, Any, Any, Any]] = []
        self.lengths: list[tuple[str, Any, int]] = []
        self.names, self.named = names, set[str]()
        self._seen: set[int] = set()

    def settle(self, read: Collection[int]) -> None:
        """After the recorded step: a list that it has appended to, as a log, may be as long as it is now.

        Unless the step read tensors (``read``: their identities) of it: then each call has more to read.
        """
        for i, (name, holder, length) in enumerate(self.lengths):
            were = itertools.islice(dict.values(holder) if isinstance(holder, dict) else holder, length)
            if len(holder) != length and not any(id(getattr(x, "_local", x)) in read for x in were):
                self.lengths[i] = (name, holder, len(holder))

    def difference(self) -> str:
        """Which of them is not, in words."""
        for name, holder, length in self.lengths:
            if len(holder) != length:
                return f"{name}, which the step reads, had {length} entries and has {len(holder)}"
        for name, holder, key, value in self.values:
            here = present(holder, key)
            if differs(here, value):
                if isinstance(value, Tensor):
                    return f"{name}, which the step reads, is another tensor; pass it as an argument"
                if not isinstance(value, _STILL):
                    return f"{name}, which the step reads, is another object"
                return f"{name}, which the step reads, was {value!r} and is {here!r}; pass it as an argument (a float may change)"
        return ""

    def take(self, name: str, value: Any, holder: Any, key: Any, depth: int) -> None:
        """Note one thing that a name stands for; ``holder``: None of what cannot be exchanged."""
        if isinstance(value, _STILL):
            if holder is not None:
                self.values.append((name, holder, key, value))
        elif isinstance(value, Tensor):
            self.roots.append((name, value))
            if holder is not None:
                self.values.append((name, holder, key, value))
        else:
            if holder is not None and not isinstance(value, types.ModuleType):
                self.values.append((name, holder, key, value))
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._inside(name, value, depth)

    def _inside(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module | Optimizer):
            self.roots.append((name, value))
            if isinstance(value, nn.Module):
                self._module(name, value, depth)
            elif _users(type(value).__module__):  # a class of its own, which may count its steps
                own = vars(value)
                for k in [k for k in own if k in self.names and k not in _of_every_optimizer()]:
                    self.take(f"{name}.{k}", own[k], own, k, depth)
                self._class(name, type(value), depth, value, frozenset(own))
        elif not depth:
            return
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self.function(value, depth - 1)
        elif isinstance(value, dict | list | tuple):
            if not isinstance(value, tuple):
                self.lengths.append((name, value, len(value)))
            # Of dict itself: a library's own kind of dict may mean something else by ``items`` and ``get``.
            parts = dict.items(value) if isinstance(value, dict) else enumerate(value)
            for at, part in parts if len(value) <= _LONG else ():
                self.take(f"{name}[{at!r}]", part, None if isinstance(value, tuple) else value, at, depth - 1)
        elif isinstance(value, types.ModuleType):
            self._attributes(name, vars(value), depth - 1, _users(value.__name__))
        elif isinstance(value, type):
            self._class(name, value, depth - 1)
        elif _users(type(value).__module__) or type(value).__module__ in _NAMESPACES:
            held = getattr(value, "__dict__", {})
            self._attributes(name, held, depth - 1)
            self._class(name, type(value), depth - 1, value, frozenset(held))

    def _attributes(self, name: str, held: Any, depth: int, wanted: bool = True) -> None:
        for k in [k for k in held if wanted and k in self.names]:
            self.take(f"{name}.{k}", held[k], held, k, depth)

    def _class(self, name: str, kind: type, depth: int, of: Any = None, own: frozenset[str] = frozenset()) -> None:
        """Values of a class that instances share, and the code of its methods and properties that are called."""
        done = set(own)
        for base in kind.__mro__ if _users(kind.__module__) else ():
            for k in [k for k in vars(base) if k in self.names and k not in done and _users(base.__module__)]:
                done.add(k)
                found: Any = vars(base)[k]
                value: Any = found
                value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
                if isinstance(value, types.FunctionType):
                    self.function(value, depth)
                elif not k.startswith("__"):
                    self.take(f"{name}.{k}", value, vars(base) if value is found else None, k, depth)

    def _hooks(self, name: str, module: nn.Module, depth: int) -> None:
        """What the code of its hooks, and of those of its parameters, names."""
        held = [getattr(module, kind) for kind in HOOKS]
        held += [getattr(p, kind) for p in own_parameters(module).values() if p is not None for kind in TENSOR_HOOKS]
        for hook in [hook for hooks in held for hook in (hooks or {}).values()]:
            self.take(f"a hook of {name}", hook, None, None, max(depth, 1))

    def _module(self, name: str, root: nn.Module, depth: int) -> None:
        """Tensors and containers that a module holds besides parameters and buffers, and what its code names."""
        for path, module in root.named_modules():
            self._hooks(f"{name}.{path}" if path else name, module, depth)
            if type(module).__module__.startswith("torch."):
                continue
            where, held = f"{name}.{path}" if path else name, vars(module)
            for k in [k for k in held if k in self.names and k not in _OF_EVERY_MODULE]:
                if k.startswith("_") or not isinstance(held[k], _STILL):  # of others a recording looks at all
                    self.take(f"{where}.{k}", held[k], held, k, max(depth - 1, 0))
            self._class(where, type(module), depth, module, frozenset(held))
            if depth and id(type(module).forward) not in self._seen:
                self._seen.add(id(type(module).forward))
                self.function(type(module).forward, depth - 1)

    def function(self, fn: Any, depth: int) -> None:
        """Note what a function's closure, globals and ``self`` hold."""
        while isinstance(fn, functools.partial | types.MethodType):
            if isinstance(fn, types.MethodType):
                self.take("self", fn.__self__, None, None, max(depth, 1))
                fn = fn.__func__
            else:
                for i, given in enumerate((*fn.args, *fn.keywords.values())):
                    self.take(f"argument {i} of {getattr(fn.func, '__name__', 'a partial')}", given, None, None, depth)
                fn = fn.func
        if not isinstance(fn, types.FunctionType) or not _users(fn.__module__ or ""):
            return
        self.named |= set(_attribute_names(fn.__code__))
        logs = _logs(fn.__code__)
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            try:
                held = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            if not (name in logs and type(held) is list):
                self.take(name, held, cell, None, depth)
        for name in _named(fn.__code__):
            if name in fn.__globals__ and not (name in logs and type(fn.__globals__[name]) is list):
                self.take(name, fn.__globals__[name], fn.__globals__, name, depth)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_LONG = 64  # a container with more is data, not settings
_NAMESPACES = ("types", "argparse")  # of the standard library's objects, those that hold settings
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@functools.cache
def own_parameters(module: nn.Module) -> dict[str, Any]:
    """A module's parameters as it has them, where asking for one by name would gather it (``fleet``'s level "p_g_os")."""
    return getattr(module._parameters, "plain", module._parameters)


def _of_every_optimizer() -> frozenset[str]:
    """Made when it is asked for: the first optimizer of a process imports torch's compiler, as long as all else takes."""
    return frozenset(vars(torch.optim.SGD([torch.empty(0)])))


def _users(module: str) -> bool:
    """Whether a module of Python is the user's, or a library's that is built on torch."""
    top = module.partition(".")[0]
    return top not in ("torch", "onecard", "numpy") and (top == "__main__" or top not in sys.stdlib_module_names)


def present(holder: Any, key: Any) -> Any:
    """What a cell, a container or an object's dict holds now."""
    if key is None:
        return holder.cell_contents
    if isinstance(holder, list):
        return holder[key] if key < len(holder) else None
    return dict.get(holder, key) if isinstance(holder, dict) else holder.get(key)


def differs(now: Any, before: Any) -> bool:
    """Whether a value is no longer what it was."""
    return now is not before and (not isinstance(before, _STILL) or type(now) is not type(before) or now != before)


@functools.lru_cache(maxsize=8192)
def _logs(code: types.CodeType) -> frozenset[str]:
    """Names of which code only calls ``append``: what such a list holds, or how long it is, changes nothing."""
    logged, other = set[str](), set[str]()
    for now, then in itertools.pairwise(dis.get_instructions(code)):
        if now.opname in ("LOAD_DEREF", "LOAD_GLOBAL"):
            (logged if then.opname in ("LOAD_ATTR", "LOAD_METHOD") and then.argval == "append" else other).add(
                now.argval
            )
    for inner in (c for c in code.co_consts if isinstance(c, types.CodeType)):
        logged |= _logs(inner)
        other |= {*inner.co_names, *inner.co_freevars} - _logs(inner)
    return frozenset(logged - other)


@functools.lru_cache(maxsize=8192)  # taking code apart took a third of the first recording of a Hugging Face model
def _named(code: types.CodeType) -> tuple[str, ...]:
    """Globals that code reads."""
    found = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found += _named(constant)
    return tuple(dict.fromkeys(found))


def _attribute_names(code: types.CodeType) -> Iterator[str]:
    """Names of attributes in code, and texts that may be some (``getattr``)."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _attribute_names(constant)


def reached(fn: Any, leaves: Sequence[Any]) -> Reached:
    """What a function reaches, and what its arguments hold besides tensors and numbers."""
    names = frozenset[str]()
    while True:  # functions that are found name more attributes, which lead to more functions
        found = _reached(fn, leaves, names)
        if found.named <= names:
            return found
        names |= found.named


def _reached(fn: Any, leaves: Sequence[Any], names: frozenset[str]) -> Reached:
    found = Reached(names)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, (*_STILL, Tensor)):
            found.take(f"argument{i}", leaf, None, None, _DEPTH)
    if isinstance(fn, nn.Module):
        found.take("model", fn, None, None, _DEPTH)
        found.function(fn.forward, _DEPTH)
    elif isinstance(fn, types.FunctionType | types.MethodType | functools.partial):
        found.function(fn, _DEPTH)
    else:
        found.function(types.MethodType(type(fn).__call__, fn), _DEPTH)
    return found
