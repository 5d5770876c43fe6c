"""Meetings: every rank brings a word, the first one decides, all hear the same. Through the store, so also from a thread.

A collective would do it faster, but a collective that one rank does not come to leaves a broken group behind, and one from a
thread mixes with the program's own. A meeting that fails leaves nothing: the group is as usable as before.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from onecard.comm.base import attempt
from onecard.comm.base.state import Kept
from onecard.comm.world import world

_meetings: Kept[Counter[str]] = Kept(Counter)
_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two looks into the store
_SLOW = 5.0  # seconds after which a rank that waits says for whom
_MARGIN = 5.0  # seconds that the others wait longer than the first rank, which knows who is missing

Decide = Callable[[Sequence[Any]], Any]


def meet(channel: str, what: str, word: Any, decide: Decide, error: str = "", outcome: str = "") -> tuple[str, Any]:
    """What the first rank decides from the words of all; every rank of the world calls it, in one order on each channel.

    Args:
        channel: meetings on different channels do not wait for each other.
        what: the call that waits, for the error that names a missing rank.
        word: anything that JSON can say.
        decide: called on the first rank, with the words by rank, if no rank brings an error. What it raises is an error.
        error: why this rank cannot go on; "" if it can.
        outcome: what stands before an error: the first rank's, on all.

    Returns:
        The error, the same on all ranks ("" if there is none), and what was decided.

    Example:
        >>> meet("doctest", "a call", 3, lambda words: sum(words))
        ('', 3)
        >>> meet("doctest", "a call", 3, lambda words: sum(words), error="no disk")
        ('no disk', None)
    """
    if world.get_world_size() == 1:
        return _after(outcome, *_answer([(error, word)], decide))
    world.init()
    me, store = world.get_rank(), attempt.store()
    _meetings.here[channel] += 1
    here = f"meet/{channel}/{_meetings.here[channel]}"
    if me == 0:
        error, answer = _after(outcome, *_gather(store, here, what, (error, word), decide))
        store.set(f"{here}/answer", json.dumps([error, answer]))
        _forget(store, f"meet/{channel}/{_meetings.here[channel] - 1}")
        return error, answer
    store.set(f"{here}/{me}", json.dumps([error, word]))
    if not _wait(store, f"{here}/answer", world.TIMEOUT.total_seconds() + _MARGIN):
        return _after(outcome, _missing([0], what), None)
    error, answer = json.loads(store.get(f"{here}/answer"))
    return error, answer


def come(
    channel: str, ranks: Sequence[int], slow: Callable[[list[int]], None], word: str = ""
) -> tuple[dict[int, str], list[int]]:
    """Wait until these ranks have come to the same place, as often as this one; their words, and who has not come in time.

    Args:
        channel: the place; ``slow``: is told once, after some seconds, who is still missing.
        word: what this rank leaves there. One that is given no ranks leaves it, and waits for nobody.
    """
    me, store = world.get_rank(), attempt.store()
    _meetings.here[channel] += 1
    here = f"come/{channel}/{_meetings.here[channel]}"
    store.set(f"{here}/{me}", word)
    others = [rank for rank in ranks if rank != me]
    until, missing = time.monotonic() + world.TIMEOUT.total_seconds(), others
    while missing and _wait(store, f"{here}/{missing[0]}", min(_SLOW, until - time.monotonic())):
        missing = [rank for rank in missing if not store.check([f"{here}/{rank}"])]
    if missing and time.monotonic() < until:
        slow(missing)
        missing = [rank for rank in missing if not _wait(store, f"{here}/{rank}", until - time.monotonic())]
    return {rank: store.get(f"{here}/{rank}").decode() for rank in others if rank not in missing}, missing


def _after(outcome: str, error: str, answer: Any) -> tuple[str, Any]:
    return f"{outcome} {error}" if error and outcome else error, answer


def _gather(store: dist.Store, here: str, what: str, mine: Any, decide: Decide) -> tuple[str, Any]:
    until = time.monotonic() + world.TIMEOUT.total_seconds()
    words, missing = [mine], []
    for rank in range(1, world.get_world_size()):
        if _wait(store, f"{here}/{rank}", until - time.monotonic()):
            words.append(json.loads(store.get(f"{here}/{rank}")))
        else:
            missing.append(rank)
    return (_missing(missing, what), None) if missing else _answer(words, decide)


def _answer(words: Sequence[tuple[str, Any]], decide: Decide) -> tuple[str, Any]:
    errors: dict[str, list[int]] = {}
    for rank, (error, _) in enumerate(words):
        if error:
            errors.setdefault(error, []).append(rank)
    if errors:
        if len(words) == 1:
            return next(iter(errors)), None
        said = [f"{_ranks(ranks, len(words))}: {error}" for error, ranks in errors.items()]
        return "\n".join(said), None
    try:
        return "", decide([word for _, word in words])
    except Exception as fault:
        return str(fault) or type(fault).__name__, None


def _ranks(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return "every rank"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _missing(ranks: Sequence[int], what: str) -> str:
    return (
        f"{what}: rank(s) {list(ranks)} did not come within {world.TIMEOUT.total_seconds():g} s. Every rank of the world makes "
        "this call: take it out of any branch on the rank. If a rank died, the launcher says how"
    )


def _wait(store: dist.Store, key: str, seconds: float) -> bool:
    """Whether a key comes in time. Not by ``store.wait``: that keeps other threads from the store while it waits."""
    until, pause = time.monotonic() + seconds, _SHORTEST
    while not store.check([key]):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST)
    return True


def _forget(store: dist.Store, before: str) -> None:
    """Drop what was said at the meeting before: everybody has come to this one, so has heard the answer of that one."""
    for name in ["answer", *range(1, world.get_world_size())]:
        with suppress(RuntimeError, NotImplementedError):
            store.delete_key(f"{before}/{name}")
