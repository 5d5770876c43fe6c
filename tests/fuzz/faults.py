"""Faults planted in right programs: does ``oc.prove`` find each, and name the operator?

    PYTHONPATH=tests python -m fuzz.faults                    # all, with a table by family
    PYTHONPATH=tests python -m fuzz.faults --only "tanh"      # those with a word in their name

A fault is one place of the library, or of a program, that is made wrong on the ranks, with the operator that must be named:
that of the first wrong value; of a gradient that no operator has made wrong, its parameter.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import tyro

import onecard as oc
from fuzz import fault_places
from fuzz import fault_programs as programs
from onecard import recorded
from onecard._torch.names import no_dispatch
from onecard.comm.base import record
from onecard.comm.joined.hub import Hub
from onecard.errors import ProofError
from onecard.proof.running import Case
from onecard.proof.seen import Entry
from onecard.proof.whole import apart
from onecard.rules import Form
from onecard.rules.registry import Row, rows

Plant = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        family, name: of it; program: right without it; world: on so many ranks; against: what one card runs, if not the same.
        plant: what makes it; where it is in the program itself, nothing.
        named: what must be named: an operator, or a result ("the gradient of 0.weight"); "": what the
            plant says; "*": the first value that is another one than without the fault.
    """

    family: str
    name: str
    program: Callable[[], Any]
    plant: Plant = nullcontext
    named: str = ""
    world: int = 2
    against: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """Whether a fault was found, and named rightly; ``idle``: it changed nothing, so that there is nothing to find."""

    found: bool
    named: bool
    said: str
    idle: bool = False


def tried(fault: Fault) -> Outcome:
    """Plant a fault and prove the program."""
    with warnings.catch_warnings(), fault.plant() as planted:
        warnings.simplefilter("ignore")
        try:
            proof = oc.prove(fault.program, world=fault.world, against=fault.against, rounding=False)
        except ProofError as error:
            return Outcome(False, False, f"ProofError: {error}"[:300])
    want = (fault.named or getattr(planted, "named", "")).removesuffix("_")  # of a write the values are the result's
    if isinstance(planted, Tamper) and not planted.struck:
        return Outcome(False, False, "", idle=True)
    if want == "*":
        return _placed(fault, proof)
    first = proof.first.operator if proof.first is not None else ""
    what = proof.wrong[0].what if proof.wrong else ""
    right = what.startswith(want) if " " in want else first == want
    if isinstance(planted, Tamper) and proof.first is not None:  # this very message, not another one of its kind
        right = right and any(all(word in said for word in planted.message) for said in proof.first.messages)
    return Outcome(not proof, not proof and right, f"want {want!r}, named {first!r}, first result {what!r}")


def _placed(fault: Fault, proof: oc.Proof) -> Outcome:
    want = first_wrong(fault)
    first = (proof.first.operator, proof.first.line) if proof.first is not None else ("", "")
    said = f"want {sorted(name for name, _ in want)}, named {first[0]!r}"
    return Outcome(not proof, not proof and first in want, said, idle=not want)


# -- messages ----------------------------------------------------------------------------------------------------------------


