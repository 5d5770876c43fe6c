"""Shares: what the losses of microbatches weigh in the loss of the batch, which is what one card computes.

A loss is a sum over samples, tokens, elements, divided by how many of them count. Over what is not asked but seen: the loss is
called with a few rows of the labels, apart and together, and that divisor is its own under which the loss of all rows follows
from those of the parts. Candidates are the samples, nothing at all (a sum), and every number that the loss divides by and that
is computed from its labels alone: the labels that are not ignored, weights of classes, masks. Whether it is such a sum
is known by the rules of what it calls, where they know; and it is seen again wherever it calls something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard._torch.names import fakes, tree_leaves
from onecard.comm.base import record
from onecard.comm.base.state import Kept
from onecard.comm.base.warned import warn
from onecard.errors import ScheduleError
from onecard.pipeline.run.loss_calls import LossCalls, bends_sums
from onecard.pipeline.run.loss_probe import (
    HOW,
    NOTHING,
    SAMPLES,
    Divisor,
    LossProbe,
    agreed,
    apart,
    parts_of,
    untouched,
    without_rows,
)
from onecard.pipeline.run.traced import Made, Unknown
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.staged import is_elsewhere

SELDOM = 512  # a branch between microbatches is looked for in the steps 1, 2, 4, 8, ..., and in one of so many
OFTEN = 8  # steps in which the loss of the whole batch is compared
_GUARDS = ("eq", "ne", "isnan", "isinf", "isfinite", "where", "masked_fill")


class Shares:
    """Of one loss function: found out once, and again only where labels come that tell candidates apart.

    Args:
        loss_fn: (what the model returns, labels) -> one number.
    """

    def __init__(self, loss_fn: Callable[[Any, Any], Any]) -> None:
        self.loss_fn = loss_fn
        self._left: list[Divisor] | None = None
        self._numbers: list[Made] = []
        # Values that are no rows: where they differ, each is of its own microbatch.
        self._without_rows: list[Tensor] = []
        self._calls: tuple[int, Any] | None = None  # what the loss called when it was judged, with which shapes
        self._judged: dict[int, tuple[list[Divisor], list[Made], list[Tensor]]] = {}
        self._confirmed, self._seen = True, dict[int, tuple[float, float]]()
        self._told, self._fresh, self._sends, self._step = False, True, False, 0

    def lose(
        self, value: Any, i: int, parts: Sequence[Any], whole: Any, sizes: Sequence[int], weights: list[Any] | None
    ) -> tuple[Any, list[Any]]:
        """The loss of microbatch ``i``, None of one that weighs nothing, and what each weighs.

        Args:
            weights: what was found for a microbatch ahead of it; None of the first one. The rest as of ``of``.

        Raises:
            ScheduleError: see ``of``.
        """
        begins, fresh = weights is None, self._left is None
        weights = self.of(value, i, parts, whole, sizes) if weights is None else weights
        if begins and self._left is not None and len(parts) > 1 and not fakes():
            self._confirm(fresh, value, i, parts, whole, sizes, weights)
        counts = isinstance(weights[i], Tensor) or bool(weights[i])
        if self._left is None or len(parts) == 1 or recorded.recorder is not None or fakes():
            return self.loss_fn(value, parts[i]) if counts else None, weights
        if not counts and not begins:
            return None, weights
        if not begins:
            self._check_values(value)
        self._step += begins
        seldom = self._step & (self._step - 1) and self._step % SELDOM
        if not begins and (self._fresh or seldom):
            return self.loss_fn(value, parts[i]), weights
        shapes = [x.shape for x in tree_leaves(value) if isinstance(x, Tensor)]
        loss: Any = None
        # The first one says what the loss calls now, even where it weighs nothing by what it called before.
        with LossCalls(value, parts[i]) as calls, nullcontext() if counts else suppress(Exception):
            loss = self.loss_fn(value, parts[i])
        if begins:
            # What is called for the first time fills caches: its next microbatch may call less.
            self._fresh = calls.key not in self._judged
            if self._calls is not None and calls.key != self._calls[0] and not self._sends:
                weights = self._of_others(calls.key, value, i, parts, whole, sizes)
            self._calls = calls.key, shapes
            self._judged.setdefault(calls.key, (self._left, self._numbers, self._without_rows))
            while len(self._judged) > KNOWN:
                self._judged.pop(next(iter(self._judged)))
        elif calls.alone and self._calls is not None and (calls.key != self._calls[0] and shapes == self._calls[1]):
            self._tell_branch(i)
        if loss is None and weights[i]:  # it counts now, and what it was called for before was refused
            loss = self.loss_fn(value, parts[i])
        return (loss if weights[i] else None), weights

    def _of_others(
        self, key: int, value: Any, i: int, parts: Sequence[Any], whole: Any, sizes: Sequence[int]
    ) -> list[Any]:
        """The weights where the loss calls other operators than when it was judged, or with other settings."""
        if key in self._judged:
            self._left, self._numbers, self._without_rows = self._judged[key]
        else:
            self._judge(value, sizes[i], whole)
        return self.of(value, i, parts, whole, sizes)

    def _tell_branch(self, i: int) -> None:
        if not self._told:
            self._told = True
            warn(
                f"the loss calls other operators for microbatch {i} than for the first one: a branch on values goes by each "
                "microbatch's own, where one card asks the whole batch once. What is decided for the batch should be computed "
                "ahead of the step; what is for a row belongs in torch.where(condition, a, b)",
            )

    def _tell_bend(self, where: str) -> None:
        """Of what no value that was tried has shown; a guard (isfinite, a count that may be 0) is not to be shown."""
        if where.partition(" ")[0] not in _GUARDS:
            warn(
                f"whether the loss of a batch follows from those of its microbatches goes by values: {where}. It did for all "
                f"that were tried; where it does not, a pipeline computes another loss. If that is meant, {HOW}",
            )

    def _check_values(self, value: Any) -> None:
        """What has no rows, and differs between microbatches, is a mean over rows of each, which weighs as many."""
        now = map(_here, without_rows(value))
        if self._without_rows and not all(map(torch.equal, now, self._without_rows)):
            raise ScheduleError(
                "the loss is a mean over what its labels count, and an earlier stage hands on a number of its own for each "
                "microbatch (an auxiliary loss), which is a mean over rows: no weight fits both. Return the auxiliary values as "
                "one for each row, and take their mean with the same mask; or divide the loss by a number of the batch that the "
                f"labels hold for each row; or {HOW}"
            )

    def of(self, value: Any, i: int, parts: Sequence[Any], whole: Any, sizes: Sequence[int]) -> list[Any]:
        """The weight of each microbatch's loss: numbers, or tensors where a step is recorded.

        Args:
            value: what the model returns for microbatch ``i``.
            parts: the labels of the microbatches; ``whole``: those of the batch.
            sizes: rows of the microbatches.

        Raises:
            ScheduleError: the loss divides by something that nobody can know before all microbatches have run, or is no mean
                or sum over rows; says what to give.
        """
        by_samples = [size / sum(sizes) for size in sizes]
        if len(parts) == 1 or fakes() or any(x.is_meta for x in tree_leaves((value, whole)) if isinstance(x, Tensor)):
            return by_samples
        if self._left is None:
            self._judge(value, sizes[i], whole)
        try:
            found = self._weights(parts, whole, by_samples)
        except ScheduleError:  # labels of another kind than those that were seen
            found = []
        weights = agreed(found) if found else None
        if weights is None:
            saw = self._judge(value, sizes[i], whole)
            weights = agreed(self._weights(parts, whole, by_samples))
            if weights is None and not saw:  # all that was looked at has no loss: a batch that is ignored
                self._left = None
                return by_samples
            if weights is None:
                raise ScheduleError(
                    "what the loss is a mean over cannot be told from a few rows (it draws random numbers, is no number for "
                    f"them, or divides by a count that has a least value), and it matters for these labels: {HOW}"
                )
        return weights

    def _confirm(
        self,
        fresh: bool,
        value: Any,
        i: int,
        parts: Sequence[Any],
        whole: Any,
        sizes: Sequence[int],
        weights: list[Any],
    ) -> None:
        """Where rows are small the loss of the whole batch is compared, with its own labels: once it was judged, in the first
        steps and seldom later, and where a number comes up that was not seen. Ahead of the loss itself, whose results may be
        written to by its next call."""
        seldom = self._step >= OFTEN and self._step & (self._step + 1)
        is_due = self._is_new(whole) or not seldom
        if not fresh and self._confirmed and (self._sends or not is_due):  # what sends would have ranks look together
            return
        probe = LossProbe(self.loss_fn, value, sizes[i], whole)
        if not probe.is_small:
            return
        with recorded.unrecorded(), torch.no_grad(), untouched(self.loss_fn, probe.device), self._heard():
            if not fresh:  # what calls other operators now is judged first
                with LossCalls(value, parts[i]) as calls, suppress(Exception):
                    self.loss_fn(value, parts[i])
                if self._calls is None or calls.key != self._calls[0]:
                    return
            self._confirmed = True
            if not probe.confirms(parts, sizes, weights):
                raise ScheduleError(_APART.format(_NO_SUM))

    def _is_new(self, whole: Any) -> bool:
        """Whether a number that the loss divides by is less or more for these labels than it ever was where it was looked at."""
        new = False
        for i, number in enumerate(self._numbers[:8] if recorded.recorder is None and not fakes() else ()):
            try:
                value = float(number.value(tree_leaves(whole)))
            except (Unknown, TypeError, ValueError, RuntimeError):
                continue
            low, high = self._seen.get(i, (math.inf, -math.inf))
            new = new or not low <= value <= high
            self._seen[i] = min(low, value), max(high, value)
        return new

    def _weights(self, parts: Sequence[Any], whole: Any, by_samples: list[float]) -> list[list[Any]]:
        """Those of each divisor that is left."""
        made: list[list[Any]] = []
        for divisor in self._left or ():
            if divisor == SAMPLES:
                made.append(by_samples)
            elif divisor == NOTHING:
                made.append([1.0] * len(parts))
            else:
                made.append(parts_of(self._numbers[int(divisor)], parts, whole, by_samples))
        return made

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Notes whether a look at the loss sends: ranks would have to look together, and each decides by itself."""

        def hear(message: Any) -> None:
            self._sends = True

        record.observers.here.append(hear)
        try:
            yield
        finally:
            record.observers.here.remove(hear)

    # -- which divisor it is -------------------------------------------------------------------------------------------

    def _judge(self, value: Any, rows: int, whole: Any) -> bool:
        """Keep the divisors under which the loss of some rows follows from those of two parts; whether any had a loss."""
        self._confirmed, self._seen = False, {}
        probe = LossProbe(self.loss_fn, value, rows, whole)
        lone = without_rows(value)
        with recorded.unrecorded(), torch.no_grad(), untouched(self.loss_fn, probe.device), self._heard():
            trace = probe.first_look(rows)
            chosen, *others = apart(trace.divisors, whole, probe.count)
            trace, left = probe.fitting(*chosen)
            if left and not trace.blind:
                for fits in [probe.fitting(*pair)[1] for pair in others]:
                    left = left & fits if fits else left
            bends = "" if trace.blind else bends_sums(self.loss_fn, value, whole, rows, probe.count)
            if lone and left and not trace.blind:
                probe.means = True
                means = probe.fitting(*chosen)[1]
                left, lone = (left & means, []) if means and left & means else (left, lone)
                probe.means = False
            if bends and left and not probe.unfits(left, *chosen):
                self._tell_bend(bends)
                bends = ""
        if trace.blind:
            raise ScheduleError(
                f"the loss divides by {trace.blind}, of which each microbatch has its own: {HOW}. "
                "No weight makes a loss that compares rows with each other (a contrastive one) that of one card"
            )
        self._numbers, self._without_rows = trace.divisors, [_here(x).clone() for x in lone]
        every: list[Divisor] = [*range(len(trace.divisors)), SAMPLES, NOTHING]
        self._left = every[:-1] if left is None else [d for d in every if d in left]
        if probe.moves and not self._left:
            raise ScheduleError(
                "the loss gives another number when it is called again with the same rows: it keeps something (a counter, a "
                "running mean), of which there is one for each step on one card, and one for each microbatch in a "
                f"pipeline. Keep it outside of the loss, and change it once a step. If that is meant, {HOW}"
            )
        if bends or not self._left:
            raise ScheduleError(_APART.format(": ".join(filter(None, ("" if self._left else _NO_SUM, bends)))))
        return probe.saw


