"""An exchange of rows that lie in blocks, several for each rank: what comes is put where it belongs, without a copy after it.

Where a backend cannot do that, rows are brought into the order of the ranks before it, or out of it after it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from onecard.comm.agree import check
from onecard.comm.issue import collectives, plain, trace
from onecard.comm.issue.forms import NATIVE, dense
from onecard.comm.issue.handle import Handle
from onecard.comm.issue.message import issue, message, recording
from onecard.comm.issue.ranks import Ranks


class Blocks(NamedTuple):
    """How rows lie that go to the ranks, or come from them.

    Attributes:
        sizes: for each rank the rows of its blocks, of as many blocks for each.
        by_rank: whether they lie by rank, and there by block; else by block, and there by rank.
    """

    sizes: tuple[tuple[int, ...], ...]
    by_rank: bool = True

    def of_ranks(self) -> list[int]:
        """Rows of each rank."""
        return [sum(rows) for rows in self.sizes]

    def spans(self, width: int) -> list[tuple[tuple[int, int], ...]]:
        """For each rank where its rows begin, and how many follow, in elements; ``width``: of a row.

        Example:
            >>> Blocks(((1, 2), (3, 4)), by_rank=False).spans(10)
            [((0, 10), (40, 20)), ((10, 30), (60, 40))]
        """
        if self.by_rank:
            lengths = self.of_ranks()
            return [((begin * width, n * width),) for begin, n in zip(accumulate([0, *lengths]), lengths, strict=False)]
        begins = [*accumulate((n for rows in zip(*self.sizes, strict=True) for n in rows), initial=0)]
        ranks = len(self.sizes)
        return [
            tuple((begins[block * ranks + rank] * width, n * width) for block, n in enumerate(rows))
            for rank, rows in enumerate(self.sizes)
        ]


def exchange(x: Tensor, group: Ranks, come: Blocks, leave: Blocks, call: str, later: bool = False) -> Handle:
    """Rows to the ranks and from them, along dim 0.

    Args:
        x: the rows that leave, as ``leave`` says; the result lies as ``come`` says.
        later: leave it under way; ``x`` is not written to until it is awaited.

    Example:
        >>> from onecard.comm.issue.ranks import of_ranks
        >>> one = Blocks(((1, 2),))
        >>> exchange(torch.arange(3), of_ranks([0]), one, one, "rows").wait().tolist()
        [0, 1, 2]
    """
    if group.size == 1:
        return Handle.complete(x)
    leaves = plain.exchanges(x, group, 0, leave.of_ranks(), call)
    width, comes = math.prod(x.shape[1:]), come.of_ranks()
    if not width or not _puts(x, group):
        return _in_order(x, group, come, leave, leaves, comes, later)
    x = dense(x)
    spans = [tuple(each[place] for place in _places(group)) for each in (come.spans(width), leave.spans(width))]
    into = x.new_empty([sum(comes), *x.shape[1:]])
    return issue(message(group, "all_to_all_pieces", *spans), into, x, later)


def _puts(x: Tensor, group: Ranks) -> bool:
    apart = x.is_meta or trace.tracing() or trace.faking() or check.on or recording()
    return x.device.type == "cpu" and x.dtype in NATIVE and not apart and getattr(group.process_group, "puts", False)


def _places(group: Ranks) -> Sequence[int]:
    return group.order or range(group.size)


def _in_order(
    x: Tensor, group: Ranks, come: Blocks, leave: Blocks, leaves: list[int], comes: list[int], later: bool
) -> Handle:
    if not leave.by_rank:
        x = turned(x, [*zip(*leave.sizes, strict=True)])
    flat, arrive, sent, shape = collectives.exchange_of(x, group, 0, comes, 0, leaves)
    way = collectives.exchanged(flat, arrive, sent, group, math.prod(x.shape[1:]) > 0, later)

    def arrived(flat: Tensor) -> Tensor:
        rows = collectives.arrived(flat, shape, group, 0, comes)
        return rows if come.by_rank else turned(rows, come.sizes)

    return way.then(arrived)


def turned(rows: Tensor, blocks: Sequence[Sequence[int]]) -> Tensor:
    """Blocks of rows with their two orders exchanged; a copy only where there is something to exchange."""
    outer, inner = len(blocks), len(blocks[0]) if blocks else 0
    if outer < 2 or inner < 2:
        return rows
    sizes = [n for row in blocks for n in row]
    if len({*sizes}) == 1:
        each = rows.unflatten(0, (outer, inner, sizes[0]))
        return each.transpose(0, 1).reshape(rows.shape)
    parts = rows.split(sizes)
    return torch.cat([parts[i * inner + j] for j in range(inner) for i in range(outer)])
