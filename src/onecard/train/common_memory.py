"""Tensors that have memory in common: which lie in whose, and what becomes of it where each is laid out anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onecard.comm.base.warned import warn
from onecard.tensor import DistTensor
from onecard.tensor.deferred.calls import storage_of


def shared(values: Sequence[Any]) -> dict[int, tuple[int, ...]]:
    """For tensors in whose memory others lie the numbers of those: a module's own parameter and ZeRO's part of it, a flat vector
    and its views, what ``state_dict()`` gave. Of two that meet otherwise, or are the same elements, the later has the earlier.

    Example:
        >>> flat = torch.zeros(6)
        >>> shared([flat, flat[:2], flat[2:], flat[3:5], torch.zeros(2), flat[2:]])
        {0: (1, 2, 3, 5), 2: (3,), 5: (2, 3)}
    """
    spans: dict[int, list[tuple[int, int, int]]] = {}
    for i, x in enumerate(values):
        if isinstance(x, Tensor) and x.layout is torch.strided and x.numel():
            start = x.storage_offset() * x.itemsize
            length = (1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))) * x.itemsize
            spans.setdefault(storage_of(x), []).append((int(start), int(start + length), i))
    found = dict[int, set[int]]()
    for sharing in spans.values():
        sharing.sort(key=lambda span: (span[0], -span[1], -span[2]))
        for at, (_, end, i) in enumerate(sharing):
            for other, until, j in sharing[at + 1 :]:
                if other >= end:
                    break
                # The first of them begins no later: it holds the other one, or that reaches beyond it.
                holder, held = (i, j) if until <= end or j < i else (j, i)
                found.setdefault(holder, set()).add(held)
    return {i: tuple(sorted(found[i])) for i in sorted(found)}


def tell_parted(module: nn.Module, call: str) -> None:
    """Tell that parameters get memory of their own which had some in common with another tensor of the module, by ``.data``."""
    named = [*module.named_parameters(), *module.named_buffers()]
    plain = [(name, x) for name, x in named if not isinstance(x, DistTensor) and not x.is_meta]
    for i, others in shared([x for _, x in plain]).items():
        for j in others:
            (one, x), (other, y) = plain[i], plain[j]
            if isinstance(x, nn.Parameter) or isinstance(y, nn.Parameter):
                warn(
                    f"{call}: {other} has memory in common with {one}, by .data or as a view, and gets memory of its own: what "
                    f"is written to one is not the other's. Parameters that are one object stay one (a.weight = b.weight). Of "
                    "a view, compute it where it is used",
                )
