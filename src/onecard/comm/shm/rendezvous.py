"""How the ranks of a group come to share one segment, or agree that they cannot."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from onecard.comm.shm import futex, peers
from onecard.comm.shm.channel import Channel
from onecard.comm.shm.segment import GONE, PID, STATE, VERDICT, Segment, SegmentLayout, rank_word

_UNDECIDED, _YES, _NO = 0, 1, 2
_PROOF = 4 * 4  # bytes from the start of the segment, within the first line


class Refused(Exception):
    """This group cannot share memory; says why. All its ranks raise it."""


def connect(store: Any, rank: int, ranks: Sequence[int], timeout: float) -> Channel:
    """This rank's channel to a group of one host.

    Args:
        store: the group's c10d store, under a prefix of its own.
        rank: this rank's number in the group; ranks: the members' global ranks.
        timeout: seconds in which all must have come.

    Raises:
        Refused: the ranks run on different hosts, or in containers that cannot see each other.
        CommunicationError: a rank did not come in time.
    """
    if len(ranks) == 1:
        channel = Channel(Segment.private(SegmentLayout(1)), 0, ranks)
        channel.enter()
        return channel
    deadline = time.monotonic() + timeout
    if rank == 0:
        return _lead(store, ranks, deadline)
    return _follow(store, rank, ranks, deadline)


def _lead(store: Any, ranks: Sequence[int], deadline: float) -> Channel:
    """Makes the segment and waits until all others have mapped it."""
    try:
        if not futex.available():
            raise OSError("no futexes on this system")
        segment, descriptor = Segment.create(SegmentLayout(len(ranks)))
    except (OSError, AttributeError, ValueError) as error:
        store.set("segment", json.dumps({"refused": f"rank {ranks[0]} cannot make shared memory: {error}"}))
        raise Refused(f"rank {ranks[0]} cannot make shared memory: {error}") from error
    try:
        proof = secrets.token_hex(16)
        segment.bytes[_PROOF : _PROOF + 32] = proof.encode()
        channel = Channel(segment, 0, ranks)
        channel.enter()
        plan = segment.plan
        offer = {"pid": channel.pid, "fd": descriptor, "proof": proof, "kernel": peers.kernel()}
        store.set("segment", json.dumps(offer | {"chunk": plan.chunk, "ring": plan.ring}))
        reason = _await_all(store, channel, deadline)
    finally:
        os.close(descriptor)
    segment.words[VERDICT] = _NO if reason else _YES
    channel.call_all()
    if reason:
        raise Refused(reason)
    return channel


def _await_all(store: Any, channel: Channel, deadline: float) -> str | None:
    """None when all have mapped the segment; else why not."""
    while absent := channel.absent():
        bell = channel.bell()
        if not channel.absent():
            break
        futex.wait(channel.bell_address, bell, 0.02)
        for rank in absent:
            if store.check([f"refused/{rank}"]):
                return store.get(f"refused/{rank}").decode()
        if time.monotonic() >= deadline:
            names = [channel.ranks[r] for r in channel.absent()]
            channel.fail(f"rank(s) {names} did not join the group of ranks {list(channel.ranks)} in time")
    return None


def _follow(store: Any, rank: int, ranks: Sequence[int], deadline: float) -> Channel:
    """Maps the segment that rank 0 offers and waits for the verdict."""
    offer = json.loads(store.get("segment"))
    if "refused" in offer:
        raise Refused(offer["refused"])
    try:
        segment = _map(offer, len(ranks))
    except (OSError, ValueError) as error:
        reason = f"rank {ranks[rank]} cannot share memory with rank {ranks[0]}: {error}"
        store.set(f"refused/{rank}", reason)
        raise Refused(reason) from error
    channel = Channel(segment, rank, ranks)
    channel.enter()
    channel.call_all()
    while segment.words[VERDICT] == _UNDECIDED:
        bell = channel.bell()
        if segment.words[VERDICT] != _UNDECIDED:
            break
        futex.wait(channel.bell_address, bell)
        lost = not channel.lives(0) or segment.words[rank_word(0, STATE)] >= GONE
        if segment.words[VERDICT] != _UNDECIDED:  # rank 0 may be gone already, with all in order
            break
        if lost:
            pid = segment.words[rank_word(0, PID)]
            channel.fail(f"rank {ranks[0]} (process {pid}) died while the group of ranks {list(ranks)} was made")
        if time.monotonic() >= deadline:
            channel.fail(f"rank {ranks[0]} did not complete the group of ranks {list(ranks)} in time")
    if segment.words[VERDICT] == _NO:
        raise Refused("another rank cannot share memory")
    return channel


def _map(offer: dict[str, Any], size: int) -> Segment:
    if offer["kernel"] != peers.kernel():
        raise OSError("they run on different hosts, or in containers that do not see each other's processes")
    if not futex.available():
        raise OSError("no futexes on this system")
    segment = Segment.open(f"/proc/{offer['pid']}/fd/{offer['fd']}", SegmentLayout(size, offer["chunk"], offer["ring"]))
    if bytes(segment.bytes[_PROOF : _PROOF + 32]) != offer["proof"].encode():
        raise OSError("the memory that was found is not the one that was offered")
    return segment
