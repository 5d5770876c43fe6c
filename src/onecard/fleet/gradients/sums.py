"""Gradients of a fleet program: summed once, when an optimizer, a clipping or the program first reads them.

Nothing is sent in backward for parameters, so that microbatches accumulate without a message. ``sync`` then sums what
each parameter's gradient consists of: summands of a group (sequence parallel, shared embeddings, shared key heads), and the
mean over the ranks that saw other data. What was summed already is not summed again; what backward has added to it since is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.gradients import holders, sparse_gradients, twins
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.tensor import DistTensor
from onecard.tensor.buckets import fill
from onecard.train import unreduced
from onecard.train.shard import held
from onecard.train.summands import anywhere
from onecard.train.unreduced import read, write


def adds_up(p: Tensor) -> bool:
    """Whether its gradient is an average and nothing else: then one of whole ones and of summands is right, too."""
    what = held(p)
    return not (what.sums or what.copies or holders.beside(p) is not None)


@torch.no_grad()
def sync(parameters: Iterable[Tensor], step: bool = False, call: str = "gradients") -> None:
    """As ``hooks.sync``, of parameters that are watched. ``call``: what ranks that are out of step are told that it was for."""
    given = [p for p in map(twins.trained, parameters) if unreduced.is_due(p) and (has_sums(p) or _is_wide(p))]
    _sync_twins([p for p in given if twins.twin_of(p) is not None])
    chosen = [p for p in given if _is_plain(p)]
    states: dict[Tensor, Any] = {p: unreduced.of(p) for p in chosen}
    added, changed = _agreed(chosen, call)
    summands = {*map(id, added)}
    for group in _in_order(s for p in added for s in held(p).sums):
        _reduce([_part(p) for p in added if _sums_over(p, group)], group, "sum")
    for p in added:
        if held(p).copies:
            _sum_copies(p)
    over = {p: (states[p].rest if step else None) or holders.averaged_over(p) for p in changed}
    for group in _in_order(d for d in over.values() if d is not None):
        mine = [p for p, d in over.items() if d is not None and d.turn == group.turn]  # others may be the same ranks
        _reduce([_part(p) for p in mine], group, "avg")
        for p in mine:
            # An expert: backward brought a sum over several ranks' losses; what the program made of that is a mean already.
            if id(p) in summands and (losses := holders.share(p)) > 1:
                _part(p).div_(losses)
    for p, state in states.items():
        if state.wide is not None:
            total = state.wide if state.kept is None else state.wide.add_(state.kept)
            state.put(p, total.to(p.dtype))
        elif state.kept is not None:
            write(p, state.kept.add_(read(p)))
        state.kept = state.wide = None
        state.trained = p.requires_grad
        if state.rest is None or not step or over.get(p) is not state.rest:
            state.is_whole()


def whole(p: Tensor, summand: Tensor) -> Tensor:
    """What a summand of a parameter's gradient is a summand of; the gradient that is there becomes whole, too."""
    state: Any = unreduced.of(p)
    call = f"hooks of {state.name or f'a parameter {[*p.shape]}'}, summed in backward, which reaches it on every rank"
    sync([p], call=call)
    known = read(p)
    write(p, summand.clone())
    state.summand = state.uneven = True
    sync([p], call=call)
    made = read(p)
    write(p, known)
    return made


