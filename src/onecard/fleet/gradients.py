"""Gradients of a fleet program: summed once, when an optimizer or a clipping first reads them; norms that count each once.

Nothing is sent in backward for parameters, so that microbatches accumulate without a message. ``sync`` then sums what
each parameter's gradient consists of: summands of a group (sequence parallel, shared embeddings, shared key heads), and the
mean over the ranks that saw other data. A gradient that was summed already is not summed again.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard.comm import plain
from onecard.comm.ranks import Ranks, of_ranks
from onecard.fleet.parameters import held
from onecard.fleet.strategy import FleetError
from onecard.tensor import DistTensor

BUCKET = 25 * 2**20  # bytes, as DistributedDataParallel
_DATA = "_onecard_data"
_SYNCED = "_onecard_synced"
_REST = "_onecard_rest"


def share_data(parameter: Tensor, group: Ranks) -> None:
    """Say that the ranks of a group hold copies of this parameter and see different data."""
    setattr(parameter, _DATA, group)


def leave_to_optimizer(parameter: Tensor, axis: str) -> None:
    """Say that an optimizer averages a parameter's gradient along an axis of the grid itself, if nobody has it summed before."""
    data = _data(parameter)
    if (
        data is not None
        and not held(parameter).sums
        and not held(parameter).copies
        and not _cut_within(parameter, data)
    ):
        from onecard.fleet.topology import get_hybrid_communicate_group

        setattr(parameter, _REST, get_hybrid_communicate_group().data(axis))


def sync(parameters: Iterable[Tensor], step: bool = False) -> None:
    """Sum the gradients of these parameters over the ranks that have summands of them; once for each backward.

    ``step``: an optimizer is about to step, which may sum along an axis itself. All ranks call it at the same place, with the
    same parameters. An optimizer's ``step`` and ``fleet.clip_grad_norm_`` do.

    Raises:
        FleetError: backward has added to gradients that were summed already, before ``zero_grad``.
    """
    chosen = [p for p in parameters if p.requires_grad and has_sums(p)]
    _fill_missing(chosen)
    todo = [p for p in chosen if p.grad is not None and not _is_synced(p)]
    sums = {(s.ranks, s.name): s for p in todo for s in held(p).sums}
    # In one order on all ranks: those of a pipeline hold other parameters, and meet some ranks here and some there.
    for (ranks, name), group in sorted(sums.items()):
        _reduce([p.grad for p in todo if any((s.ranks, s.name) == (ranks, name) for s in held(p).sums)], group, "sum")
    for p in todo:
        if held(p).copies:
            _sum_copies(p)
    over = {p: getattr(p, _REST, None) or _data(p) if step else _data(p) for p in todo}
    for group in {d.ranks: d for d in over.values() if d is not None}.values():
        mine = [p for p, d in over.items() if d is not None and d.ranks == group.ranks]
        _reduce([p.grad for p in mine if not _cut_within(p, group)], group, "avg")
        for p in mine:
            if _cut_within(p, group):  # its part alone: what came to it is a sum over the ranks' losses
                p.grad.div_(group.size)  # type: ignore[union-attr]
    for p in todo:
        if over[p] is _data(p):
            note(p)


def is_whole(parameter: Tensor) -> bool:
    """Whether its gradient is summed, as it is now."""
    return not has_sums(parameter) or _is_synced(parameter)


def note(parameter: Tensor) -> None:
    """Remember that this gradient, as it is now, is the whole one."""
    setattr(parameter, _SYNCED, (weakref.ref(parameter.grad), parameter.grad._version))  # type: ignore[union-attr]


def has_sums(p: Tensor) -> bool:
    """Whether other ranks have summands of its gradient."""
    what, data = held(p), _data(p)
    return bool(what.sums or what.copies) or (data is not None and data.size > 1)


def in_stages(p: Tensor) -> bool:
    """Whether other ranks have other parameters of its model."""
    from onecard.fleet.topology import get_hybrid_communicate_group

    return _data(p) is not None and get_hybrid_communicate_group().degrees["pp"] > 1


def _data(p: Tensor) -> Ranks | None:
    return getattr(p, _DATA, None)


def _cut_within(p: Tensor, group: Ranks) -> bool:
    part = held(p).group
    return part is not None and part.size > 1 and set(part.ranks) <= set(group.ranks)


def _is_synced(p: Tensor) -> bool:
    known = getattr(p, _SYNCED, None)
    if known is None or known[0]() is not p.grad:
        return False
    if p.grad._version == known[1]:
        return True
    if p.grad._version == known[1] + 1 and (held(p).sums or held(p).copies):
        raise FleetError(
            f"backward has added to a gradient of shape {list(p.shape)} that was summed over ranks before: call zero_grad() "
            "after the optimizer's step, and clip or sum no earlier than after the last backward of a step"
        )
    return False


