"""reshard: (Layout, Layout) -> the cheapest chain of Steps, with its bytes and seconds. Pure.

A step is one collective (or a local slice) on one axis. The chain is found by Dijkstra's algorithm over the layouts
that lie between the two; with one or two axes that is a handful of states, and every answer is cached.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf

from onecard.errors import LayoutError
from onecard.machine.cost import MACHINE, Machine, sent
from onecard.place.layout import Layout
from onecard.place.parts import Dim, common, is_merged, merge, spread

Shape = tuple[int, ...]
LIMIT = 8192  # plans that are kept


@dataclass(frozen=True, slots=True)
class Step:
    """One collective on one axis.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice" or "fill" (the last two send nothing).
        axis: the mesh axis whose ranks take part.
        source, target: layouts before and after.
        dim: the dim that is cut, joined or, for all_to_all, joined; ``to_dim`` the dim that all_to_all cuts.
        op: the reduction.
        bytes: what one rank sends, at most; ``seconds``: what the cost model expects.
        inner: where a dim is merged, the step on the tensor with its merged dims taken apart, which has the shape ``opened``.
    """

    kind: str
    axis: int
    source: Layout
    target: Layout
    dim: int = -1
    to_dim: int = -1
    op: str = ""
    bytes: int = 0
    seconds: float = 0.0
    inner: Step | None = None
    opened: Shape = ()


@lru_cache(maxsize=LIMIT)
def plan(shape: Shape, itemsize: int, source: Layout, target: Layout, machine: Machine = MACHINE) -> tuple[Step, ...]:
    """The cheapest chain of steps from one layout of a tensor to another on the same mesh.

    Args:
        shape: the whole tensor's shape.
        itemsize: bytes of an element.
        source, target: the layouts.
        machine: what steps are priced with.

    Returns:
        Steps in order; empty if the layouts are equal.

    Raises:
        LayoutError: a value is to become a pending norm, which could not give back its sign.

    Example:
        >>> from onecard.place.mesh import ProcessMesh
        >>> from torch.distributed.tensor import Partial, Shard
        >>> mesh = ProcessMesh([0, 1], ["x"])
        >>> steps = plan((4, 8), 4, Layout.of(mesh, 2, [Partial()]), Layout.of(mesh, 2, [Shard(0)]))
        >>> [(step.kind, step.bytes) for step in steps]
        [('reduce_scatter', 64)]
    """
    check_norms(source, target)
    if source.merged or target.merged:
        return _plan_opened(shape, itemsize, source, target, machine)
    counter = 0
    heap: list[tuple[float, int, int, Layout, tuple[Step, ...]]] = [(0.0, 0, 0, source, ())]
    done: set[Layout] = set()
    while heap:
        seconds, length, _, layout, steps = heapq.heappop(heap)
        if layout is target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        for step in _moves(shape, itemsize, layout, target, machine):
            if step.target not in done:
                counter += 1
                heapq.heappush(heap, (seconds + step.seconds, length + 1, counter, step.target, (*steps, step)))
    raise AssertionError(f"no chain from {source} to {target}")  # every layout can be gathered and cut again


def alike(shape: Shape, source: Layout, target: Layout) -> tuple[tuple[Shape, ...], Layout, Layout] | None:
    """Two layouts of a tensor with every dim taken apart into the parts that both are made of.

    Returns:
        The sizes of each dim's parts, and both layouts in those dims; None if their parts cross each other.

    Example:
        >>> from onecard.place.mesh import ProcessMesh
        >>> from onecard.place.parts import Part
        >>> mesh = ProcessMesh([0, 1], ["x"])
        >>> cut, merged = Layout.make(mesh, ((0,),)), Layout.make(mesh, ((Part(2, ()), Part(6, (0,))),))
        >>> alike((12,), cut, merged)
        (((2, 6),), x=Shard(0), x=Shard(1))
    """
    sizes = [_common(n, a, b) for n, a, b in zip(shape, source.dims, target.dims, strict=True)]
    if None in sizes:
        return None
    opened = [_in_parts(layout, sizes) for layout in (source, target)]  # type: ignore[arg-type]
    return None if None in opened else (tuple(sizes), *opened)  # type: ignore[return-value, arg-type]


def _common(size: int, one: Dim, other: Dim) -> Shape | None:
    first, second = (tuple(part.size for part in dim) if is_merged(dim) else (size,) for dim in (one, other))
    return first if first == second else common(first, second)


def _in_parts(layout: Layout, sizes: Sequence[Shape]) -> Layout | None:
    """The layout in dims of these sizes; None if its shards are no products of them."""
    dims = [spread(dim, parts, layout.mesh) for dim, parts in zip(layout.dims, sizes, strict=True)]
    if None in dims:
        return None
    return Layout.make(layout.mesh, tuple(axes for dim in dims for axes in dim or ()), layout.pending)


def _merged(layout: Layout, sizes: Sequence[Shape]) -> Layout:
    """The way back from ``_in_parts``."""
    axes = iter(layout.dims)
    dims = [
        merge([(size, next(axes)) for size in parts], layout.mesh) if len(parts) > 1 else next(axes) for parts in sizes
    ]
    return Layout.make(layout.mesh, tuple(dims), layout.pending)


def one_piece(shape: Shape, source: Layout, target: Layout) -> Layout:
    """The source with those dims gathered whose parts cross the target's."""
    keep = []
    for d, (size, a, b) in enumerate(zip(shape, source.dims, target.dims, strict=True)):
        parts = _common(size, a, b)
        fits = parts is not None and None not in (
            spread(dim, parts, lay.mesh) for dim, lay in ((a, source), (b, target))
        )
        keep.append(source.dims[d] if fits else ())
    return Layout.make(source.mesh, tuple(keep), source.pending)