class Tamper:
    """Makes one message of a program another one.

    Args:
        number: of the message, among those that carry floats and matter; mode: see ``_given``.
    """

    def __init__(self, number: int, mode: str) -> None:
        self.number, self.mode, self.struck, self.named, self.message = number, mode, False, "", ""
        self._seen, self._before = 0, dict[Any, Any]()
        self._complete = Hub._complete

    @contextmanager
    def planted(self) -> Iterator[Tamper]:
        def wrong(hub: Hub, slot: Any, ranks: Any) -> None:
            with no_dispatch():  # no rank's work
                self._wrong(hub, slot, ranks)
            self._complete(hub, slot, ranks)

        self.struck, self._seen, self._before = False, 0, {}
        with mock.patch.object(Hub, "_complete", wrong):
            yield self

    def _wrong(self, hub: Hub, slot: Any, ranks: Any) -> None:
        posts = [slot.posts[i] for i in range(len(ranks))]
        first = posts[0]
        matters = (
            first.given and first.given[0].is_floating_point() and (first.agreed or ("",))[0] not in ("max", "min")
        )
        if len(ranks) > 1 and matters and first.given[0].abs().sum() > 0:
            self._seen += 1
            given = [list(post.given) for post in posts]
            if self._seen - 1 == self.number and self._spoil(posts, given):
                self.struck, serving = True, recorded.watcher.serving if recorded.watcher is not None else []
                self.named = serving[-1] if serving else first.kind
                number = hub._numbers[hub.baton.running, ranks] - 1  # of the last rank's, which has just come
                self.message = first.kind, f"among ranks {list(ranks)} (their message {number})"
            self._before[first.kind, tuple(x.shape for x in first.given)] = given

    def _spoil(self, posts: Any, given: Any) -> bool:
        """Give each rank other parts; False where that would change nothing."""
        changed = False
        for me, post in enumerate(posts):
            other = self._given(me, post, given)
            if other is None:
                return False
            changed = changed or any(
                float((a - b).abs().max()) > 1e-3 * float(b.abs().max()) for x, y in zip(other, given, strict=True)
                for a, b in zip(x, y, strict=True) if b.numel() and a.is_floating_point()
            )  # fmt: skip
            post.fill = lambda _, fill=post.fill, other=other: fill(other)
        return changed

    def _given(self, me: int, post: Any, given: Any) -> Any:
        def times(factor: Callable[[int], float]) -> Any:
            return [[x * factor(rank) if x.is_floating_point() else x for x in each] for rank, each in enumerate(given)]

        if self.mode == "missing":  # each has its own alone
            return times(lambda rank: float(rank == me))
        if self.mode == "lost":
            return times(lambda rank: float(rank != 1))
        if self.mode == "twice":
            return times(lambda rank: 2.0 if rank == 1 else 1.0)
        if self.mode == "mean":
            return times(lambda rank: 1.0 / len(given))
        if self.mode == "of another":
            summed = "reduce" in post.kind or "gradients" in record.serving.here[0]  # in whatever order
            return None if summed else [given[1], given[0], *given[2:]]
        return self._before.get((post.kind, tuple(x.shape for x in given[0])))  # "old"


MODES = ("missing", "twice", "mean", "of another", "old", "lost")


def messages() -> Iterator[Fault]:
    """Each message of some programs, in some of the modes."""
    for name, (program, world, count) in programs.SENDING.items():
        for number in range(count):
            for mode in MODES[number % 2 :: 2]:
                if mode == "of another" and "ZeRO" in name:
                    continue  # summands that come in parts may come in any order
                tamper = Tamper(number, mode)
                family = "messages of buckets" if name.startswith("ZeRO") else "messages"
                yield Fault(family, f"{name}: message {number} {mode}", program, tamper.planted, world=world)


# -- rules -------------------------------------------------------------------------------------------------------------------


def _row(name: str, form: Form, **options: Any) -> Plant:
    return lambda: mock.patch.dict(rows, {name: Row((name,), form, **options)})


def _without_hook(name: str) -> Plant:
    """A rule whose hook for parts is left out."""
    old = rows[name]
    return lambda: mock.patch.dict(rows, {name: Row((name,), old.form, None, None)})


def rules() -> Iterator[Fault]:
    """Wrong rows of the table."""
    for name, function in programs.NONLINEAR.items():
        yield Fault(
            "rules", f"a pending sum passes {name}", programs.pending(function),
            _row(name, Form("... -> ...", linear="self")), name,
        )  # fmt: skip
    for name, function in programs.PAIRS.items():
        yield Fault(
            "rules", f"pending sums meet in {name}", programs.pending_pair(function),
            _row(name, Form("..., ... -> ...", linear="self + other")), name,
        )  # fmt: skip
    for name, function in programs.ALONG.items():
        yield Fault(
            "rules", f"a cut dim passes {name}", programs.along(function), _row(name, Form("... -> ...")), name
        )  # fmt: skip
    for name, function in programs.LOCAL.items():
        yield Fault("rules", f"{name} without its hook", programs.along(function), _without_hook(name), name)
    for name, reduce in (("amax", "sum"), ("amin", "sum"), ("sum", "avg"), ("mm", "avg"), ("bmm", "avg")):
        yield Fault(
            "rules", f"{name} reduced by {reduce}", programs.reduced(name), _row(name, _reduced(name, reduce)), name
        )


