"""Random programs of collectives, and their meaning in one process: what tests compare backends with."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.int8)
COPIES = ("broadcast", "all_gather", "all_gather_base", "gather", "scatter", "all_to_all", "all_to_all_base", "ring")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_base", "all_reduce_coalesced")
OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
_IN_ORDER = {
    "sum": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One collective: among `members` (global ranks), on tensors of `shape`."""

    kind: str
    members: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    op: str = "sum"
    root: int = 0
    strided: bool = False
    asynchronous: bool = False
    seed: int = 0


def value(call: Call, rank: int, part: int = 0) -> torch.Tensor:
    """What a rank of the group brings; the same in every process. Small numbers, so that nothing overflows."""
    generator = torch.Generator().manual_seed(call.seed * 1009 + rank * 31 + part)
    if call.dtype.is_floating_point or call.dtype.is_complex:
        made = torch.randn(call.shape, generator=generator, dtype=torch.float64).to(call.dtype)
    else:
        made = torch.randint(0, 2 if call.dtype is torch.bool else 4, call.shape, generator=generator).to(call.dtype)
    return strided(made) if call.strided else made


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of a larger tensor."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 1] = tensor
    return wide[..., 1]


def reduced(values: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction in the order of the ranks; narrow floats in float32, rounded once."""
    dtype = values[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    if dtype is torch.bool and op in ("sum", "product"):
        return functools.reduce({"sum": torch.logical_or, "product": torch.logical_and}[op], values)
    return functools.reduce(_IN_ORDER[op], [v.to(wide) for v in values]).to(dtype)


def lengths(call: Call, source: int, target: int) -> int:
    """How many rows a rank sends to another one in an uneven all-to-all."""
    return (call.seed + 3 * source + 5 * target) % 4


def empty(call: Call) -> torch.Tensor:
    made = torch.full(call.shape, 1).to(call.dtype)
    return strided(made) if call.strided else made


def run(call: Call, group, rank: int) -> list[torch.Tensor]:
    """Runs a call on this rank of a group; returns what it received."""
    size, root, mine = len(call.members), call.root % len(call.members), value(call, rank)
    options = {"group": group, "async_op": call.asynchronous}
    dst = call.members[root]
    result: list[torch.Tensor] = []
    if call.kind == "all_reduce":
        result, work = [mine], dist.all_reduce(mine, OPS[call.op], **options)
    elif call.kind == "all_reduce_coalesced":
        result = [mine, value(call, rank, 1)]
        opts = dist.AllreduceCoalescedOptions()
        opts.reduceOp = OPS[call.op]
        work = group.allreduce_coalesced(result, opts)
        work.wait()
    elif call.kind == "reduce":
        work = dist.reduce(mine, dst, OPS[call.op], **options)
        result = [mine] if rank == root else []
    elif call.kind == "reduce_scatter":
        result = [empty(call)]
        work = dist.reduce_scatter(result[0], [value(call, rank, p) for p in range(size)], OPS[call.op], **options)
    elif call.kind == "reduce_scatter_base":
        result = [empty(call)]
        joined = torch.cat([value(call, rank, p) for p in range(size)])
        opts = dist.ReduceScatterOptions()
        opts.reduceOp = OPS[call.op]
        work = group._reduce_scatter_base(result[0], joined, opts)
        work.wait()
    elif call.kind == "broadcast":
        result, work = [mine], dist.broadcast(mine, dst, **options)
    elif call.kind == "all_gather":
        result = [empty(call) for _ in range(size)]
        work = dist.all_gather(result, mine, **options)
    elif call.kind == "all_gather_base":
        result = [torch.zeros(size * call.shape[0], *call.shape[1:], dtype=call.dtype)]
        work = group._allgather_base(result[0], mine)
        work.wait()
    elif call.kind == "gather":
        result = [empty(call) for _ in range(size)] if rank == root else []
        work = dist.gather(mine, result or None, dst, **options)
    elif call.kind == "scatter":
        result = [empty(call)]
        parts = [value(call, rank, p) for p in range(size)] if rank == root else None
        work = dist.scatter(result[0], parts, dst, **options)
    elif call.kind == "all_to_all":
        result = [empty(call) for _ in range(size)]
        work = exchange_lists(call, result, [value(call, rank, p) for p in range(size)], group, rank)
    elif call.kind == "all_to_all_base":
        out, split = (
            [lengths(call, s, rank) for s in range(size)],
            [lengths(call, rank, t) for t in range(size)],
        )
        rows = call.shape[1:]
        send = torch.cat([rows_of(call, rank, t) for t in range(size)])
        result = [torch.zeros(sum(out), *rows, dtype=call.dtype)]
        work = dist.all_to_all_single(result[0], send, out, split, **options)
    else:
        result = [empty(call)]
        requests = [
            dist.P2POp(dist.isend, mine, call.members[(rank + 1) % size], group, tag=call.seed),
            dist.P2POp(dist.irecv, result[0], call.members[rank - 1], group, tag=call.seed),
        ]
        works = dist.batch_isend_irecv(requests)
        for each in works:
            each.wait()
        work = None
    if call.asynchronous and work is not None:
        work.wait()
    return result


def exchange_lists(call: Call, result, parts, group, rank):
    if group.name() == "gloo":  # which has no all_to_all of lists
        flat = torch.cat([p.reshape(-1) for p in parts])
        got = torch.empty_like(flat)
        dist.all_to_all_single(got, flat, group=group)
        for tensor, piece in zip(result, got.chunk(len(result)) if flat.numel() else parts, strict=True):
            tensor.copy_(piece.view(tensor.shape))
        return None
    return dist.all_to_all(result, parts, group=group, async_op=call.asynchronous)


def rows_of(call: Call, source: int, target: int) -> torch.Tensor:
    tall = Call(call.kind, call.members, (lengths(call, source, target), *call.shape[1:]), call.dtype, seed=call.seed)
    return value(tall, source, target)


def meaning(call: Call, rank: int) -> list[torch.Tensor]:
    """What `run` must return on a rank, computed in this process alone."""
    size, root = len(call.members), call.root % len(call.members)
    everyone = range(size)
    if call.kind in ("all_reduce", "reduce"):
        whole = reduced([value(call, r) for r in everyone], call.op)
        return [whole] if call.kind == "all_reduce" or rank == root else []
    if call.kind == "all_reduce_coalesced":
        return [reduced([value(call, r, p) for r in everyone], call.op) for p in (0, 1)]
    if call.kind in ("reduce_scatter", "reduce_scatter_base"):
        return [reduced([value(call, r, rank) for r in everyone], call.op)]
    if call.kind == "broadcast":
        return [value(call, root)]
    if call.kind == "all_gather" or (call.kind == "gather" and rank == root):
        return [value(call, r) for r in everyone]
    if call.kind == "all_gather_base":
        return [torch.cat([value(call, r) for r in everyone])]
    if call.kind == "scatter":
        return [value(call, root, rank)]
    if call.kind == "all_to_all":
        return [value(call, r, rank) for r in everyone]
    if call.kind == "all_to_all_base":
        return [torch.cat([rows_of(call, r, rank) for r in everyone])]
    return [value(call, (rank - 1) % size)] if call.kind == "ring" else []
