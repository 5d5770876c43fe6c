"""Gradients of a fleet program: summed once, when an optimizer or a clipping first reads them.

Nothing is sent in backward for parameters, so that microbatches accumulate without a message. ``sync`` then sums what
each parameter's gradient consists of: summands of a group (sequence parallel, shared embeddings, shared key heads), and the
mean over the ranks that saw other data. A gradient that was summed already is not summed again.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onecard import recorded
from onecard.comm import plain
from onecard.comm.ranks import Ranks
from onecard.fleet import twins
from onecard.fleet.parameters import held
from onecard.fleet.strategy import FleetError
from onecard.tensor import DistTensor

BUCKET = 25 * 2**20  # bytes, as DistributedDataParallel
_DATA = "_onecard_data"
# Of a parameter: which gradient it was, and how often written to, when it was whole, and when backward last added to it.
_WHOLE = "_onecard_whole"
_ADDED = "_onecard_added"
_REST = "_onecard_rest"  # the ranks over which it is averaged where an optimizer averages over others itself


def share_data(parameter: Tensor, group: Ranks) -> None:
    """Say that the ranks of a group hold copies of this parameter and see different data."""
    setattr(parameter, _DATA, group)
    if group.size > 1:
        _watch(parameter)


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
    given = [p for p in parameters if p.requires_grad and has_sums(p)]
    _sync_twins([p for p in given if twins.twin_of(p) is not None])
    chosen = [p for p in given if twins.twin_of(p) is None]
    for p in chosen:
        _check(p)
    added, changed = _agreed(chosen)
    sums = {(s.ranks, s.name): s for p in added for s in held(p).sums}
    # In one order on all ranks: those of a pipeline hold other parameters, and meet some ranks here and some there.
    for (ranks, name), group in sorted(sums.items()):
        _reduce([p.grad for p in added if any((s.ranks, s.name) == (ranks, name) for s in held(p).sums)], group, "sum")
    for p in added:
        if held(p).copies:
            _sum_copies(p)
    for p in added:
        setattr(p, _WHOLE, None)  # on all ranks alike
    over = {p: (getattr(p, _REST, None) if step else None) or _data(p) for p in changed}
    for group in {d.ranks: d for d in over.values() if d is not None}.values():
        mine = [p for p, d in over.items() if d is not None and d.ranks == group.ranks]
        _reduce([p.grad for p in mine if not _cut_within(p, group)], group, "avg")
        for p in mine:
            if _cut_within(p, group):  # its part alone: what came to it is a sum over the ranks' losses
                p.grad.div_(group.size)  # type: ignore[union-attr]
    for p in changed:
        if over[p] is _data(p):
            note(p)


def is_whole(parameter: Tensor) -> bool:
    """Whether its gradient is summed, as it is now."""
    return not has_sums(parameter) or _since(parameter, _WHOLE) == 0


def _sync_twins(chosen: list[Tensor]) -> None:
    """The same of parameters of ``group_sharded_parallel``: averages first, which cut them; then parts with parts."""
    twins.check(chosen)
    twins.finish(chosen)
    todo = [p for p in chosen if held(p).sums and not twins.is_summed(p)]
    sums = {(s.ranks, s.name): s for p in todo for s in held(p).sums}
    for (ranks, name), group in sorted(sums.items()):
        mine = [p for p in todo if any((s.ranks, s.name) == (ranks, name) for s in held(p).sums)]
        missing = [p for p, used in zip(mine, _used(mine, group), strict=True) if used and p.grad is None]
        for p in missing:
            p.grad = twins.twin_of(p).zero(p)  # type: ignore[union-attr]
        twins.finish(missing)
        _reduce([p.grad._local for p in mine if isinstance(p.grad, DistTensor)], group, "sum")
    for p in todo:
        twins.note(p)


def note(parameter: Tensor) -> None:
    """Remember that this gradient, as it is now, is the whole one."""
    if twins.twin_of(parameter) is not None:
        return twins.note(parameter)
    if parameter.grad is not None and has_sums(parameter):
        setattr(parameter, _WHOLE, _now(parameter))
        _watch(parameter)


def _watch(parameter: Tensor) -> None:
    """Have backward say when it adds to the gradient: other writes are the user's."""
    distributed = isinstance(parameter, DistTensor)  # its gradient comes from its twin
    if not (distributed or hasattr(parameter, _ADDED)) and parameter.requires_grad and parameter.is_leaf:
        setattr(parameter, _ADDED, None)
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, _ADDED, _now(p)))