def _reduced(name: str, op: str) -> Form:
    texts = {
        "mm": ("m k, k n -> m n", {}),
        "bmm": ("b m k, b k n -> b m n", {}),
        "sum": ("... dim:r -> ... dim:- *", {}),
    }
    text, _ = texts.get(name, ("... dim:r -> ... dim:- *", {}))
    return Form(text, reduce=op)


# -- places of the library ---------------------------------------------------------------------------------------------------


def places() -> Iterator[Fault]:
    """Places of the manual level, ZeRO, clipping, schedules and random numbers."""
    for family, name, program, world, owner, attribute, wrong in fault_places.places():
        right = getattr(owner, attribute)
        yield Fault(
            family, name, program, lambda o=owner, a=attribute, w=wrong, r=right: mock.patch.object(o, a, w(r)), "*", world
        )  # fmt: skip


def first_wrong(fault: Fault) -> set[tuple[str, str]]:
    """The operators, with their lines, that are the first to have other values than without the fault, on any rank.

    What a message brings to a rank is not the first, if another rank's own operator has made another value.
    """
    case = Case(fault.program, (), fault.world)
    right = case.ranks(True)
    with fault.plant():
        wrong = case.ranks(True)
    found = [_first(a.entries, b.entries) for a, b in zip(right, wrong, strict=True)]
    seen = [entry for entry in found if entry is not None]
    seen = [entry for entry in seen if entry.message is None] or seen
    least = min((entry.number for entry in seen), default=0)
    return {(entry.name, entry.line) for entry in seen if entry.number == least}


def _first(right: Sequence[Entry], wrong: Sequence[Entry]) -> Entry | None:
    for a, b in zip(right, wrong, strict=False):
        if (a.name, a.line, len(a.values)) != (b.name, b.line, len(b.values)):
            return b
        for x, y in zip(a.values, b.values, strict=True):
            same = (
                x.alike == y.alike
                and x.local.shape == y.local.shape
                and str(x.spec and x.spec.layout) == str(y.spec and y.spec.layout)
            )
            if not same or apart(x.local, y.local) > 1e-7:
                return b
    return None


def by_hand() -> Iterator[Fault]:
    """Programs of plain collectives with a mistake in them."""
    for family, name, program, against, named in programs.by_hand():
        yield Fault(family, name, program, named=named, against=against)


def all_faults() -> list[Fault]:
    """All of them."""
    return [*rules(), *messages(), *places(), *by_hand()]


@dataclass(frozen=True)
class Options:
    """Planted faults under ``oc.prove``; exit status 1 if too few are found or named."""

    only: str = ""
    """those with this in their family and name"""
    verbose: bool = False
    """say of each what was named"""


def main(options: Options) -> int:
    """Tries them and prints a table by family."""
    found, named, all_of, begun = Counter[str](), Counter[str](), Counter[str](), time.monotonic()
    for fault in all_faults():
        if options.only not in f"{fault.family}: {fault.name}":
            continue
        outcome = tried(fault)
        if outcome.idle:
            continue
        all_of[fault.family] += 1
        found[fault.family] += outcome.found
        named[fault.family] += outcome.named
        if options.verbose or not outcome.named:
            print(
                f"{fault.family}: {fault.name}: {'found' if outcome.found else 'NOT FOUND'}, {outcome.said}", flush=True
            )
    print(f"{'family':24}{'faults':>8}{'found':>8}{'named':>8}")
    for family, n in all_of.items():
        print(f"{family:24}{n:8}{found[family]:8}{named[family]:8}")
    total = max(all_of.total(), 1)
    print(
        f"{'all':24}{all_of.total():8}{found.total() / total:8.1%}{named.total() / total:8.1%}  {time.monotonic() - begun:.0f} s"
    )
    return int(found.total() < 0.99 * total or named.total() < 0.95 * total)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(tyro.cli(Options)))
