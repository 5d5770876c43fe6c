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

import math
import os
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from onecard.comm import agree, attempt, check, claims, record, world
from onecard.errors import CommunicationError

on = os.environ.get("ONECARD_CHECK", "") == ""

OFTEN = 8  # calls: the distance of comparisons in the steady state
SELDOM = 512  # and never more than one call of so many, however long a run is
SLOTS = 4  # words of one subject that lie in the store; a rank may be so many comparisons behind
PATIENCE = 2.0  # seconds: for the words of ranks that are known to be out of step
_MASK = 0xFFFFFFFFFFFF
_FIELD, _PART = "\x1f", "\x1e"
_STOPPED = "stopped"


@dataclass(slots=True)
class Site:
    """A subject that ranks compare, with how often it came up here. Equal labels mean the same on all ranks."""

    label: str
    count: int = 0
    due: int = 1
    asked: int = 0
    words: list[str] = field(default_factory=lambda: [""] * SLOTS)

    def tick(self) -> bool:
        """Whether this call is one to compare.

        Example:
            >>> site = Site("x")
            >>> [call for call in range(1, 33) if site.tick()]
            [1, 2, 4, 8, 16, 24, 32]
        """
        self.count += 1
        if self.count < self.due:
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
            mine = f"{number}{_PART}{world.get_rank()}{_PART}{word}"
            found = agree.exchange(f"sparse/{self.label}/{slot}", self.words[slot], mine)
            if found:
                self.words[slot] = found
                count, rank, said = found.split(_PART, 2)
                if found != mine and int(count) == number:
                    answered(int(rank), said)

        agree.when_met(compare)


_sites: dict[Any, Site] = {}
_serial = 0


def site(key: Any, label: Callable[[], str]) -> Site:
    """The site of a key; its label, made when it first comes up, must mean the same on all ranks."""
    found = _sites.get(key)
    if found is None:
        found = _sites[key] = Site(label())
    return found


def serial() -> int:
    """The next number, for subjects that have no name: the same on all ranks, if they come up in one order."""
    global _serial
    _serial += 1
    return _serial


def forget() -> None:
    """Begin anew, with a new process group."""
    _sites.clear()
    _progress.clear()
    _codes.clear()


# -- what must be equal ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Subject:
    """A tensor that should be the same on some ranks: what it is called, why it should be equal, and what to do if not."""

    name: str
    tensor: Tensor
    belief: str
    cure: str


