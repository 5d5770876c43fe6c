"""Sequence parallelism: between the cut layers, each rank has a part of the sequence (Korthikanti et al., 2022).

The sequence is the first dim, as in Megatron and Paddle; ``dim`` (of the layers ``seq_dim``) names another one. Where it
does not divide by the ranks, pad it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.fleet.layers.heads import QKVParallelLinear
from onecard.fleet.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from onecard.fleet.layers.mappings import _GatherFrom, _ScatterTo
from onecard.fleet.layers.parameters import parts_among, sum_over
from onecard.fleet.layers.vocabulary import VocabParallelEmbedding
from onecard.train.shard import held

Function = torch.autograd.Function


def _mp(group: Ranks | None) -> Ranks:
    return group or get_hybrid_communicate_group().group("mp")


def scatter(x: Tensor, dim: int = 0, group: Ranks | None = None) -> Tensor:
    """This rank's part of a sequence that all hold; its gradient is gathered."""
    group = _mp(group)
    return (
        x
        if group.size == 1
        else _ScatterTo.apply(x, group, dim % x.dim(), plain.cut_sizes(x, group, dim, None, "scatter"))
    )


def gather(x: Tensor, dim: int = 0, group: Ranks | None = None) -> Tensor:
    """The whole sequence, for what all ranks compute alike; its gradient is cut."""
    group = _mp(group)
    return x if group.size == 1 else _GatherFrom.apply(x, group, dim % x.dim(), None)


def all_gather(x: Tensor, dim: int = 0, group: Ranks | None = None) -> Tensor:
    """The whole sequence; its gradient is summed and cut (reduce-scattered).

    For what each rank computes a part of. A layer that sums its input's gradient itself (``ColumnParallelLinear``) wants
    ``gather``: behind this one gradients would be summed twice. ``ColumnSequenceParallelLinear`` does all of it.
    """
    group = _mp(group)
    return x if group.size == 1 else _AllGather.apply(x, group, dim % x.dim())


def reduce_scatter(x: Tensor, dim: int = 0, group: Ranks | None = None) -> Tensor:
    """This rank's part of the sum of the ranks' summands; its gradient is gathered."""
    group = _mp(group)
    return x if group.size == 1 else _ReduceScatter.apply(x, group, dim % x.dim())


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Ranks, dim: int) -> Tensor:
        ctx.given = (group, dim)
        return plain.all_gather(x, group, dim, call="sequence parallel")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ReduceScatter.apply(grads[0], *ctx.given), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Ranks, dim: int) -> Tensor:
        ctx.given = (group, dim)
        return plain.reduce_scatter(x, group, dim, call="sequence parallel")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllGather.apply(grads[0], *ctx.given), None, None


class _Operator:
    """Paddle's form, ``ScatterOp.apply(x)``."""

    def __init__(self, function: Any) -> None:
        self.apply, self.__doc__ = function, function.__doc__


ScatterOp, GatherOp = _Operator(scatter), _Operator(gather)
AllGatherOp, ReduceScatterOp = _Operator(all_gather), _Operator(reduce_scatter)


def mark_as_sequence_parallel_parameter(parameter: Tensor, group: Ranks | None = None) -> Tensor:
    """Say that a parameter which every rank holds (of a norm, a bias) sees only this rank's part of the sequence.

    Its gradient is then summed over the ranks before anybody reads it. A ``copy.deepcopy``, and what takes the parameter's
    place in its module, is marked alike. Parameters of layers that are cut are left as they are: nothing of theirs is missing.
    """
    over, now = _mp(group), held(parameter)
    return parameter if now.settled or parts_among(now, over) else sum_over(parameter, over)


def register_sequence_parallel_allreduce_hooks(
    model: nn.Module, accumulation_steps: int = 1, fuse_sequence_parallel_allreduce: bool = False
) -> None:
    """Paddle's call. Nothing is left to do: gradients of marked parameters are summed, in buckets, when they are read.

    Raises:
        FleetError: there is sequence parallelism in the model, but no parameter is marked.
    """
    parallel = [m for m in model.modules() if getattr(m, "seq_dim", None) is not None]
    if parallel and not any(held(p).sums for p in model.parameters()):
        raise FleetError(
            "this model has sequence-parallel layers, but no parameter is marked: its norms see a part of the sequence each. "
            "fleet.mark_as_sequence_parallel_parameter(norm.weight), and norm.bias"
        )


class ColumnSequenceParallelLinear(ColumnParallelLinear):
    """A ColumnParallelLinear whose x is this rank's part of the sequence: gathered before the product, in backward again.

    So no rank keeps the whole x. ``gather_output`` must be False: the row layer after it takes its part.

    Source: ``paddle.distributed.fleet.utils.sequence_parallel_utils.ColumnSequenceParallelLinear``.
    """

    def __init__(self, *args: Any, seq_dim: int = 0, **options: Any) -> None:
        options.setdefault("gather_output", False)
        super().__init__(*args, **options)
        _sequence(self, seq_dim)


class MergedColumnSequenceParallelLinear(MergedColumnParallelLinear):
    """A MergedColumnParallelLinear whose x is this rank's part of the sequence."""

    def __init__(self, *args: Any, seq_dim: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        _sequence(self, seq_dim)


class QKVSequenceParallelLinear(QKVParallelLinear):
    """A QKVParallelLinear whose x is this rank's part of the sequence."""

    def __init__(self, *args: Any, seq_dim: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        _sequence(self, seq_dim)


class RowSequenceParallelLinear(RowParallelLinear):
    """A RowParallelLinear that gives this rank its part of the sequence of y: reduce-scatter instead of all-reduce.

    Source: ``paddle.distributed.fleet.utils.sequence_parallel_utils.RowSequenceParallelLinear``.
    """

    def __init__(self, *args: Any, seq_dim: int = 0, **options: Any) -> None:
        options.setdefault("input_is_parallel", True)
        super().__init__(*args, **options)
        if not self.input_is_parallel:
            raise FleetError("RowSequenceParallelLinear takes this rank's part of the inputs: input_is_parallel=True")
        _sequence(self, seq_dim)


class VocabSequenceParallelEmbedding(VocabParallelEmbedding):
    """A VocabParallelEmbedding that gives this rank its part of the sequence."""

    def __init__(self, *args: Any, seq_dim: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seq_dim = seq_dim

    def forward(self, ids: Tensor) -> Tensor:
        """Ids of the whole sequence -> embeddings of this rank's part."""
        return reduce_scatter(self.look_up(ids), self.seq_dim, self.group)


def _sequence(layer: Any, seq_dim: int) -> None:
    if getattr(layer, "gather_output", False):
        raise FleetError(f"{type(layer).__name__} leaves its output in parts: gather_output=False")
    layer.seq_dim = seq_dim
    layer.settle()