def _plan_opened(shape: Shape, itemsize: int, source: Layout, target: Layout, machine: Machine) -> tuple[Step, ...]:
    """The plan of the tensor with its merged dims taken apart, said of the tensor itself."""
    found = alike(shape, source, target)
    if found is None:
        between = one_piece(shape, source, target)
        return plan(shape, itemsize, source, between, machine) + plan(shape, itemsize, between, target, machine)
    sizes, opened, goal = found
    numbers = [d for d, parts in enumerate(sizes) for _ in parts]
    whole = tuple(size for parts in sizes for size in parts)
    return tuple(
        replace(
            step,
            source=_merged(step.source, sizes),
            target=_merged(step.target, sizes),
            dim=numbers[step.dim] if step.dim >= 0 else -1,
            to_dim=numbers[step.to_dim] if step.to_dim >= 0 else -1,
            inner=step if step.dim >= 0 else None,
            opened=whole if step.dim >= 0 else (),
        )
        for step in plan(whole, itemsize, opened, goal, machine)
    )


def loses_sign(source: Layout, target: Layout) -> bool:
    """Whether a value is to become a pending norm: joining that would give the value without its sign."""
    known = {op for _, op in source.pending}
    return any(op.startswith("norm") and op not in known for _, op in target.pending)


def check_norms(source: Layout, target: Layout) -> None:
    """Raise a LayoutError if the move ``loses_sign``."""
    if loses_sign(source, target):
        raise LayoutError(
            f"a tensor that lies as [{source}] cannot become [{target}]: ranks join summands of a norm to a norm, which has "
            "no sign, so the value would be lost. Keep it whole on that axis, Replicate(); if each rank holds the norm of "
            "its own part, that is what it is: onecard.from_local(part_norm, mesh, placements)"
        )


@lru_cache(maxsize=LIMIT)
def seconds(shape: Shape, itemsize: int, source: Layout, target: Layout, machine: Machine = MACHINE) -> float:
    """Estimated time of ``plan`` in seconds; infinite if there is none."""
    if loses_sign(source, target):
        return inf
    return sum(step.seconds for step in plan(shape, itemsize, source, target, machine))


