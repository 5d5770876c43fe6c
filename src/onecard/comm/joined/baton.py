"""One process runs all ranks in turn: a rank keeps the process until it waits for another one.

So a run is the same each time, module-level state belongs to whoever runs, and ranks that wait for each other in a circle are
found at once, without a time-out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from onecard.errors import CommunicationError

Ready = Callable[[], bool]


class Stopped(BaseException):
    """Ends a rank because another one has failed."""


class Baton:
    """Who of ``size`` threads runs.

    Args:
        size: how many there are.
        enter, leave: are called with a rank's number as it begins to run, and as it stops, on its own thread.

    Attributes:
        running: the rank that runs.
        fault: what ended the first rank that failed, with its number.
    """

    def __init__(self, size: int, enter: Callable[[int], None], leave: Callable[[int], None]) -> None:
        self.size, self._enter, self._leave = size, enter, leave
        self.running = 0
        self.fault: tuple[int, BaseException] | None = None
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._ready: list[Ready | None] = [None] * size
        self._words = [""] * size
        self._ended = [False] * size
        self._inside = [False] * size

    def run(self, call: Callable[[int], Any]) -> list[Any]:
        """``call(rank)`` on each rank's thread, to the end; what each returned.

        Raises:
            BaseException: what the first rank that failed raised, with a note of its number.
        """
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                with self._entered(rank):
                    if self.fault is None:
                        results[rank] = call(rank)
            except Stopped:
                pass
            except BaseException as fault:  # of coming and going, too: else the others would wait for ever
                self.fault = self.fault or (rank, fault)
            finally:
                self._ended[rank] = True
                self._pass_on(rank)

        threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}") for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if self.fault is not None:
            rank, fault = self.fault
            if not isinstance(fault, _Circle):
                fault.add_note(f"on rank {rank} of {self.size}")
            raise fault
        return results

    @contextmanager
    def _entered(self, rank: int) -> Iterator[None]:
        self._come(rank)
        try:
            yield
        finally:
            self._go(rank)

    def _come(self, rank: int) -> None:
        self._enter(rank)
        self._inside[rank] = True

    def _go(self, rank: int) -> None:
        if self._inside[rank]:
            self._inside[rank] = False
            self._leave(rank)

    def wait(self, ready: Ready, words: str) -> None:
        """Let others run until ``ready()``; ``words`` say what for.

        Raises:
            CommunicationError: all ranks wait, none for what can still come; says what each waits for.
        """
        if ready():
            return
        me = self.running
        self._ready[me], self._words[me] = ready, words
        try:
            self._give_way(me)
        finally:
            self._ready[me], self._words[me] = None, ""

    def give_way(self) -> None:
        """Let every other rank that can run do so first: for who looks again and again."""
        self._give_way(self.running)

    def _give_way(self, me: int) -> None:
        self._check()
        if (following := self._following(me)) is None:
            said = "; ".join(self._said(rank) for rank in range(self.size))
            raise _Circle(f"no rank can go on: {said}. All of them must make the same calls in the same order")
        if following != me:
            self._go(me)
            self.running = following
            self._turns[following].release()
            self._turns[me].acquire()
            self._come(me)
        self._check()

    def _check(self) -> None:
        if self.fault is not None:
            raise Stopped

    def _following(self, me: int) -> int | None:
        """The next rank that can run; this one last."""
        for step in range(1, self.size + 1):
            rank = (me + step) % self.size
            ready = self._ready[rank]
            if not self._ended[rank] and (self.fault is not None or ready is None or ready()):
                return rank
        return None

    def _said(self, rank: int) -> str:
        return f"rank {rank} {'has ended' if self._ended[rank] else 'waits for ' + self._words[rank]}"

    def _pass_on(self, me: int) -> None:
        """A rank has ended."""
        if all(self._ended):
            return
        following = self._following(me)
        if following is None:  # all that are left wait: one of them finds that out itself
            following = next(rank for rank in range(self.size) if not self._ended[rank])
            said = "; ".join(self._said(rank) for rank in range(self.size))
            self.fault = (
                following,
                _Circle(f"no rank can go on: {said}. All of them must make the same calls in the same order"),
            )
        self.running = following
        self._turns[following].release()


class _Circle(CommunicationError):
    """Names the ranks itself."""
