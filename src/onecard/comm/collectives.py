"""The collectives that a reshard needs, on plain local tensors. The only place that calls torch.distributed's.

Each takes the tensor that this rank holds and returns a new one. Uneven shards are told by ``sizes``, the lengths
along the dim on each rank of the group, which every rank can compute (layout.py), so that no message is spent on them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from onecard.comm import flight
from onecard.comm.groups import Group
from onecard.errors import CommunicationError

_REDUCE = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def _wait(name: str, group: Group, nbytes: int, start: Callable[[], Any]) -> None:
    """Run one collective; a fault says which, among whom, and where this rank stands."""
    board = flight.board
    if board is not None:
        board.enter(name, tuple(sorted(group.ranks)), nbytes)
    try:
        work = start()
        if work is not None:
            work.wait()
    except RuntimeError as fault:
        raise CommunicationError(
            f"{name} of {nbytes} bytes among ranks {list(group.ranks)} failed on rank {group.ranks[group.index]}: "
            f"{fault}. A rank that is gone, or that runs another program than the others, shows as this."
        ) from fault
    finally:
        if board is not None:
            board.leave()


def _at_once(options: Any) -> Any:
    """Options of a call whose result is awaited right after: no need to hand it to another thread or stream."""
    options.asyncOp = False
    return options


def _options(op: str) -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(_REDUCE[op])
    return _at_once(options)


_OPTIONS = {op: _options(op) for op in _REDUCE}
_GATHER, _EXCHANGE = _at_once(AllgatherOptions()), _at_once(dist.AllToAllOptions())
_BARRIER = _at_once(dist.BarrierOptions())


def all_reduce(local: Tensor, group: Group, op: str = "sum", inplace: bool = False) -> Tensor:
    """The reduction of all ranks' tensors, on every rank. ``op`` as in ``Partial``; "norm2.0" joins 2-norms."""
    if op.startswith("norm"):
        power = float(op[4:])
        return all_reduce(local.abs() ** power, group, "sum", inplace=True) ** (1.0 / power)
    result = local if inplace and local.is_contiguous() else local.clone(memory_format=torch.contiguous_format)
    buffer = result.view(torch.uint8) if result.dtype is torch.bool else result
    pg = group.process_group
    if pg is not None and result.numel():
        _wait("all_reduce", group, result.nbytes, lambda: pg.allreduce([buffer], _OPTIONS[op]))
    return result.div_(group.size) if op == "avg" else result


def all_gather(local: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """The ranks' tensors joined along ``dim``; ``sizes`` are their lengths along it."""
    pg, largest = group.process_group, max(sizes)
    if pg is None:
        return local
    turned = local.movedim(dim, 0) if dim else local
    if turned.shape[0] < largest:
        turned = torch.cat([turned, turned.new_zeros((largest - turned.shape[0], *turned.shape[1:]))])
    send = turned.contiguous()
    gathered = send.new_empty((group.size * largest, *send.shape[1:]))
    if send.numel():
        _wait("all_gather", group, send.nbytes, lambda: pg._allgather_base(gathered, send, _GATHER))
    if largest * group.size != sum(sizes) or group.order:
        blocks = _by_place(gathered.split(largest), group)
        gathered = torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])
    return gathered.movedim(0, dim).contiguous() if dim else gathered


def reduce_scatter(local: Tensor, group: Group, dim: int, sizes: Sequence[int], op: str = "sum") -> Tensor:
    """This rank's part along ``dim`` of the reduction of all ranks' tensors.

    Built on all_to_all (each part travels once, and every rank adds in the order of the ranks), because Gloo has no
    reduce-scatter of its own that sends less than an all-reduce.
    """
    pg = group.process_group
    if op.startswith("norm"):
        power = float(op[4:])
        return reduce_scatter(local.abs() ** power, group, dim, sizes, "sum") ** (1.0 / power)
    if pg is None:
        return local
    if local.is_cuda and op in ("sum", "avg") and len(set(sizes)) == 1 and not group.order:
        return _reduce_scatter_base(local, group, dim, sizes, op)
    parts = all_to_all_parts(local, group, dim, sizes)
    stacked = torch.stack(parts)
    reduce = {
        "sum": lambda t: t.sum(0),
        "avg": lambda t: t.sum(0) / group.size,
        "max": lambda t: t.amax(0),
        "min": lambda t: t.amin(0),
        "product": lambda t: t.prod(0),
    }
    return reduce[op](stacked).to(local.dtype)


