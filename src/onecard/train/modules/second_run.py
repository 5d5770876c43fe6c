"""What a module's forward does when backward runs it again, that is not to be done twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onecard import recorded
from onecard._torch.names import tree_leaves
from onecard.comm.base.state import Kept
from onecard.train.modules.python_state import PythonState


class FirstForward(AbstractContextManager[None]):
    """Around a module's first forward: what its buffers and its state in Python were ahead of it, of those that it changes.

    Which it changes is known from the forwards before; of a module that is new here all are kept until it has run.

    Args:
        modules: whose; with those below them.
        given: its arguments.

    Attributes:
        copies: of buffers; ``changed``: which it has written to, None before it has run; ``state``: of Python.
    """

    def __init__(self, modules: Sequence[nn.Module], given: Any = ()) -> None:
        self.modules, self.given = all_below(modules), given
        self.state: PythonState | None = None
        self._before = list[tuple[nn.Module, str, Tensor, int, Tensor | None]]()
        self.copies: dict[tuple[nn.Module, str], Tensor] = {}
        self.changed: set[tuple[nn.Module, str]] | None = None

    def __enter__(self) -> None:
        self._before = []
        self.state, self.given = PythonState(self.modules, self.given), ()
        with torch.no_grad():
            for m in self.modules:
                known = _changed.here.get(m)
                for name, buffer in m._buffers.items():
                    if buffer is not None:
                        # A recording may not write what it writes down; copies that nobody reads are left out of it.
                        keeps = known is None or name in known or recorded.recorder is not None
                        self._before.append((m, name, buffer, _version(buffer), buffer.clone() if keeps else None))

    def __exit__(self, *_: object) -> None:
        if self.state is not None:
            self.state.keep_changed()
        recording = recorded.recorder is not None
        written = set[tuple[nn.Module, str]]()
        for m, name, buffer, version, copy in self._before:
            now = m._buffers.get(name)
            changed = now is not buffer or _version(buffer) != version or name in _STATISTICS
            known = _changed.here.setdefault(m, set())
            if changed or recording:
                written.add((m, name))
            if changed:
                known.add(name)
            if copy is not None and (changed or recording):
                self.copies[m, name] = copy
        self._before, self.changed = [], written


_changed: Kept[WeakKeyDictionary[nn.Module, set[str]]] = Kept(WeakKeyDictionary)
"""The buffers that a module's forward was seen to change."""


_STATISTICS = ("running_mean", "running_var")
"""Torch's norms write them without counting it."""


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version


class BuffersApart(AbstractContextManager[None]):
    """Inside, buffers are copies: what forward writes to them (statistics of batch norm, counters) is dropped, and what it
    changes in Python (attributes that count, caches of keys and values).

    Args:
        modules: whose; with those below them.
        first: its first forward, whose buffers they begin from; None: as they are now.

    Example:
        >>> norm, x = nn.BatchNorm1d(2), torch.tensor([[1.0, 2], [3, 4]])
        >>> with BuffersApart([norm]):
        ...     norm(x).shape
        torch.Size([2, 2])
        >>> norm.num_batches_tracked.item()
        0
    """

    def __init__(self, modules: Sequence[nn.Module], first: FirstForward | None = None) -> None:
        self.modules, self._held = all_below(modules), list[tuple[nn.Module, dict[str, Tensor | None]]]()
        self._first = first
        self._back: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self._held = [(m, dict(m._buffers)) for m in self.modules]
        copies: dict[int, Tensor] = {}
        begin, only = ({}, None) if self._first is None else (self._first.copies, self._first.changed)
        if self._first is not None and self._first.state is not None:
            self._back = self._first.state.begin()
        with torch.no_grad():
            for m, buffers in self._held:
                for name, buffer in buffers.items():
                    if buffer is not None and (only is None or (m, name) in only):
                        m._buffers[name] = copies.setdefault(id(buffer), begin.get((m, name), buffer).clone())

    def __exit__(self, *_: object) -> None:
        self._back()
        for m, buffers in self._held:
            m._buffers.update(buffers)
        self._held = []


def all_below(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """These and those below them, each once."""
    return [*{id(m): m for module in modules for m in module.modules()}.values()]


def modules_of(function: Any, given: Any = (), depth: int = 3) -> list[nn.Module]:
    """The modules that a function calls, as far as it names them: it is the forward of one, or has them in its closure, among the
    names of its file, or its arguments; so may functions that it calls, to a ``depth``."""
    if isinstance(function, ForwardAgain):
        return [function.module]
    if isinstance(function, partial):
        return modules_of(function.func, (given, function.args, function.keywords), depth)
    named = [function, getattr(function, "__self__", None), *tree_leaves(given)]
    code = getattr(function, "__code__", None)
    if code is not None and depth:
        held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        mine = [x for name in code.co_names if (x := function.__globals__.get(name)) is not None]
        held += [x for x in mine if getattr(x, "__globals__", function.__globals__) is function.__globals__]
        for x in tree_leaves(held):
            if isinstance(x, nn.Module):
                named += _those_named(x, code.co_names)
            elif isinstance(x, FunctionType | MethodType | partial):
                named += modules_of(x, (), depth - 1)
    return [x for x in tree_leaves(named) if isinstance(x, nn.Module)]


def _those_named(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Of ``lambda x: model.block(x)`` not all of the model."""
    found = [x for name in names if (x := module._modules.get(name)) is not None]
    return found or [module]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def runs_of(modules: Sequence[nn.Module], given: Any = ()) -> tuple[FirstForward, BuffersApart]:
    """``context_fn`` of ``torch.utils.checkpoint``: what the first and the second forward run in. ``given``: the arguments."""
    first = FirstForward(modules, given)
    return first, BuffersApart(modules, first)


class ForwardAgain:
    """In the place of a module's forward: keeps its arguments alone, and runs it again in backward. A copy of the module has a
    forward of its own, which by a closure it would not.

    Args:
        module: whose; ``run``: (forward, arguments) -> what it gives; torch's checkpoint if left out.
    """

    def __init__(self, module: nn.Module, run: Callable[..., Any] | None = None) -> None:
        self.module, self.forward, self.run = module, module.forward, run
        self.__wrapped__ = module.forward  # whose signature it has, for who asks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.run is not None:
            return self.run(self.forward, *args, **kwargs)
        contexts = partial(runs_of, [self.module], (args, kwargs))
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def run_again_in_backward(module: nn.Module, run: Callable[..., Any] | None = None) -> None:
    """Have a module's forward run again in backward: see ``ForwardAgain``."""
    again: Any = ForwardAgain(module, run)
    module.forward = again
