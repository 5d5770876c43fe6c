"""The rule by which the ranks of a large all-reduce follow each other, at every pace that a scheduler may give them."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from onecard.comm.shm.reduction import Numbers, fold
from onecard.comm.shm.relay import CHUNK, _Relay


class Wrong(Exception):
    """A rank found a total that is not the one it needs, or nobody could go on."""


def parts(size, chunks, progress, fewer):
    """Each rank's part; how far the ranks are is a list. Nobody touches the numbers, which lie nowhere."""
    numbers = Numbers(0, chunks * CHUNK // 4, np.float32, 4, fold(torch.float32, "sum"))
    for rank in range(size):
        channel = SimpleNamespace(rank=rank, size=size, progress=progress.__getitem__)
        channel.buffers = lambda count, _: [0] * (count - fewer)
        yield _Relay(channel, numbers, True)


def play(size, chunks, seed, fewer=0):
    """Runs all ranks by turns of chance. A rank begins and ends what it does at a position in turns of their own."""
    choose, progress, busy = random.Random(seed), [0] * size, [False] * size
    ranks = list(parts(size, chunks, progress, fewer))
    lag, end = ranks[0].lag, chunks + ranks[0].lag
    totals = [None] * len(ranks[0].totals)  # of each buffer, the chunk, and how many ranks are in it
    paces = [choose.choice((1, 1, 10, 100)) for _ in range(size)]

    def look(rank, chunk, added):
        found = totals[chunk % len(totals)]
        if found != (chunk, added):
            raise Wrong(f"rank {rank} wants chunk {chunk} of {added} ranks and finds {found}")

    while min(progress) < end:
        able = [r for r in range(size) if busy[r] or (progress[r] < end and ranks[r]._may(r, progress[r]))]
        if not able:
            raise Wrong(f"nobody can go on at {progress}")
        rank = choose.choices(able, [paces[r] for r in able])[0]
        position = progress[rank]
        if position >= lag and rank < size - 1:
            look(rank, position - lag, size)
        if position < chunks:
            if rank == 0 and not busy[0]:
                totals[position % len(totals)] = (position, 0)
            look(rank, position, rank)
            if busy[rank]:
                totals[position % len(totals)] = (position, rank + 1)
        progress[rank] += busy[rank]
        busy[rank] = not busy[rank]


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_no_total_is_lost_and_nobody_waits_for_ever(size):
    for seed in range(30):
        play(size, chunks=seed + 1, seed=seed)


def test_one_buffer_less_is_seen():
    """A control: the rule is as tight as it says."""
    with pytest.raises(Wrong, match="wants chunk"):
        for seed in range(200):
            play(3, 30, seed, fewer=1)
