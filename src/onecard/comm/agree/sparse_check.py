"""The sparse check, always on: ranks compare, now and then, what they send and what they believe to be equal.

A message carries the history of its group: a hash of what each message so far was for (operator, operand, shape) and of
how far the loaders are. Shared memory compares it with every message. Other backends cannot carry it along, so there it is
compared through the store of the rendezvous, as are the digests of what must be equal on several ranks: plain operands,
what is given to ``shard_tensor`` and ``from_local``, parameters that an operator has just written to. Each is compared at its
calls 1, 2, 4, 8, 16, 24, ...

Nobody waits for anybody: the first to come leaves its word, the others compare theirs with it, at the cost of one round
trip to the store. ``ONECARD_CHECK=0`` switches it off; ``ONECARD_CHECK=1`` compares every call and finds the element.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from onecard import recorded
from onecard._torch.modes import values_are_there
from onecard.comm.agree import agree, check, claims, prints
from onecard.comm.base import attempt, record
from onecard.comm.base.state import Kept
from onecard.comm.base.warned import warn
from onecard.comm.world import world
from onecard.errors import CommunicationError

on: Kept[bool] = Kept(bool)
"""Only in the real world: a pretended rank has nobody to compare with."""

each: Kept[bool] = Kept(bool)
"""Whether each call is compared now, on all ranks: as a recorded step runs as it is once more, which is seldom enough."""

OFTEN = 8  # calls: the distance of comparisons in the steady state
SELDOM = 512  # and never more than one call of so many, however long a run is
SLOTS = 4  # words of one subject that lie in the store; a rank may be so many comparisons behind
FIELD, PART = "\x1f", "\x1e"
_STOPPED = "stopped"


@dataclass(slots=True)
class Site:
    """A subject that ranks compare, with how often it came up here. Equal labels mean the same on all ranks."""

    label: str
    count: int = 0
    due: int = 1
    asked: int = 0
    words: list[str] = field(default_factory=lambda: [""] * SLOTS)
    met: Any = None

    def tick(self) -> bool:
        """Whether this call is one to compare.

        Example:
            >>> site = Site("x")
            >>> [call for call in range(1, 33) if site.tick()]
            [1, 2, 4, 8, 16, 24, 32]
        """
        self.count += 1
        if self.count < self.due and not each.here:
            return False
        self.due = self.count + min(self.count, max(OFTEN, self.count // SELDOM))
        return True

    def ask(self, word: str, answered: Callable[[int, str], None]) -> None:
        """Leave this rank's word for the call; ``answered`` is told of the rank that came first, if that was another one.

        Now, or as soon as the ranks have met. The store holds the last few words only: a word takes the place of the one
        that all ranks saw there before.
        """
        slot, number = self.asked % SLOTS, self.count
        self.asked += 1

        def compare() -> None:
            if self.met is not dist.group.WORLD:  # another store: it holds no words yet
                self.met, self.words = dist.group.WORLD, [""] * SLOTS
            mine = f"{number}{PART}{world.get_rank()}{PART}{word}"
            found = agree.exchange(f"sparse/{self.label}/{slot}", self.words[slot], mine)
            if found:
                self.words[slot] = found
                count, rank, said = found.split(PART, 2)
                if found != mine and int(count) == number:
                    answered(int(rank), said)

        agree.when_met(compare)


_sites: Kept[dict[Any, Site]] = Kept(dict)
_numbers: Kept[Counter[str]] = Kept(Counter)


def site(key: Any, label: Callable[[], str]) -> Site:
    """The site of a key; its label, made when it first comes up, must mean the same on all ranks."""
    found = _sites.here.get(key)
    if found is None:
        found = _sites.here[key] = Site(label())
    return found


def serial(of: str) -> int:
    """The next number of subjects that have no name: the same on all ranks that have such, if they come up in one order.

    Ranks may have more of other subjects: experts, stages of a pipeline.

    Args:
        of: which subjects, with the ranks that have them.
    """
    _numbers.here[of] += 1
    return _numbers.here[of] - 1


def every_call() -> AbstractContextManager[None]:
    """Inside, each call is compared; entered on all ranks alike."""
    return each.during(True)


def obey_environment() -> None:
    """What ONECARD_CHECK says: unset, the sparse check; 0, none; else the debug check of every call, in place of it."""
    wanted = os.environ.get("ONECARD_CHECK", "")
    on.here = wanted == ""
    if wanted not in ("", "0"):
        check.enable()


# -- what must be equal ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subject:
    """A tensor that should be the same on some ranks: what it is called, why it should be equal, and what to do if not."""

    name: str
    tensor: Tensor
    belief: str
    cure: str


def is_plain(x: Any) -> bool:
    """Whether a tensor is one of torch's own kind, or a parameter that differs in its gradient only."""
    return type(x) in (Tensor, torch.nn.Parameter) or getattr(type(x), "is_local_parameter", False)


def comparable(tensor: Tensor) -> bool:
    """Whether a tensor has values, now: not one that is only traced or rehearsed with."""
    return is_plain(tensor) and tensor.device.type != "meta" and not _traced(tensor)


