"""Rows to their experts and back: two all-to-alls whose sizes are known at run time.

The one thing that the host waits for is how many rows go where: ``sizes_of`` reads it, once for each forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard.comm.issue import blocks, plain
from onecard.comm.issue.blocks import Blocks
from onecard.comm.issue.handle import Handle
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.errors import FleetError, RecordingError
from onecard.fleet.layers.once import differentiated_once

Function = torch.autograd.Function
_CALL, _BACK = "tokens to experts", "tokens from experts"


@dataclass(frozen=True)
class RowCounts:
    """How many rows travel.

    Attributes:
        group: the ranks that have the experts.
        leave: for each rank, the rows of this one for each of its experts.
        come: for each rank, its rows for each of this one's experts.
    """

    group: Ranks
    leave: tuple[tuple[int, ...], ...]
    come: tuple[tuple[int, ...], ...]

    def to_ranks(self) -> list[int]:
        """Rows to each rank."""
        return [sum(rows) for rows in self.leave]

    def from_ranks(self) -> list[int]:
        """Rows from each rank."""
        return [sum(rows) for rows in self.come]

    def of_experts(self) -> list[int]:
        """Rows for each of this rank's experts."""
        return [sum(rows) for rows in zip(*self.come, strict=True)]


def sizes_of(counts: Tensor, owned: Sequence[int], group: Ranks) -> RowCounts:
    """What every rank sends, from each rank's numbers of rows for all experts. The host waits for them here.

    Args:
        counts: (experts,) int64; one number more says how many rows name an expert that is not there.
        owned: how many experts each rank has.

    Raises:
        FleetError: a row, of any rank, names an expert that is not there: on all ranks, with the same words.
        RecordingError: the step is being recorded.
    """
    bounds = [*accumulate(owned, initial=0)]
    table = counts[None] if group.size == 1 else plain.all_gather(counts[None], group, 0, call="sizes")
    if recorded.recorder is not None:
        raise RecordingError(
            "a MoELayer cannot be recorded: the host reads in each forward how many rows go to which rank. Run its step as it "
            "is, without oc.to_static; or mark stacked experts by Shard(0) along an axis 'ep', whose rows are calls of a "
            "recording (docs/howto/experts.md)"
        )
    rows = table.tolist()
    if wrong := {group.ranks[place]: row[-1] for place, row in enumerate(rows) if row[-1]}:
        raise FleetError(
            f"the router names experts that are not there, for {sum(wrong.values())} choices (rank: choices, {wrong}): "
            f"experts are 0 to {bounds[-1] - 1}, and -1 is none"
        )
    spans = [slice(begin, end) for begin, end in pairwise(bounds)]
    mine = spans[group.index]
    return RowCounts(
        group, tuple(tuple(rows[group.index][span]) for span in spans), tuple(tuple(row[mine]) for row in rows)
    )


def balanced_sizes(rows: int, owned: Sequence[int], group: Ranks) -> RowCounts:
    """The sizes of a world without data: every expert is chosen alike.

    Example:
        >>> balanced_sizes(6, [2], of_ranks([0])).of_experts()
        [3, 3]
    """
    total = sum(owned)
    each = [rows // total + (i < rows % total) for i in range(total)]
    bounds = [*accumulate(owned, initial=0)]
    spans = [tuple(each[begin:end]) for begin, end in pairwise(bounds)]
    return RowCounts(group, tuple(spans), (spans[group.index],) * group.size)


# -- the way there and back --------------------------------------------------------------------------------------------


def to_experts(rows: Tensor, sizes: RowCounts) -> Tensor:
    """Rows in the order of all experts -> the rows of all ranks for this one's experts, in their order."""
    return _travel(rows, Blocks(sizes.leave), Blocks(sizes.come, by_rank=False), sizes.group, _CALL)


def from_experts(rows: Tensor, sizes: RowCounts) -> Tensor:
    """The way back of ``to_experts``."""
    return _travel(rows, Blocks(sizes.come, by_rank=False), Blocks(sizes.leave), sizes.group, _BACK)


def _anchor() -> Tensor:
    """Something that needs a gradient: all ranks take part in a backward's messages, also those that have no rows."""
    return torch.empty(0, requires_grad=torch.is_grad_enabled(), device="cpu")


def _travel(rows: Tensor, leave: Blocks, come: Blocks, group: Ranks, call: str) -> Tensor:
    return rows if group.size == 1 else _Exchange.apply(_anchor(), rows, leave, come, group, call)


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, leave: Blocks, come: Blocks, group: Ranks, call: str) -> Any:
        ctx.given = (come, leave, group, call)
        return blocks.exchange(rows, group, come, leave, call).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, _Exchange.apply(_anchor(), grads[0], *ctx.given), None, None, None, None