def _now(p: Tensor) -> tuple[Any, int]:
    return weakref.ref(p.grad), p.grad._version  # type: ignore[union-attr]


def _since(p: Tensor, word: str) -> int | None:
    """How often the gradient has been written to since then; None if it is another tensor now."""
    known = getattr(p, word, None)
    return None if p.grad is None or known is None or known[0]() is not p.grad else p.grad._version - known[1]


def has_sums(p: Tensor) -> bool:
    """Whether other ranks have summands of its gradient."""
    what, data = held(p), _data(p)
    return bool(what.sums or what.copies) or (data is not None and data.size > 1)


def of_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What it updates: its own plain parameters, or the distributed ones of ``group_sharded_parallel``."""
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    return [p for p in parameters if type(p) in (nn.Parameter, Tensor)] or parameters


def of_fleet(parameters: Any) -> bool:
    """Whether any is a part or a copy: the same on all ranks, which hold parts and copies of the same parameters."""
    if not isinstance(parameters, list):
        return False
    parts = (held(p).group for p in parameters)
    cut = any(group is not None and group.size > 1 for group in parts)
    return cut or any(has_sums(p) or in_stages(p) for p in parameters)


def scale(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply whole gradients, which stay whole."""
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(factor.to(p.grad.dtype) if isinstance(factor, Tensor) else factor)
            note(p)


def in_stages(p: Tensor) -> bool:
    """Whether other ranks have other parameters of its model."""
    from onecard.fleet.topology import get_hybrid_communicate_group

    return _data(p) is not None and get_hybrid_communicate_group().degrees["pp"] > 1


def _data(p: Tensor) -> Ranks | None:
    return getattr(p, _DATA, None)


def _cut_within(p: Tensor, group: Ranks) -> bool:
    part = held(p).group
    return part is not None and part.size > 1 and set(part.ranks) <= set(group.ranks)


def _is_added(p: Tensor) -> bool:
    """Whether backward has added to the gradient since it was whole, so that it is one rank's summand."""
    whole, added = _since(p, _WHOLE), _since(p, _ADDED)
    return p.grad is not None and (whole is None or (added is not None and added < whole))


def _check(p: Tensor) -> None:
    whole, added = _since(p, _WHOLE), _since(p, _ADDED)
    if whole == 1 and added == 0 and (held(p).sums or held(p).copies):
        raise FleetError(
            f"backward has added to a gradient of shape {list(p.shape)} that was summed over ranks before: call zero_grad() "
            "after the optimizer's step, and clip or sum no earlier than after the last backward of a step"
        )
    if added and _is_added(p):
        warnings.warn(
            f"a gradient of shape {list(p.shape)} was written to after backward, before it was summed over the ranks: right "
            "only where all ranks multiply by the same number. Before clipping or scaling of your own: fleet.sync(parameters)",
            stacklevel=2,
        )


def _agreed(parameters: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those to whose gradients backward has added on any rank, and those that have changed at all; the same on all ranks.

    A parameter that some ranks did not use gets zeros there: on one card its gradient is that of the others' data.
    """
    by_group: dict[tuple[tuple[int, ...], str], tuple[Ranks, list[Tensor]]] = {}
    for p in parameters:
        for group in [*held(p).sums, *([held(p).group] if held(p).copies else []), _data(p)]:
            if group is not None and group.size > 1 and not (group is _data(p) and _cut_within(p, group)):
                by_group.setdefault((group.ranks, group.name), (group, []))[1].append(p)
    said = {id(p): [p.grad is not None, _is_added(p), _is_added(p) or _since(p, _WHOLE) != 0] for p in parameters}
    for _, (group, mine) in sorted(by_group.items(), key=lambda item: item[0]):
        with recorded.unrecorded():  # the same in every replay
            words = torch.tensor([said[id(p)] for p in mine], dtype=torch.uint8, device=mine[0].device)
            anywhere = plain.all_reduce(words, group, "max", inplace=True, call="gradients").tolist()
        said |= {id(p): word for p, word in zip(mine, anywhere, strict=True)}
    there = [p for p in parameters if said[id(p)][0]]
    for p in there:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    return [p for p in there if said[id(p)][1]], [p for p in there if said[id(p)][2]]


def _used(mine: list[Tensor], group: Ranks) -> list[bool]:
    """For each parameter whether a rank of the group has a gradient."""
    with recorded.unrecorded():  # the same in every replay
        there = torch.tensor([p.grad is not None for p in mine], dtype=torch.uint8, device=mine[0].device)
        return [bool(n) for n in plain.all_reduce(there, group, "max", inplace=True, call="gradients").tolist()]


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