def comparable(tensor: Tensor) -> bool:
    """Whether a tensor has values, now: not one that is only traced or rehearsed with."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type != "meta" and not _traced(tensor)


def _traced(tensor: Tensor) -> bool:
    if torch._C._len_torch_dispatch_stack() or tensor._is_zerotensor():
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
    prints = [f"{s.name}{_FIELD}{fingerprint(s.tensor)}" for s in given]
    reasons = [(s.name, s.belief, s.cure) for s in given]
    count = where.count

    def answered(rank: int, word: str) -> None:
        theirs, *said = word.split(_PART)
        for reason, mine, other in zip(reasons, prints, said, strict=False):
            if mine.split(_FIELD)[:2] != other.split(_FIELD)[:2]:  # the norm may depend on where memory begins
                sides = {world.get_rank(): (line, mine), rank: (theirs, other)}
                _differs(where.label, count, operator, reason, sides)
                return

    where.ask(_PART.join([line, *prints]), answered)


def fingerprint(x: Tensor) -> str:
    """A digest of a tensor in a few dozen bytes: of all its bits, its norm, and some of its values.

    Example:
        >>> fingerprint(torch.tensor([3.0, 4.0])) == fingerprint(torch.tensor([4.0, 3.0]))
        False
        >>> norm_and_values(fingerprint(torch.tensor([3.0, 4.0])))
        (5.0, [3.0, 4.0])
    """
    x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x.is_cuda:
        return _on_device(x.reshape(-1))
    if x.dtype not in _NUMPY:  # numpy does not know it: its bits, and its values as wider ones
        wide = torch.view_as_real(x) if x.is_complex() else x.float()
        return _print(_bits(x.reshape(-1).contiguous().view(torch.uint8).numpy()), wide.numpy().reshape(-1))
    array = np.ascontiguousarray(x.numpy()).reshape(-1)
    return _print(_bits(array), array)


def _print(bits: int, array: Any) -> str:
    norm = math.sqrt(np.dot(array, array)) if array.dtype.kind == "f" else math.nan
    return f"{bits:x}{_FIELD}{norm!r}{_FIELD}{array[:: max(1, -(-array.size // 8))].astype(np.float64).tobytes().hex()}"


def _bits(array: Any) -> int:
    """A hash of memory: of few bytes all, of many their sum as words, and a hash of some."""
    if array.nbytes <= _FEW:
        return zlib.crc32(array.data)
    data = array.view(np.uint8)
    words = data[: data.size // 8 * 8].view(np.int64)
    some = zlib.crc32(words[:: 8 * words.size // _FEW].tobytes(), zlib.crc32(data[words.size * 8 :].data))
    return (int(words.sum()) & 0xFFFFFFFFFFFFFFFF) << 32 | some


def _on_device(flat: Tensor) -> str:
    """The same on a GPU: sums there, and a few values brought here."""
    data = flat.view(torch.uint8)
    whole = data[: data.numel() // 8 * 8]
    words = (whole.clone() if whole.data_ptr() % 8 else whole).view(torch.int64)
    real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    some = real[:: max(1, -(-real.numel() // 8))].double().cpu().numpy()
    norm = float(torch.linalg.vector_norm(real)) if real.is_floating_point() else math.nan
    sample = torch.cat([words[:: max(1, 8 * words.numel() // _FEW)].view(torch.uint8), data[whole.numel() :]])
    bits = (int(words.sum()) & 0xFFFFFFFFFFFFFFFF) << 32 | zlib.crc32(sample.cpu().numpy().data)
    return f"{bits:x}{_FIELD}{norm!r}{_FIELD}{some.tobytes().hex()}"


def norm_and_values(said: str) -> tuple[float, list[float]]:
    """What a fingerprint says for people; the norm is NaN for what is not of floating point."""
    _, norm, values = said.split(_FIELD)
    return float(norm), np.frombuffer(bytes.fromhex(values)).tolist()


_FEW = 1 << 12  # bytes that are hashed one by one
_NUMPY = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool})


def _differs(
    label: str, count: int, operator: str, reason: tuple[str, str, str], sides: dict[int, tuple[str, str]]
) -> None:
    name, belief, cure = reason
    names, prints = {}, {}
    for rank, (_, said) in sides.items():
        names[rank], _, prints[rank] = said.partition(_FIELD)
    found = {rank: norm_and_values(prints[rank]) for rank in sorted(sides)}
    lines = {line for line, _ in sides.values()}
    shown = "\n".join(
        f"  rank {rank}: {names[rank] + ' ' if len(set(names.values())) > 1 else ''}[{', '.join(f'{v:.6g}' for v in values)}"
        f"{', ...' if len(values) >= 8 else ''}]{f', at {sides[rank][0]}' if len(lines) > 1 else ''}"
        for rank, (_, values) in found.items()
    )
    at = lines.pop() if len(lines) == 1 else sides[world.get_rank()][0]
    text = f"{operator} at {at}: {name} {belief}, but it differs between ranks (seen at call {count})"
    if len(set(names.values())) == 1 and _rounding(*found.values()):
        if _once(label):
            warnings.warn(f"{text}\n{shown}\n{_ROUNDING}", stacklevel=2)
        return
    stop(f"{text}; some of its values:\n{shown}\n{cure}. {_HOW}")


def _rounding(mine: tuple[float, list[float]], theirs: tuple[float, list[float]]) -> bool:
    """Whether two prints differ by no more than the order of a sum makes. Not where there are no norms, or not of numbers."""
    near = abs(mine[0] - theirs[0]) <= 1e-4 * max(mine[0], theirs[0])
    pairs = list(zip(mine[1], theirs[1], strict=False))
    scale = max(abs(v) for pair in pairs for v in pair)
    return near and all(abs(a - b) <= 1e-3 * scale for a, b in pairs)


_told: set[str] = set()


def _once(label: str) -> bool:
    new = label not in _told
    _told.add(label)
    return new


_HOW = "ONECARD_CHECK=1 compares every call and finds the first element that differs; ONECARD_CHECK=0 compares nothing"
_ROUNDING = (
    "They agree to about a thousandth, so that this may be rounding: kernels that add in another order each time, ranks with "
    "other numbers of threads or other processors. Copies that drift apart do not come together again by themselves"
)


def parts(where: Site, call: str, local: Tensor, part: tuple[int, ...], cure: str) -> None:
    """Warn if another rank gives the same values as another part of a whole: most likely each has the whole."""
    if check.on or not comparable(local) or not _telling(local):
        return
    bits, line, values = fingerprint(local).split(_FIELD)[0], record.user_line(), claims.first(local)

    def answered(rank: int, word: str) -> None:
        theirs, other = word.split(_FIELD)
        if theirs != str(part) and bits == other and _once(where.label):
            warnings.warn(
                f"{call} at {line}: ranks {rank} and {world.get_rank()} give equal values, {values}, as different parts, so "
                f"that the whole holds them more than once. {cure}",
                stacklevel=2,
            )

    where.ask(f"{part}{_FIELD}{bits}", answered)


def _telling(local: Tensor) -> bool:
    """Whether equal values can hardly be chance: zeros, ones and small integers may well be equal."""
    return local.is_floating_point() and local.numel() >= 8 and bool((local != local.flatten()[0]).any())


# -- what is sent ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Progress:
    """What some ranks do together that sends nothing, such as reading batches: a hash of it, and the last in words."""

    chain: int = 0
    text: str = ""


_progress: dict[frozenset[int], Progress] = {}
_codes: dict[Any, int] = {}


def mark(ranks: Iterable[int], text: str) -> None:
    """Note that these ranks do something in step, which no message shows."""
    if on and world.get_world_size() > 1:
        progress = _progress.setdefault(frozenset(ranks), Progress())
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
        key = (name, record.serving, dtype)
        code = _codes.get(key)
        if code is None:
            if len(_codes) >= 10_000:
                _codes.clear()
            code = _codes[key] = zlib.crc32(repr(key).encode())
        chain = _mixed(self.chain, code)
        for ranks, progress in _progress.items():
            if self.ranks <= ranks:
                chain = _mixed(chain, progress.chain)
        self.chain = chain
        self.last.append((chain, name, record.serving))
        if self.carried:
            self.group.stamp = (chain ^ chain >> 24) & 0xFFFFFFFF
            self.site.count += 1
        elif self.site.tick() and not check.on:
            self._compare()

    def _compare(self) -> None:
        """Compare the last messages with those of the rank that came first: the first that differs tells what went wrong."""
        mine = [f"{chain:x}{_FIELD}{_message(name, serving)}" for chain, name, serving in self.last]
        here = f"{record.user_line()}{self._done()}"
        self.site.ask(_PART.join([here, *mine]), lambda rank, word: self._answered(mine, here, rank, word))

    def _answered(self, mine: list[str], here: str, rank: int, word: str) -> None:
        there, *theirs = word.split(_PART)
        pairs = [(a.split(_FIELD), b.split(_FIELD)) for a, b in zip(mine, theirs, strict=False)]
        at = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
        if at is not None:
            number = self.site.count - len(mine) + 1 + at
            says = {world.get_rank(): (pairs[at][0][1], here), rank: (pairs[at][1][1], there)}
            stop(out_of_step({r: f"message {number}, {said}; found at {line}" for r, (said, line) in says.items()}))

    def _done(self) -> str:
        return "".join(f"; {p.text}" for ranks, p in _progress.items() if self.ranks <= ranks)

    def sides(self) -> str:
        """What each rank was about to send, once it is known that they are out of step; "" where they do not say it."""
        me, begin = world.get_rank(), time.monotonic()
        key = f"sides/{self.site.label}/{self.site.count}"
        found: dict[int, str] = {}
        with suppress(RuntimeError, ValueError, dist.DistError):
            store = attempt.store()
            _, name, serving = self.last[-1]
            words = f"message {self.site.count}, {_message(name, serving)}, at {record.user_line()}{self._done()}"
            store.set(f"{key}/{me}", words)
            while len(found) < len(self.ranks) and time.monotonic() - begin < PATIENCE:
                for rank in self.ranks - set(found):
                    if store.check([f"{key}/{rank}"]):
                        found[rank] = store.get(f"{key}/{rank}").decode()
                time.sleep(0.005)
        return out_of_step(found) if len(found) > 1 else ""


def _message(name: str, serving: tuple[str, str, tuple[int, ...]]) -> str:
    operator, operand, shape = serving
    return f"{name}, for {operand!r} {list(shape)} of {operator}" if operator else name


def out_of_step(said: dict[int, str]) -> str:
    """The error of ranks whose messages are not for the same."""
    same = len({words.partition(", at ")[0].partition("; ")[0] for words in said.values()}) == 1
    before = " (these messages are alike, but not what was done before them)" if same else ""
    return f"ranks are out of step{before}\n{check.listed(said)}\n{check.ADVICE}"


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
