"""The collectives that a reshard needs, on plain local tensors: what each sends, and what becomes of what comes.

Each takes the tensor that this rank holds and returns a new one, or a handle of it. Uneven shards are told by ``sizes``, the
lengths along the dim on each rank of the group, which every rank can compute (layout.py), so that no message is spent on them.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecard._torch import names as _torch
from onecard.comm.agree import check
from onecard.comm.issue import by_rank, trace
from onecard.comm.issue.forms import NATIVE, dense
from onecard.comm.issue.groups import Group
from onecard.comm.issue.handle import Handle
from onecard.comm.issue.message import NOTHING, issue, message
from onecard.comm.world.pretend import pretending
from onecard.errors import CommunicationError
from onecard.place.reductions import averaged, join, reduction


def all_reduce(local: Tensor, group: Group, op: str = "sum", inplace: bool = False) -> Tensor:
    """The reduction of all ranks' tensors, on every rank. ``op`` as in ``Partial``; "norm2.0" joins 2-norms."""
    if op.startswith("norm"):
        power = float(op[4:])
        joined = all_reduce(local.abs() ** power, group, "sum", inplace=True) ** (1.0 / power)
        return local.copy_(joined) if inplace else joined
    if local.dtype not in NATIVE:
        joined = _all_reduce_foreign(local, group, op)
        return local.copy_(joined) if inplace else joined
    if local.dtype is torch.bool:
        op = reduction(op).of_truths
    if op in ("max", "min") and local.is_floating_point():
        extreme = _extreme(local, group, op)
        return local.copy_(extreme) if inplace else extreme
    return _reduced(local, group, op, inplace).wait()


_AS_IT_IS = NATIVE - {torch.bool}


def reduced(local: Tensor, group: Group, op: str = "sum", inplace: bool = False, later: bool = False) -> Handle:
    """``all_reduce``, left under way if asked for and possible. ``inplace``: ``local`` is not read before it is awaited."""
    if not (local.dtype in _AS_IT_IS and op in ("sum", "avg")):
        return Handle.complete(all_reduce(local, group, op, inplace))
    return _reduced(local, group, op, inplace, later)


def _reduced(local: Tensor, group: Group, op: str, inplace: bool, later: bool = False) -> Handle:
    result = local if inplace and local.is_contiguous() else local.clone(memory_format=torch.contiguous_format)
    if group.process_group is None or not result.numel():
        if group.process_group is not None:
            check.nothing_sent()
        return Handle.complete(averaged(result, group.size) if op == "avg" else result)
    buffer = result.view(torch.uint8) if result.dtype is torch.bool else result
    coming = issue(message(group, "all_reduce", "sum" if op == "avg" else op), buffer, buffer, later)
    return coming.then(lambda _: averaged(result, group.size) if op == "avg" else result)


def _all_reduce_foreign(local: Tensor, group: Group, op: str) -> Tensor:
    """Of a dtype that backends do not know: complex numbers add as pairs, small integers as larger ones."""
    if not local.is_complex():
        return all_reduce(local.to(torch.int32 if local.element_size() < 4 else torch.int64), group, op).to(local.dtype)
    if op == "product":
        return all_gather(local.unsqueeze(0), group, 0, [1] * group.size).prod(0)
    if op not in ("sum", "avg"):
        raise CommunicationError(f"complex numbers have no {op}: reduce their real and imaginary parts, or their abs()")
    return torch.view_as_complex(all_reduce(torch.view_as_real(dense(local)), group, op))


def _extreme(local: Tensor, group: Group, op: str) -> Tensor:
    """The maximum or minimum of floating-point tensors; NaN wins, as on one card (Gloo and NCCL may drop it).

    The bits of a float, with those below the sign turned over where it is negative, order as integers do.
    """
    wide = local.float() if local.element_size() < 4 else local
    wide = wide.masked_fill(wide.isnan(), math.nan)  # one NaN: positive, so above every number
    kind = torch.int32 if wide.element_size() == 4 else torch.int64
    low = torch.iinfo(kind).max
    turned = wide if op == "max" else wide.neg().masked_fill_(wide.isnan(), math.nan)
    bits = turned.contiguous().view(kind)
    keys = all_reduce(bits ^ ((bits >> (8 * bits.element_size() - 1)) & low), group, "max", inplace=True)
    joined = (keys ^ ((keys >> (8 * keys.element_size() - 1)) & low)).view(wide.dtype)
    return (joined if op == "max" else joined.neg()).to(local.dtype)


def all_gather(local: Tensor, group: Group, dim: int, sizes: Sequence[int], into: Tensor | None = None) -> Tensor:
    """The ranks' tensors joined along ``dim``; ``sizes`` are their lengths along it. ``into``: where to, if lengths are equal,
    ``dim`` is 0 and the group counts as its ranks do; ``local`` may be its part of it."""
    return gathered(local, group, dim, sizes, into).wait()


