"""resharding.plan: every chain, executed step by step in numpy for all ranks at once, gives what the target says."""

from math import isclose, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from onecard import ProcessMesh
from onecard.cost import MACHINE
from onecard.layout import Layout
from onecard.resharding import plan, seconds

ITEM = 8  # bytes of a float64
JOIN = {
    "sum": lambda parts: np.sum(parts, axis=0),
    "avg": lambda parts: np.mean(parts, axis=0),
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
    "product": lambda parts: np.prod(parts, axis=0),
}


# ---- a simulation of all ranks: {coordinate: local array}


def places(mesh):
    return list(np.ndindex(*mesh.shape))


def line(mesh, axis, place):
    return [(*place[:axis], i, *place[axis + 1 :]) for i in range(mesh.shape[axis])]


def distribute(whole, layout, random):
    """What every rank holds; on pending axes random numbers whose reduction is the whole."""
    parts = {(): whole}
    for axis, op in layout.pending:
        n = layout.mesh.shape[axis]
        parts = {(*at, i): p for at, part in parts.items() for i, p in enumerate(summands(part, op, n, random))}
    axes = [axis for axis, _ in layout.pending]
    return {
        place: parts[tuple(place[a] for a in axes)][layout.local_slices(whole.shape, place)].copy()
        for place in places(layout.mesh)
    }


def summands(whole, op, n, random):
    if op in ("sum", "avg"):
        parts = [random.normal(size=whole.shape) for _ in range(n - 1)]
        parts.append(whole - sum(parts))
        return [part * n for part in parts] if op == "avg" else parts
    if op == "product":
        parts = [random.uniform(0.5, 2, size=whole.shape) for _ in range(n - 1)]
        return [*parts, whole / np.prod([np.ones(whole.shape), *parts], axis=0)]
    away = {"max": -1, "min": 1}[op]
    owner = random.integers(n, size=whole.shape)
    return [whole + away * (owner != i) * random.uniform(size=whole.shape) for i in range(n)]


def gathered(whole, layout, local):
    """The whole tensor that the ranks hold, checked to be the same wherever it is held twice."""
    joined = dict(local)
    for axis, op in layout.pending:
        joined = {p: JOIN[op]([joined[q] for q in line(layout.mesh, axis, p)]) for p in joined}
    result = np.full(whole.shape, np.nan)
    for place, part in joined.items():
        slices = layout.local_slices(whole.shape, place)
        assert part.shape == layout.local_shape(whole.shape, place), f"shape at {place}"
        assert np.isnan(result[slices]).all() or np.allclose(result[slices], part), f"ranks differ at {place}"
        result[slices] = part
    return result


def run(steps, local, shape):
    for step in steps:
        local = {place: run_one(step, local, shape, place) for place in local}
    return local


def run_one(step, local, shape, place):
    """One step on one rank, from what the ranks along the step's axis hold."""
    mesh, index = step.source.mesh, place[step.axis]
    ranks = [local[p] for p in line(mesh, step.axis, place)]
    mine = local[place]

    def cut(array, dim):
        lengths = [step.target.bounds(shape, dim, p)[1] for p in line(mesh, step.axis, place)]
        return np.split(array, np.cumsum(lengths)[:-1], axis=dim)[index]

    if step.kind == "all_reduce":
        return JOIN[step.op](ranks)
    if step.kind == "reduce_scatter":
        return cut(JOIN[step.op](ranks), step.dim)
    if step.kind == "all_gather":
        return np.concatenate(ranks, axis=step.dim)
    if step.kind == "all_to_all":
        return cut(np.concatenate(ranks, axis=step.dim), step.to_dim)
    if step.kind == "slice":
        return cut(mine, step.dim)
    assert step.kind == "fill"
    if step.op in ("max", "min", "avg") or index == 0:
        return mine
    return np.ones_like(mine) if step.op == "product" else np.zeros_like(mine)


# ---- random layouts


@st.composite
def layout_of(draw, mesh, shape, ops):
    dims, pending = [[] for _ in shape], []
    op = draw(st.sampled_from(ops))  # one operator: a sum over one axis of a max over another has no one value
    for axis in draw(st.permutations(range(mesh.ndim))):
        use = draw(st.sampled_from([None, "pending", *range(len(shape))]))
        if use == "pending":
            pending.append((axis, op))
        elif use is not None:
            dims[use].append(axis)
    return Layout.make(mesh, tuple(map(tuple, dims)), tuple(sorted(pending)))