@torch.no_grad()
def asked(parameters: list[Tensor], summands: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The gradients of which a rank has these summands, in the messages of a ``sync``; those that are there stay as they are."""
    states: list[Any] = [unreduced.of(p) for p in parameters]
    kept = [(read(p), state.noted()) for p, state in zip(parameters, states, strict=True)]
    for p, state, summand in zip(parameters, states, summands, strict=True):
        state.kept = state.wide = None
        write(p, None if summand is None else summand.clone())  # torch's may be a number that is expanded
        state.summand = state.uneven = summand is not None
    try:
        sync(parameters)
        return [read(p) for p in parameters]
    finally:
        for p, state, (grad, noted) in zip(parameters, states, kept, strict=True):
            write(p, grad)
            state.back(noted)


def _part(p: Tensor) -> Any:
    """What this rank has of a gradient, in the dtype in which it adds up."""
    state = unreduced.of(p)
    return read(p) if state is None or state.wide is None else state.wide


def _is_plain(p: Tensor) -> bool:
    if isinstance(p, DistTensor) and twins.twin_of(p) is None and any(s.size > 1 for s in held(p).sums):
        raise FleetError(
            f"a distributed parameter of shape {list(p.shape)} is marked (fleet.sum_over, mark_as_sequence_parallel_parameter), "
            "as plain ones are: its gradient is summed by its layout. Leave the mark out"
        )
    return not isinstance(p, DistTensor)


def _is_wide(p: Tensor) -> bool:
    state = unreduced.of(p)
    return state is not None and state.wide is not None


def is_whole(parameter: Tensor) -> bool:
    """Whether its gradient is summed, as it is now."""
    state = unreduced.of(parameter)
    return not has_sums(parameter) or (state is not None and not state.uneven)


def _sync_twins(chosen: list[Tensor]) -> None:
    """The same of parameters of ``group_sharded_parallel``: averages first, which cut them; then parts with parts."""
    twins.check(chosen)
    twins.finish(chosen)
    todo = [p for p in chosen if held(p).sums and not twins.is_summed(p)]
    for group in _in_order(s for p in todo for s in held(p).sums):
        mine = [p for p in todo if _sums_over(p, group)]
        twins.fill(p for p, used in zip(mine, _used(mine, group), strict=True) if used and p.grad is None)
        _reduce([p.grad._local for p in mine if isinstance(p.grad, DistTensor)], group, "sum")
    for p in todo:
        twins.note(p)


def note(parameter: Tensor) -> None:
    """Remember that a distributed parameter's gradient, as it is now, is the whole one; of others it is known."""
    if twins.twin_of(parameter) is not None:
        twins.note(parameter)


def has_sums(p: Tensor) -> bool:
    """Whether other ranks have summands of its gradient."""
    what, data = held(p), holders.data_of(p)
    return bool(what.sums or what.copies) or (data is not None and data.size > 1)


def of_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What it updates: its own plain parameters, or the distributed ones of ``group_sharded_parallel``."""
    parameters = [p for each in optimizer.param_groups for p in each["params"]]
    return [p for p in parameters if not isinstance(p, DistTensor)] or parameters


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


def mean_loss(loss: Any, parameters: Iterable[Tensor]) -> Any:
    """What a closure returns, of all data: the mean over the ranks that see different ones."""
    group = next((data for p in parameters if (data := holders.data_of(p)) is not None), None)
    if loss is None or group is None or group.size == 1:
        return loss
    if isinstance(loss, DistTensor):  # with a penalty on weights that ZeRO has cut; of this rank's data all the same
        loss = loss.full_tensor()
    mine = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float(loss), dtype=torch.float64, device="cpu")
    whole = plain.all_reduce(mine.clone(), group, "avg", call="closure")
    return whole if isinstance(loss, Tensor) else whole.item()


def in_stages(p: Tensor) -> bool:
    """Whether other ranks have other parameters of its model."""
    return holders.data_of(p) is not None and get_hybrid_communicate_group().degrees["pp"] > 1


def refuse_parts(p: Tensor, group: Ranks, call: str) -> None:
    """Refuse a parameter of which ranks that should hold copies hold parts, and which is no expert: ZeRO would divide copies."""
    part = held(p).group
    if part is not None and held(p).experts is None and len(set(part.ranks) & set(group.ranks)) > 1:
        raise FleetError(
            f"{call}: a parameter of shape {list(p.shape)} is this rank's part of {list(held(p).shape)} among ranks "
            f"{list(part.ranks)} (fleet.mark, mp_group=), and {call} divides what ranks {list(group.ranks)} hold copies of. "
            "Without ZeRO it is trained: fleet.distributed_model(model), with dp_degree"
        )


def _agreed(parameters: list[Tensor], call: str) -> tuple[list[Tensor], list[Tensor]]:
    """Those to whose gradients backward has added on any rank, and those that may differ at all; the same on all ranks.

    A parameter that some ranks did not use gets zeros there: on one card its gradient is that of the others' data.
    """
    by_group: dict[tuple[Any, ...], tuple[Ranks, list[Tensor]]] = {}
    for p in parameters:
        for group in [*held(p).sums, *([held(p).group] if held(p).copies else []), holders.averaged_over(p)]:
            if group is not None and group.size > 1:
                by_group.setdefault(group.turn, (group, []))[1].append(p)
    states: dict[Tensor, Any] = {p: unreduced.of(p) for p in parameters}
    said = {
        p: [(grad := _part(p)) is not None, states[p].summand, states[p].uneven, _is_dense(grad)] for p in parameters
    }
    for _, (group, mine) in sorted(by_group.items(), key=lambda item: item[0]):
        said |= dict(zip(mine, anywhere([said[p] for p in mine], group, mine[0].device, call), strict=True))
    there = [p for p in parameters if said[p][0]]
    for p in there:
        aside = not states[p].summand and (states[p].dtype is not None or not adds_up(p))
        if _part(p) is None or (said[p][1] and aside):
            states[p].kept = read(p)  # whole, where others have a summand
            write(p, torch.zeros_like(p) if said[p][3] else sparse_gradients.empty_like(p))
        elif said[p][3] and read(p) is not None:
            write(p, sparse_gradients.dense(read(p)))
        if said[p][1] and states[p].dtype is not None:
            states[p].widen(p)
    return [p for p in there if said[p][1]], [p for p in there if said[p][2]]


def _in_order(groups: Iterable[Ranks]) -> list[Ranks]:
    """Each once, in one order on all ranks: those of a pipeline hold other parameters, and meet some here and some there."""
    return [group for _, group in sorted({group.turn: group for group in groups}.items(), key=lambda item: item[0])]


def _sums_over(p: Tensor, group: Ranks) -> bool:
    return any(s.turn == group.turn for s in held(p).sums)


def _is_dense(grad: Tensor | None) -> bool:
    return grad is not None and not grad.is_sparse


def _used(mine: list[Tensor], group: Ranks) -> list[bool]:
    """For each parameter whether a rank of the group has a gradient."""
    return [there for (there,) in anywhere([[p.grad is not None] for p in mine], group, mine[0].device)]


def _reduce(grads: list[Any], group: Ranks, op: str, call: str = "gradients") -> None:
    if group.size == 1:
        return
    sparse_gradients.reduce([g for g in grads if g.is_sparse], group, op)
    for bucket in buckets([g for g in grads if not g.is_sparse]):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            plain.all_reduce(bucket[0], group, op, inplace=True, call=call)
            continue
        with together(bucket) as flat:
            plain.all_reduce(flat, group, op, inplace=True, call=call)


@contextmanager
def together(bucket: Sequence[Tensor]) -> Iterator[Tensor]:
    """Several tensors as one of one dim, which is written back into them."""
    flat = torch.cat([x.reshape(-1) for x in bucket])
    yield flat
    for x, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
        x.copy_(part.view(x.shape))


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Those that travel together."""
    kinds: dict[Any, list[Tensor]] = {}
    for x in tensors:
        kinds.setdefault((x.dtype, x.device), []).append(x)
    for alike in kinds.values():
        yield from fill(alike, lambda x: x.nbytes)


def _sum_copies(p: Tensor) -> None:
    """Rows that several ranks hold: each adds its own to a tensor of all such rows, and takes back what it holds."""
    what, grad = held(p), _part(p)
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
