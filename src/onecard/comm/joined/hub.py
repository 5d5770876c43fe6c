"""Where ranks of one process hand each other what they send: collectives by their number in a group, messages by tag."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import no_dispatch
from onecard.comm.base import record
from onecard.comm.base.state import Kept
from onecard.comm.joined.baton import Baton
from onecard.comm.shm.work import ShmWork
from onecard.errors import CommunicationError

Parts = Sequence[Sequence[Tensor]]
Fill = Callable[[Parts], None]
Arrived = Callable[[Sequence[Tensor]], None]
FOREVER = 1e9  # seconds: ranks that wait in a circle are told at once


@dataclass(frozen=True, slots=True)
class Told:
    """A message of a rank, for who listens.

    Attributes:
        kind: all_reduce, all_gather, ...; ranks: among whom; op: of a reduction.
        operator, operand: what needs it, where onecard knows; source: the user's line.
        shape, dtype: of the first tensor that is given.
        number: how many messages this group has had before; equal on its ranks.
    """

    kind: str
    ranks: tuple[int, ...]
    op: str
    operator: str
    operand: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: int

    def __str__(self) -> str:
        for_whom = f" for {self.operand!r} of {self.operator}" if self.operator else ""
        op = f"({self.op})" if self.op else ""
        which = "" if self.kind in ("send", "recv") else f" (their message {self.number})"
        return f"{self.kind}{op} of {list(self.shape)} among ranks {list(self.ranks)}{which}{for_whom}, {self.source}"


class _Work(ShmWork):
    """Who asks for its future waits in C++, as DistributedDataParallel does, where no other rank can run: it is there first."""

    def get_future(self) -> Any:
        """A future that is done."""
        self.wait()
        return super().get_future()


@dataclass(slots=True)
class _Post:
    """What one rank brings to a collective: its tensors, how it fills its own with all ranks' ones, and who is told then."""

    kind: str
    agreed: tuple[Any, ...]
    given: Sequence[Tensor]
    into: Sequence[Tensor]
    fill: Fill
    work: ShmWork
    arrived: Arrived | None


@dataclass(slots=True)
class _Slot:
    """One collective of a group, until its last rank comes."""

    posts: dict[int, _Post] = field(default_factory=dict)
    done: bool = False