_NO_SUM = (
    "it is no sum over rows that is divided by their number, or by one number computed from the labels (but by several, or it "
    "takes a root, compares rows, or takes a largest number or a variance of all)"
)
_APART = (
    "the loss of a batch does not follow from those of its microbatches: {}, so that a pipeline, which has one microbatch at a "
    f"time, computes another loss. If that is meant, {HOW}"
)
KNOWN = 16
_known: Kept[dict[Any, Shares]] = Kept(dict)


def shares_of(loss_fn: Callable[[Any, Any], Any]) -> Shares:
    """Those of a loss that comes again: a function written in the loop is a new one each time, of the same code and values."""
    code = getattr(loss_fn, "__code__", None)
    held = [cell.cell_contents for cell in getattr(loss_fn, "__closure__", None) or ()]
    held += [
        *(getattr(loss_fn, "__defaults__", None) or ()),
        *(getattr(loss_fn, "__kwdefaults__", None) or {}).values(),
    ]
    key = id(loss_fn) if code is None else (code, id(getattr(loss_fn, "__self__", None)), *map(id, held))
    found = _known.here.pop(key, None)
    if found is None:
        found = Shares(loss_fn)
        while len(_known.here) >= KNOWN:
            _known.here.pop(next(iter(_known.here)))
    found.loss_fn = loss_fn
    _known.here[key] = found  # and so what its key names is alive
    return found


def _here(x: Tensor) -> Tensor:
    """What of it lies on this rank, in each microbatch alike; nothing of what lies elsewhere."""
    local = x._local if isinstance(x, DistTensor) else x.detach()
    return torch.zeros((), device="cpu") if is_elsewhere(local) else local
