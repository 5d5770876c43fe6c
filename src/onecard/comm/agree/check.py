"""The debug check, ``ONECARD_CHECK=1``: ranks compare what they are about to do, and what they believe to be equal.

Off, it costs nothing. On, each collective, each operand of which ranks hold copies and each value given to
``shard_tensor`` or ``from_local`` is first compared through the store of the rendezvous. Not through a collective: where
the ranks are out of step, that would hang as well. A difference raises a CommunicationError on every rank that takes
part, which names both sides.

The idea is that of ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, with the operator and the line of the user's program.
"""

from __future__ import annotations

import atexit
import json
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from onecard import recorded
from onecard.comm.agree import claims
from onecard.comm.agree.claims import Claim
from onecard.comm.base import attempt, record
from onecard.comm.base.state import Kept
from onecard.comm.base.warned import warn
from onecard.comm.world import world
from onecard.errors import CommunicationError

on = False
LOOK = 0.5  # seconds to wait before asking where the others are
_SENT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_AT = "check/at"

_counts: Kept[dict[tuple[int, ...], int]] = Kept(dict)
_said: Kept[list[record.Notice]] = Kept(list)
_switched: list[Callable[[], None]] = []


@dataclass(frozen=True, slots=True)
class Announced:
    """What one rank is about to do: ``call`` and ``digest`` must be equal on all ranks, the rest is for people."""

    call: str
    line: str
    why: str = ""
    digest: str = ""
    value: str = ""
    words: str = ""  # for the other ranks only: it may be long

    def __str__(self) -> str:
        return f"{self.call}{self.why}{self.value}, at {self.line}"


def enable() -> None:
    """Switch the check on in this process, as ``ONECARD_CHECK=1`` does. Every rank must."""
    global on
    if not on:
        on = True
        record.observers.here.append(_listen)
        atexit.register(_leave)
        for switched in _switched:
            switched()


def when_on(switched: Callable[[], None]) -> None:
    """Call a function as soon as the check is on."""
    _switched.append(switched)
    if on:
        switched()


def collective(name: str, ranks: Iterable[int], sent: Tensor | None) -> None:
    """Compare a collective that is about to run. Parts of an all_to_all may differ in size."""
    kind = "" if sent is None else f" of {_kind(sent) if name != 'all_to_all' else _dtype(sent)}"
    why = ""
    if _said.here:
        message = _said.here.pop(0)
        why = f", for {message.operand!r} {list(message.shape)} of {message.operator}"
    found = _exchange(tuple(sorted(ranks)), Announced(name + kind, record.user_line(), why))
    if len({(entry.call, entry.why) for entry in found.values()}) > 1:
        _stop(_out_of_step(found))


def nothing_sent() -> None:
    """A collective that has nothing to send on this line of ranks: what was said of it is not of the next one."""
    if on and _said.here:
        _said.here.pop(0)


def equal(operator: str, ranks: Iterable[int], claimed: Iterable[Claim]) -> None:
    """Compare tensors of which ranks believe that they hold the same."""
    given = [c for c in claimed if not c.tensor.is_meta]
    if not given or recorded.is_sketching():
        return
    call = f"{operator} with {' and '.join(c.name for c in given)}"
    digests = json.dumps([[list(c.part), claims.digest(c.tensor)] for c in given])
    value = f" = {claims.first(given[0].tensor)}" if len(given) == 1 else ""
    members = tuple(sorted(ranks))
    found = _exchange(members, Announced(call, record.user_line(), digest=digests, value=value))
    if len({entry.call for entry in found.values()}) > 1:
        _stop(_out_of_step(found))
    if len({entry.digest for entry in found.values()}) > 1:
        said = {rank: json.loads(entry.digest) for rank, entry in found.items()}
        for i, claim in enumerate(given):
            holders = _at_odds({rank: (tuple(words[i][0]), words[i][1]) for rank, words in said.items()})
            if holders:
                _stop(f"{operator} at {record.user_line()}: {_difference(claim, members, holders)}")