def _fill_missing(parameters: list[Tensor]) -> None:
    """A parameter that some ranks did not use gets zeros there: on one card its gradient is that of the others' data."""
    by_group: dict[tuple[tuple[int, ...], str], tuple[Ranks, list[Tensor]]] = {}
    for p in parameters:
        for group in [*held(p).sums, *([held(p).group] if held(p).copies else []), _data(p)]:
            if group is not None and group.size > 1 and not (group is _data(p) and _cut_within(p, group)):
                by_group.setdefault((group.ranks, group.name), (group, []))[1].append(p)
    for _, (group, mine) in sorted(by_group.items(), key=lambda item: item[0]):
        with recorded.unrecorded():  # the same in every replay
            there = torch.tensor([p.grad is not None for p in mine], dtype=torch.uint8, device=mine[0].device)
            anywhere = plain.all_reduce(there, group, "max", inplace=True, call="gradients").tolist()
        for p, used in zip(mine, anywhere, strict=True):
            if used and p.grad is None:
                p.grad = torch.zeros_like(p)


def _reduce(grads: list[Any], group: Ranks, op: str) -> None:
    if group.size == 1:
        return
    for bucket in _buckets(grads):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            plain.all_reduce(bucket[0], group, op, inplace=True, call="gradients")
            continue
        flat = torch.cat([g.reshape(-1) for g in bucket])
        plain.all_reduce(flat, group, op, inplace=True, call="gradients")
        for g, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            g.copy_(part.view(g.shape))


def _buckets(grads: list[Tensor]) -> Iterator[list[Tensor]]:
    kinds: dict[Any, list[Tensor]] = {}
    for grad in grads:
        kinds.setdefault((grad.dtype, grad.device), []).append(grad)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        for grad in alike:
            if bucket and sum(g.nbytes for g in bucket) + grad.nbytes > BUCKET:
                yield bucket
                bucket = []
            bucket.append(grad)
        yield bucket


def _sum_copies(p: Tensor) -> None:
    """Rows that several ranks hold: each adds its own to a tensor of all such rows, and takes back what it holds."""
    what, grad = held(p), p.grad
    group = what.group
    if group is None or grad is None:
        return
    for start, length in what.copies:
        shape = list(grad.shape)
        shape[what.dim] = length
        rows = grad.new_zeros(shape)
        mine = [(box[what.dim], here) for box, here in what.boxes() if start <= box[what.dim][0] < start + length]
        for (begin, end), here in mine:
            rows.narrow(what.dim, begin - start, end - begin).add_(grad[here])
        plain.all_reduce(rows, group, inplace=True, call="gradients of shared heads")
        for (begin, end), here in mine:
            grad[here] = rows.narrow(what.dim, begin - start, end - begin)


# -- norms -----------------------------------------------------------------------------------------------------------------


def _owned(p: Tensor) -> Iterator[Tensor]:
    """What this rank counts of a gradient: each element of the whole is counted on one rank of the world."""
    from onecard.fleet.topology import get_hybrid_communicate_group

    what, grad = held(p), p.grad
    if grad is None:
        return
    cut = set(what.group.ranks) if what.group is not None else set()
    hcg = get_hybrid_communicate_group()
    for axis, degree in hcg.degrees.items():
        line = hcg.group(axis)
        copies = degree > 1 and not (axis == "pp" or set(line.ranks) <= cut)
        if copies and line.index != 0:
            return
    for group in what.sums:
        if group.index != 0:
            return
    if what.dim < 0 or not what.runs:
        yield grad
        return
    for start, length in what.owned():
        yield grad.narrow(what.dim, start, length)


def grad_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of the gradient of the whole model, each parameter counted once, whatever is cut or copied.

    Every rank of the world calls it. Sums what is still to be summed.
    """
    chosen = [p for p in parameters]
    sync(chosen)
    mine = [part for p in chosen for part in _owned(p) if part.numel()]
    device = next((p.device for p in chosen), torch.device("cpu"))
    world = of_ranks(name="world")
    if norm_type == math.inf:
        largest = torch.stack([p.abs().max().float() for p in mine]).max() if mine else torch.zeros((), device=device)
        return plain.all_reduce(largest, world, "max", call="grad_norm")
    total = torch.zeros((), device=device, dtype=torch.float32)
    if mine:
        total = torch.nn.utils.get_total_norm(mine, norm_type).float() ** norm_type
    return plain.all_reduce(total, world, call="grad_norm") ** (1.0 / norm_type)


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """As ``torch.nn.utils.clip_grad_norm_``, of the whole model: the norm is the same on all ranks, and one card's.

    Returns:
        The norm before clipping.

    Raises:
        RuntimeError: it is not finite, and ``error_if_nonfinite``.
    """
    chosen = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(isinstance(p, DistTensor) for p in chosen):  # of group_sharded_parallel: their norm is that of the whole
        return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type, error_if_nonfinite)
    norm = grad_norm(chosen, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {norm.item()}, so it cannot be clipped"
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for p in chosen:
        if p.grad is not None:
            p.grad.mul_(scale.to(p.grad.dtype))
            note(p)
    return norm


class ClipGradByGlobalNorm:
    """Paddle's object for ``fleet.distributed_optimizer(opt, grad_clip=ClipGradByGlobalNorm(1.0))``.

    Paddle scales by clip / max(clip, norm), torch by clip / (norm + 1e-6); here it is torch's.
    """

    def __init__(self, clip_norm: float = 1.0) -> None:
        self.clip_norm = clip_norm

    def __call__(self, parameters: Any) -> Tensor:
        return clip_grad_norm_(parameters, self.clip_norm)