def _moves(shape: Shape, itemsize: int, layout: Layout, goal: Layout, machine: Machine) -> Iterator[Step]:
    """The steps worth trying: those that take an axis away from where the goal does not want it, or put it there."""
    step = partial(_step, machine, shape, itemsize, layout)
    pending = dict(layout.pending)
    wanted = dict(goal.pending)
    for axis in range(layout.mesh.ndim):
        dim, goal_dim = layout.dim_of(axis), goal.dim_of(axis)
        if axis in pending:
            if wanted.get(axis) != pending[axis]:
                yield step("all_reduce", axis, _with(layout, axis), op=pending[axis])
                if goal_dim is None:
                    goal_dim = _dim_inside(shape, layout, axis, machine)
                if goal_dim is not None:
                    cut = _with(layout, axis, dim=goal_dim)
                    yield step("reduce_scatter", axis, cut, dim=goal_dim, op=pending[axis])
        elif dim is None:
            if goal_dim is not None:
                yield step("slice", axis, _with(layout, axis, dim=goal_dim), dim=goal_dim)
            elif axis in wanted and pending.items() <= wanted.items():
                # Last of all: the identity of this reduction is not that of another that is still pending (ones, and a sum).
                yield step("fill", axis, _with(layout, axis, op=wanted[axis]), op=wanted[axis])
        elif layout.dims[dim][-1] == axis and not _in_place(layout, goal, dim):
            yield step("all_gather", axis, _with(layout, axis), dim=dim)
            if goal_dim is not None and goal_dim != dim:
                cut = _with(layout, axis, dim=goal_dim)
                yield step("all_to_all", axis, cut, dim=dim, to_dim=goal_dim)


def _dim_inside(shape: Shape, layout: Layout, axis: int, machine: Machine) -> int | None:
    """A dim that may be cut on the way to a sum over hosts, along an axis inside of them: each byte then crosses once.

    Source: two-level sums (for example Goyal et al., 2017, section 4.2).
    """
    ranks, pending = layout.mesh.shape[axis], [other for other, _ in layout.pending]
    if not machine.per_host or ranks == 1 or machine.crosses(layout.mesh, axis):
        return None
    if not any(machine.crosses(layout.mesh, other) for other in pending):
        return None
    free = [d for d, n in enumerate(shape) if not layout.dims[d] and n >= ranks]
    return min(free, key=lambda d: (shape[d] % ranks, d), default=None)


def _in_place(layout: Layout, goal: Layout, dim: int) -> bool:
    """Whether the axes on a dim already are what the goal has there, or its outer part."""
    axes = layout.dims[dim]
    return goal.dims[dim][: len(axes)] == axes


def _with(layout: Layout, axis: int, dim: int | None = None, op: str = "") -> Layout:
    """The layout with one axis taken away and put innermost on ``dim``, or made pending, or left replicated."""
    dims = tuple(
        (*(a for a in axes if a != axis), axis) if d == dim else tuple(a for a in axes if a != axis)
        for d, axes in enumerate(layout.dims)
    )
    pending = tuple(p for p in layout.pending if p[0] != axis)
    return Layout.make(layout.mesh, dims, tuple(sorted((*pending, (axis, op)))) if op else pending)


def _step(
    machine: Machine,
    shape: Shape,
    itemsize: int,
    layout: Layout,
    kind: str,
    axis: int,
    target: Layout,
    dim: int = -1,
    to_dim: int = -1,
    op: str = "",
) -> Step:
    ranks = layout.mesh.shape[axis]
    before, after = layout.largest(shape) * itemsize, target.largest(shape) * itemsize
    # Of a reduce-scatter each rank gives parts as long as the longest.
    sends = 0 if kind in ("slice", "fill") else sent(kind, ranks * after if kind == "reduce_scatter" else before, ranks)
    # A local copy is not free, or else chains would slice and fill for nothing.
    cost = machine.message(sends, link=machine.link(layout.mesh, axis)) if sends else 1e-7 + machine.copy(after)
    return Step(kind, axis, layout, target, dim, to_dim, op, sends, cost)
