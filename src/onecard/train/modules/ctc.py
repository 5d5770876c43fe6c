"""CTC loss: each rank on its part of the batch, as the recurrent layers before it.

torch's kernel reads the lengths as numbers and keeps a table whose size depends on them, so that no rule can say how it is
cut; sequences of a batch do not meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from onecard._torch.names import DispatchKeySet
from onecard.place.layout import Layout
from onecard.recorded import values_of
from onecard.tensor import DistTensor
from onecard.tensor.dispatch.composite import numbers_of
from onecard.tensor.dispatch.entries import whole
from onecard.tensor.dispatch.intercept import onward
from onecard.train.local_code import local_map
from onecard.train.modules.recurrent import batch_placements

aten = torch.ops.aten
_MEAN, _SUM = 1, 2  # torch.nn._reduction


def _loss(op: Any) -> Callable[..., Tensor]:
    def kernel(
        keyset: DispatchKeySet, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
        reduction: int = _MEAN, zero_infinity: bool = False,
    ) -> Tensor:  # fmt: skip
        inputs, wanted = (_listed(op, lengths) for lengths in (input_lengths, target_lengths))
        if not isinstance(log_probs, DistTensor) or log_probs.dim() != 3:
            rest = (blank, reduction, zero_infinity)
            return onward(aten.ctc_loss.IntList, keyset, log_probs, targets, inputs, wanted, *rest)
        if targets.dim() == 1:  # one sequence after the other: small, and cut nowhere
            rows = numbers_of(op, targets).split(wanted)
            targets = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        losses = _each(log_probs, targets, inputs, wanted, blank, zero_infinity)
        if reduction == _MEAN:
            return (losses / losses.new_tensor(wanted).clamp(min=1)).mean()
        return losses.sum() if reduction == _SUM else losses

    return kernel


def _listed(op: Any, lengths: Any) -> list[int]:
    return values_of(numbers_of(op, lengths)) if isinstance(lengths, Tensor) else list(lengths)


def _each(
    log_probs: DistTensor,
    targets: Tensor,
    inputs: Sequence[int],
    wanted: Sequence[int],
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The loss of each sequence; log_probs is (time, batch, classes), targets (batch, length)."""
    mesh, batch = log_probs.mesh, log_probs.shape[1]
    placements = batch_placements(mesh, log_probs)
    by_sequence = tuple(Shard(0) if isinstance(p, Shard) else Replicate() for p in placements)
    mine = Layout.of(mesh, 1, by_sequence).local_slices((batch,))[0] if log_probs._spec.here else slice(0)

    def on_part(log_probs: Tensor, targets: Tensor) -> Tensor:
        return aten.ctc_loss.IntList(log_probs, targets, inputs[mine], wanted[mine], blank, 0, zero_infinity)

    run = local_map(on_part, [placements, by_sequence], [by_sequence], mesh, out_shapes=[(batch,)])
    return run(log_probs, targets)


for _op in (aten.ctc_loss.Tensor, aten.ctc_loss.IntList):
    whole(_op)(_loss(_op))
