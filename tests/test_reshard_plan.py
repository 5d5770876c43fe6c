"""resharding.plan: every chain, executed step by step in numpy for all ranks at once, gives what the target says."""

from collections import Counter
from itertools import permutations
from math import isclose, prod

import numpy as np
import pytest
from amounts import amount
from hypothesis import example, given, settings
from hypothesis import strategies as st
from naive_layouts import JOIN, distribute, gathered, line, places
from torch.distributed.tensor import Partial, Replicate, Shard

from onecard import ProcessMesh
from onecard.errors import LayoutError
from onecard.machine.cost import MACHINE
from onecard.moves.resharding import plan, seconds
from onecard.place.layout import Layout

ITEM = 8  # bytes of a float64
OPS = ["sum", "avg", "max", "min", "product"]
# ---- a simulation of all ranks: {coordinate: local array}


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

CUBE = ProcessMesh(np.arange(8).reshape(2, 2, 2), ["a0", "a1", "a2"])


@st.composite
def layout_of(draw, mesh, shape, ops):
    dims, pending = [[] for _ in shape], []
    op = draw(st.sampled_from(ops))  # one operator: a sum over one axis of a max over another has no one value
    uses = [None, "pending", *range(len(shape))]
    for axis in draw(st.sampled_from(list(permutations(range(mesh.ndim))))):
        use = draw(st.sampled_from(uses))
        if use == "pending":
            pending.append((axis, op))
        elif use is not None:
            dims[use].append(axis)
    return Layout.make(mesh, tuple(map(tuple, dims)), tuple(sorted(pending)))


@st.composite
def changes(draw):
    """(shape, source, target) on a mesh of one to three axes; dims are uneven, of size one, or empty."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    mesh = ProcessMesh(np.arange(prod(sizes)).reshape(sizes), [f"a{i}" for i in range(len(sizes))])
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    return shape, draw(layout_of(mesh, shape, OPS)), draw(layout_of(mesh, shape, OPS))


executed = Counter()


@settings(max_examples=amount(120, 4000), deadline=None)
@given(changes(), st.integers(0, 2**32))
# Ones that fill up a product may not come while a sum is pending: it would add them.
@example(((), Layout.make(CUBE, (), ((1, "sum"),)), Layout.make(CUBE, (), ((2, "product"),))), 0)
def check_a_chain(change, seed):
    shape, source, target = change
    random = np.random.default_rng(seed)
    whole = random.uniform(0.5, 2, size=shape)
    local = distribute(whole, source, random)
    steps = plan(shape, ITEM, source, target)
    assert [step.source for step in steps] == [source, *(step.target for step in steps)][: len(steps)]
    assert (steps[-1].target if steps else source) is target
    assert np.allclose(gathered(whole, target, run(steps, local, shape)), whole)
    executed["chains"] += 1


def test_any_chain_gives_the_target():
    check_a_chain()
    assert executed["chains"] >= amount(120, 4000)


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(changes())
def test_bytes_bound_what_any_rank_sends_and_free_steps_send_nothing(change):
    shape, source, target = change
    for step in plan(shape, ITEM, source, target):
        n = source.mesh.shape[step.axis]
        assert moved_bytes(step, shape) <= step.bytes + ITEM
        assert (step.bytes == 0) == (step.kind in ("slice", "fill") or n == 1 or prod(shape) == 0)
        if step.bytes:
            assert isclose(step.seconds, MACHINE.latency + step.bytes / MACHINE.bandwidth)


def test_a_pending_norm_comes_only_from_a_norm():
    """Joining summands of a norm gives no sign back: what is whole cannot become that."""
    norm, other = ((0, "norm2.0"),), ((2, "norm2.0"),)
    with pytest.raises(LayoutError, match=r"cannot become .*which has no sign.*Replicate\(\).*from_local\(part_norm"):
        plan((4,), 4, Layout.replicated(CUBE, 1), Layout.make(CUBE, ((),), norm))
    with pytest.raises(LayoutError, match="which has no sign"):
        plan((4,), 4, Layout.make(CUBE, ((),), ((1, "sum"),)), Layout.make(CUBE, ((),), norm))
    steps = plan((4,), 4, Layout.make(CUBE, ((),), norm), Layout.make(CUBE, ((),), other))
    assert [step.kind for step in steps] == ["all_reduce", "fill"]


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