class Departure:
    """Rows that are on their way to the experts while something else is computed; backward leaves theirs on its way, too."""

    def __init__(self, rows: Tensor, sizes: RowCounts) -> None:
        self._group = sizes.group
        self._handle: Handle | None = None
        self._leave, self._come = Blocks(sizes.leave), Blocks(sizes.come, by_rank=False)
        self._stand_in = rows if self._group.size == 1 else _Start.apply(_anchor(), rows, self)

    def arrive(self) -> Tensor:
        """The rows for this rank's experts, in their order."""
        if self._group.size > 1:
            self._stand_in = _Arrive.apply(self._stand_in, self)
        return self._stand_in

    def send(self, rows: Tensor, back: bool) -> None:
        """Start the rows, or their gradients back."""
        come, leave = (self._leave, self._come) if back else (self._come, self._leave)
        self._handle = blocks.exchange(rows, self._group, come, leave, _CALL, later=True)

    def receive(self) -> Tensor:
        """What was started."""
        assert self._handle is not None
        handle, self._handle = self._handle, None
        return handle.wait()


class _Start(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, way: Departure) -> Tensor:
        ctx.way = way
        way.send(rows, back=False)
        return rows.new_zeros(()).expand(sum(way._come.of_ranks()), *rows.shape[1:])

    @staticmethod
    @differentiated_once("a MoELayer's exchange")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, ctx.way.receive(), None


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, way: Departure) -> Tensor:
        ctx.way, ctx.shape = way, stand_in.shape
        return way.receive()

    @staticmethod
    @differentiated_once("a MoELayer's exchange")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.way.send(grads[0], back=True)
        return grads[0].new_zeros(()).expand(ctx.shape), None


# -- Paddle's calls ----------------------------------------------------------------------------------------------------


def global_scatter(x: Tensor, local_count: Tensor, global_count: Tensor, group: Ranks | None = None) -> Tensor:
    """Rows to the ranks of their experts.

    Args:
        x: rows in the order of all experts: those of rank 0's, of rank 1's, ...
        local_count: (ranks x experts of a rank,) int64: rows of this rank for each expert.
        global_count: the same numbers, rows of each rank for this one's experts.
        group: all ranks if left out.

    Returns:
        The rows for this rank's experts: those of its first expert, of all ranks, first. Differentiable.

    Raises:
        FleetError: numbers that do not fit x or each other.

    Source: ``paddle.distributed.utils.moe_utils.global_scatter``.

    Example:
        >>> global_scatter(torch.ones(3, 2), torch.tensor([1, 2]), torch.tensor([1, 2])).shape
        torch.Size([3, 2])
    """
    sizes = _given(x, local_count, global_count, group, "global_scatter", local_count)
    return to_experts(x, sizes)


def global_gather(x: Tensor, local_count: Tensor, global_count: Tensor, group: Ranks | None = None) -> Tensor:
    """The way back of ``global_scatter``, which the same numbers describe.

    Source: ``paddle.distributed.utils.moe_utils.global_gather``.
    """
    sizes = _given(x, local_count, global_count, group, "global_gather", global_count)
    return from_experts(x, sizes)


def _given(x: Tensor, local: Tensor, whole: Tensor, group: Ranks | None, call: str, rows: Tensor) -> RowCounts:
    group = of_ranks() if group is None else group
    leave, come = local.reshape(-1).tolist(), whole.reshape(-1).tolist()
    if len(leave) != len(come) or not leave or len(leave) % group.size or sum(rows.reshape(-1).tolist()) != x.shape[0]:
        raise FleetError(
            f"{call}: local_count has {len(leave)} numbers and global_count {len(come)}; want one for each expert of each of "
            f"{group.size} ranks, and {x.shape[0]} rows together, as x has, not {sum(rows.reshape(-1).tolist())}"
        )
    each = len(leave) // group.size
    by_rank = [tuple(map(tuple, (n[i : i + each] for i in range(0, len(n), each)))) for n in (leave, come)]
    return RowCounts(group, by_rank[0], by_rank[1])
