"""What a module's forward does when backward runs it again, that is not to be done twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class BuffersApart(AbstractContextManager[None]):
    """Inside, buffers are copies: what forward writes to them (statistics of batch norm, counters) is dropped.

    Args:
        module: whose; None: of nobody.

    Example:
        >>> norm, x = nn.BatchNorm1d(2), torch.tensor([[1.0, 2], [3, 4]])
        >>> with BuffersApart(norm):
        ...     norm(x).shape
        torch.Size([2, 2])
        >>> norm.num_batches_tracked.item()
        0
    """

    def __init__(self, module: nn.Module | None) -> None:
        self.module, self._held = module, list[tuple[nn.Module, dict[str, Tensor | None]]]()

    def __enter__(self) -> None:
        self._held = [] if self.module is None else [(m, dict(m._buffers)) for m in self.module.modules()]
        copies: dict[int, Tensor] = {}
        with torch.no_grad():
            for m, buffers in self._held:
                for name, buffer in buffers.items():
                    if buffer is not None:
                        m._buffers[name] = copies.setdefault(id(buffer), buffer.clone())

    def __exit__(self, *_: object) -> None:
        for m, buffers in self._held:
            m._buffers.update(buffers)
        self._held = []


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The module whose forward a function is; None of another function."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def runs_of(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """``context_fn`` of ``torch.utils.checkpoint``: what the first and the second forward run in."""
    return nullcontext(), BuffersApart(module)
