"""What pending values reduce to on real ranks, for every reduction and dtype, against the same in plain torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import onecard as oc
from onecard.layout import REDUCTIONS
from onecard.testing import assert_close, multirank, run_ranks

R, S, P = oc.Replicate(), oc.Shard, oc.Partial
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WHOLES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
BITS = ("band", "bor", "bxor")
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda t: t.sum(0),
    "avg": lambda t: t.sum(0).div(len(t), rounding_mode=None if t.is_floating_point() else "trunc"),
    "product": lambda t: t.prod(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
    "band": lambda t: functools.reduce(torch.bitwise_and, t),
    "bor": lambda t: functools.reduce(torch.bitwise_or, t),
    "bxor": lambda t: functools.reduce(torch.bitwise_xor, t),
}
TRUTHS = {"sum": "bor", "max": "bor", "avg": "band", "product": "band", "min": "band"}


def summands(dtype: torch.dtype, ranks: int) -> Tensor:
    """One for each rank, some of them negative, in sums that no number of ranks divides."""
    values = torch.tensor([[-5, 3, 0, 1, 7], [-2, 1, 0, 1, -6], [0, 5, 1, 1, 4]])[:ranks]
    return values.abs().to(dtype) if dtype is torch.uint8 else values.to(dtype)


def values(op: str, given: Tensor) -> Tensor:
    return REDUCE[TRUTHS.get(op, op) if given.dtype is torch.bool else op](given).to(given.dtype)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_every_reduction_of_every_dtype(backend: str) -> None:
    run_ranks(reductions, 3, backend=backend)


def reductions() -> None:
    rank, mesh = dist.get_rank(), oc.ProcessMesh([0, 1, 2], ["x"])
    for dtype in (*FLOATS, *WHOLES):
        given = summands(dtype, 3)
        for op in REDUCTIONS:
            if op in BITS and dtype in FLOATS:
                continue
            mine, expected = given[rank].clone(), values(op, given)
            for target in (R, S(0)):
                x = oc.from_local(mine, mesh, [P(op)])
                moved = oc.reshard(x, mesh, [target])
                assert_close(moved.full_tensor(), expected, rtol=1e-2, atol=0)
                assert moved.to_local().view(torch.uint8).max() <= 1 or dtype is not torch.bool
            assert torch.equal(mine, given[rank])


@multirank(2)
def test_a_whole_value_stays_itself_under_every_reduction() -> None:
    mesh = oc.ProcessMesh([0, 1], ["x"])
    for dtype in (torch.float32, torch.int64):
        whole = torch.tensor([[3, -1, 2], [0, 5, -7]]).to(dtype)
        for op in REDUCTIONS:
            if op not in BITS or dtype is torch.int64:
                pending = oc.reshard(oc.shard_tensor(whole, mesh, [R]), mesh, [P(op)])
                assert_close(pending.full_tensor(), whole)
                assert_close(oc.reshard(pending, mesh, [S(1)]).full_tensor(), whole)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_number_that_is_none_wins(backend) -> None:
    """NaN of one rank, of either sign, in maxima and minima; Gloo's own maxima may lose it."""
    run_ranks(none_wins, 2, backend=backend)


def none_wins() -> None:
    rank, mesh = dist.get_rank(), oc.ProcessMesh([0, 1], ["x"])
    nan, inf = float("nan"), float("inf")
    for dtype in FLOATS:
        given = torch.tensor([[nan, 1.0, -inf, -2.0, inf, -3.0], [1.0, -nan, -5.0, -1.0, nan, -3.5]]).to(dtype)
        for op in ("max", "min"):
            x = oc.from_local(given[rank], mesh, [P(op)])
            for target in (R, S(0)):
                assert_close(oc.reshard(x, mesh, [target]).full_tensor(), values(op, given))
        cut = oc.from_local(given[rank : rank + 1], mesh, [S(0)])
        for name in ("amax", "amin", "max", "min"):
            result = getattr(cut, name)(0)
            result = result if isinstance(result, torch.Tensor) else result.values
            assert_close(result.full_tensor(), values("m" + name[-2:], given))


@multirank(2)
def test_a_step_never_writes_to_the_memory_of_from_local() -> None:
    """Not the first step, nor a later one that finds the first had nothing to do."""
    rank, ops = dist.get_rank(), ("sum", "avg", "max")
    for grid in ([[0, 1]], [[0], [1]], [[[0], [1]]]):
        names = ["a", "b", "c"][: torch.tensor(grid).dim()]
        mesh = oc.ProcessMesh(grid, names)
        for op in ops:
            mine = torch.full((4,), 1.0 + rank)
            x = oc.from_local(mine, mesh, [P(op)] * mesh.ndim)
            oc.reshard(x, mesh, [R] * mesh.ndim)
            x.full_tensor()
            torch.relu(x)
            assert_close(mine, torch.full((4,), 1.0 + rank))


@multirank(3, backend="shm")
def test_shared_memory_in_place_and_by_its_rules() -> None:
    rank = dist.get_rank()
    for count in (1, 5, 70_000):
        given = torch.stack([torch.arange(3.0 * count) * (r + 1) for r in range(3)])
        mine = given[rank].clone()
        part = mine[rank * count : (rank + 1) * count]  # the result lies in the operand
        dist.reduce_scatter_tensor(part, mine)
        assert torch.equal(part, given.sum(0)[rank * count : (rank + 1) * count])
        shifted = given[rank].clone()  # and over two parts of it, of which one is the last to be added
        start = max(rank * count - count // 2, 0)
        into = shifted[start : start + count]
        dist.reduce_scatter_tensor(into, shifted)
        assert torch.equal(into, given.sum(0)[rank * count : (rank + 1) * count])
    x = torch.tensor([-1, 1, -2, 2]) * (1 + (rank == 0))
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [-1, 1, -2, 2]  # -4/3, 4/3, -8/3, 8/3: rounded toward zero


@multirank(2, backend="shm")
def test_a_message_is_received_as_what_it_was_sent() -> None:
    if dist.get_rank() == 0:
        with suppress(RuntimeError):  # it may be told
            dist.send(torch.ones(4), 1)
    else:
        with pytest.raises(RuntimeError, match=r"4 float32 .* which receives 4 int32"):
            dist.recv(torch.empty(4, dtype=torch.int32), 0)