@st.composite
def changes(draw):
    """(shape, source, target) on a mesh of one to three axes; dims are uneven, of size one, or empty."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    ranks = draw(st.permutations(range(prod(sizes))))
    mesh = ProcessMesh(np.array(ranks).reshape(sizes), [f"a{i}" for i in range(len(sizes))])
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    return shape, draw(layout_of(mesh, shape, list(JOIN))), draw(layout_of(mesh, shape, list(JOIN)))


@settings(max_examples=300, deadline=None)
@given(changes(), st.integers(0, 2**32))
def test_any_chain_gives_the_target(change, seed):
    shape, source, target = change
    random = np.random.default_rng(seed)
    whole = random.uniform(0.5, 2, size=shape)
    local = distribute(whole, source, random)
    steps = plan(shape, ITEM, source, target)
    assert [step.source for step in steps] == [source, *(step.target for step in steps)][: len(steps)]
    assert (steps[-1].target if steps else source) is target
    assert np.allclose(gathered(whole, target, run(steps, local, shape)), whole)


@settings(max_examples=300, deadline=None)
@given(changes())
def test_the_chain_is_never_dearer_than_gathering_everything(change):
    shape, source, target = change
    whole = Layout.replicated(source.mesh, len(shape))
    price = seconds(shape, ITEM, source, target)
    assert price <= seconds(shape, ITEM, source, whole) + seconds(shape, ITEM, whole, target) + 1e-12
    assert isclose(price, sum(step.seconds for step in plan(shape, ITEM, source, target)))
    assert plan(shape, ITEM, source, source) == ()


def moved_bytes(step, shape):
    """Bytes that the busiest rank sends in a step: around a ring, or to each other rank its part."""
    mesh, most = step.source.mesh, 0
    n = mesh.shape[step.axis]
    for place in places(mesh):
        mine = prod(step.source.local_shape(shape, place))
        kept = prod(step.target.local_shape(shape, place))
        sent = {
            "all_reduce": 2 * (n - 1) * mine // n,
            "all_gather": (n - 1) * mine,
            "reduce_scatter": (n - 1) * kept,
            "all_to_all": (n - 1) * mine // n,
        }.get(step.kind, 0)
        most = max(most, sent)
    return most * ITEM


@settings(max_examples=200, deadline=None)
@given(changes())
def test_bytes_bound_what_any_rank_sends_and_free_steps_send_nothing(change):
    shape, source, target = change
    for step in plan(shape, ITEM, source, target):
        n = source.mesh.shape[step.axis]
        assert moved_bytes(step, shape) <= step.bytes + ITEM
        assert (step.bytes == 0) == (step.kind in ("slice", "fill") or n == 1 or prod(shape) == 0)
        if step.bytes:
            assert isclose(step.seconds, MACHINE.latency + step.bytes / MACHINE.bandwidth)


# ---- the chains that people expect

X = ProcessMesh([0, 1], ["x"])
GRID = ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def kinds(shape, source, target, mesh=X):
    def layout(p):
        return p if isinstance(p, Layout) else Layout.of(mesh, len(shape), p)

    return [(s.kind, mesh.dim_names[s.axis]) for s in plan(shape, 4, layout(source), layout(target))]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (R, R, []), (S0, S0, []), (P, P, []),
        (R, S0, ["slice"]), (R, P, ["fill"]),
        (S0, R, ["all_gather"]), (S0, S1, ["all_to_all"]), (S1, S0, ["all_to_all"]),
        (P, R, ["all_reduce"]), (P, S1, ["reduce_scatter"]),
        (S0, P, ["all_gather", "fill"]), (P, Partial("max"), ["all_reduce", "fill"]),
    ],
)  # fmt: skip
def test_one_axis(source, target, expected):
    assert kinds((6, 5), [source], [target]) == [(kind, "x") for kind in expected]


def test_one_pass_over_the_bytes():
    steps = plan((4, 8), 4, Layout.of(X, 2, [P]), Layout.of(X, 2, [R]))
    assert [step.bytes for step in steps] == [2 * 128 // 2]
    steps = plan((4, 8), 4, Layout.of(X, 2, [S0]), Layout.of(X, 2, [S1]))
    assert [step.bytes for step in steps] == [64 // 2]


def test_what_shrinks_goes_first_and_what_grows_goes_last():
    assert kinds((64, 64), [P, R], [R, S0], GRID) == [
        ("slice", "tp"),
        ("all_reduce", "dp"),
    ]
    assert kinds((64, 64), [P, S0], [R, R], GRID) == [("all_reduce", "dp"), ("all_gather", "tp")]
    assert kinds((64, 64), [P, P], [S0, R], GRID) == [("reduce_scatter", "dp"), ("all_reduce", "tp")]


def test_axes_on_one_dim_are_gathered_from_the_inside():
    both = Layout.make(GRID, ((0, 1), ()))
    assert kinds((8, 4), both, [R, R], GRID) == [("all_gather", "tp"), ("all_gather", "dp")]
    swapped = Layout.make(GRID, ((1, 0), ()))
    assert kinds((8, 4), swapped, [R, R], GRID) == [("all_gather", "dp"), ("all_gather", "tp")]
    assert kinds((8, 4), swapped, both, GRID) != []


def test_an_axis_of_one_rank_costs_nothing():
    alone = ProcessMesh([[0], [1]], ["dp", "tp"])
    steps = plan((4, 6), 4, Layout.of(alone, 2, [R, P]), Layout.of(alone, 2, [R, R]))
    assert [(step.kind, step.bytes) for step in steps] == [("all_reduce", 0)]
