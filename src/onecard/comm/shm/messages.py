"""Messages between two ranks: send and recv with tags, through one ring for each direction of each pair.

Whoever has something under way moves it: the thread that waits, and one thread of the group for those who do not. A
rank sleeps on its mail bell, which every rank rings that wrote to it or made room for it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import torch
from torch import Tensor

from onecard.comm.base import failed
from onecard.comm.shm import futex, tensors
from onecard.comm.shm.channel import Channel
from onecard.comm.shm.envelopes import CODES, HEADER, Arriving, Inbox, Receiving, Sending
from onecard.comm.shm.segment import FAILED, GONE, HERE, LINE, MAIL, STATE, rank_word
from onecard.comm.shm.signature import DTYPES
from onecard.comm.shm.work import LAG, ShmWork, take
from onecard.errors import CommunicationError

_MASK = 0xFFFFFFFF
_NAP = 10 * LAG
_LINGER = 10
"""Naps after the last message before the thread goes to sleep: to wake it for each one costs more than a small message."""


class Messages:
    """One rank's messages in a group."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._segment = channel, channel.segment
        self._rank, self._size = channel.rank, channel.size
        self._words = channel.segment.bytes.cast("I")
        self._capacity = channel.segment.plan.ring
        self._lock = threading.Lock()
        self._fence = futex.make_fence()
        self._mail = self._segment.word_address(rank_word(self._rank, MAIL))
        self._rung = 0
        self._sent = [0] * self._size
        self._asked: dict[int | None, int] = {}  # receives so far, by source
        self._outbox: list[deque[Sending]] = [deque() for _ in range(self._size)]
        self._inbox = [Inbox() for _ in range(self._size)]
        self._wanted: list[Receiving] = []
        self._signal: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._awake = False
        self._waiting = 0  # callers that move things while they wait, so that the thread need not
        self._serving = False

    # -- calls ---------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int, tag: int, timeout: float) -> ShmWork:
        """Puts a message on its way. It may be read after this rank has gone on, or has left."""
        self._check(to)
        work = ShmWork(None, [tensor], timeout, self._finish)
        dense = tensors.dense(tensor)
        with self._lock:
            number = self._sent[to] = self._sent[to] + 1
            header = HEADER.pack(number, dense.numel(), dense.nbytes, tag) + bytes([CODES[dense.dtype]])
            self._outbox[to].append(Sending(work, to, dense, header, time.monotonic() + timeout))
        return self._begin(work)

    def receive(self, tensor: Tensor, source: int | None, tag: int, timeout: float) -> ShmWork:
        """Asks for a message, from anybody if `source` is None."""
        self._check(self._rank if source is None else source)
        work = ShmWork(None, [tensor], timeout, self._finish)
        dense = tensors.dense(tensor, read=False)
        with self._lock:
            number = self._asked[source] = self._asked.get(source, 0) + 1
            wanted = Receiving(work, source, tag, tensor, dense, time.monotonic() + timeout, number)
            if not self._match_early(wanted):
                self._wanted.append(wanted)
        return self._begin(work)

    def _check(self, rank: int) -> None:
        self._channel.check()
        if not 0 <= rank < self._size:
            raise ValueError(f"rank {rank} is not in the group, which has {self._size} ranks")

    def forget(self, is_old: Callable[[int], bool]) -> None:
        """Gives up messages that have come and that nobody has asked for, by their tags."""
        with self._lock:
            for box in self._inbox:
                box.early = deque(arriving for arriving in box.early if not is_old(arriving.tag))

    def drain(self) -> None:
        """Completes what has been sent."""
        while any(self._outbox):
            with self._lock:
                pending = [sending.work for queue in self._outbox for sending in queue]
            for work in pending:
                self._finish(work, 0.0)

    def stop(self) -> None:
        """Ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._signal.put(False)
            self._ring(self._rank)
            if thread is not threading.current_thread():
                thread.join(1.0)

    # -- moving --------------------------------------------------------------------------------------------------

    def _begin(self, work: ShmWork) -> ShmWork:
        self._move()
        if work.is_completed():
            return work
        with self._lock:
            asleep, self._awake = not self._awake, True
        if asleep:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=f"shm-mail-{self._rank}", daemon=True)
                self._thread.start()
            self._signal.put(True)
        return work

    def _serve(self) -> None:
        while take(self._signal):
            idle = 0
            while self._thread is not None and self._stay(idle):
                idle = 0 if self._busy() else idle + 1
                if self._waiting or idle:
                    time.sleep(_NAP)
                    continue
                self._serving = True
                self._turn()
                self._serving = False

    def _stay(self, idle: int) -> bool:
        with self._lock:  # so that nobody counts on a thread that is about to sleep
            self._awake = idle < _LINGER or self._busy()
            return self._awake

    def _busy(self) -> bool:
        return bool(self._wanted) or any(self._outbox) or any(box.current is not None for box in self._inbox)

    def _finish(self, work: ShmWork, seconds: float) -> None:
        limit = time.monotonic() + seconds if seconds > 0 else float("inf")
        with self._lock:
            self._waiting += 1
        try:
            while not work.is_completed():
                self._turn(work)
                if time.monotonic() > limit:
                    raise CommunicationError(f"timed out: the message did not come through within {seconds:.3g} s")
        finally:
            with self._lock:
                self._waiting -= 1

    def _turn(self, work: ShmWork | None = None) -> None:
        """Moves what can be moved; if that is nothing, sleeps until there is mail."""
        bell = self._words[rank_word(self._rank, MAIL)]
        self._fence_of_thread()
        if self._move() or (work is not None and work.is_completed()):
            return
        before = time.monotonic()
        futex.wait(self._mail, bell)
        if time.monotonic() - before >= futex.NAP * 0.9 or self._trouble():
            with self._lock:
                self._look()

    def _trouble(self) -> bool:
        return any(self._words[rank_word(rank, STATE)] > HERE for rank in range(self._size))

    def _fence_of_thread(self) -> None:
        with self._lock:
            self._fence()

    def _move(self) -> bool:
        """One round over all rings; whether anything moved."""
        with self._lock:
            moved = False
            for to, queue in enumerate(self._outbox):
                while queue and self._push(to, queue[0]):
                    moved = True
                    if queue[0].done < queue[0].dense.nbytes:
                        break
                    queue.popleft().work.end(None)
            for source in self._sources():
                while self._pull(source):
                    moved = True
            if moved and self._waiting + self._serving > 1:
                self._ring(self._rank)  # another thread may wait for what this one moved
            return moved

    def _sources(self) -> set[int]:
        """The ranks from which something is wanted, or on its way."""
        sources = {rank for rank, box in enumerate(self._inbox) if box.current is not None}
        for wanted in self._wanted:
            if wanted.source is None:
                return set(range(self._size))
            sources.add(wanted.source)
        return sources

    def _ring(self, rank: int) -> None:
        # A value that nobody else writes and that this rank has not written lately: each ring changes the word.
        self._rung += 1
        self._words[rank_word(rank, MAIL)] = (self._rung * self._size + self._rank) & _MASK
        futex.wake(self._segment.word_address(rank_word(rank, MAIL)))

    def _push(self, to: int, sending: Sending) -> bool:
        """Writes as much of a message as there is room for; whether that was anything."""
        ring = self._segment.ring(self._rank, to)
        head, tail = ring // 4, (ring + LINE) // 4
        at = self._words[head]
        self._fence()
        free = self._capacity - ((at - self._words[tail]) & _MASK)
        if sending.done < 0:
            if free < LINE:
                return False
            start = ring + 2 * LINE + at % self._capacity
            self._segment.bytes[start : start + len(sending.header)] = sending.header
            at, free, sending.done = at + LINE, free - LINE, 0
        elif free == 0:
            return False
        while free > 0 and (rest := sending.dense.nbytes - sending.done) > 0:
            place = at % self._capacity
            size = min(rest, free, self._capacity - place)
            base = self._segment.base + ring + 2 * LINE
            ctypes.memmove(base + place, sending.dense.data_ptr() + sending.done, size)
            sending.done += size
            taken = -(-size // LINE) * LINE  # only a message's last piece is not whole lines
            at, free = at + taken, free - taken
        self._fence()
        self._words[head] = at & _MASK
        self._ring(to)
        return True

    def _pull(self, source: int) -> bool:
        """Reads as much as there is of what comes from a rank; whether that was anything."""
        ring = self._segment.ring(source, self._rank)
        head, tail = ring // 4, (ring + LINE) // 4
        at = before = self._words[tail]
        there = (self._words[head] - at) & _MASK
        self._fence()
        box = self._inbox[source]
        moved = False
        if box.current is None:
            if there == 0 or not any(w.source in (None, source) for w in self._wanted):
                return False
            box.current = self._open(source, ring + 2 * LINE + at % self._capacity)
            at, there, moved = at + LINE, there - LINE, True
        arriving = box.current
        while there > 0 and (rest := arriving.size - arriving.done) > 0:
            place = at % self._capacity
            size = min(rest, there, self._capacity - place)
            if arriving.buffer is not None:
                base = self._segment.base + ring + 2 * LINE
                ctypes.memmove(arriving.buffer.data_ptr() + arriving.done, base + place, size)
            arriving.done += size
            taken = -(-size // LINE) * LINE
            at, there, moved = at + taken, there - taken, True
        if moved:
            self._fence()
            self._words[tail] = at & _MASK
            self._fence()
            # The sender waits for room only if it filled the ring, as far as it knew of it.
            if (self._words[head] - before) & _MASK > self._capacity - LINE:
                self._ring(source)
        if arriving.done == arriving.size:
            box.current = None
            self._arrived(source, arriving)
            moved = True
        return moved

    # -- matching ------------------------------------------------------------------------------------------------

    def _open(self, source: int, start: int) -> Arriving:
        data = self._segment.bytes[start : start + HEADER.size + 1]
        number, count, size, tag = HEADER.unpack_from(data)
        arriving = Arriving(number, count, size, tag, DTYPES[data[HEADER.size]])
        for wanted in self._wanted:
            if wanted.tag == tag and wanted.source in (None, source):
                self._wanted.remove(wanted)
                self._give(source, arriving, wanted)
                return arriving
        arriving.buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._inbox[source].early.append(arriving)
        return arriving

    def _give(self, source: int, arriving: Arriving, wanted: Receiving) -> None:
        """Lets a message fill the tensor of who asked for it; a message that does not fit is an error of both."""
        ranks = self._channel.ranks
        if (arriving.count, arriving.dtype) != (wanted.tensor.numel(), wanted.tensor.dtype):
            reason = (
                f"rank {ranks[source]} sends {arriving} (message {arriving.number}, tag {arriving.tag}) to rank "
                f"{ranks[self._rank]}, which receives {wanted.tensor.numel()} "
                f"{str(wanted.tensor.dtype).removeprefix('torch.')}"
            )
            self._channel.leave(FAILED, reason)
            wanted.work.end(CommunicationError(reason))
            return
        wanted.work.source = source
        arriving.receiving = wanted
        if arriving.buffer is None:
            arriving.buffer = wanted.dense

    def _match_early(self, wanted: Receiving) -> bool:
        sources = range(self._size) if wanted.source is None else (wanted.source,)
        for source in sources:
            for arriving in self._inbox[source].early:
                if arriving.tag == wanted.tag:
                    self._inbox[source].early.remove(arriving)
                    self._give(source, arriving, wanted)
                    if arriving.done == arriving.size:
                        self._arrived(source, arriving)
                    return True
        return False

    def _arrived(self, source: int, arriving: Arriving) -> None:
        wanted, buffer = arriving.receiving, arriving.buffer
        if wanted is None:
            return
        if buffer is not None and buffer is not wanted.dense:
            ctypes.memmove(wanted.dense.data_ptr(), buffer.data_ptr(), arriving.size)
        if wanted.dense is not wanted.tensor:
            tensors.fill(wanted.tensor, wanted.dense)
        wanted.work.end(None)

    # -- faults --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Ends what can never be completed, or not in time."""
        now = time.monotonic()
        for to, queue in enumerate(self._outbox):
            for sending in list(queue):
                if reason := self._lost(
                    to, now, sending.deadline, f"send #{sending.number} to rank {self._channel.ranks[to]}"
                ):
                    queue.remove(sending)
                    sending.work.end(CommunicationError(reason))
        for wanted in list(self._wanted):
            self._look_at(wanted, now)
        for source, box in enumerate(self._inbox):
            arriving = box.current
            if arriving is not None and arriving.receiving is not None and self._empty(source):
                what = f"recv #{arriving.number} from rank {self._channel.ranks[source]}"
                if reason := self._lost(source, now, arriving.receiving.deadline, what):
                    box.current = None
                    arriving.receiving.work.end(CommunicationError(reason))

    def _look_at(self, wanted: Receiving, now: float) -> None:
        sources = [r for r in range(self._size) if r != self._rank] if wanted.source is None else [wanted.source]
        if not all(self._empty(source) for source in sources):
            return
        reasons = []
        for source in sources:
            whom = "any rank" if wanted.source is None else f"rank {self._channel.ranks[source]}"
            what = f"recv #{wanted.number} from {whom}"
            reasons.append(self._lost(source, now, wanted.deadline, f"{what} with tag {wanted.tag}"))
        if all(reasons):
            self._wanted.remove(wanted)
            wanted.work.end(CommunicationError(str(reasons[0])))

    def _empty(self, source: int) -> bool:
        ring = self._segment.ring(source, self._rank)
        return self._words[ring // 4] == self._words[(ring + LINE) // 4]

    def _lost(self, rank: int, now: float, deadline: float, what: str) -> str | None:
        name = f"rank {self._channel.ranks[rank]}"
        state = self._words[rank_word(rank, STATE)]
        if self._channel.failure is not None:
            return self._channel.failure
        if state == FAILED and rank != self._rank:
            return self._segment.text(rank)
        if state == GONE:
            return f"{name} is gone: it left the group, or ended, before {what}"
        if not self._channel.lives(rank):
            return f"{name} died before or in {what}"
        if said := failed.looked():
            return said
        return f"timed out in {what} on rank {self._channel.ranks[self._rank]}" if now > deadline else None