def _at_odds(said: dict[int, tuple[tuple[int, ...], str]]) -> list[int]:
    """The ranks that hold one part, if their digests of it differ; of several such parts the first."""
    for part in sorted({part for part, _ in said.values()}):
        holders = [rank for rank in sorted(said) if said[rank][0] == part]
        if len({said[rank][1] for rank in holders}) > 1:
            return holders
    return []


def _difference(claim: Claim, members: tuple[int, ...], holders: list[int]) -> str:
    """Which tensor differs between its holders, and where first. All members take part, so that all can say it."""
    mine, line = world.get_rank() in holders, record.user_line()

    def ask(what: str, words: Sequence[str]) -> list[list[str]]:
        sent = Announced(f"{what} of {claim.name}", line, words=json.dumps(list(words)) if mine else "[]")
        found = _exchange(members, sent)
        return [json.loads(found[rank].words) for rank in holders]

    digests = ask("blocks", claims.blocks(claim.tensor) if mine else ())
    block = next(i for i, those in enumerate(zip(*digests, strict=True)) if len(set(those)) > 1)
    sides = ask("values", claims.values(claim.tensor, block) if mine else ())
    element = next((i for i, those in enumerate(zip(*sides, strict=True)) if len(set(those)) > 1), 0)
    exact = len({claims.rounded(side[element]) for side in sides}) == 1
    ends = block == len(digests[0]) - 1
    shown = {
        rank: claims.around(side, element, exact, block == 0, ends) for rank, side in zip(holders, sides, strict=True)
    }
    where = f", first at {claims.place(claim, block, element)}" if mine else f" {', '.join(map(str, holders))}"
    return f"{claim.name} {claim.belief}, but it differs between ranks{where}\n{listed(shown)}\n{claim.cure}"


def same_parts(call: str, ranks: Iterable[int], local: Tensor, part: tuple[int, ...], cure: str) -> None:
    """Warn if all ranks give one and the same tensor as different parts of a whole: most likely each has the whole."""
    entry = Announced(f"{call}: compare parts", record.user_line(), why=str(part), digest=claims.digest(local))
    found = _exchange(tuple(sorted(ranks)), entry)
    telling = local.is_floating_point() and local.numel() >= 8 and bool((local != local.flatten()[0]).any())
    if telling and len({e.why for e in found.values()}) > 1 and len({e.digest for e in found.values()}) == 1:
        warn(
            f"{call} at {entry.line}: ranks {sorted(found)} all give equal values, {claims.first(local)}, as different parts, "
            f"so that the whole holds them {len(found)} times. {cure}",
        )


def agreed(call: str, ranks: Iterable[int], cure: str) -> None:
    """Compare what a call says of a whole tensor, such as its shape."""
    found = _exchange(tuple(sorted(ranks)), Announced(call, record.user_line()))
    if len({entry.call for entry in found.values()}) > 1:
        _stop(_out_of_step(found, cure))


def _listen(message: record.Notice) -> None:
    """Remember which operator the next collectives are for: those of one operand are announced before they run."""
    last = _said.here[-1] if _said.here else None
    if last is not None and (last.operator, last.operand, last.source) != (
        message.operator,
        message.operand,
        message.source,
    ):
        _said.here.clear()
    if message.step.kind in _SENT:
        _said.here.append(message)


def _exchange(ranks: tuple[int, ...], entry: Announced) -> dict[int, Announced]:
    """Each rank's entry. The keys of one exchange are deleted in the next one: whoever is there has read them."""
    if len(ranks) == 1:
        return {ranks[0]: entry}
    world.init()
    if dist.get_backend() == "fake":  # a pretended rank has nobody to compare with
        return {world.get_rank(): entry}
    me, store = world.get_rank(), attempt.store()
    number = _counts.here[ranks] = _counts.here.get(ranks, 0) + 1
    key, before = f"check/{ranks}/{number}", f"check/{ranks}/{number - 1}"
    try:
        store.set(f"{key}/{me}", json.dumps(asdict(entry)))
        store.set(f"{_AT}/{me}", json.dumps({"ranks": ranks, "number": number, "text": str(entry)}))
        found = {rank: entry if rank == me else _await(store, key, rank, ranks, entry) for rank in ranks}
        if number > 1:
            store.delete_key(f"{before}/{me}")
    except (RuntimeError, dist.DistError) as fault:
        if isinstance(fault, CommunicationError):
            raise
        raise CommunicationError(f"rank {me} cannot compare {entry}: another rank is gone ({fault})") from fault
    return found


