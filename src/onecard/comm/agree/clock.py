"""The messages of a process group so far: what each was for, as a hash that ranks compare to see that they are in step."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from onecard.comm.agree import check, sparse_check
from onecard.comm.agree.sparse_check import FIELD, OFTEN, PART, Site
from onecard.comm.base import attempt, record
from onecard.comm.base.state import Kept
from onecard.comm.world import world

PATIENCE = 2.0  # seconds: for the words of ranks that are known to be out of step
_MASK = 0xFFFFFFFFFFFF


@dataclass(slots=True)
class SilentProgress:
    """What some ranks do together that sends nothing, such as reading batches: a hash of it, and the last in words."""

    chain: int = 0
    text: str = ""


_progress: Kept[dict[frozenset[int], SilentProgress]] = Kept(dict)
_codes: dict[Any, int] = {}
sent: Kept[int] = Kept(int)
"""How many messages this process has sent."""
latest: Kept[Clock | None] = Kept(lambda: None)
"""That of the last message that did not carry the number itself."""


def mark(ranks: Iterable[int], text: str) -> None:
    """Note that these ranks do something in step, which no message shows."""
    if sparse_check.on.here and world.get_world_size() > 1:
        progress = _progress.here.setdefault(frozenset(ranks), SilentProgress())
        progress.chain = _mixed(progress.chain, zlib.crc32(text.encode()))
        progress.text = text


def _mixed(chain: int, code: int) -> int:
    return (chain * 1000003 ^ code) & _MASK


class Clock:
    """The messages of one process group so far: how many, and a hash of what each was for."""

    __slots__ = ("carried", "chain", "group", "last", "ranks", "site")

    def __init__(self, ranks: tuple[int, ...], group: Any) -> None:
        self.ranks, self.group = frozenset(ranks), group
        self.site = Site("messages/" + "_".join(map(str, ranks)))
        self.chain = 0
        self.last: deque[tuple[int, str, Any]] = deque(maxlen=2 * OFTEN)
        # A group of shared memory compares this number itself.
        self.carried = hasattr(group, "stamp")

    def tick(self, name: str, dtype: torch.dtype | None) -> None:
        """A message is about to be sent.

        Raises:
            CommunicationError: another rank's messages were for something else.
        """
        key = (name, record.serving.here, dtype)
        code = _codes.get(key)
        if code is None:
            if len(_codes) >= 10_000:
                _codes.clear()
            code = _codes[key] = zlib.crc32(repr(key).encode())
        chain = _mixed(self.chain, code)
        for ranks, progress in _progress.here.items():
            if self.ranks <= ranks:
                chain = _mixed(chain, progress.chain)
        self.chain = chain
        sent.here += 1
        self.last.append((chain, name, record.serving.here))
        if self.carried:
            self.group.stamp = (chain ^ chain >> 24) & 0xFFFFFFFF
            self.site.count += 1
            return
        latest.here = self
        if self.site.tick() and not check.on:
            self._compare()

    def _compare(self) -> None:
        """Compare the last messages with those of the rank that came first: the first that differs tells what went wrong."""
        mine = [f"{chain:x}{FIELD}{_message(name, serving)}" for chain, name, serving in self.last]
        here = f"{record.user_line()}{self._done()}"
        self.site.ask(PART.join([here, *mine]), lambda rank, word: self._answered(mine, here, rank, word))

    def _answered(self, mine: list[str], here: str, rank: int, word: str) -> None:
        there, *theirs = word.split(PART)
        pairs = [(a.split(FIELD), b.split(FIELD)) for a, b in zip(mine, theirs, strict=False)]
        at = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
        if at is not None:
            number = self.site.count - len(mine) + 1 + at
            says = {world.get_rank(): (pairs[at][0][1], here), rank: (pairs[at][1][1], there)}
            sparse_check.stop(
                out_of_step({r: f"message {number}, {said}; found at {line}" for r, (said, line) in says.items()})
            )

    def _done(self) -> str:
        return "".join(f"; {p.text}" for ranks, p in _progress.here.items() if self.ranks <= ranks)

    def tell(self, line: str) -> str:
        """Leave for the others what this rank was about to send; the same in words."""
        chain, name, serving = self.last[-1]
        words = f"message {self.site.count}, {_message(name, serving)}, at {line}{self._done()}"
        with suppress(RuntimeError, ValueError, dist.DistError):
            attempt.store().set(f"{self._sides()}/{world.get_rank()}", f"{chain:x}{FIELD}{words}")
        return words

    def _sides(self) -> str:
        return f"sides/{self.site.label}/{self.site.count}"

    def sides(self, apart: bool, patience: float = PATIENCE) -> str:
        """What each rank was about to send, if they are out of step; "" where they are not, or do not say it.

        Args:
            apart: it is known that they are.
            patience: seconds to wait for the others' words.
        """
        begin, found = time.monotonic(), dict[int, list[str]]()
        self.tell(record.user_line())
        with suppress(RuntimeError, ValueError, dist.DistError):
            store = attempt.store()
            while True:
                for rank in self.ranks - set(found):
                    if store.check([f"{self._sides()}/{rank}"]):
                        found[rank] = store.get(f"{self._sides()}/{rank}").decode().split(FIELD)
                if len(found) == len(self.ranks) or time.monotonic() - begin >= patience:
                    break
                time.sleep(0.005)
        differ = apart or len({chain for chain, _ in found.values()}) > 1
        return out_of_step({rank: words for rank, (_, words) in found.items()}) if differ and len(found) > 1 else ""


def _message(name: str, serving: tuple[str, str, tuple[int, ...]]) -> str:
    operator, operand, shape = serving
    return f"{name}, for {operand!r} {list(shape)} of {operator}" if operator else name


def out_of_step(said: dict[int, str]) -> str:
    """The error of ranks whose messages are not for the same."""
    same = len({words.partition(", at ")[0].partition("; ")[0] for words in said.values()}) == 1
    before = " (these messages are alike, but not what was done before them)" if same else ""
    return f"ranks are out of step{before}\n{check.listed(said)}\n{check.ADVICE}"
