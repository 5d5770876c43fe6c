"""decide: which layout each operand of one call must have, and which layouts its results then have. Pure.

Eager dispatch, graph capture, the planner and the simulator all call this one function. It weighs, for each mesh
axis, the uses that the operands already make of it: cut a factor, carry a pending sum through, or neither.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations, product
from math import prod

from onecard.machine.cost import MACHINE, Machine
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.place.parts import Axes, Dim, axes_of, chunk, is_merged, merge
from onecard.rules.refine import refine
from onecard.rules.rule import Bound, Pattern, Shape
from onecard.rules.work import Work, work_of

# (shape, bytes an element, from, to) -> seconds
Cost = Callable[[Shape, int, Layout, Layout], float]
Sized = tuple[Shape, int]

# Half of what it costs to reduce a pending result counts now: the sum may still merge with another, or never be needed.
PENDING_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Use:
    """What one mesh axis does in one call: cut ``factor``, let ``carriers`` stay pending under ``op``, or nothing."""

    factor: int | None = None
    op: str = ""
    carriers: frozenset[int] = frozenset()


IDLE = Use()


@dataclass(frozen=True, slots=True)
class Decision:
    """The layouts a call runs under; ``uses`` says what each mesh axis does, in terms of the factors of ``bound``."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    uses: tuple[Use, ...]
    seconds: float
    bound: Bound

    def reason(self) -> str:
        """Why the rule needs these layouts, in words."""
        return ", ".join(
            f"{name} {_words(use, self.bound)}"
            for name, use in zip(self.operands[0].mesh.dim_names, self.uses, strict=True)
        )


def decide(
    bound: Bound,
    layouts: Sequence[Layout],
    operands: Sequence[Sized],
    results: Sequence[Sized],
    cost: Cost,
    fixed: Mapping[int, Layout] | None = None,
    kept: Collection[int] = (),
    hinted: Mapping[int, int] | None = None,
    machine: Machine = MACHINE,
    dtype: str = "",
) -> Decision | None:
    """The cheapest layouts under which the operator, run on each rank's local tensors, keeps its one-card meaning.

    Args:
        bound: the operator's rule bound to this call.
        layouts: the operands' layouts, all on one mesh.
        operands, results: shape and bytes of an element of each.
        cost: seconds to change a layout; the time that a rank computes is added to it.
        fixed: results that must get a given layout (the operand of the same number keeps its own); None: any.
        hinted: for an axis, the factor of the results that it had better cut if nothing speaks against it.
        kept: operands that must keep their layout, because the operator writes to them.
        machine: what computations are priced with, as ``cost`` prices messages; ``dtype``: in which it computes.

    Returns:
        The decision, or None if ``fixed`` cannot be met.
    """
    best: Decision | None = None
    for rule in _rules(bound, layouts):
        for uses, candidate in _candidates(rule, layouts, hinted or {} if rule is bound else {}):
            if not _keeps(candidate, layouts, fixed or {}, kept):
                continue
            seconds = _price(candidate, layouts, operands, results, cost)
            if best is None or seconds < best.seconds:  # else what is computed cannot make it cheaper
                seconds += _work(rule, candidate, uses, operands, results, fixed or {}).seconds(machine, dtype)
            if best is None or seconds < best.seconds:
                best = Decision(candidate[0], candidate[1], uses, seconds, rule)
    return best


Chosen = tuple[tuple[Use, ...], "Candidate"]


def _candidates(bound: Bound, layouts: Sequence[Layout], hinted: Mapping[int, int]) -> Iterable[Chosen]:
    """The ways to run the call from these layouts. New sizes of a known pattern only cost otherwise."""
    if bound.pattern is None or any(layout.merged for layout in layouts):
        return _arranged(bound, layouts, hinted)
    return _known(bound.pattern, tuple(layouts), tuple(hinted.items()))


@lru_cache(4096)
def _known(pattern: Pattern, layouts: tuple[Layout, ...], hinted: tuple[tuple[int, int], ...]) -> tuple[Chosen, ...]:
    return tuple(_arranged(pattern.bound, layouts, dict(hinted)))


