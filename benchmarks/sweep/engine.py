"""One rank of the sweep: every operator under every placement, against what one card gives.

Ranks run the same list. After each case they compare how it ended over a process group of their own, so that an
operator that fails on one rank only is found at once; one that hangs is ended by a timer, and the parent goes on
behind it in fresh processes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map

from onecard import to_static
from onecard.static.run import rechecked
from sweep.compare import difference
from sweep.libraries import Library, make
from sweep.samples import (
    RANDOM,
    SEED_OF_DATABASE,
    VALUELESS,
    Placing,
    Sample,
    operators,
    placings,
    samples,
    title,
    unseeded,
    variants,
    with_other_values,
)

STATES = ("right", "refused", "wrong", "crashed", "one-sided", "hung")

REPLAYS_ONLY = patch.object(rechecked, "next_check", lambda call: 1 << 62)
"""Inside, a recording is not compared with its step: its third call would be no replay."""


@dataclass
class Options:
    """What a rank runs."""

    library: str = "onecard"
    dtype: str = "float32"
    samples: int = 3
    placings: int = 8
    partial: bool = False
    seconds: float = 20.0
    """for one case, before it counts as hung"""


@dataclass
class Outcome:
    """What became of one operator: the worst of its cases."""

    name: str
    dtype: str
    state: str = "right"
    how: str = "ruled"
    cases: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    def note(self, state: str, text: str) -> None:
        self.cases += 1
        self.counts[state] = self.counts.get(state, 0) + 1
        if STATES.index(state) > STATES.index(self.state):
            self.state = state
        if state != "right" and (len(self.faults) < 8 or state not in ("refused",)):
            self.faults = (self.faults + [f"{state}: {text}"])[:24]


def run(names: Sequence[str], options: Options, path: str) -> None:
    """Entry point of a rank: write one line of JSON for each operator begun and each one finished."""
    warnings.simplefilter("ignore")
    library = make(options.library)
    control = dist.new_group(backend="gloo")
    dtype = getattr(torch, options.dtype)
    table = {title(op): op for op in operators(dtype)}
    if library.replays:  # each recording looks at all objects of the process; those of the database are most of them
        gc.collect()
        gc.freeze()
    with open(f"{path}.{dist.get_rank()}", "a", buffering=1) as out:
        for count, name in enumerate(names):
            if count % 20 == 0 and dist.get_rank() == 0:
                print(f"{options.library} {options.dtype}: {len(names) - count} operators to go")
            print(json.dumps({"begin": name}), file=out)
            outcome = sweep_operator(table[name], dtype, library, control, options, out)
            print(json.dumps(asdict(outcome)), file=out)
            if outcome.state == "one-sided":
                return  # the ranks may be out of step: the parent starts fresh ones


def sweep_operator(
    op: Any, dtype: torch.dtype, library: Library, control: Any, options: Options, out: TextIO
) -> Outcome:
    """Run one operator in all its cases."""
    outcome, start = Outcome(title(op), options.dtype), time.monotonic()
    with library.watch() as seen:
        for text, case in _cases(op, dtype, library, options):
            print(json.dumps({"case": text}), file=out)
            faulthandler.dump_traceback_later(options.seconds, exit=True, file=sys.stderr)
            state, why = _attempt(case, library)
            state, why = _agreed(state, why, control)
            faulthandler.cancel_dump_traceback_later()
            outcome.note(state, f"{text}: {why}")
            if state == "one-sided":
                break
    for how in ("gathered", "decomposed"):
        if how in seen:
            outcome.how = how
            break
    outcome.seconds = time.monotonic() - start
    return outcome


def _attempt(case: Callable[[], str], library: Library) -> tuple[str, str]:
    try:
        why = case()
    except library.refusals as error:
        return "refused", f"{type(error).__name__}: {_first_lines(error)}"
    except Exception as error:  # whatever an operator raises is a finding
        return "crashed", f"{type(error).__name__}: {_first_lines(error)}"
    return ("wrong", why) if why else ("right", "")


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:240]


def _agreed(state: str, why: str, control: Any) -> tuple[str, str]:
    """The worse of the ranks' states; "one-sided" if one raised and another did not, or they sent unequally."""
    sent = dist.group.WORLD._get_sequence_number_for_group()
    mine = torch.tensor([STATES.index(state), sent])
    all_of = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of, mine, group=control)
    states = [STATES[int(t[0])] for t in all_of]
    raised = [s in ("refused", "crashed") for s in states]
    if any(raised) and not all(raised):
        return "one-sided", f"{states} {why}"
    if len({int(t[1]) for t in all_of}) > 1:
        return "one-sided", f"unequal numbers of collectives; {states} {why}"
    worst = max(states, key=STATES.index)
    return worst, why if worst == state else f"on another rank ({state} here)"


