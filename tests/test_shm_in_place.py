"""Shared memory: results that lie in what is sent, as FSDP has them, and receives that do not fit what is sent."""

import itertools
import re

import pytest
import torch
import torch.distributed as dist
from shm_programs import reduced

from onecard.errors import CommunicationError
from onecard.testing import run_ranks

SIZES = (1, 7, 1000, 300_000)  # elements of a part: one line, some, a slot, more than a slot


def part(rank: int, index: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + index)
    return torch.randint(-50, 50, (count,), generator=generator).to(dtype)


def reduce_scatter_in_place(listed):
    rank, size = dist.get_rank(), dist.get_world_size()
    for count, dtype, op in itertools.product(SIZES, (torch.float32, torch.int64), ("sum", "max")):
        whole = torch.cat([part(rank, index, count, dtype) for index in range(size)])
        parts = list(whole.split(count))
        if listed:
            dist.reduce_scatter(parts[rank], parts, getattr(dist.ReduceOp, op.upper()))
        else:
            dist.reduce_scatter_tensor(parts[rank], whole, getattr(dist.ReduceOp, op.upper()))
        expected = reduced([part(r, rank, count, dtype) for r in range(size)], op)
        assert torch.equal(parts[rank], expected), (count, dtype, op)


@pytest.mark.share(1)
@pytest.mark.parametrize("nproc", [2, 3])
@pytest.mark.parametrize("listed", [False, True])
def test_a_reduce_scatter_into_its_own_input(nproc, listed):
    run_ranks(reduce_scatter_in_place, nproc, listed, backend="shm")


def all_gather_in_place():
    rank, size = dist.get_rank(), dist.get_world_size()
    for count, dtype in itertools.product(SIZES, (torch.float32, torch.int64)):
        whole = torch.zeros(size * count, dtype=dtype)
        parts = list(whole.split(count))
        parts[rank].copy_(part(rank, 0, count, dtype))
        dist.all_gather_into_tensor(whole, parts[rank])
        assert torch.equal(whole, torch.cat([part(r, 0, count, dtype) for r in range(size)])), (count, dtype)


def test_an_all_gather_of_a_part_of_its_own_result():
    run_ranks(all_gather_in_place, 3, backend="shm")


def mismatched(sent, received, early):
    """Rank 1 receives what rank 0 sends as something else of as many bytes; early: the message is there before it asks."""
    rank = dist.get_rank()
    if rank == 0:
        work = dist.isend(torch.arange(6).to(sent), 1)
        with pytest.raises(CommunicationError) as fault:
            if early:
                dist.recv(torch.zeros(1), 1)  # of nobody: until the group is broken
            work.wait()
            dist.recv(torch.zeros(1), 1)
        return str(fault.value)
    if early:
        first = torch.zeros(1)
        work = dist.irecv(first, 0, tag=9)  # makes this rank read what has come
        for _ in range(200):
            if work.is_completed() or any(box.early for box in dist.group.WORLD._messages._inbox):
                break
            torch.empty(1).normal_()
            import time

            time.sleep(0.01)
    target = torch.full((6,), 7).to(received)
    with pytest.raises(CommunicationError) as fault:
        dist.recv(target, 0)
    assert torch.equal(target, torch.full((6,), 7).to(received))  # nothing was written
    return str(fault.value)


@pytest.mark.share(1)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    ("sent", "received"),
    [(torch.float32, torch.int32), (torch.bfloat16, torch.float16), (torch.float32, torch.float64)],
)
def test_a_receive_with_another_dtype_is_an_error_of_both(sent, received, early):
    words = [str(dtype).removeprefix("torch.") for dtype in (sent, received)]
    says = rf"rank 0 sends 6 {words[0]} \(message 1, tag 0\) to rank 1, which receives 6 {words[1]}"
    for text in run_ranks(mismatched, 2, sent, received, early, backend="shm"):
        assert re.search(says, text), text
