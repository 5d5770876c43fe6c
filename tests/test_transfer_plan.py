"""Plans of transfers between meshes, in one process: against masks of the whole tensor, carried out in numpy."""

import math
from collections import Counter

import numpy as np
import pytest
from amounts import amount
from hypothesis import given, settings
from hypothesis import strategies as st

import onecard as oc
from onecard.machine.cost import MACHINE
from onecard.moves.transfer import box_of, far_lower_bound, lower_bound, plan_transfer, reduced_source
from onecard.place.layout import Layout


def nth_permutation(items, n):
    """Permutation n of the items; one number to draw, and 0 leaves them as they are."""
    items, result = list(items), []
    while items:
        n, at = divmod(n, len(items))
        result.append(items.pop(at))
    return result


@st.composite
def meshes(draw, world=8):
    shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 2), (2, 1, 2)]))
    ranks = nth_permutation(range(world), draw(st.integers(0, math.factorial(world) - 1)))[: int(np.prod(shape))]
    return oc.ProcessMesh(np.array(ranks).reshape(shape), [f"a{i}" for i in range(len(shape))])


@st.composite
def layouts(draw, ndim, pending=()):
    mesh = draw(meshes())
    dims = [[] for _ in range(ndim)]
    marks = []
    for axis in nth_permutation(range(mesh.ndim), draw(st.integers(0, 5))):
        use = draw(st.sampled_from([None, *range(ndim), *pending]))
        if isinstance(use, str):
            marks.append((axis, use))
        elif use is not None:
            dims[use].append(axis)
    return Layout.make(mesh, tuple(map(tuple, dims)), tuple(sorted(marks)))


HOSTS = [(), ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 2), (3, 4, 5), (6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))]
executed = Counter()


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    pending = draw(st.sampled_from(["sum", "max"]))
    hosts = draw(st.sampled_from(HOSTS))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape), pending=(pending,))), hosts


def parts(whole, layout):
    return {r: whole[tuple(slice(a, b) for a, b in box_of(layout, whole.shape, r))] for r in layout.mesh.process_ids}


def holds(target, rank):
    place = target.mesh.coordinate(rank)
    return all(op != "sum" or place[axis] == 0 for axis, op in target.pending)


def carried_out(plan, whole):
    """What each rank has after the pieces of a plan, those that are passed on last."""
    have = parts(whole, plan.source)
    got = {rank: np.zeros_like(part) for rank, part in parts(whole, plan.target).items()}
    for piece in sorted(plan.pieces, key=lambda p: p.hop):
        held = plan.target if piece.hop else plan.source
        part = (got if piece.hop else have)[piece.sender]
        sent = part[inside(piece.box, box_of(held, whole.shape, piece.sender))]
        assert sent.size, "no empty message"
        got[piece.receiver][inside(piece.box, box_of(plan.target, whole.shape, piece.receiver))] += sent
    return got


def fewest(whole, source, target, hosts):
    """By masks of the whole tensor: elements that ranks need and lack, and that hosts need and lack."""
    near = far = 0
    host = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    needs, held = {}, {}
    for masks, layout in ((needs, target), (held, source)):
        for rank in layout.mesh.process_ids:
            if layout is source or holds(target, rank):
                masks[rank] = np.zeros(whole.shape, bool)
                masks[rank][tuple(slice(a, b) for a, b in box_of(layout, whole.shape, rank))] = True
    nothing = np.zeros(whole.shape, bool)
    for rank, mask in needs.items():
        near += int((mask & ~held.get(rank, nothing)).sum())
    for number in set(host.values()):
        here = [[m for r, m in masks.items() if host[r] == number] for masks in (needs, held)]
        wanted, present = (np.logical_or.reduce([nothing, *masks]) for masks in here)
        far += int((wanted & ~present).sum())
    return near, far


@settings(max_examples=amount(100, 4000), deadline=None)
@given(cases())
def check_a_plan(case):
    shape, source, target, hosts = case
    whole = np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)
    plan = plan_transfer(shape, 4, source, target, hosts)
    near, far = fewest(whole, source, target, hosts)
    assert plan.bytes == lower_bound(shape, 4, source, target) == 4 * near
    assert plan.far_bytes == far_lower_bound(shape, 4, source, target, hosts) == 4 * far
    assert plan.bytes == sum(map(plan.sent_by, range(8)))
    wanted = parts(whole, target)
    for rank, part in carried_out(plan, whole).items():
        np.testing.assert_array_equal(part, wanted[rank] if holds(target, rank) else 0 * part)
    executed["plans"] += 1


def test_plans_move_each_element_once():
    check_a_plan()
    assert executed["plans"] >= amount(100, 4000)


