"""What is cut along the vocabulary: the embedding, and the cross entropy that never gathers its logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecard import recorded
from onecard.comm.issue import plain, trace
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.fleet.layers import initial
from onecard.fleet.layers.linear import runs_of
from onecard.fleet.layers.mappings import reduce_from
from onecard.fleet.layers.once import differentiated_once
from onecard.fleet.layers.parameters import Parallel, part_sizes
from onecard.train.shard import Shard

Function = torch.autograd.Function


class VocabParallelEmbedding(Parallel):
    """An embedding whose rows are divided over the ranks; each looks up what it has, and the results are summed.

    Args:
        num_embeddings, embedding_dim: of the whole table. Rows that do not divide: the last rank takes the rest.
        weight_attr: a ``fleet.ParamAttr`` or an initializer; normal numbers, as ``nn.Embedding``, if left out.
        mp_group: the ranks that share it; those along mp if left out.

    Source: ``paddle.distributed.fleet.meta_parallel.VocabParallelEmbedding``.
    """

    weight: Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        weight_attr: Any = None,
        mp_group: Ranks | None = None,
        name: str | None = None,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.name = num_embeddings, embedding_dim, name
        self.group = mp_group or get_hybrid_communicate_group().group("mp")
        self.cuts = part_sizes(num_embeddings, self.group.size)
        self.start = sum(self.cuts[: self.group.index])
        what = Shard((num_embeddings, embedding_dim), 0, runs_of([self.cuts], self.group.index), self.group)
        attr = initial.attr_of(weight_attr, "weight_attr")
        self.register_part("weight", initial.make(what, attr, initial.Normal(), device, dtype), what)

    def forward(self, ids: Tensor) -> Tensor:
        """(...) ids of the whole vocabulary -> (..., embedding_dim)."""
        if self.group.size == 1:
            self._check(ids)
            return F.embedding(ids, self.weight)
        return reduce_from(self.look_up(ids), self.group)

    def look_up(self, ids: Tensor) -> Tensor:
        """This rank's summand: its rows, and zeros for ids of other ranks."""
        self._check(ids)
        rows = self.weight.shape[0]
        if not rows:
            return self.weight.new_zeros((*ids.shape, self.embedding_dim)) + self.weight.sum()
        here = ids - self.start
        elsewhere = (here < 0) | (here >= rows)
        return F.embedding(here.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)

    def _check(self, ids: Tensor) -> None:
        if recorded.recorder is not None:  # asked in each replay, without a look at the values here
            inside = ((ids >= 0) & (ids < self.num_embeddings)).all()
            torch.ops.aten._assert_async.msg(inside, f"{self.name or type(self).__name__}: {self._range('ids')}")
            return
        # A GPU would have to wait for it, and a graph cannot ask for values.
        if ids.device.type == "cpu" and ids.numel() and not trace.tracing() and not trace.faking():
            low, high = (int(bound) for bound in torch.aminmax(ids))
            if low < 0 or high >= self.num_embeddings:
                raise FleetError(f"{self.name or type(self).__name__} got {self._range(f'ids from {low} to {high}')}")

    def _range(self, found: str) -> str:
        return f"{found}; its {self.num_embeddings} rows are 0 to {self.num_embeddings - 1}"

    def extra_repr(self) -> str:
        """For ``print``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={list(self.group.ranks)}"


class ParallelCrossEntropy(nn.Module):
    """Cross entropy of logits whose classes are divided over the ranks: two messages of a few numbers for each token.

    Args:
        mp_group: the ranks that share the classes; those along mp if left out.
        ignore_index: labels that have no loss.
        label_smoothing: as of ``F.cross_entropy``.
        num_classes: of all ranks together. Where it is given, logits that are not this rank's part are an error.
        reduction: "none", as in Paddle: one number for each label. "mean" over the labels of this rank that are not
            ignored, "sum"; a mean over the labels of all data-parallel ranks is ``fleet.token_mean``.
        margin: (m1, m2, m3) of the margin softmax: cos(m1 t + m2) - m3 takes the place of cos t at the label, for logits
            that are cosines; ``scale`` multiplies them.

    Source: ``paddle.distributed.fleet.meta_parallel.ParallelCrossEntropy``; the margins are those of ArcFace (Deng et al.,
    2019) and ``paddle.nn.functional.margin_cross_entropy``.
    """

    def __init__(
        self,
        mp_group: Ranks | None = None,
        name: str | None = None,
        ignore_index: int = -100,
        *,
        label_smoothing: float = 0.0,
        num_classes: int | None = None,
        reduction: str = "none",
        margin: tuple[float, float, float] | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if reduction not in ("none", "mean", "sum"):
            raise FleetError(f"reduction is {reduction!r}; want 'none', 'mean' or 'sum'")
        self.group = mp_group or get_hybrid_communicate_group().group("mp")
        self.name, self.ignore_index, self.label_smoothing = name, ignore_index, label_smoothing
        self.num_classes, self.reduction, self.margin, self.scale = num_classes, reduction, margin, scale

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        """(..., this rank's classes), labels (...) or (..., 1) -> losses in the shape of the labels, or one number."""
        flat = label.squeeze(-1) if label.dim() == logits.dim() else label
        if flat.shape != logits.shape[:-1]:
            raise FleetError(f"labels {list(label.shape)} do not fit logits {list(logits.shape)}")
        self._check(logits)
        if self.margin is not None:
            logits = self._with_margin(logits, flat)
        if self.scale != 1.0:
            logits = logits * self.scale
        loss = _CrossEntropy.apply(logits, flat, self.group, self.ignore_index, self.label_smoothing)
        if self.reduction == "none":
            return loss.view(label.shape)
        return loss.sum() if self.reduction == "sum" else loss.sum() / (flat != self.ignore_index).sum()

    def _check(self, logits: Tensor) -> None:
        if self.num_classes is None:
            return
        wanted = part_sizes(self.num_classes, self.group.size)[self.group.index]
        if logits.shape[-1] != wanted:
            raise FleetError(
                f"ParallelCrossEntropy got {logits.shape[-1]} classes on place {self.group.index} of {self.group.size} "
                f"ranks, whose part of {self.num_classes} is {wanted}. Logits that are gathered already go to F.cross_entropy; "
                "ColumnParallelLinear(..., gather_output=False) leaves them in parts"
            )

    def _with_margin(self, cosines: Tensor, label: Tensor) -> Tensor:
        m1, m2, m3 = self.margin or (1.0, 0.0, 0.0)
        start = _starts(cosines.shape[-1], self.group, cosines)[self.group.index]
        if not cosines.shape[-1]:  # more ranks than classes
            return cosines
        here = (label >= start) & (label < start + cosines.shape[-1])
        at = (label - start).masked_fill(~here, 0)[..., None]
        chosen = cosines.gather(-1, at)
        inside = 1 - torch.finfo(cosines.dtype).eps
        moved = (m1 * chosen.clamp(-inside, inside).acos() + m2).cos() - m3
        return cosines.scatter_add(-1, at, (moved - chosen) * here[..., None])


def _starts(width: int, group: Ranks, like: Tensor) -> list[int]:
    """Where each rank's classes begin, from how many each has."""
    widths = torch.zeros(group.size, dtype=torch.float64, device=like.device)
    with recorded.unrecorded():  # the ranks' sizes, which no step changes
        widths[group.index] = width
        counts = plain.all_reduce(widths, group, inplace=True, call="cross entropy").tolist()
    return [int(sum(counts[:place])) for place in range(group.size)]


class _CrossEntropy(Function):
    """Message 1: largest logits, and how many classes each rank has. Message 2: sums of exponentials, logits at the labels."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, group: Ranks, ignore: int, smoothing: float) -> Tensor:
        wide = logits.float() if logits.element_size() < 4 else logits
        ignored = label == ignore
        peak, start, classes = _peak(wide, group)
        _check_labels(label, ignored, classes, ignore)
        shifted = wide - peak[..., None]
        here = (label >= start) & (label < start + wide.shape[-1]) & ~ignored
        at = (label - start).masked_fill(~here, 0)[..., None]
        exponentials = shifted.exp()
        sums = [exponentials.sum(-1)]
        sums.append(shifted.gather(-1, at)[..., 0] * here if wide.shape[-1] else torch.zeros_like(peak))
        if smoothing:
            sums.append(shifted.sum(-1))
        total = plain.all_reduce(torch.stack(sums), group, inplace=True, call="cross entropy")
        log_sum = total[0].log()
        loss = log_sum - total[1]
        if smoothing:
            # A factor: a loss in a pipeline that divides by what came with the logits would be one that no weight fits.
            loss = (1 - smoothing) * loss + smoothing * (log_sum - total[2] * (1 / classes))
        softmax = exponentials / total[0][..., None]
        ctx.save_for_backward(softmax.to(logits.dtype), at, here, ignored)
        ctx.given = (smoothing, classes)
        return loss.masked_fill_(ignored, 0.0).to(logits.dtype if logits.element_size() >= 4 else torch.float32)

    @staticmethod
    @differentiated_once("ParallelCrossEntropy")
    def backward(ctx: Any, *grads: Tensor) -> Any:
        softmax, at, here, ignored = ctx.saved_tensors
        smoothing, classes = ctx.given
        grad = softmax - smoothing / classes if smoothing else softmax.clone()
        if grad.shape[-1]:
            grad.scatter_add_(-1, at, -(1 - smoothing) * here[..., None].to(grad.dtype))
        scale = grads[0].masked_fill(ignored, 0.0)[..., None].to(grad.dtype)
        return grad.mul_(scale), None, None, None, None


def _check_labels(label: Tensor, ignored: Tensor, classes: Any, ignore: int) -> None:
    """Each label is a class, or ignored. A GPU tells it by its own assertion, as torch's loss does: nobody waits for it."""
    if label.is_meta or trace.tracing() or trace.faking():
        return
    if label.device.type != "cpu" or recorded.recorder is not None:
        torch.ops.aten._assert_async.msg(
            (((label >= 0) & (label < classes)) | ignored).all(), "ParallelCrossEntropy: a label is no class"
        )
    elif (kept := label[~ignored]).numel():
        low, high = (int(bound) for bound in torch.aminmax(kept))
        if low < 0 or high >= int(classes):
            raise FleetError(
                f"ParallelCrossEntropy got labels from {low} to {high}; its {int(classes)} classes are 0 to {int(classes) - 1}, "
                f"and what is left out is ignore_index={ignore}"
            )


def _peak(wide: Tensor, group: Ranks) -> tuple[Tensor, Any, Any]:
    """The largest logit of each token over all ranks; this rank's first class; how many classes there are."""
    if wide.shape[-1]:
        mine = wide.amax(-1)
    else:
        mine = wide.new_full(wide.shape[:-1], torch.finfo(wide.dtype).min)
    if group.size == 1:
        return mine, 0, wide.shape[-1]
    widths = mine.new_zeros(group.size)
    widths[group.index] = wide.shape[-1]
    both = plain.all_reduce(torch.cat([mine.reshape(-1), widths]), group, "max", call="cross entropy")
    if wide.is_meta:
        return mine, 0, group.size * wide.shape[-1]
    counts = both[-group.size :].long()  # not read: a GPU would have to wait for it
    return both[: -group.size].view(mine.shape), counts[: group.index].sum(), counts.sum()


def class_center_sample(
    label: Tensor, num_classes: int, num_samples: int, group: Ranks | None = None
) -> tuple[Tensor, Tensor]:
    """For very many classes: this rank's classes that a batch needs, filled up with others drawn at random.

    Args:
        label: (n,) labels of the whole batch, equal on all ranks.
        num_classes: that this rank holds.
        num_samples: that it keeps; all that the batch needs, should they be more.
        group: the ranks that share the classes; those along mp if left out.

    Returns:
        The labels as numbers among the classes kept by all ranks, and this rank's kept classes (local numbers), ascending.

    Source: ``paddle.nn.functional.class_center_sample``; partial FC (An et al., 2021).
    """
    group = group or get_hybrid_communicate_group().group("mp")
    start = _starts(num_classes, group, label)[group.index]
    mine = label[(label >= start) & (label < start + num_classes)] - start
    needed = torch.zeros(num_classes, dtype=torch.bool, device=label.device)
    needed[mine] = True
    spare = max(0, num_samples - int(needed.sum()))
    others = (~needed).nonzero()[:, 0]
    needed[others[torch.randperm(len(others), device="cpu")[:spare].to(label.device)]] = True
    kept = needed.nonzero()[:, 0]
    begin = _starts(len(kept), group, label)[group.index]
    numbers = torch.zeros_like(label)
    inside = (label >= start) & (label < start + num_classes)
    numbers[inside] = torch.searchsorted(kept, label[inside] - start) + begin
    return plain.all_reduce(numbers, group, call="class_center_sample"), kept
