"""What a module's forward does when backward runs it again, that is not to be done twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from onecard import recorded
from onecard.comm.base.state import Kept


class FirstForward(AbstractContextManager[None]):
    """Around a module's first forward: what its buffers were ahead of it, of those that it changes.

    Which it changes is known from the forwards before; of a module that is new here all are kept until it has run.

    Args:
        module: whose; None: of nobody.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.module = module
        self._before = list[tuple[nn.Module, str, Tensor, int, Tensor | None]]()
        self.copies: dict[tuple[nn.Module, str], Tensor] = {}

    def __enter__(self) -> None:
        self._before = []
        with torch.no_grad():
            for m in () if self.module is None else self.module.modules():
                known = _changed.here.get(m)
                for name, buffer in m._buffers.items():
                    if buffer is not None:
                        # A recording may not write what it writes down; copies that nobody reads are left out of it.
                        keeps = known is None or name in known or recorded.recorder is not None
                        self._before.append((m, name, buffer, _version(buffer), buffer.clone() if keeps else None))

    def __exit__(self, *_: object) -> None:
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
    """Inside, buffers are copies: what forward writes to them (statistics of batch norm, counters) is dropped.

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

    def __enter__(self) -> None:
        self._held = [] if self.module is None else [(m, dict(m._buffers)) for m in self.module.modules()]
        copies: dict[int, Tensor] = {}
        begin = {} if self._first is None else self._first.copies
        with torch.no_grad():
            for m, buffers in self._held:
                for name, buffer in buffers.items():
                    if buffer is not None:
                        m._buffers[name] = copies.setdefault(id(buffer), begin.get((m, name), buffer).clone())

    def __exit__(self, *_: object) -> None:
        for m, buffers in self._held:
            m._buffers.update(buffers)
        self._held = []


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module whose forward a function is; None of another function."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def runs_of(module: nn.Module | None) -> tuple[FirstForward, BuffersApart]:
    """``context_fn`` of ``torch.utils.checkpoint``: what the first and the second forward run in."""
    first = FirstForward(module)
    return first, BuffersApart(module, first)
