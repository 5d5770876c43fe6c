"""The rule by which the ranks of a large exchange follow each other, at every pace that a scheduler may give them."""

import ctypes
import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from onecard.comm import shm
from onecard.comm.shm import algorithms, futex
from onecard.comm.shm.channel import Channel
from onecard.comm.shm.follow import _Follow
from onecard.comm.shm.reduction import Numbers, fold
from onecard.comm.shm.segment import Plan, Segment
from onecard.comm.shm.signature import Signature


class Wrong(Exception):
    """A rank found a chunk that is not the one it wants, or nobody could go on."""


def play(size, chunks, seed, fewer=0):
    """Runs all ranks by turns of chance. A rank begins and ends what it does at a position in turns of their own."""
    choose, progress, busy = random.Random(seed), [0] * size, [False] * size
    memory = {}  # what lies in a rank's buffer: a chunk, or None while it is written
    ranks = []

    def part(rank):
        plan = SimpleNamespace(chunk=4 * 64, turns=2)
        channel = SimpleNamespace(rank=rank, size=size, progress=progress.__getitem__)
        channel.segment = SimpleNamespace(plan=plan, use_large_pages=lambda: None)
        channel.slots = lambda turn: [1000 * r + 256 * turn for r in range(size)]

        def write(chunk, buffer):
            memory[buffer] = chunk if busy[rank] else None

        def read(chunk, buffers):
            for other, buffer in enumerate(buffers):
                if other != rank and memory.get(buffer) != chunk:
                    raise Wrong(f"rank {rank} wants chunk {chunk} of rank {other} and finds {memory.get(buffer)}")

        made = _Follow(channel, chunks, write, read)
        del made.buffers[len(made.buffers) - fewer :]
        return made

    ranks += [part(rank) for rank in range(size)]
    end = ranks[0].end
    paces = [choose.choice((1, 1, 10, 100)) for _ in range(size)]
    while min(progress) < end:
        able = [r for r in range(size) if busy[r] or (progress[r] < end and ranks[r].may(r, progress[r]))]
        if not able:
            raise Wrong(f"nobody can go on at {progress}")
        rank = choose.choices(able, [paces[r] for r in able])[0]
        ranks[rank].do(progress[rank])
        progress[rank] += busy[rank]
        busy[rank] = not busy[rank]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_no_chunk_is_lost_and_nobody_waits_for_ever(size):
    for seed in range(30):
        play(size, chunks=seed + 1, seed=seed)


def test_one_buffer_less_is_seen():
    """A control: the rule is as tight as it says."""
    with pytest.raises(Wrong, match="wants chunk"):
        for seed in range(200):
            play(3, 30, seed, fewer=1)


@pytest.mark.skipif(not shm.available(), reason="needs Linux")
def test_nobody_sleeps_through_a_call(monkeypatch):
    """Five ranks in one process, which look only when they are woken: here a sleep that nobody ends is an error."""
    long = futex._Timespec(5, 0)

    def wait(address, value, seconds):
        begin = time.monotonic()
        futex._call(futex._NUMBER, address, futex._WAIT, value, ctypes.addressof(long), None, 0)
        if time.monotonic() - begin >= 5:
            raise Wrong("nobody woke a rank that sleeps")

    monkeypatch.setattr(futex, "wait", wait)
    size, counts = 5, [700_000, 10, 0, 1_500_001, 300_000]  # elements: more than a slot, and not alike
    segment = Segment.private(Plan(size))
    channels = [Channel(segment, rank, range(size)) for rank in range(size)]
    for channel in channels:
        channel.enter()
        channel._spin = 0
    whole = [
        np.concatenate([np.full(n, 10.0 * rank + r, np.float32) for r, n in enumerate(counts)]) for rank in range(size)
    ]
    starts = np.cumsum([0, *counts[:-1]])

    def both(rank):
        """Reduces into the part of what is reduced, and joins the parts again."""
        places = [whole[rank].ctypes.data + 4 * int(start) for start in starts]
        numbers = Numbers(places[rank], counts[rank], np.float32, 4, fold(torch.float32, "sum"))
        deadline = time.monotonic() + 60
        for number in (1, 3):
            of = Signature(number, "reduce_scatter", sum(counts), torch.float32, "sum")
            algorithms.reduce_scatter(channels[rank], of, deadline, places, counts, numbers)
            of = Signature(number + 1, "all_gather", sum(counts), torch.float32)
            algorithms.all_gather(channels[rank], of, deadline, places[rank], [4 * n for n in counts], places)

    with ThreadPoolExecutor(size) as ranks:
        list(ranks.map(both, range(size)))
    for x in whole:  # 0 + 10 + ... + 40, and r for each of five; then five times that
        assert all(
            (x[s : s + n] == 5 * (100 + 5 * r)).all() for r, (s, n) in enumerate(zip(starts, counts, strict=True))
        )