def _cases(op: Any, dtype: torch.dtype, library: Library, options: Options) -> Iterator[tuple[str, Callable[[], str]]]:
    for number, sample in enumerate(samples(op, dtype, options.samples)):
        for form, function in variants(op):
            if form and number:
                continue
            expected = _expected(function, sample, bool(form), op.name)
            if expected is None:
                continue
            if op.name.startswith(RANDOM):
                expected = _drawn(function, sample, expected, library)
            others = with_other_values(sample, dtype, function) if library.replays else ()
            limit = options.placings if not form else 3
            for placing in placings(sample.tensors, limit, options.partial):
                text = f"{form} {_words(sample, placing)}".strip()
                yield text, Case(function, sample, placing, expected, library, bool(form), others)
        if op.supports_out and not number:
            yield from _out_cases(op, sample, dtype, library)


def _words(sample: Sample, placing: Placing) -> str:
    def one(t: Tensor, p: Any) -> str:
        kind = (
            "plain" if p is None else "R" if isinstance(p, Replicate) else f"S{p.dim}" if isinstance(p, Shard) else "P"
        )
        return f"{list(t.shape)}:{kind}"

    return " ".join(one(t, p) for t, p in zip(sample.tensors, placing, strict=True))


@dataclass
class Expected:
    """What one card gives: the result, the gradients of the tensors that ask for one, what is comparable."""

    result: Any
    after: list[Tensor]
    grads: list[Tensor | None] | None
    weights: list[Tensor]
    values: bool


def _call(function: Callable[..., Any], sample: Sample, tensors: Sequence[Tensor]) -> Any:
    torch.manual_seed(1)
    return sample.run(function, tensors)


def _expected(function: Callable[..., Any], sample: Sample, inplace: bool, name: str) -> Expected | None:
    """One card's answer, or None if one card refuses the sample."""
    try:
        leaves = [_leaf(t, sample.grad and not inplace) for t in sample.tensors]
        result = _call(function, sample, leaves)
        after = [t.detach().clone() for t in leaves]
        torch.manual_seed(2)
        again = sample.run(function, [_leaf(t, False) for t in sample.tensors])
    except Exception:
        return None
    values = name not in VALUELESS and not difference(_detached(again), _detached(result))
    kept = _snapshot(result)
    grads, weights = None, []
    if sample.grad and not inplace:
        with contextlib.suppress(Exception):  # no gradient on one card, none asked of others
            grads, weights = _gradients(sample.finish(result), leaves, None)
    return Expected(kept, after, grads, weights, values)


def _drawn(function: Callable[..., Any], sample: Sample, expected: Expected, library: Library) -> Expected:
    """What the library itself draws where everything is replicated, if that has the right shape: the reference then."""
    placing = (Replicate(),) * len(sample.tensors)
    case = Case(function, sample, placing, expected, library, expected.grads is None)
    try:
        placed = case.placed()
        result = _call(function, sample, placed)
        whole = _snapshot(case.whole(result))
        if difference(whole, expected.result, values=False):
            return expected
        grads = None
        if expected.grads is not None:
            found, _ = _gradients(sample.finish(result), placed, expected.weights, case.replicate)
            grads = case.whole(found)
        after = [_snapshot(case.whole(t)) for t in placed]
    except Exception:  # the cases will show it
        return expected
    return Expected(whole, after, grads, expected.weights, expected.values)


def _leaf(t: Tensor, grad: bool) -> Tensor:
    return t.detach().clone().requires_grad_(grad and t.requires_grad)


def _detached(value: Any) -> Any:
    return tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, value)


def _snapshot(value: Any) -> Any:
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)


def _gradients(
    result: Any, leaves: Sequence[Tensor], weights: list[Tensor] | None, place: Callable[[Tensor], Tensor] | None = None
) -> tuple[list[Tensor | None], list[Tensor]]:
    """Gradients of a weighted sum of all results, with the weights, drawn if None."""
    outputs = [v for v in tree_flatten(result)[0] if isinstance(v, Tensor) and v.requires_grad]
    wanted = [t for t in leaves if t.requires_grad]
    if not outputs or not wanted:
        raise ValueError("nothing to differentiate")
    if weights is None:
        generator = torch.Generator().manual_seed(3)
        weights = [torch.randn(v.shape, generator=generator, dtype=v.dtype) for v in outputs]
    total: Any = 0
    for value, weight in zip(outputs, weights, strict=True):
        part = (value * (weight if place is None else place(weight))).sum()
        total = total + (part.abs() if part.is_complex() else part)
    grads = torch.autograd.grad(total, wanted, allow_unused=True)
    return list(grads), weights


