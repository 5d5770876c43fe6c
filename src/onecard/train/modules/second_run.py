"""What a module's forward does when backward runs it again, that is not to be done twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onecard import recorded
from onecard.comm.base.state import Kept
from onecard.train.modules.python_state import PythonState


class FirstForward(AbstractContextManager[None]):
    """Around a module's first forward: what its buffers and its state in Python were ahead of it, of those that it changes.

    Which it changes is known from the forwards before; of a module that is new here all are kept until it has run.

    Args:
        module: whose; None: of nobody.
        given: its arguments.

    Attributes:
        copies: of buffers; ``state``: what it has changed in Python.
    """

    def __init__(self, module: nn.Module | None, given: Any = ()) -> None:
        self.module, self.given = module, given
        self.state: PythonState | None = None
        self._before = list[tuple[nn.Module, str, Tensor, int, Tensor | None]]()
        self.copies: dict[tuple[nn.Module, str], Tensor] = {}

    def __enter__(self) -> None:
        self._before = []
        self.state, self.given = PythonState(self.module, self.given), ()
        with torch.no_grad():
            for m in () if self.module is None else self.module.modules():
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
        for m, name, buffer, version, copy in self._before:
            now = m._buffers.get(name)
            changed = now is not buffer or _version(buffer) != version or name in _STATISTICS
            known = _changed.here.setdefault(m, set())
            if changed:
                known.add(name)
            if copy is not None and (changed or recording):
                self.copies[m, name] = copy
        self._before = []


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
        module: whose; None: of nobody.
        first: its first forward, whose buffers they begin from; None: as they are now.

    Example:
        >>> norm, x = nn.BatchNorm1d(2), torch.tensor([[1.0, 2], [3, 4]])
        >>> with BuffersApart(norm):
        ...     norm(x).shape
        torch.Size([2, 2])
        >>> norm.num_batches_tracked.item()
        0
    """

    def __init__(self, module: nn.Module | None, first: FirstForward | None = None) -> None:
        self.module, self._held = module, list[tuple[nn.Module, dict[str, Tensor | None]]]()
        self._first = first
        self._back: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self._held = [] if self.module is None else [(m, dict(m._buffers)) for m in self.module.modules()]
        copies: dict[int, Tensor] = {}
        begin = {} if self._first is None else self._first.copies
        if self._first is not None and self._first.state is not None:
            self._back = self._first.state.begin()
        with torch.no_grad():
            for m, buffers in self._held:
                for name, buffer in buffers.items():
                    if buffer is not None:
                        m._buffers[name] = copies.setdefault(id(buffer), begin.get((m, name), buffer).clone())

    def __exit__(self, *_: object) -> None:
        self._back()
        for m, buffers in self._held:
            m._buffers.update(buffers)
        self._held = []


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module whose forward a function is; None of another function."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    owner = function.module if isinstance(function, ForwardAgain) else owner
    return owner if isinstance(owner, nn.Module) else None


def runs_of(module: nn.Module | None, given: Any = ()) -> tuple[FirstForward, BuffersApart]:
    """``context_fn`` of ``torch.utils.checkpoint``: what the first and the second forward run in. ``given``: the arguments."""
    first = FirstForward(module, given)
    return first, BuffersApart(module, first)


class ForwardAgain:
    """In the place of a module's forward: keeps its arguments alone, and runs it again in backward. A copy of the module has a
    forward of its own, as it would by a closure not.

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
        contexts = partial(runs_of, self.module, (args, kwargs))
        return checkpoint(self.forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def run_again_in_backward(module: nn.Module, run: Callable[..., Any] | None = None) -> None:
    """Have a module's forward run again in backward: see ``ForwardAgain``."""
    again: Any = ForwardAgain(module, run)
    module.forward = again