def _reduce_scatter_base(local: Tensor, group: Group, dim: int, sizes: Sequence[int], op: str) -> Tensor:
    send = local.movedim(dim, 0).contiguous()
    result = send.new_empty((sizes[0], *send.shape[1:]))
    options = _at_once(dist.ReduceScatterOptions())
    options.reduceOp = dist.ReduceOp(_REDUCE[op])
    pg = group.process_group
    _wait("reduce_scatter", group, send.nbytes, lambda: pg._reduce_scatter_base(result, send, options))
    result = result.movedim(0, dim).contiguous()
    return result / group.size if op == "avg" else result


def all_to_all_parts(local: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> list[Tensor]:
    """Send part i of this tensor along ``dim`` to rank i; return what each rank sent here, all of one shape."""
    send = [part.contiguous() for part in local.split(list(sizes), dim)]
    shape = send[group.index].shape
    return _exchange(send, [shape] * group.size, local, group)


def all_to_all(
    local: Tensor, group: Group, dim: int, sizes: Sequence[int], to_dim: int, to_sizes: Sequence[int]
) -> Tensor:
    """Join along ``dim`` (lengths ``sizes``) while cutting along ``to_dim`` (lengths ``to_sizes``)."""
    if group.process_group is None:
        return local
    send = [part.contiguous() for part in local.split(list(to_sizes), to_dim)]
    shape = list(send[group.index].shape)
    shapes = [torch.Size([*shape[:dim], size, *shape[dim + 1 :]]) for size in sizes]
    return torch.cat(_exchange(send, shapes, local, group), dim)


def _exchange(send: list[Tensor], shapes: Sequence[torch.Size], like: Tensor, group: Group) -> list[Tensor]:
    send, shapes = _by_rank(send, group), _by_rank(shapes, group)
    flat = torch.cat([part.reshape(-1) for part in send])
    counts = [shape.numel() for shape in shapes]
    result = like.new_empty(sum(counts))
    out_splits, in_splits = counts, [part.numel() for part in send]
    pg = group.process_group
    if result.numel() or flat.numel():
        _wait(
            "all_to_all", group, flat.nbytes, lambda: pg.alltoall_base(result, flat, out_splits, in_splits, _EXCHANGE)
        )
    return _by_place([part.view(shape) for part, shape in zip(result.split(counts), shapes, strict=True)], group)


def _by_rank(parts: Sequence[Any], group: Group) -> list[Any]:
    """Parts listed by place in the mesh, listed by rank of the process group."""
    return [parts[place] for place in group.order] if group.order else list(parts)


def _by_place(parts: Sequence[Any], group: Group) -> list[Any]:
    """Parts listed by rank of the process group, listed by place in the mesh."""
    return [parts[group.order.index(place)] for place in range(group.size)] if group.order else list(parts)


def broadcast(tensor: Tensor, group: Group, index: int) -> Tensor:
    """Fill ``tensor`` in place on every rank of the group with that of the rank at ``index``."""
    pg = group.process_group
    if pg is not None and tensor.numel():
        options = _at_once(dist.BroadcastOptions())
        options.rootRank, options.rootTensor = group.order.index(index) if group.order else index, 0
        _wait("broadcast", group, tensor.nbytes, lambda: pg.broadcast([tensor], options))
    return tensor


def broadcast_object(value: Any, group: Group, index: int) -> Any:
    """The Python value of the rank at ``index`` on every rank. Pickled: only between ranks of one program."""
    if group.process_group is None:
        return value
    data = pickle.dumps(value) if group.index == index else b""
    size = broadcast(torch.tensor([len(data)]), group, index)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
    return value if group.index == index else pickle.loads(broadcast(buffer, group, index).numpy().tobytes())


def barrier(group: Group) -> None:
    """Wait until every rank of the group is here."""
    pg = group.process_group
    if pg is not None:
        _wait("barrier", group, 0, lambda: pg.barrier(_BARRIER))