def gathered(
    local: Tensor, group: Group, dim: int, sizes: Sequence[int], into: Tensor | None = None, later: bool = False
) -> Handle:
    """``all_gather``, left under way if asked for and possible."""
    largest = max(sizes)
    if group.process_group is None:
        return Handle.complete(local)
    if not largest:
        check.nothing_sent()
        return Handle.complete(local)
    send = padded(local, dim, largest)
    whole = send.new_empty((group.size * largest, *send.shape[1:])) if into is None else into
    if not send.numel():
        check.nothing_sent()
        return Handle.complete(joined(whole, group, dim, sizes))
    coming = issue(message(group, "all_gather_into_tensor", group.size), whole, send, later)
    return coming.then(lambda whole: joined(whole, group, dim, sizes))


def padded(local: Tensor, dim: int, length: int) -> Tensor:
    """What a rank gives to an all-gather: contiguous, the dim to be joined outermost and of one length on all ranks."""
    turned = local.movedim(dim, 0) if dim else local
    if turned.shape[0] < length:
        turned = torch.cat([turned, turned.new_zeros((length - turned.shape[0], *turned.shape[1:]))])
    return dense(turned)


def joined(gathered: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """What the ranks gave, without what pads it, in the order of the mesh."""
    largest, total = max(sizes), sum(sizes)
    full = total // max(largest, 1)
    if group.order or any(size != largest for size in sizes[:full]) or sum(sizes[: full + 1]) != total:
        blocks = _by_place(gathered.split(largest), group)
        gathered = torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])
    elif largest * group.size != total:  # what is missing is missing at the end
        gathered = gathered[:total].clone()
    return gathered.movedim(0, dim).contiguous() if dim else gathered


def reduce_scatter(
    local: Tensor, group: Group, dim: int, sizes: Sequence[int], op: str = "sum", into: Tensor | None = None
) -> Tensor:
    """This rank's part along ``dim`` of the reduction of all ranks' tensors. ``into``: memory that the result may take.

    Built on all_to_all (each part travels once, and every rank adds in the order of the ranks) where the backend has nothing
    better: Gloo's own reduce-scatter sends as much as an all-reduce.
    """
    return scattered(local, group, dim, sizes, op, into).wait()


def scattered(
    local: Tensor,
    group: Group,
    dim: int,
    sizes: Sequence[int],
    op: str = "sum",
    into: Tensor | None = None,
    later: bool = False,
) -> Handle:
    """``reduce_scatter``, left under way if asked for and possible."""
    if op.startswith("norm"):
        power = float(op[4:])
        total = scattered(local.abs() ** power, group, dim, sizes, "sum", None, later)
        return total.then(lambda total: total ** (1.0 / power))
    if group.process_group is None:
        return Handle.complete(local)
    if scatters(local, group, sizes, op):
        return _scattered_by_backend(local, group, dim, sizes, op, into, later)
    shape = [*local.shape[:dim], sizes[group.index], *local.shape[dim + 1 :]]
    flat, _, leave, _ = exchange_of(local, group, dim, sizes, dim, sizes)
    came = exchanged(flat, [math.prod(shape)] * group.size, leave, group, local.numel() > 0, later)
    return came.then(lambda came: join(of_each(came, shape, group), op))


def scatters(local: Tensor, group: Group, sizes: Sequence[int], op: str) -> bool:
    """Whether the backend has a reduce-scatter that is taken: NCCL, shared memory, which adds as it reads, a pretended world."""
    if op not in ("sum", "avg") or len(set(sizes)) > 1 or group.order or local.is_meta or not local.numel():
        return False
    shared = (
        (getattr(group.process_group, "scatters", False) or pretending())
        and local.is_floating_point()
        and not trace.tracing()
    )
    return local.is_cuda or shared


def _scattered_by_backend(
    local: Tensor, group: Group, dim: int, sizes: Sequence[int], op: str, into: Tensor | None, later: bool
) -> Handle:
    send = local.movedim(dim, 0).contiguous()
    shape = (sizes[0], *send.shape[1:])
    result = send.new_empty(shape) if into is None else into.view(shape)

    def finish(result: Tensor) -> Tensor:
        result = result.movedim(0, dim).contiguous()
        return averaged(result, group.size) if op == "avg" else result

    return issue(message(group, "reduce_scatter_tensor", "sum", group.size), result, send, later).then(finish)


def all_to_all(
    local: Tensor, group: Group, dim: int, sizes: Sequence[int], to_dim: int, to_sizes: Sequence[int]
) -> Tensor:
    """Join along ``dim`` (lengths ``sizes``) while cutting along ``to_dim`` (lengths ``to_sizes``)."""
    return turned(local, group, dim, sizes, to_dim, to_sizes).wait()