def _await(store: Any, key: str, rank: int, ranks: tuple[int, ...], mine: Announced) -> Announced:
    begin, pause = time.monotonic(), 0.0005
    while not store.check([f"{key}/{rank}"]):
        waited = time.monotonic() - begin
        if waited > LOOK:
            where, certain = _whereabouts(store, rank, ranks)
            if certain or waited > world.TIMEOUT.total_seconds():
                wait = "" if certain else f" after {waited:.0f} s"
                _stop(
                    f"ranks are out of step: rank {world.get_rank()} waits for rank {rank}, which does not come{wait}\n"
                    f"  rank {world.get_rank()}: {mine}\n  rank {rank}: {where}\n{ADVICE}"
                )
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return Announced(**json.loads(store.get(f"{key}/{rank}")))


def _whereabouts(store: Any, rank: int, ranks: tuple[int, ...]) -> tuple[str, bool]:
    """Where a rank was last, and whether it is certain that it will not come: it ended, or waits for this one."""
    if not store.check([f"{_AT}/{rank}"]):
        return "has come to no collective yet", False
    at = json.loads(store.get(f"{_AT}/{rank}"))
    if at["ranks"] is None:
        return at["text"], True
    group = tuple(at["ranks"])
    waits = group != ranks and world.get_rank() in group and at["number"] > _counts.here.get(group, 0)
    return (f"waits in {at['text']}" if waits else f"was last in {at['text']}"), waits


def _stop(text: str) -> NoReturn:
    _tell("has stopped with an error: " + text.partition("\n")[0])
    raise CommunicationError(text)


def _leave() -> None:
    if _counts.here:
        _tell("has ended its program")


def _tell(text: str) -> None:
    """Tell the others that this rank comes no more, so that nobody waits for it."""
    with suppress(RuntimeError, ValueError, dist.DistError):
        store = attempt.store()
        store.set(f"{_AT}/{world.get_rank()}", json.dumps({"ranks": None, "text": text}))


ADVICE = (
    "Every rank must run the same operators in the same order, on tensors of the same whole shape. Look for a branch on the "
    "rank around something that communicates, and take it out:\n"
    "    value = loss.item()  # on every rank\n    if onecard.get_rank() == 0:\n        print(value)"
)


EQUAL = (
    "Make it equal: draw it after the same torch.manual_seed(...) on every rank, or take one rank's: "
    "onecard.shard_tensor(x, mesh, [onecard.Replicate()], src=0). If each rank holds a part: "
    "onecard.from_local(x, mesh, [onecard.Shard(0)])"
)


DTYPES = (
    "Only the dtypes differ: give every rank the same torch.set_default_dtype(...) and autocast, and cast what each loads: "
    "x.to(dtype)"
)
_DTYPE = re.compile(r"\b(?:(?:float|bfloat|int|uint|complex)\d+|bool)\b")


def _out_of_step(found: dict[int, Announced], cure: str = ADVICE) -> str:
    if len({_DTYPE.sub("", entry.call + entry.why) for entry in found.values()}) == 1:
        cure = DTYPES
    return f"ranks are out of step\n{listed({rank: str(entry) for rank, entry in found.items()})}\n{cure}"


def listed(found: dict[int, str]) -> str:
    """One line for each rank, those that say the same together."""
    sides: dict[str, list[int]] = {}
    for rank, words in sorted(found.items()):
        sides.setdefault(words, []).append(rank)
    return "\n".join(
        f"  rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {words}" for words, ranks in sides.items()
    )


def plain(operand: str, x: Tensor) -> Claim:
    """The claim of a plain tensor among distributed ones: it counts as equal on all ranks."""
    return Claim(f"the plain tensor {operand!r}{record.name_of(x)} {_kind(x)}", x, "counts as Replicate", EQUAL)


def _kind(x: Tensor) -> str:
    return f"{list(x.shape)} {_dtype(x)}"


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
