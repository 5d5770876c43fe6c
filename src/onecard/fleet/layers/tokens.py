"""Losses that are means over tokens: by the count of all ranks and microbatches, not the mean of means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.comm.base.state import Kept
from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.tensor import DistTensor

weighed: Kept[bool] = Kept(bool)
"""Whether a pipeline weighs its microbatches' losses by this rank's labels."""


def token_mean(
    losses: Tensor,
    valid: Tensor | None = None,
    group: Ranks | None = None,
    step: Sequence[Tensor | int] | None = None,
) -> Tensor:
    """The mean of losses over the tokens of *all* ranks that see other data, and of all microbatches of a step.

    Args:
        losses: of tokens, in any shape: a distributed tensor, or this rank's own.
        valid: which of them count, or by how much; all if left out.
        group: the ranks that have other tokens; those along dp, sharding and sep if left out. Distributed tensors need none.
        step: with accumulation, what ``valid`` is in each microbatch of the step, or the number of its tokens. The results
            of the microbatches then add up to the mean over all of the step's tokens, and so do their gradients: no
            division by the number of microbatches.

    Returns:
        One number, the same on all ranks. For plain tensors its gradient is such that the mean of the ranks' gradients, which
        ``fleet`` makes, is the gradient of this mean.

    Raises:
        FleetError: ``valid`` of another shape than ``losses``.

    Example:
        >>> from onecard import ProcessMesh, Shard, shard_tensor
        >>> losses = shard_tensor([1.0, 2.0, 6.0], ProcessMesh([0], ["dp"]), [Shard(0)])
        >>> token_mean(losses, torch.tensor([True, True, False])).item()
        1.5
        >>> [token_mean(losses[i : i + 2], step=[2, 1]).item() for i in (0, 2)]
        [1.0, 2.0]
    """
    if valid is not None and valid.shape != losses.shape:
        raise FleetError(
            f"token_mean: valid {list(valid.shape)} says of each loss whether it counts, and losses are {list(losses.shape)}; "
            "take them from cross_entropy(..., reduction='none')"
        )
    kept = losses if valid is None else _kept(losses, valid)
    counts = [valid if valid is not None else losses.numel()] if step is None else [*step]
    distributed = isinstance(losses, DistTensor)
    count: Any = sum(_count(c, losses.dtype) for c in counts)
    if distributed:
        return kept.sum() / count
    if not isinstance(count, Tensor):
        count = losses.new_tensor(count)
    if group is None:
        from onecard.fleet.grid.topology import get_hybrid_communicate_group

        group = get_hybrid_communicate_group().data()
    if group.size > 1 and step is None and weighed.here:
        raise FleetError(
            "token_mean in the loss of a pipeline is a microbatch's mean over all ranks, and loss_weight weighs it by this "
            "rank's labels: that is no mean over the batch. Divide the sum of losses by the tokens of the batch on all ranks, "
            "which come with the labels: train_batch([x, (y, tokens)]), tokens having that number for each row, and "
            "loss_fn returning (losses * valid).sum() * dp_degree / tokens[0], without loss_weight"
        )
    if group.size == 1:  # as plain operators: a pipeline sees what the loss of a microbatch is divided by
        return kept.sum() / count
    return _TokenMean.apply(kept.sum(), count, group)


def _kept(losses: Tensor, valid: Tensor) -> Tensor:
    """What does not count may be infinite."""
    return losses.masked_fill(~valid, 0.0) if valid.dtype is torch.bool else losses * valid.to(losses.dtype)


def _count(valid: Tensor | int, dtype: torch.dtype) -> Any:
    return valid.sum().to(torch.promote_types(dtype, torch.float32)) if isinstance(valid, Tensor) else float(valid)


class _TokenMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, group: Ranks) -> Tensor:
        wide = torch.promote_types(total.dtype, torch.float32)
        both = torch.stack([total.detach().to(wide), count.to(wide)])
        both = plain.all_reduce(both, group, call="token_mean")
        ctx.scale = group.size / both[1]
        return (both[0] / both[1]).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (grads[0] * ctx.scale).to(grads[0].dtype), None, None
