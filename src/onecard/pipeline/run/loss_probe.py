"""A loss, called with a few rows: from what it gives follows what it is a mean over."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onecard import recorded
from onecard._torch.names import tree_leaves, tree_map
from onecard.comm.base.state import random_state
from onecard.errors import ScheduleError
from onecard.pipeline.run.loss_calls import LARGE
from onecard.pipeline.run.stage import one_number
from onecard.pipeline.run.traced import Made, Trace, Unknown
from onecard.tensor.convert import unshard
from onecard.tensor.dist_tensor import DistTensor
from onecard.train.modules.python_state import PythonState
from onecard.train.modules.second_run import modules_of

WAVE = 997  # numbers that stand-ins repeat
ROWS = 128  # of the labels, among which two are looked for that count for more and for less
SAMPLES, NOTHING = "samples", "nothing"
Divisor = str | int  # the i-th number that the loss was seen to divide by

HOW = (
    "say what a microbatch's loss is a mean over, a function of its labels: loss_weight=lambda labels: (labels != -100).sum(), "
    "or loss_weight=len for samples"
)


class LossProbe:
    """A loss, called with a few rows of labels and values that stand in for what the model returns: ramps within (0, 1), which
    are logits and probabilities alike."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any], value: Any, rows: int, whole: Any) -> None:
        self.loss_fn, self.value, self.rows, self.whole = loss_fn, value, rows, whole
        self.count = next((len(x) for x in tree_leaves(whole) if isinstance(x, Tensor) and x.dim()), 1)
        first = next((x for x in tree_leaves(value) if isinstance(x, Tensor)), None)
        self.device = torch.device("cpu") if first is None else first.device
        each = [x.numel() // max(rows, 1) for x in tree_leaves(value) if isinstance(x, Tensor)]
        small = max(each, default=0) <= LARGE  # what is large costs less in float32
        self.dtypes: list[torch.dtype | None] = [*([torch.float64] if small else []), torch.float32, None]
        """Of the numbers; the first that the loss takes. None: those that it gets."""
        self.tolerance = 0.0
        # What stand-ins are multiplied by, and what is added; and where their wave begins.
        self.affine, self.phase = (1.0, 0.0), 0.0
        self.saw = False  # whether any of the rows had a loss
        self.moves = False  # whether the same rows give another number when they come again
        self.means = False  # whether what has no rows is a mean over them, and not the same for all

    def first_look(self, rows: int) -> Trace:
        """What the loss divides by, of two rows; of those of a microbatch where a guard of its own does not let these."""
        dtypes = [*self.dtypes]
        try:
            return self.look([0, self.count - 1], (0, 2))[1]
        except ScheduleError:
            self.dtypes = dtypes
            some = min(rows, self.count, _OFTEN)
            return self.look([*range(some)], (0, some))[1]

    def fitting(self, p: int, q: int) -> tuple[Trace, set[Divisor] | None]:
        """The divisors that explain the loss of a few rows by those of two parts of them; None: nothing can be seen.

        Each row is once the one that is alone, or what is taken of all rows (a largest number) may be the same in both parts.
        What a single row has none of (a variance) is seen of two and two.
        """
        if not self._begins(p):  # by a row that has no loss every rule adds up
            p, q = q, p
        found = [self._tried([p], [p, q]), self._tried([q], [q, p])]
        if any(fits is None for _, fits in found):
            found.append(self._tried([p, q], [p, q]))
        seen = [(trace, fits) for trace, fits in found if fits is not None and trace is not None]
        if seen:
            return seen[0][0], set.intersection(*(fits for _, fits in seen))
        trace = next((trace for trace, _ in found if trace is not None), None)
        return (trace, None) if trace is not None else self._explaining([p], [p, q])  # and its error

    def _begins(self, p: int) -> float:
        """The loss of a row alone, and whether it is another one when it is asked for again; 0 of what it does not take."""
        dtypes = [*self.dtypes]
        try:
            once, again = (self.look([p], (0, 1))[0] for _ in range(2))
        except ScheduleError:
            self.dtypes = dtypes
            return 0.0
        self.moves = abs(once - again) > self.tolerance * (abs(once) + abs(again))
        self.saw = self.saw or (math.isfinite(once) and once != 0)
        return once

    def _tried(self, some: list[int], more: list[int]) -> tuple[Trace | None, set[Divisor] | None]:
        """As ``_explaining``; (None, None) of rows that the loss does not take: a guard of its own may not let them."""
        dtypes = [*self.dtypes]
        try:
            return self._explaining(some, more)
        except ScheduleError:
            self.dtypes = dtypes
            return None, None

    def _explaining(self, some: list[int], more: list[int]) -> tuple[Trace, set[Divisor] | None]:
        """The divisors that explain the loss of some rows and more by those of each."""
        begin, end = len(some), len(some) + len(more)
        groups = {(0, begin): some, (begin, end): more, (0, end): some + more}
        found = [self.look(group, part) for part, group in groups.items()]
        (one, two, three), trace = (loss for loss, _ in found), found[-1][1]
        self.saw = self.saw or any(math.isfinite(x) and x for x in (one, two, three))
        if not all(map(math.isfinite, (one, two, three))):
            trace.blind = trace.blind or trace.chooses
            return trace, None
        near = self.tolerance * (abs(one) + abs(two) + abs(three))
        fits = set[Divisor]()
        for divisor in (*range(len(trace.divisors)), SAMPLES, NOTHING):
            a, b, both = self._sizes(trace, divisor, list(groups.values()))
            if both and abs((a * one + b * two) / both - three) <= near:
                fits.add(divisor)
        if NOTHING not in fits or not one:  # a row that has no loss adds up by every rule
            trace.blind = trace.blind or trace.chooses
        return trace, fits

    @property
    def is_small(self) -> bool:
        """Whether the loss of the whole batch costs little."""
        each = max(
            (x.numel() // max(self.rows, 1) for x in tree_leaves(self.value) if isinstance(x, Tensor)), default=0
        )
        return each * self.count <= 4 * LARGE

    def confirms(self, parts: Sequence[Any], sizes: Sequence[int], weights: Sequence[Any]) -> bool:
        """Whether the loss of the batch follows from those of its microbatches, with these weights; False only if not."""
        if any(isinstance(w, Tensor) for w in weights):
            return True
        total, begin = 0.0, 0
        try:
            for part, size, weight in zip(parts, sizes, weights, strict=True):
                if weight:
                    total += weight * self._called(part, (begin, begin + size))[0]
                begin += size
            whole = self._called(self.whole, (0, begin))[0]
        except Exception:  # what a loss does not take is said where it was judged
            return True
        near = max(self.tolerance, _WEIGHED) * (abs(total) + abs(whole))
        return not math.isfinite(total - whole) or abs(total - whole) <= near

    def unfits(self, left: Collection[Divisor], p: int, q: int) -> bool:
        """Whether values of other sizes show that none of these divisors fits: those of rows on both sides of a bend."""
        for number, self.affine in enumerate(_AFFINE):
            self.phase = 0.9 * number
            dtypes = [*self.dtypes]
            try:
                fits = self.fitting(p, q)[1]
            except ScheduleError:  # such values it does not take
                fits = None
            self.dtypes = dtypes
            if fits is not None and fits.isdisjoint(left):
                return True
        return False

    def _sizes(self, trace: Trace, divisor: Divisor, groups: list[list[int]]) -> list[float]:
        if not isinstance(divisor, int):
            return [float(len(group)) if divisor == SAMPLES else 1.0 for group in groups]
        try:
            made = trace.divisors[divisor]  # in the loss' own precision: weights among the labels
            labels = [tree_map(self._widened, _chosen(self.whole, group)) for group in groups]
            return [float(made.value(tree_leaves(each))) for each in labels]
        except Unknown:
            return [0.0, 0.0, 0.0]

    def look(self, group: list[int], part: tuple[int, int]) -> tuple[float, Trace]:
        """The loss of some rows, and what it divided by. In float64, unless something in it is of another dtype."""
        try:
            return self._called(_chosen(self.whole, group), part)
        except ScheduleError:
            raise
        except Exception as fault:
            if len(self.dtypes) == 1:
                raise ScheduleError(
                    f"loss_fn cannot be called with {len(group)} of {self.count} rows ({type(fault).__name__}: "
                    f"{str(fault)[:200]}), so that nobody sees what it is a mean over: {HOW}"
                ) from fault
            del self.dtypes[0]
            return self.look(group, part)

    def _called(self, labels: Any, part: tuple[int, int]) -> tuple[float, Trace]:
        values = tree_map(lambda x: self._stand_in(x, part) if isinstance(x, Tensor) else x, self.value)
        labels = tree_map(self._widened, labels)
        before = _drawn_from()
        with torch.autocast(self.device.type, enabled=False), Trace(values, labels) as trace, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of so few rows: the loss of a microbatch gives them again
            loss = self.loss_fn(values, labels)
        loss = one_number(unshard(loss) if isinstance(loss, DistTensor) else loss)
        self.tolerance = _NEAR.get(loss.dtype, 2e-2)
        drawn = not all(map(torch.equal, before, _drawn_from()))
        self.saw = self.saw or drawn
        return math.nan if drawn else float(loss), trace

    def _widened(self, x: Any) -> Any:
        return x.to(self.dtypes[0]) if self.dtypes[0] and isinstance(x, Tensor) and x.is_floating_point() else x

    def _stand_in(self, x: Tensor, part: tuple[int, int]) -> Tensor:
        begin, end = part
        each, rest = divmod(x.shape[0], self.rows) if x.dim() else (0, 1)
        shape = list(x.shape) if rest else [end * each, *x.shape[1:]]
        dtype = (self.dtypes[0] or x.dtype) if x.is_floating_point() else x.dtype
        if not x.is_floating_point():
            made = torch.zeros(shape, dtype=dtype, device=x.device)
        else:
            few = (
                torch.arange(WAVE, dtype=torch.float64, device="cpu")
                .mul_(1.7)
                .add_(self.phase)
                .sin_()
                .to(x.device, dtype)
            )
            count, shares = math.prod(shape), 1 if rest else end
            wave = few.repeat(-(-count // WAVE))[:count].view(shares, -1)
            places = torch.arange(shares, device=x.device) % len(_PLACES)
            middle, high = torch.tensor(_PLACES, dtype=dtype, device=x.device)[places].T
            made = wave.mul_(high[:, None]).add_(middle[:, None]).view(shape)
            made = made.mul_(self.affine[0]).add_(self.affine[1])
        if not x.dim() and self.means and x.is_floating_point():
            return made + 0.1 * sum(range(begin, end)) / (end - begin)
        return made if rest else made[each * begin : each * end]


def _affine(i: int) -> tuple[float, float]:
    """A factor and a summand: every other one leaves numbers within (0, 1), probabilities still."""
    u, v = i * 0.6180339887 % 1, i * 0.7548776662 % 1
    if i % 2:
        return 0.05 + 0.9 * u, (0.95 - 0.9 * u) * v
    return 10 ** (4 * u - 1.5), (2 * v - 1) * 10 ** (4 * u - 1.5)


_PLACES = ((0.35, 0.05), (0.5, 0.3), (0.65, 0.15), (0.4, 0.2))
"""Around which number the stand-ins of a row lie, and how far off."""
_AFFINE = tuple(map(_affine, range(96)))
_NEAR = {torch.float64: 1e-6, torch.float32: 5e-6}
"""Within which numbers of a dtype are the same: losses in float64, too, may have parts in float32."""
_WEIGHED = 2e-5  # the same of a batch, of which the weights are summed in the labels' own precision
_OFTEN = 8  # times that a row is taken, to see whether a count with a least value (clamp(min=1)) knows it


def without_rows(value: Any) -> list[Tensor]:
    """Of a value what is one number, which may be another one for each microbatch."""
    return [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point() and not x.dim()]


def _chosen(labels: Any, rows: list[int]) -> Any:
    return tree_map(lambda x: x[rows] if isinstance(x, Tensor) else x, labels)


def apart(divisors: Sequence[Made], whole: Any, count: int) -> list[tuple[int, int]]:
    """A row that counts for much, and one that counts for less; if all count alike the first and the last.

    Of several divisors also pairs that count for something, as much by one of them, and not so by another.
    """
    found, more = list[tuple[int, int]](), list[tuple[int, int]]()
    for number in divisors:
        some = range(0, count, -(-count // ROWS))
        try:
            sizes = {i: float(number.value(tree_leaves(_chosen(whole, [i] * _OFTEN)))) for i in some}
        except Unknown:
            continue
        for pairs, rows in ((found, sizes), (more, {i: n for i, n in sizes.items() if n})):
            p, q = max(rows, key=sizes.__getitem__, default=0), min(rows, key=sizes.__getitem__, default=0)
            if sizes[p] != sizes[q]:
                pairs.append((p, q))
    first = found[0] if found else (0, count - 1)
    return [first, *(pair for pair in dict.fromkeys(more) if len(divisors) > 1 and pair != first)]


def _drawn_from() -> list[Tensor]:
    """The states of the generators, the GPUs' too."""
    return [x for x in tree_leaves(random_state()) if isinstance(x, Tensor)]


@contextmanager
def untouched(loss_fn: Any, device: torch.device) -> Iterator[None]:
    """Inside, a loss may draw, write to its buffers, and change what it holds (lists, counters): all is put back."""
    kept = [(b, b.clone()) for b in loss_fn.buffers()] if isinstance(loss_fn, nn.Module) else []
    state = PythonState(modules_of(loss_fn), _held(loss_fn))
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        state.keep_changed()
        state.begin()
        for buffer, before in kept:
            if not torch.equal(buffer, before):
                buffer.copy_(before)


def _held(function: Any) -> list[Any]:
    """What a function has at hand: its object, its closure, what of its file it names."""
    found = [function, getattr(function, "__self__", None)]
    if isinstance(function, partial):
        found += [*function.args, *function.keywords.values(), *_held(function.func)]
    code = getattr(function, "__code__", None)
    if code is not None:
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # one that is still empty
                found.append(cell.cell_contents)
        found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        found += [function.__globals__.get(name) for name in code.co_names]
    return found


def parts_of(number: Made, parts: Sequence[Any], whole: Any, by_samples: list[float]) -> list[Any]:
    """What each part has of a number."""
    try:
        counts = [number.value(tree_leaves(labels)) for labels in (*parts, whole)]
    except Unknown as fault:
        raise ScheduleError(f"what the loss divides by cannot be computed for these labels ({fault}): {HOW}") from fault
    if recorded.recorder is not None and recorded.recorder.listens:
        return [count / counts[-1] for count in counts[:-1]]
    *each, total = torch.stack([c.double() for c in counts]).tolist()
    return [one / total for one in each] if total else by_samples  # of nothing: the loss is no number, as on one card


def agreed(found: Sequence[list[Any]]) -> list[Any] | None:
    """The weights that all of these are; of tensors, in a recording, the first. None: they differ.

    A microbatch that weighs nothing by one of them has no loss, whatever it weighs by the others.
    """
    plain = [weights for weights in found if not any(isinstance(w, Tensor) for w in weights)]
    if len(plain) < len(found):
        return found[0]
    pairs = [(a, b) for weights in plain[1:] for a, b in zip(plain[0], weights, strict=True) if a and b]
    if not all(math.isclose(a, b, rel_tol=1e-6) for a, b in pairs):
        return None
    return max(plain, key=lambda weights: weights.count(0.0))