def _arranged(bound: Bound, layouts: Sequence[Layout], hinted: Mapping[int, int]) -> Iterator[Chosen]:
    mesh = layouts[0].mesh
    options = [_options(bound, layouts, axis) for axis in range(mesh.ndim)]
    for axis, factor in hinted.items():
        options[axis].insert(0, Use(factor=factor))
    for uses in product(*options):
        candidate = _try(bound, layouts, mesh, uses)
        if candidate is not None:
            yield uses, candidate


def _rules(bound: Bound, layouts: Sequence[Layout]) -> tuple[Bound, ...]:
    """The rule in terms of the operands' parts, if some are merged, and as it is."""
    if not any(layout.merged for layout in layouts):
        return (bound,)
    fine = refine(bound, layouts)
    return (bound,) if fine is bound else (fine, bound)


def exactly(bound: Bound, layouts: Sequence[Layout]) -> Decision | None:
    """The decision if the call may run under just these operand layouts, else None (used by ``verify``)."""
    mesh = layouts[0].mesh
    for uses in product(*(_options(bound, layouts, axis) for axis in range(mesh.ndim))):
        candidate = _try(bound, layouts, mesh, uses)
        if candidate is not None and candidate[0] == tuple(layouts):
            return Decision(candidate[0], candidate[1], uses, 0.0, bound)
    return None


def strategies(bound: Bound, mesh: ProcessMesh) -> Iterator[Decision]:
    """Every way in which a call may run on a mesh, wherever its operands are now (for ``verify`` and planners).

    Axes that cut the same factor are taken in each order.
    """
    for uses in product(_every_use(bound), repeat=mesh.ndim):
        groups: dict[int, list[int]] = {}
        for axis, use in enumerate(uses):
            if use.factor is not None:
                groups.setdefault(use.factor, []).append(axis)
        for order in product(*(permutations(axes) for axes in groups.values())):
            candidate = _arrange(bound, mesh, uses, dict(zip(groups, order, strict=True)))
            if candidate is not None:
                yield Decision(candidate[0], candidate[1], uses, 0.0, bound)


def _every_use(bound: Bound) -> list[Use]:
    uses = {IDLE: None}
    uses |= {Use(factor=factor): None for factor in sorted(bound.free)}
    if bound.moves:
        everything = frozenset(range(len(bound.operands))) - bound.unread
        uses |= {Use(op=op, carriers=everything): None for op in ("sum", "max")}
    if bound.keeps in ("max", "min", "product"):  # numbers of any sign are no norms
        uses[Use(op=bound.keeps, carriers=frozenset(range(len(bound.operands))))] = None
    if bound.terms:
        for chosen in product(*bound.terms):
            uses[Use(op="sum", carriers=frozenset(chosen))] = None
            if len(bound.terms) == 1:
                uses[Use(op="avg", carriers=frozenset(chosen))] = None
    return list(uses)


def _options(bound: Bound, layouts: Sequence[Layout], axis: int) -> list[Use]:
    """What an axis may do: anything that at least one operand already does with it, and nothing."""
    uses: dict[Use, None] = {}
    ops = set()
    for dims, layout in zip(bound.operands, layouts, strict=True):
        dim = layout.dim_of(axis)
        if dim is not None:
            factor = factor_of(dims[dim], layout.dims[dim], axis, bound.sizes, layout.mesh)
            if factor is None and layout.merged and dims[dim]:
                factor = dims[dim][0]  # in one piece
            if factor in bound.free:
                uses[Use(factor=factor)] = None
        ops |= {op for a, op in layout.pending if a == axis}
    for op in sorted(ops):
        for carriers in _carriers(bound, layouts, axis, op):
            uses[Use(op=op, carriers=carriers)] = None
    uses[IDLE] = None
    return list(uses)


