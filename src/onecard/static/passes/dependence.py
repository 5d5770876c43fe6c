"""How a value of a step depends on the rows of its batch: what is said of each tensor, and of a whole step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

ROWS, ADDS, ALIKE, COUNT, MIXED, UNKNOWN, PLACES = "rows", "adds", "alike", "count", "mixed", "unknown", "places"
ORDER, SINGLE = "order", "single"
COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")


@dataclass(frozen=True, slots=True)
class Entries:
    """The ``length`` entries of a dim of rows, as ``Kind`` says how these lie in it, that numbers name."""

    order: int
    before: int
    size: int
    length: int


@dataclass(frozen=True, slots=True)
class Kind:
    """How a tensor depends on the rows of the batch.

    Attributes:
        how: ROWS: it has one for each (in ``dim``, as the factor of ``size`` with ``before`` combinations of others ahead of it).
            ADDS: the batch's is the sum of the microbatches' (``degree`` 1), or the mean (0). ALIKE: no row has a value of its
            own, along ``dims`` (None: along all), and along such a factor of ``dim`` if it has a ``size``. PLACES: the numbers
            of the rows. COUNT: of the batch alone, no parameter in it. ORDER: numbers of entries (``points``) of a dim of rows,
            where ``dim`` is. MIXED: none of these. SINGLE: of a batch of one row. UNKNOWN: nobody can tell.
        degree: of ROWS and COUNT, too: by how many factors "number of rows" it was multiplied, since it was made.
        length: of ADDS and COUNT without parameters: how many of these factors are numbers, each a microbatch's length.
        where: what made it so, with its line.
        learns: whether parameters are in it.
        zero: of ALIKE: whether it was made of zeros, to which something is added.
        counts: of ADDS: whether it says how often each number is there.
        order: of ROWS and ORDER: in which order they are, each sorted by numbers of its own; 0: the batch's.
    """

    how: str
    dim: int = 0
    before: int = 1
    size: int = 0
    degree: int = 0
    where: str = ""
    learns: bool = False
    dims: frozenset[int] | None = None
    length: int = 0
    zero: bool = False
    counts: bool = False
    order: int = 0
    points: Entries | None = None

    def alike(self, dim: int) -> bool:
        """Whether all along a dim are the same."""
        return self.how == ALIKE and (self.dims is None or dim in self.dims)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Where ``rows`` rows lie in what is drawn: in ``dim`` with ``before`` combinations ahead of each; -1: it has none."""

    dim: int = -1
    before: int = 1
    rows: int = 0


class AddedNumber(NamedTuple):
    """A number of a microbatch that a call adds: the size of its argument, by operator and line."""

    name: str
    line: str
    number: float


@dataclass
class Verdict:
    """What a run has shown.

    Attributes:
        losses: of each ``backward()``; ``results``: of each leaf of what the step gives back, None: the batch is not in it.
        noted: the numbers of calls, and what they were given that was made in the step without the batch, by what they are and
            the line (None: no number). ``unsure``: some may be counts of rows; ``open``: nobody can tell whether they are.
        values: of leaves of what the step gives back in which there is nothing of the batch: numbers, and tensors of one;
            ``held``: tensors of several elements that it has made.
        draws: of what was drawn, the shapes in their order.
        normalized: the lines that normalize a batch by its own mean and variance; ``summed``: that add a sum over rows to a value
            in which there is nothing of the batch.
        terms: numbers that grow with the batch and are added to counts of it (``mask.numel() - mask.sum()``).
    """

    losses: list[Kind] = field(default_factory=list)
    results: list[Kind | None] = field(default_factory=list)
    noted: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    values: dict[int, float] = field(default_factory=dict)
    held: dict[int, Tensor] = field(default_factory=dict)
    draws: list[tuple[int, ...]] = field(default_factory=list)
    normalized: list[str] = field(default_factory=list)
    summed: list[str] = field(default_factory=list)
    terms: set[AddedNumber] = field(default_factory=set)
    unsure: bool = False
    open: bool = False


@dataclass(frozen=True)
class Doubt:
    """Where a step of microbatches is another one than that of their batch, in words.

    ``gradients``: whether what trains is another number, not only what the step returns or keeps.
    """

    words: str
    gradients: bool


def placed(now: Sequence[int], then: Sequence[int], rows: int, k: int, known: Drawn | None) -> Drawn | None:
    """Where rows lie in what is drawn, ``now`` of a microbatch and ``then`` of its batch; None: nobody can tell.

    ``known``: where they lie in what it is made for.
    """
    grown = [d for d, (n, m) in enumerate(zip(now, then, strict=False)) if n != m]
    if len(now) != len(then) or not grown:
        return Drawn() if len(now) == len(then) else None
    dim, *more = grown
    if more or then[dim] != k * now[dim] or now[dim] % rows:
        return None
    if known is not None and known.dim == dim and now[dim] % (rows * known.before) == 0:
        return Drawn(dim, known.before, rows)
    return Drawn(dim, 1, rows) if now[dim] == rows else None


def degree_of(name: str, degrees: Mapping[int, int]) -> int:
    """The degree of a count that an operator makes of others, from theirs, by operand."""
    if name in COMPARISONS:
        return 0
    if name == "mul":
        return sum(degrees.values())
    if name in ("div", "reciprocal"):
        over = sum(d for i, d in degrees.items() if i or name == "reciprocal")
        return (degrees.get(0, 0) if name == "div" else 0) - over
    return max(degrees.values())


def may_count(number: float, rows: int) -> bool:
    """Whether a number may be a count of rows, or one over it."""
    times = (1 / number if 0 < number < 1 else number) / rows
    return times > 0.5 and abs(times - round(times)) < 1e-9 * times and round(times) * rows > 1


def told(kind: Kind | None) -> bool:
    return kind is not None and kind.how not in (ALIKE, PLACES)
