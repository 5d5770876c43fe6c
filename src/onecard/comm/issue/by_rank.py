"""Several tensors in the memory of one message, rank by rank: how they are put in, and taken out again.

One node of a recording each, so that a step on a thousand ranks has as many nodes as on two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor

from onecard.comm.issue import trace
from onecard.recorded import one_node

Runs = tuple[tuple[int, int], ...]
"""Lengths of the ranks' parts of a dim: (how many ranks, how long) one after the other."""


def runs_of(sizes: Sequence[int]) -> Runs:
    """The lengths of the ranks' parts, in short.

    Example:
        >>> runs_of([2, 2, 2, 1, 0])
        ((3, 2), (1, 1), (1, 0))
    """
    return tuple((len([*same]), size) for size, same in groupby(sizes))


@one_node(is_pure=True)
def packed(wholes: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Runs], order: Sequence[int] = ()) -> Tensor:
    """Of each rank in turn, its parts of all tensors, in new memory.

    Args:
        wholes: tensors of one dtype.
        dims: of each, the dim that is cut; ``sizes``: how, by the ranks' places in the mesh.
        order: the places in the order of the process group, if it is another.

    Example:
        >>> packed([torch.arange(4), torch.arange(10, 12)], [0, 0], [((2, 2),), ((2, 1),)]).tolist()
        [0, 1, 10, 2, 3, 11]
    """
    if _nothing_there():
        return wholes[0].new_empty(sum(whole.numel() for whole in wholes))
    if _even(sizes, order):
        parts = [_ranks_first(*each) for each in zip(wholes, dims, sizes, strict=True)]
        return torch.cat([part.reshape(len(part), part.numel() // len(part)) for part in parts], 1).view(-1)
    return torch.cat([part.reshape(-1) for part in _by_rank(wholes, dims, sizes, order)])


@one_node(0, is_pure=True)
def unpack(
    wholes: Sequence[Tensor], flat: Tensor, dims: Sequence[int], sizes: Sequence[Runs], order: Sequence[int] = ()
) -> None:
    """Fill tensors from what ``packed`` makes of them."""
    if _nothing_there():
        return
    if _even(sizes, order):
        parts = [_ranks_first(*each) for each in zip(wholes, dims, sizes, strict=True)]
        rows = flat.view(len(parts[0]), flat.numel() // len(parts[0]))
        for into, piece in zip(parts, rows.split([part.numel() // len(part) for part in parts], 1), strict=True):
            into.copy_(piece.view(into.shape))
        return
    parts = _by_rank(wholes, dims, sizes, order)
    ends = [*accumulate(part.numel() for part in parts)]
    for part, end in zip(parts, ends, strict=True):
        part.copy_(flat[end - part.numel() : end].view(part.shape))


def _nothing_there() -> bool:
    """Whether there are no data to be copied, and nobody writes down how: many views that nobody needs."""
    return trace.faking() and not trace.tracing()


def _even(sizes: Sequence[Runs], order: Sequence[int]) -> bool:
    return not order and all(len(runs) == 1 and runs[0][1] for runs in sizes)


def _ranks_first(whole: Tensor, dim: int, runs: Runs) -> Tensor:
    """A view of a tensor that is cut evenly, with the ranks as its first dim."""
    return whole.unflatten(dim, runs[0]).movedim(dim, 0)


def _by_rank(
    wholes: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[Runs], order: Sequence[int]
) -> list[Tensor]:
    """The parts of the first rank, then those of the next one."""
    cut = [
        whole.split([size for ranks, size in runs for _ in range(ranks)], dim)
        for whole, dim, runs in zip(wholes, dims, sizes, strict=True)
    ]
    return [parts[place] for place in order or range(len(cut[0])) for parts in cut]