def _traced(tensor: Tensor) -> bool:
    if not values_are_there() or tensor._is_zerotensor():
        return True
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def equal(where: Site, operator: str, subjects: Sequence[Subject]) -> None:
    """Compare the digests of tensors with those of the rank that came first to this call.

    Raises:
        CommunicationError: they differ by more than rounding. Names both ranks, the tensor and its first values.
    """
    given = [s for s in subjects if comparable(s.tensor)]
    if not given or check.on:
        return
    line = record.user_line()
    with recorded.unrecorded():
        said = [f"{s.name}{FIELD}{prints.fingerprint(s.tensor)}" for s in given]
    reasons = [(s.name, s.belief, s.cure) for s in given]
    count = where.count

    def answered(rank: int, word: str) -> None:
        theirs, *others = word.split(PART)
        for reason, mine, other in zip(reasons, said, others, strict=False):
            if mine.split(FIELD)[:2] != other.split(FIELD)[:2]:  # the norm may depend on where memory begins
                sides = {world.get_rank(): (line, mine), rank: (theirs, other)}
                _differs(where.label, count, operator, reason, sides)
                return

    where.ask(PART.join([line, *said]), answered)


def _differs(
    label: str, count: int, operator: str, reason: tuple[str, str, str], sides: dict[int, tuple[str, str]]
) -> None:
    name, belief, cure = reason
    names, digests = {}, {}
    for rank, (_, said) in sides.items():
        names[rank], _, digests[rank] = said.partition(FIELD)
    found = {rank: prints.norm_and_values(digests[rank]) for rank in sorted(sides)}
    lines = {line for line, _ in sides.values()}
    shown = "\n".join(
        f"  rank {rank}: {names[rank] + ' ' if len(set(names.values())) > 1 else ''}[{', '.join(f'{v:.6g}' for v in values)}"
        f"{', ...' if len(values) >= 8 else ''}]{f', at {sides[rank][0]}' if len(lines) > 1 else ''}"
        for rank, (_, values) in found.items()
    )
    at = lines.pop() if len(lines) == 1 else sides[world.get_rank()][0]
    text = f"{operator} at {at}: {name} {belief}, but it differs between ranks (seen at call {count})"
    if len(set(names.values())) == 1 and prints.rounding(*found.values()):
        if _once(label):
            warn(f"{text}\n{shown}\n{_ROUNDING}")
        return
    stop(f"{text}; some of its values:\n{shown}\n{cure}. {_HOW}")


_told: Kept[set[str]] = Kept(set)


def _once(label: str) -> bool:
    new = label not in _told.here
    _told.here.add(label)
    return new


_HOW = "ONECARD_CHECK=1 compares every call and finds the first element that differs; ONECARD_CHECK=0 compares nothing"
_ROUNDING = (
    "They agree to about a thousandth, so that this may be rounding: kernels that add in another order each time, ranks with "
    "other numbers of threads or other processors. Copies that drift apart do not come together again by themselves"
)


def parts(where: Site, call: str, local: Tensor, part: tuple[int, ...], cure: str) -> None:
    """Warn if another rank gives the same values as another part of a whole: most likely each has the whole."""
    if check.on or not comparable(local):
        return
    with recorded.unrecorded():
        if not _telling(local):
            return
        bits, line, values = prints.fingerprint(local).split(FIELD)[0], record.user_line(), claims.first(local)

    def answered(rank: int, word: str) -> None:
        theirs, other = word.split(FIELD)
        if theirs != str(part) and bits == other and _once(where.label):
            warn(
                f"{call} at {line}: ranks {rank} and {world.get_rank()} give equal values, {values}, as different parts, so "
                f"that the whole holds them more than once. {cure}",
            )

    where.ask(f"{part}{FIELD}{bits}", answered)


def _telling(local: Tensor) -> bool:
    """Whether equal values can hardly be chance, or meant: zeros, ones and small integers may well be equal, and positions,
    which count up, or are the same in each row, are equal in all parts."""
    if local.numel() < 8 or not bool((local != local.flatten()[0]).any()):
        return False
    if local.is_floating_point():
        return True
    if local.dtype is torch.bool or local.is_complex() or local.numel() < 16 or len(local.unique()) < 8:
        return False
    steps = local.flatten().diff()
    return bool((steps != steps[0]).any()) and bool((local != local[:1]).any())


# -- the end -----------------------------------------------------------------------------------------------------------


def stop(text: str) -> NoReturn:
    """Raise an error on this rank; the others are told why it comes no more."""
    with suppress(RuntimeError, ValueError, dist.DistError):
        agree.exchange(_STOPPED, "", f"{world.get_rank()} {text}")
    raise CommunicationError(text)


def stopped() -> str:
    """Why another rank has stopped, if it said so; else ""."""
    with suppress(RuntimeError, ValueError, dist.DistError):
        store = attempt.store()
        if store.check([_STOPPED]):
            rank, _, text = store.get(_STOPPED).decode().partition(" ")
            return f"rank {rank} has stopped: {text}" if int(rank) != world.get_rank() else ""
    return ""


obey_environment()