def factor_of(factors: Axes, dim: Dim, axis: int, sizes: Sequence[int], mesh: ProcessMesh) -> int | None:
    """Which factor of a dim an axis cuts; None if the dim's parts are no products of its factors."""
    if not is_merged(dim):
        return factor_under(factors, dim, axis, sizes, mesh)
    at = 0
    for part in dim:
        stop = at
        while stop < len(factors) and prod(sizes[f] for f in factors[at:stop]) < part.size:
            stop += 1
        if prod(sizes[f] for f in factors[at:stop]) != part.size:
            return None
        if axis in part.axes:
            return factor_under(factors[at:stop], part.axes, axis, sizes, mesh)
        at = stop
    return None


def factor_under(factors: Axes, axes: Axes, axis: int, sizes: Sequence[int], mesh: ProcessMesh) -> int | None:
    """Which factor of a dim an axis cuts, given that the dim's axes cut its factors from the outside in."""
    if not factors:
        return None
    at, left = 0, sizes[factors[0]]
    for other in axes:
        if left == 1 and at + 1 < len(factors):
            at, left = at + 1, sizes[factors[at + 1]]
        last = at + 1 == len(factors)
        if not last and left % mesh.shape[other]:
            return None
        if other == axis:
            return factors[at]
        left = -(-left // mesh.shape[other])
    return None


def _carriers(bound: Bound, layouts: Sequence[Layout], axis: int, op: str) -> Iterator[frozenset[int]]:
    """Sets of operands that may be pending together, so that the results are pending likewise."""
    if bound.moves or bound.keeps == op:
        yield frozenset(range(len(layouts))) - bound.unread
    if not bound.terms or not (op == "sum" or (op == "avg" and len(bound.terms) == 1)):
        return
    choices = []
    for term in bound.terms:
        pending = [i for i in term if (axis, op) in layouts[i].pending]
        choices.append(pending or [term[0]])
    for chosen in product(*choices):
        yield frozenset(chosen)


Candidate = tuple[tuple[Layout, ...], tuple[Layout, ...]]


def _try(bound: Bound, layouts: Sequence[Layout], mesh: ProcessMesh, uses: Sequence[Use]) -> Candidate | None:
    """The layouts under these uses of the axes, or None if the shards would not line up."""
    return _arrange(bound, mesh, uses, _cut_order(bound, layouts, uses))


def _arrange(bound: Bound, mesh: ProcessMesh, uses: Sequence[Use], cut: Mapping[int, Axes]) -> Candidate | None:
    """The layouts under these uses, the axes on each factor in the order that ``cut`` gives."""
    if any(not _divides(bound, factor, axes, mesh) for factor, axes in cut.items()):
        return None
    places = []
    for dims in (*bound.operands, *bound.results):
        placed = tuple(_place(dim, cut, bound, mesh) for dim in dims)
        if any(axes is None for axes in placed):
            return None
        places.append(placed)
    pending: list[list[tuple[int, str]]] = [[] for _ in places]
    for axis, use in enumerate(uses):
        if not _pend(bound, axis, use, pending):
            return None
    made = [Layout.make(mesh, dims, tuple(p)) for dims, p in zip(places, pending, strict=True)]  # type: ignore[arg-type]
    split = len(bound.operands)
    return tuple(made[:split]), tuple(made[split:])


def _cut_order(bound: Bound, layouts: Sequence[Layout], uses: Sequence[Use]) -> dict[int, Axes]:
    """For each cut factor its axes, outermost first: the order that an operand has already, else the mesh's."""
    cut: dict[int, list[int]] = {}
    for axis, use in enumerate(uses):
        if use.factor is not None:
            cut.setdefault(use.factor, []).append(axis)
    for axes in cut.values():
        if len(axes) > 1:
            seen = [a for layout in layouts for dim in layout.dims for a in axes_of(dim) if a in axes]
            axes.sort(key=lambda a: seen.index(a) if a in seen else len(seen) + a)
    return {factor: tuple(axes) for factor, axes in cut.items()}


def _divides(bound: Bound, factor: int, axes: Axes, mesh: ProcessMesh) -> bool:
    if factor in bound.nonempty or factor in bound.even:
        smallest = largest = bound.sizes[factor]
        for axis in axes:
            smallest = chunk(smallest, mesh.shape[axis], mesh.shape[axis] - 1)[1]
            largest = chunk(largest, mesh.shape[axis], 0)[1]
        if factor in bound.nonempty and smallest == 0:
            return False
        return factor not in bound.even or smallest == largest
    return True


def _place(factors: Axes, cut: Mapping[int, Axes], bound: Bound, mesh: ProcessMesh) -> Dim | None:
    """The axes of one dim, or its parts; None if it must not be merged, or has no elements to be."""
    if len(factors) == 1:
        return cut.get(factors[0], ())
    parts = [(bound.sizes[factor], cut.get(factor, ())) for factor in factors]
    dim = merge(parts, mesh) if all(size for size, _ in parts) else _outermost(parts)
    return None if dim is None or (is_merged(dim) and any(f in bound.pieces for f in factors)) else dim


def _outermost(parts: Sequence[tuple[int, Axes]]) -> Axes | None:
    """Among no elements, what is cut on the outside."""
    return None if any(axes for _, axes in parts[1:]) else parts[0][1]


def _pend(bound: Bound, axis: int, use: Use, pending: list[list[tuple[int, str]]]) -> bool:
    """Write down which operands and results are pending on an axis; False if this use is impossible."""
    split = len(bound.operands)
    if use.op:
        touched = [split + r for r, sources in enumerate(bound.sources) if sources & use.carriers]
        for i in (*use.carriers, *touched):
            pending[i].append((axis, use.op))
        return True
    if use.factor is None:
        return True
    has = [any(use.factor in dim for dim in dims) for dims in bound.operands]
    lost = False
    for r, dims in enumerate(bound.results):
        if any(use.factor in dim for dim in dims) or not any(has[i] for i in bound.sources[r]):
            continue
        if not bound.reduce[r]:
            return False
        pending[split + r].append((axis, bound.reduce[r]))
        lost = True
    if lost:
        # A summand without the factor (the bias of addmm) must be added once, not once a rank.
        for first in dict.fromkeys(term[0] for term in bound.terms if not any(has[i] for i in term)):
            pending[first].append((axis, "sum"))
    return True


def _keeps(candidate: Candidate, layouts: Sequence[Layout], fixed: Mapping[int, Layout], kept: Collection[int]) -> bool:
    operands, results = candidate
    return all(operands[i] is layouts[i] for i in (*fixed, *kept)) and all(
        results[i] is layout for i, layout in fixed.items()
    )


def _price(
    candidate: Candidate, layouts: Sequence[Layout], operands: Sequence[Sized], results: Sequence[Sized], cost: Cost
) -> float:
    seconds = 0.0
    for layout, target, (shape, size) in zip(layouts, candidate[0], operands, strict=True):
        if layout is not target:
            seconds += cost(shape, size, layout, target)
    for layout, (shape, size) in zip(candidate[1], results, strict=True):
        if layout.pending:
            seconds += PENDING_SHARE * cost(shape, size, layout, layout.reduced())
    return seconds


def _work(
    bound: Bound,
    candidate: Candidate,
    uses: Sequence[Use],
    operands: Sequence[Sized],
    results: Sequence[Sized],
    fixed: Collection[int],
) -> Work:
    """What a rank computes. Without it a large product would gather its operands as soon as they are smaller than its result,
    and every rank would do all of the work."""
    given = [size * layout.largest(shape) for layout, (shape, size) in zip(candidate[0], operands, strict=True)]
    made = [size * layout.largest(shape) for layout, (shape, size) in zip(candidate[1], results, strict=True)]
    for r in fixed:  # in an operand's memory
        made[r] = 0
    mesh = candidate[0][0].mesh
    shared = prod(mesh.shape[axis] for axis, use in enumerate(uses) if use.factor is not None)
    return work_of(bound, given, made, shared)


def _words(use: Use, bound: Bound) -> str:
    if use.factor is not None:
        return f"cuts {bound.names[use.factor]}"
    return f"keeps a pending {use.op}" if use.op else "cuts nothing"
