"""Merged dims without processes: what ranks hold, plans and transfers, against index sets in numpy."""

import math
import random
from collections import Counter

import numpy as np
import pytest
from amounts import amount
from naive_layouts import JOIN, line, places, summands
from torch.distributed.tensor import Replicate, Shard

from onecard import ProcessMesh
from onecard.errors import LayoutError
from onecard.moves.resharding import alike, plan, seconds
from onecard.moves.transfer import lower_bound
from onecard.place.layout import Layout
from onecard.place.parts import Part, is_merged, merge

ITEM = 8
PRODUCTS = {12: [(12,), (2, 6), (6, 2), (3, 4), (4, 3), (2, 3, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)]}
PRODUCTS |= {10: [(10,), (5, 2), (2, 5)], 30: [(30,), (5, 6), (6, 5), (5, 2, 3)], 5: [(5,)], 2: [(2,)]}
X = ProcessMesh([0, 1], ["x"])
XY = ProcessMesh([[0, 1], [2, 3]], ["x", "y"])


# ---- the reference: for each dim the indices that a rank holds


def indices(layout, size, dim, place):
    """The indices of one dim at a place, from the rule for each part."""
    parts = layout.dims[dim] if is_merged(layout.dims[dim]) else [(size, layout.dims[dim])]
    held = np.arange(size).reshape([n for n, _ in parts])
    for at, (_, axes) in enumerate(parts):
        for axis in axes:
            step = -(-held.shape[at] // layout.mesh.shape[axis])
            held = held.take(range(place[axis] * step, min((place[axis] + 1) * step, held.shape[at])), axis=at)
    return held.reshape(-1)


def box(layout, shape, place):
    return np.ix_(*(indices(layout, n, d, place) for d, n in enumerate(shape)))


def distribute(whole, layout, numbers):
    parts = {(): whole}
    for axis, op in layout.pending:
        n = layout.mesh.shape[axis]
        parts = {(*at, i): p for at, part in parts.items() for i, p in enumerate(summands(part, op, n, numbers))}
    axes = [axis for axis, _ in layout.pending]
    return {p: parts[tuple(p[a] for a in axes)][box(layout, whole.shape, p)] for p in places(layout.mesh)}


def gathered(whole, layout, local):
    joined = dict(local)
    for axis, op in layout.pending:
        joined = {p: JOIN[op]([joined[q] for q in line(layout.mesh, axis, p)]) for p in joined}
    result = np.full(whole.shape, np.nan)
    for place, part in joined.items():
        mine = box(layout, whole.shape, place)
        assert part.shape == layout.local_shape(whole.shape, place)
        assert np.isnan(result[mine]).all() or np.allclose(result[mine], part), f"ranks differ at {place}"
        result[mine] = part
    return result


# ---- all ranks, step by step


def run(steps, local, shape):
    for step in steps:
        local = {place: run_one(step, local, shape, place) for place in local}
    return local


def run_one(step, local, shape, place):
    if step.inner is None:
        return one_step(step, local, shape, place)
    inner = step.inner
    opened = {p: x.reshape(inner.source.local_shape(step.opened, p)) for p, x in local.items()}
    return one_step(inner, opened, step.opened, place).reshape(step.target.local_shape(shape, place))


def one_step(step, local, shape, place):
    peers = line(step.source.mesh, step.axis, place)
    ranks = [local[p] for p in peers]

    def cut(array, dim):
        lengths = [step.target.bounds(shape, dim, p)[1] for p in peers]
        return np.split(array, np.cumsum(lengths)[:-1], axis=dim)[place[step.axis]]

    if step.kind in ("all_reduce", "reduce_scatter"):
        total = JOIN[step.op](ranks)
        return total if step.kind == "all_reduce" else cut(total, step.dim)
    if step.kind == "fill":
        first = step.op in ("max", "min", "avg") or place[step.axis] == 0
        return local[place] if first else np.full_like(local[place], step.op == "product")
    joined = local[place] if step.kind == "slice" else np.concatenate(ranks, axis=step.dim)
    return (
        cut(joined, {"slice": step.dim, "all_to_all": step.to_dim}[step.kind]) if step.kind != "all_gather" else joined
    )


# ---- random layouts


def merged_layout(chance, mesh, shape, ops):
    """Every dim a product of one to three parts; each axis cuts a part, is pending, or does nothing."""
    sizes = [chance.choice(PRODUCTS[n]) for n in shape]
    slots = [(d, i) for d, parts in enumerate(sizes) for i in range(len(parts))]
    cut, pending, op = {slot: [] for slot in slots}, [], chance.choice(ops)
    for axis in chance.sample(range(mesh.ndim), mesh.ndim):
        use = chance.choice([None, "pending", *slots, *slots])
        if use == "pending" and op:
            pending.append((axis, op))
        elif isinstance(use, tuple):
            cut[use].append(axis)
    dims = [merge([(n, tuple(cut[d, i])) for i, n in enumerate(parts)], mesh) for d, parts in enumerate(sizes)]
    return Layout.make(mesh, tuple(dims), tuple(sorted(pending)))


def changes(count, ops=("sum", "avg", "max", "product")):
    chance = random.Random(11)
    for _ in range(count):
        sizes = chance.choice([(2,), (3,), (2, 2), (2, 3), (2, 1, 2), (2, 2, 2)])
        mesh = ProcessMesh(np.arange(math.prod(sizes)).reshape(sizes), [f"a{i}" for i in range(len(sizes))])
        shape = tuple(chance.choice(sorted(PRODUCTS)) for _ in range(chance.choice((1, 2))))
        yield shape, merged_layout(chance, mesh, shape, ops), merged_layout(chance, mesh, shape, ops)


def test_any_chain_gives_the_target():
    seen, numbers = Counter(), np.random.default_rng(1)
    count = amount(200, 6000)
    for shape, source, target in changes(count):
        whole = numbers.uniform(0.5, 2, size=shape)
        steps, found = plan(shape, ITEM, source, target), alike(shape, source, target)
        assert np.allclose(gathered(whole, target, run(steps, distribute(whole, source, numbers), shape)), whole)
        if found is not None:  # an ordinary plan of the opened tensor, at its price
            sizes, opened, goal = found
            flat = tuple(n for parts in sizes for n in parts)
            assert seconds(shape, ITEM, source, target) == sum(s.seconds for s in plan(flat, ITEM, opened, goal))
            assert [s.source for s in steps] == [source, *(s.target for s in steps)][: len(steps)]
        seen.update(merged=source.merged or target.merged, crossed=found is None)
        seen.update(messages=any(step.bytes for step in steps), inner=any(step.inner is not None for step in steps))
    assert seen["merged"] >= 0.4 * count and seen["crossed"] >= 0.025 * count, seen
    assert seen["messages"] >= 0.4 * count and seen["inner"] >= 0.25 * count, seen


def test_one_step_sends_what_is_missing_and_no_more():
    """Of plans that are one step: the bytes of all ranks are the lower bound."""
    seen = Counter()
    for shape, source, target in changes(2000, (None,)):
        steps, found = plan(shape, ITEM, source, target), alike(shape, source, target)
        if len(steps) != 1 or found is None or not (source.merged or target.merged):
            continue
        sizes, opened, goal = found
        flat = tuple(n for parts in sizes for n in parts)
        if all(len({lay.local_shape(flat, p) for p in places(lay.mesh)}) == 1 for lay in (opened, goal)):
            assert steps[0].bytes * source.mesh.size == lower_bound(flat, ITEM, opened, goal)
            seen[steps[0].kind] += 1
    assert min(seen[kind] for kind in ("all_gather", "all_to_all", "slice")) >= 10, seen


# ---- the canonical form


def test_what_is_an_ordinary_cut_is_the_ordinary_layout():
    assert merge([(4, (0,)), (3, ())], X) == (0,)
    assert merge([(2, (0,)), (6, (1,))], XY) == (0, 1)
    assert merge([(5, ()), (3, ())], X) == () == merge([], X)
    assert merge([(1, ()), (6, (0,))], X) == (0,)
    assert merge([(4, (0,)), (3, (1,))], XY) == (Part(4, (0,)), Part(3, (1,)))
    assert merge([(2, ()), (3, ()), (4, (0,)), (5, ())], X) == (Part(6, ()), Part(20, (0,)))
    assert merge([(5, (0,)), (6, ())], X) == (Part(5, (0,)), Part(6, ()))


def test_layouts_that_hold_the_same_are_one():
    """Canonical: two layouts of which no plan has a step are one object, where their parts can be compared."""
    for shape, source, target in changes(2000, (None,)):
        if 1 in source.mesh.shape or alike(shape, source, target) is None or plan(shape, ITEM, source, target):
            continue
        assert source is target


def test_a_merged_layout_says_what_it_is():
    layout = Layout.make(XY, ((Part(8, ()), Part(16, (1, 0))), ()))
    assert repr(layout) == "x=Shard(0, part 1 of [8, 16]), y=Shard(0, part 1 of [8, 16]), y>x"
    assert layout.placements[0] != Shard(0) and layout.placements[0] == layout.placements[1]
    assert layout.dim_of(0) == 0 and layout.axes(0) == (1, 0) and layout.merged and not layout.is_replicated
    assert Layout.make(XY, layout.dims) is layout
    with pytest.raises(LayoutError, match=r"flatten\(0, 1\)"):
        Layout.of(XY, 2, [layout.placements[0], Replicate()])


def test_there_is_no_one_stretch_of_a_merged_dim():
    layout = Layout.make(X, ((Part(3, ()), Part(4, (0,))),))
    for ask in (
        lambda: layout.bounds((12,), 0, (0,)),
        lambda: layout.local_offset((12,), (0,)),
        lambda: layout.local_slices((12,), (1,)),
    ):
        with pytest.raises(LayoutError, match="merged"):
            ask()
    assert layout.local_shape((12,), (1,)) == (6,)
