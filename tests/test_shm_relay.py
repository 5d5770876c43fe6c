"""The rule by which the ranks of a large all-reduce follow each other, at every pace that a scheduler may give them."""

import ctypes
import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from onecard.comm import shm
from onecard.comm.shm import futex
from onecard.comm.shm.channel import Channel
from onecard.comm.shm.reduction import Numbers, fold
from onecard.comm.shm.relay import CHUNK, _Relay, relay
from onecard.comm.shm.segment import Segment, SegmentLayout
from onecard.comm.shm.signature import CollectiveSignature


class Wrong(Exception):
    """A rank found a total that is not the one it needs, or nobody could go on."""


def parts(size, chunks, progress, fewer):
    """Each rank's part; how far the ranks are is a list. Nobody touches the numbers, which lie nowhere."""
    numbers = Numbers(0, chunks * CHUNK // 4, np.float32, 4, fold(torch.float32, "sum"))
    for rank in range(size):
        channel = SimpleNamespace(rank=rank, size=size, progress=progress.__getitem__)
        channel.buffers = lambda count, _: [0] * count
        part = _Relay(channel, numbers, True)
        del part.totals[len(part.totals) - fewer :]
        yield part


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


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_no_total_is_lost_and_nobody_waits_for_ever(size):
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
    size, count = 5, 40 * CHUNK // 4
    segment = Segment.private(SegmentLayout(size))
    channels = [Channel(segment, rank, range(size)) for rank in range(size)]
    data = [np.full(count, 1.0 + rank, np.float32) for rank in range(size)]
    for channel in channels:
        channel.enter()
        channel._spin = 0

    def reduce(rank):
        numbers = Numbers(data[rank].ctypes.data, count, np.float32, 4, fold(torch.float32, "sum"))
        for number in range(3):
            signature = CollectiveSignature(number + 1, "all_reduce", count, torch.float32, "sum")
            relay(channels[rank], signature, time.monotonic() + 60, numbers, True)

    with ThreadPoolExecutor(size) as ranks:
        list(ranks.map(reduce, range(size)))
    assert all((x == 15 * 5 * 5).all() for x in data)