def inside(box, held):
    return tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(box, held, strict=True))


TWO_HOSTS = ((0, 1, 2, 3), (4, 5, 6, 7))


def two_hosts(source, target, shape=(8, 6)):
    """A plan from four ranks of one host to four of the other."""
    one, two = (oc.ProcessMesh(ranks, ["x"]) for ranks in TWO_HOSTS)
    return plan_transfer(shape, 4, Layout.of(one, 2, [source]), Layout.of(two, 2, [target]), TWO_HOSTS)


@pytest.mark.parametrize("source", [oc.Replicate(), oc.Shard(0)])
def test_a_slow_link_is_crossed_once_and_the_rest_is_an_all_gather(source):
    plan = two_hosts(source, oc.Replicate())
    nbytes = 8 * 6 * 4
    assert plan.far_bytes == nbytes and plan.bytes == 4 * nbytes
    crossing = [p for p in plan.pieces if p.hop == 0]
    assert {p.sender for p in crossing} <= set(TWO_HOSTS[0]) and {p.receiver for p in crossing} == set(TWO_HOSTS[1])
    # All share the work: a quarter over the slow link from each, to each; then three quarters to the neighbours.
    assert {plan.sent_by(rank) for rank in TWO_HOSTS[0]} == {nbytes // 4}
    assert {plan.sent_by(rank) for rank in TWO_HOSTS[1]} == {3 * nbytes // 4}
    assert plan.bounds() == (
        "all ranks send 768 bytes, at least 768 are needed; between hosts 192, at least 192; within hosts 576, at least 576"
    )


def test_what_is_on_the_host_does_not_cross_again():
    """Overlapping meshes: host 1 holds all of it on ranks 4 and 5, so that nothing crosses."""
    both, two = oc.ProcessMesh([[0, 1], [4, 5]], ["dp", "tp"]), oc.ProcessMesh([4, 5, 6, 7], ["x"])
    source = Layout.of(both, 1, [oc.Replicate(), oc.Shard(0)])
    plan = plan_transfer((8,), 4, source, Layout.of(two, 1, [oc.Replicate()]), TWO_HOSTS)
    assert plan.far_bytes == 0 and all(p.hop == 0 for p in plan.pieces)


def test_expected_time_knows_the_slow_link():
    far = two_hosts(oc.Shard(0), oc.Shard(0), (1000, 6))
    near = plan_transfer(far.shape, 4, far.source, far.target)
    assert far.bytes == near.bytes and far.seconds == MACHINE.message(6000, 6000) > near.seconds == MACHINE.message(
        6000
    )


def test_many_replicas_send_a_share_each():
    source = Layout.replicated(oc.ProcessMesh([0, 1, 2, 3], ["x"]), 2)
    for machines in ((), TWO_HOSTS):
        plan = plan_transfer((8, 6), 4, source, Layout.replicated(oc.ProcessMesh([4], ["x"]), 2), machines)
        assert {plan.sent_by(rank) for rank in range(4)} == {48} and plan.bytes == 192


def test_replicas_share_the_sending():
    source = Layout.replicated(oc.ProcessMesh([0, 1], ["x"]), 1)
    plan = plan_transfer((8,), 4, source, Layout.replicated(oc.ProcessMesh([2, 3, 4, 5], ["x"]), 1))
    assert plan.sent_by(0) == plan.sent_by(1) == plan.bytes // 2


def test_a_pending_source_is_cut_before_it_leaves():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    assert reduced_source(Layout.of(mesh, 2, [oc.Partial()]), (2, 6)) is Layout.of(mesh, 2, [oc.Shard(1)])
    assert reduced_source(Layout.of(mesh, 1, [oc.Partial()]), (1,)) is Layout.of(mesh, 1, [oc.Replicate()])


def test_seconds_of_a_rank_are_of_what_it_sends_or_takes_and_nothing_else():
    """Ranks 0 and 1 swap halves of which one stays, rank 2 has its part already."""
    one, other = (oc.ProcessMesh(ranks, ["x"]) for ranks in ([0, 1, 2], [1, 0, 2]))
    layouts = [Layout.make(mesh, ((0,), ()), ()) for mesh in (one, other)]
    plan = plan_transfer((6, 5), 4, *layouts)
    kept = [p for p in plan.pieces if p.sender == p.receiver]
    assert [p.sender for p in kept] == [2], "one piece moves nowhere"
    moved = MACHINE.message(2 * 5 * 4, 0)
    assert [plan.seconds_of(rank, MACHINE) for rank in range(4)] == [
        moved,
        moved,
        MACHINE.message(0, 0),
        MACHINE.message(0, 0),
    ]