@dataclass
class Case:
    """One call under one placing; calling it says what is wrong, "" if nothing."""

    function: Callable[..., Any]
    sample: Sample
    placing: Placing
    expected: Expected
    library: Library
    inplace: bool
    others: Sequence[Tensor] = ()
    """with other values, for the calls ahead of a replay"""

    def __call__(self) -> str:
        expected = self.expected
        if self.library.replays:
            return self._replayed()
        placed = self.placed()
        result = _call(self.function, self.sample, placed)
        whole = self.whole(result)
        random = not expected.values
        why = difference(whole, expected.result, values=not random)
        if why:
            return why
        if self.inplace:
            why = difference(self.whole(list(placed)), expected.after, values=not random)
            return f"the operand after the call: {why}" if why else ""
        if expected.grads is None or random:
            return ""
        grads, _ = _gradients(self.sample.finish(result), placed, expected.weights, self.replicate)
        why = difference(self.whole(grads), expected.grads)
        return f"gradient: {why}" if why else ""

    def _replayed(self) -> str:
        """The same of a recorded step's third call, which is a replay. The calls before it are given other values."""
        expected, random = self.expected, not self.expected.values
        weights = {id(w): self.replicate(w) for w in expected.weights}
        wants = expected.grads is not None and not self.inplace and not random

        def step(*tensors: Tensor) -> Any:
            result = self.sample.run(self.function, tensors)
            if not wants:
                return _detached(result), None
            grads, _ = _gradients(self.sample.finish(result), tensors, expected.weights, lambda w: weights[id(w)])
            return _detached(result), grads

        recorded, seed = to_static(step), 1
        for given in (self.others, self.others, self.sample.tensors):
            placed = self.placed(given)
            torch.manual_seed(seed)
            with unseeded() as seeded_by_database, REPLAYS_ONLY:
                result, grads = recorded(*placed)
            seed = SEED_OF_DATABASE if seeded_by_database else 1
        if len(recorded.recordings) != 1:
            return "it is not replayed"
        if why := difference(self.whole(result), expected.result, values=not random):
            return why
        if self.inplace and (why := difference(self.whole(list(placed)), expected.after, values=not random)):
            return f"the operand after the call: {why}"
        why = difference(self.whole(grads), expected.grads) if wants else ""
        return f"gradient: {why}" if why else ""

    def placed(self, tensors: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The tensors of the sample, or others in their places, laid out."""
        placed = []
        for t, p in zip(self.sample.tensors if tensors is None else tensors, self.placing, strict=True):
            leaf = _leaf(t, not self.inplace)
            if p is None and not self.library.takes_plain:
                p = Replicate()
            placed.append(leaf if p is None else self.library.place(leaf, p))
        return placed

    def replicate(self, weight: Tensor) -> Tensor:
        """A replicated tensor."""
        return self.library.place(weight, Replicate())

    def whole(self, value: Any) -> Any:
        """A result with every distributed tensor gathered."""
        kind = self.library.tensor
        return tree_map(lambda v: self.library.whole(v) if isinstance(v, kind) else _plain(v), value)


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _out_cases(
    op: Any, sample: Sample, dtype: torch.dtype, library: Library
) -> Iterator[tuple[str, Callable[[], str]]]:
    """op(..., out=): for one result tensor, into a tensor cut along its first dim."""
    bare = Sample([_leaf(t, False) for t in sample.tensors], sample.run, sample.finish, False)
    expected = _expected(op.op, bare, True, op.name)
    if expected is None or not isinstance(expected.result, Tensor):
        return
    if op.name.startswith(RANDOM):
        expected = _drawn(op.op, bare, expected, library)
    shape, dtype = expected.result.shape, expected.result.dtype

    def with_out(*args: Any, **kwargs: Any) -> Any:
        blank = torch.zeros(shape, dtype=dtype)
        out = library.place(blank, Shard(0) if blank.dim() else Replicate())
        result = op.op(*args, **kwargs, out=out)
        if result is not out:
            raise AssertionError("out= did not return its argument")
        return out

    try:  # does one card know out= for this sample?
        bare.run(lambda *a, **k: op.op(*a, **k, out=torch.zeros(shape, dtype=dtype)), bare.tensors)
    except Exception:
        return
    for placing in placings(bare.tensors, 1, False):
        if None not in placing:
            others = with_other_values(bare, dtype, op.op) if library.replays else ()
            yield f"out= {_words(bare, placing)}", Case(with_out, bare, placing, expected, library, True, others)
