"""Meetings: every rank brings a word, the first one decides, all hear the same. Through the store, so also from a thread.

A collective would do it faster, but a collective that one rank does not come to leaves a broken group behind, and one from a
thread mixes with the program's own. A meeting that fails leaves nothing: the group is as usable as before.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from onecard.comm.base import attempt, failed, flight, record
from onecard.comm.base.state import Kept
from onecard.comm.base.warned import warn
from onecard.comm.world import gone, world
from onecard.errors import CommunicationError

_meetings: Kept[Counter[str]] = Kept(Counter)
_SHORTEST, _LONGEST = 0.0005, 0.02  # seconds between two looks into the store
_SLOW = 5.0  # seconds after which a rank that waits says for whom
_PATIENCE = 10.0  # the same in a call of the program, which ranks may come to at other times
_LOOK = 1.0  # seconds between two looks where the others are
_MARGIN = 5.0  # seconds that the others wait longer than the first rank, which knows who is missing

Decide = Callable[[Sequence[Any]], Any]


def meet(
    channel: str, what: str, word: Any, decide: Decide, error: str = "", outcome: str = "", busy: bool = False
) -> tuple[str, Any]:
    """What the first rank decides from the words of all; every rank of the world calls it, in one order on each channel.

    Args:
        channel: meetings on different channels do not wait for each other.
        what: the call that waits, for the error that names a missing rank.
        word: anything that JSON can say.
        decide: called on the first rank, with the words by rank, if no rank brings an error. What it raises is an error.
        error: why this rank cannot go on; "" if it can.
        outcome: what stands before an error: the first rank's, on all.
        busy: the others have work to do first, so that it is nothing to tell if they take long.

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
    store.set(f"{here}/{me}", json.dumps([error, word]))
    waits = _Waits(store, here, what, busy)
    if me == 0:
        missing, words = _gather(waits)
        error, answer = _after(outcome, *((missing, None) if missing else _answer(words, decide)))
        store.set(f"{here}/answer", json.dumps([error, answer]))
        if not missing:  # who has not come may come late, and hears then what was said
            _forget(store, f"meet/{channel}/{_meetings.here[channel] - 1}")
        return error, answer
    if why := waits.until("answer", [0], _MARGIN):
        return _after(outcome, why, None)
    error, answer = json.loads(store.get(f"{here}/answer"))
    return error, answer


class _Waits:
    """A rank at a meeting that waits for others: by when, and what it says of those that do not come."""

    def __init__(self, store: dist.Store, here: str, what: str, busy: bool) -> None:
        self.store, self.here, self._quiet = store, here, busy
        self._main = threading.current_thread() is threading.main_thread()
        self._what = f"{what} at {record.user_line()}" if self._main else what
        self._since = time.monotonic()

    def until(self, key: str, ranks: Sequence[int], margin: float = 0.0) -> str:
        """Wait for a key that comes once these ranks have come; "" if it has, else which of them have not, and where they are."""
        end, look = self._since + world.TIMEOUT.total_seconds() + margin, _LOOK
        while not _wait(self.store, f"{self.here}/{key}", min(look, end - time.monotonic())):
            missing = [rank for rank in ranks if not self.store.check([f"{self.here}/{rank}"])]
            waited = time.monotonic() - self._since
            never = gone.ended(missing) or [rank for rank in missing if self._for_this_one(rank)]
            if self.store.check([f"{self.here}/{rank}" for rank in never]):  # they have come since
                never = []
            if never or time.monotonic() >= end:
                limit = f"did not come within {world.TIMEOUT.total_seconds():g} s"
                return self._said(missing or ranks, "do not come" if never else limit)
            if missing and waited >= _PATIENCE and not self._quiet and self._main:
                self._quiet = True
                warn(self._said(missing, f"have not come for {waited:.0f} s, and are waited for"))
        return ""

    def _for_this_one(self, rank: int) -> bool:
        """Whether a rank waits in a message to which this one cannot come, for its program is here."""
        mine = flight.board.here
        entry = mine.of(rank) if mine is not None and self._main else None
        if mine is None or entry is None or not entry.inside or world.get_rank() not in entry.ranks:
            return False
        return mine.counts.get(entry.key, 0) < entry.group_seq

    def _said(self, ranks: Sequence[int], how: str) -> str:
        ended, places = gone.ended(ranks), []
        for rank in ranks:
            entry = flight.board.here.of(rank) if flight.board.here is not None else None
            if rank in ended:
                places.append(f"rank {rank} has ended")
            elif entry is not None and entry.seq:
                places.append(f"rank {rank} {'waits in' if entry.inside else 'was last in'} {entry}")
        where = f": {'; '.join(places)}" if places else ""
        died = "" if ended else ". If a rank died, the launcher says how"
        return (
            f"{self._what}: rank(s) {[*ranks]} {how}{where}. Every rank of the world makes this call, each for its part: take it "
            f"out of 'if onecard.get_rank() == 0:', and out of any other branch on the rank{died}"
        )


def come(
    channel: str, ranks: Sequence[int], slow: Callable[[list[int]], None], word: str = ""
) -> tuple[dict[int, str], list[int]]:
    """Wait until these ranks have come to the same place, as often as this one; their words, and who has not come: in time, or as
    one of them has ended.

    Args:
        channel: the place; ``slow``: is told once, after some seconds, who is still missing.
        word: what this rank leaves there. One that is given no ranks leaves it, and waits for nobody.
    """
    me, store = world.get_rank(), attempt.store()
    _meetings.here[channel] += 1
    here = f"come/{channel}/{_meetings.here[channel]}"
    store.set(f"{here}/{me}", word)
    others = [rank for rank in ranks if rank != me]
    since, missing, quiet = time.monotonic(), others, False
    until = since + world.TIMEOUT.total_seconds()
    while missing:
        came = _wait(store, f"{here}/{missing[0]}", min(_LOOK, until - time.monotonic()))
        never = [] if came else gone.ended(missing)
        missing = [rank for rank in missing if not store.check([f"{here}/{rank}"])]
        if {*never} & {*missing} or time.monotonic() >= until:
            break
        if said := failed.looked():
            raise CommunicationError(said)
        if missing and not quiet and time.monotonic() - since > _SLOW:
            quiet = True
            slow(missing)
    return {rank: store.get(f"{here}/{rank}").decode() for rank in others if rank not in missing}, missing


def _after(outcome: str, error: str, answer: Any) -> tuple[str, Any]:
    return f"{outcome} {error}" if error and outcome else error, answer


def _gather(waits: _Waits) -> tuple[str, list[Any]]:
    """Why ranks do not come, and the words of all."""
    others = range(1, world.get_world_size())
    for rank in others:
        if why := waits.until(str(rank), others):
            return why, []
    return "", [json.loads(waits.store.get(f"{waits.here}/{rank}")) for rank in (0, *others)]


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
    for name in ["answer", *range(world.get_world_size())]:
        with suppress(RuntimeError, NotImplementedError):
            store.delete_key(f"{before}/{name}")