class Hub:
    """What has been brought and not yet fetched.

    Attributes:
        listener: is told of each message as a rank begins it; what it returns is called with what has arrived.
    """

    def __init__(self, baton: Baton) -> None:
        self.baton = baton
        self.listener: Callable[[int, Told, Sequence[Tensor]], Arrived | None] | None = None
        self._slots: dict[tuple[tuple[int, ...], int], _Slot] = {}
        self._numbers: defaultdict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
        self._mail: defaultdict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)  # from, to, tag
        self._asked: list[tuple[int | None, int, int, Tensor, ShmWork, Arrived | None]] = []

    def post(
        self, ranks: tuple[int, ...], kind: str, agreed: tuple[Any, ...], given: Sequence[Tensor], into: Sequence[Tensor],
        fill: Fill,
    ) -> ShmWork:  # fmt: skip
        """Bring this rank's part of a collective; it is done as the last one comes.

        Args:
            agreed: what all ranks must say alike.
            given: this rank's tensors; others see copies.
            into: what ``fill`` fills, out of all ranks' tensors in the order of the group.

        Raises:
            CommunicationError: the ranks have brought different calls; says both.
        """
        me = self.baton.running
        number = self._numbers[me, ranks]
        self._numbers[me, ranks] += 1
        arrived = self._tell(
            me, kind, ranks, str(agreed[0]) if agreed and isinstance(agreed[0], str) else "", given, number
        )
        slot = self._slots.setdefault((ranks, number), _Slot())
        words = f"{kind}{_words(agreed)} among ranks {list(ranks)} (its message {number})"
        work = _Work(None, list(into), FOREVER, lambda made, _: self.baton.wait(made.is_completed, words))
        with torch.no_grad(), no_dispatch():  # what a message does inside is no rank's work, for who looks on
            copies = [x.detach().clone() for x in given]
        slot.posts[ranks.index(me)] = _Post(kind, agreed, copies, into, fill, work, arrived)
        if len(slot.posts) == len(ranks):
            del self._slots[ranks, number]
            self._complete(slot, ranks)
        return work

    def _complete(self, slot: _Slot, ranks: tuple[int, ...]) -> None:
        posts = [slot.posts[i] for i in range(len(ranks))]
        first = posts[0]
        fault: BaseException | None = None
        for rank, post in zip(ranks, posts, strict=True):
            if (post.kind, post.agreed) != (first.kind, first.agreed):
                fault = CommunicationError(
                    f"ranks {list(ranks)} call different collectives: rank {ranks[0]} {first.kind}{_words(first.agreed)}, rank "
                    f"{rank} {post.kind}{_words(post.agreed)}"
                )
                break
        if fault is None:
            given = [post.given for post in posts]
            try:
                with torch.no_grad():
                    for post in posts:
                        with no_dispatch():
                            post.fill(given)
                        if post.arrived is not None:
                            post.arrived(post.into)
            except (RuntimeError, ValueError, IndexError) as found:
                fault = CommunicationError(f"{first.kind} among ranks {list(ranks)}: {found}")
        for post in posts:
            post.work.end(fault)

    # -- from rank to rank -----------------------------------------------------------------------------------------------

    def send(self, x: Tensor, to: int, tag: int) -> ShmWork:
        """Put a tensor into a rank's mail; it may be written to at once."""
        me = self.baton.running
        self._tell(me, "send", (me, to), "", [x], tag)
        self._mail[me, to, tag].append(x.detach().clone())
        work = ShmWork(None, [x], FOREVER, lambda *_: None)
        work.end(None)
        self._deliver()
        return work

    def receive(self, x: Tensor, source: int | None, tag: int, others: Sequence[int]) -> ShmWork:
        """Fill a tensor with the next of that tag, from ``source`` or any of ``others``."""
        me = self.baton.running
        arrived = self._tell(me, "recv", (me if source is None else source, me), "", [x], tag)
        whom = "any rank" if source is None else f"rank {source}"
        words = f"recv of {list(x.shape)} from {whom} with tag {tag}"
        work = _Work(None, [x], FOREVER, lambda made, _: self.baton.wait(made.is_completed, words))
        self._asked.append((source, me, tag, x, work, arrived))
        self._deliver()
        return work

    def _deliver(self) -> None:
        for asked in [*self._asked]:
            source, me, tag, x, work, arrived = asked
            found = next(
                (key for key, mail in self._mail.items() if mail and key[1:] == (me, tag) and source in (None, key[0])),
                None,
            )
            if found is not None:
                self._asked.remove(asked)
                work.source = found[0]
                come = self._mail[found].popleft()
                fits = come.dtype == x.dtype and come.numel() == x.numel()
                if fits:
                    with torch.no_grad():
                        x.detach().copy_(come.view(x.shape))
                        if arrived is not None:
                            arrived([x])
                work.end(
                    None if fits else CommunicationError(
                        f"rank {me} waits for {list(x.shape)} {x.dtype} from rank {found[0]}, which sent {list(come.shape)} "
                        f"{come.dtype}"
                    )
                )  # fmt: skip

    def _tell(self, me: int, kind: str, ranks: Any, op: str, given: Sequence[Tensor], number: int) -> Arrived | None:
        if self.listener is None:
            return None
        operator, operand, _ = record.serving.here
        first = given[0] if given else torch.empty(0, device="cpu")
        told = Told(kind, ranks, op, operator, operand, record.user_line(), tuple(first.shape), first.dtype, number)
        return self.listener(me, told, given)


def _words(agreed: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, agreed))})" if agreed else ""


hub: Kept[Hub | None] = Kept(lambda: None)
"""Of the present world, if all its ranks are in this process."""