def turned(
    local: Tensor,
    group: Group,
    dim: int,
    sizes: Sequence[int],
    to_dim: int,
    to_sizes: Sequence[int],
    later: bool = False,
) -> Handle:
    """``all_to_all``, left under way if asked for and possible."""
    if group.process_group is None:
        return Handle.complete(local)
    flat, arrive, leave, shape = exchange_of(local, group, dim, sizes, to_dim, to_sizes)
    rest = math.prod(size for d, size in enumerate(local.shape) if d not in (dim, to_dim))
    came = exchanged(flat, arrive, leave, group, sum(sizes) * sum(to_sizes) * rest > 0, later)
    return came.then(lambda came: arrived(came, shape, group, dim, sizes))


def exchange_of(
    local: Tensor, group: Group, dim: int, sizes: Sequence[int], to_dim: int, to_sizes: Sequence[int]
) -> tuple[Tensor, list[int], list[int], list[int]]:
    """An all-to-all's message: what is sent, how many elements come from and go to each rank of the process group, and the
    shape of what comes together (``arrived``)."""
    flat = dense(by_rank.packed([local], [to_dim], [by_rank.runs_of(to_sizes)], tuple(group.order or ())))
    shape = list(local.shape)
    leave = [local.numel() // max(shape[to_dim], 1) * size for size in _by_rank(to_sizes, group)]
    shape[to_dim] = to_sizes[group.index]
    shape[dim] = 1
    arrive = [math.prod(shape) * size for size in _by_rank(sizes, group)]
    shape[dim] = sum(sizes)
    return flat, arrive, leave, shape


def arrived(flat: Tensor, shape: Sequence[int], group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """What came from the ranks of an all-to-all, joined along a dim in the order of the mesh."""
    if not dim and not group.order:
        return flat.view(shape)
    into = flat.new_empty(shape)
    by_rank.unpack([into], flat, [dim], [by_rank.runs_of(sizes)], tuple(group.order or ()))
    return into


def of_each(flat: Tensor, shape: Sequence[int], group: Group) -> Tensor:
    """What came from the ranks, all of one shape, with the places of the mesh as a new first dim."""
    given = flat.view(group.size, *shape)
    return torch.stack(_by_place(list(given), group)) if group.order else given


def exchanged(
    flat: Tensor, arrive: list[int], leave: list[int], group: Group, anything: bool = True, later: bool = False
) -> Handle:
    """An all-to-all of stretches of a flat tensor, by rank of the process group.

    ``anything``: whether any rank of the group has an element; a rank that has none must take part in the others'.
    """
    result = flat.new_empty(sum(arrive))
    if not anything:
        check.nothing_sent()
        return Handle.complete(result)
    if flat.dtype not in NATIVE:
        size = flat.element_size()
        arrive, leave = [n * size for n in arrive], [n * size for n in leave]
    return issue(message(group, "all_to_all_single", arrive, leave), result, flat, later)


def _by_rank(parts: Sequence[Any], group: Group) -> list[Any]:
    """Parts listed by place in the mesh, listed by rank of the process group."""
    return [parts[place] for place in group.order] if group.order else list(parts)


def _by_place(parts: Sequence[Any], group: Group) -> list[Any]:
    """Parts listed by rank of the process group, listed by place in the mesh."""
    return [parts[group.order.index(place)] for place in range(group.size)] if group.order else list(parts)


def broadcast(tensor: Tensor, group: Group, index: int) -> Tensor:
    """Fill ``tensor`` in place on every rank of the group with that of the rank at ``index``."""
    if group.process_group is not None and tensor.numel():
        root = group.order.index(index) if group.order else index
        issue(message(group, "broadcast", root), tensor, tensor)
    return tensor


def broadcast_object(value: Any, group: Group, index: int) -> Any:
    """The Python value of the rank at ``index`` on every rank. Pickled: only between ranks of one program."""
    if group.process_group is None:
        return value
    # A group of NCCL alone moves nothing that lies on the CPU.
    device = _torch.object_device(group.process_group)
    data = pickle.dumps(value) if group.index == index else b""
    size = broadcast(torch.tensor([len(data)], device=device), group, index)
    buffer = (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(int(size), dtype=torch.uint8, device="cpu")
    )
    buffer = broadcast(buffer.to(device), group, index)
    return value if group.index == index else pickle.loads(buffer.cpu().numpy().tobytes())


def backend_of(group: Group) -> str:
    """What carries a group's messages; "none" where it has none to send."""
    return "none" if group.process_group is None else str(dist.get_backend(group.process_group))


def barrier(group: Group) -> None:
    """Wait until every rank of the group is here."""
    if group.process_group is not None:
        issue(message(group, "barrier"), NOTHING, NOTHING)
