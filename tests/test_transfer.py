"""Between meshes: plans against a naive reference in one process, then on real ranks, with gradients; pipelines by marks."""

import math
import os
from collections import Counter
from datetime import timedelta
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import onecard as oc
from onecard.comm import hosts, world
from onecard.cost import MACHINE
from onecard.errors import CommunicationError
from onecard.layout import Layout
from onecard.testing import RankError, assert_close, multirank, run_ranks
from onecard.transfer import box_of, far_lower_bound, lower_bound, plan_transfer, settled_source

# ---- plans, in one process


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


@settings(max_examples=2000, deadline=None)
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
    assert executed["plans"] >= 2000


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
    assert settled_source(Layout.of(mesh, 2, [oc.Partial()]), (2, 6)) is Layout.of(mesh, 2, [oc.Shard(1)])
    assert settled_source(Layout.of(mesh, 1, [oc.Partial()]), (1,)) is Layout.of(mesh, 1, [oc.Replicate()])


MESHES = [
    ([0, 1], [2, 3]),
    ([0, 1, 2, 3], [2]),
    ([1, 2], [2, 1]),
    ([[0, 1], [2, 3]], [[3, 2], [0, 1]]),
    ([0, 1, 2], [1, 3]),
    ([3], [[0, 1], [2, 3]]),
]
KINDS = [oc.Replicate(), oc.Shard(0), oc.Shard(1), oc.Partial()]


def mesh_of(ranks):
    return oc.ProcessMesh(ranks, ["a", "b"][: np.ndim(ranks)])


@multirank(4, timeout=40)
@pytest.mark.parametrize("pair", MESHES, ids=str)
def test_between_meshes_on_ranks(pair):
    one, two = map(mesh_of, pair)
    whole = torch.arange(1.0, 16.0).reshape(5, 3)
    weight = torch.linspace(-1, 1, 15).reshape(5, 3)
    for source, target in product(product(KINDS, repeat=one.ndim), product(KINDS, repeat=two.ndim)):
        if len(source) + len(target) > 3 and len(set(source) | set(target)) < 3:
            continue  # the rest of the 2x2 pairs repeat themselves
        x = oc.shard_tensor(whole, one, source).detach().requires_grad_()
        y = oc.reshard(x, two, target)
        assert y.mesh is two and y.placements == tuple(target)
        assert_close(y.full_tensor(), whole)  # everywhere, outside both meshes too
        (y * oc.shard_tensor(weight, two, [oc.Replicate()] * two.ndim)).sum().backward()
        assert x.grad.mesh is one
        assert_close(x.grad.full_tensor(), weight)


@multirank(4)
def test_explain_shows_the_bytes_of_a_transfer():
    one, two = oc.ProcessMesh([0, 1], ["x"]), oc.ProcessMesh([2, 3], ["y"])
    x = oc.shard_tensor(torch.ones(4, 3), one, [oc.Replicate()])
    with oc.explain() as report:
        oc.reshard(x, two, [oc.Shard(0)])
    assert report.bytes == (24 if oc.get_rank() < 2 else 0)
    assert "between meshes" in str(report) and "transfer" in str(report)


def pretend_two_hosts():
    """As a launcher says it of two machines with half of the ranks each."""
    half = oc.get_world_size() // 2
    os.environ.update(GROUP_RANK=str(oc.get_rank() // half), LOCAL_WORLD_SIZE=str(half))


@multirank(4)
@pytest.mark.parametrize("source", [oc.Replicate(), oc.Shard(0), oc.Partial(), oc.Partial("max")], ids=str)
def test_between_hosts_each_element_crosses_once(source):
    pretend_two_hosts()
    one, two = oc.ProcessMesh([0, 1], ["x"]), oc.ProcessMesh([2, 3], ["y"])
    whole, weight = torch.arange(12.0).reshape(4, 3), torch.linspace(-1, 1, 12).reshape(4, 3)
    x = oc.shard_tensor(whole, one, [source]).detach().requires_grad_()
    with oc.explain() as report:
        y = oc.reshard(x, two, [oc.Replicate()])
        (y * oc.shard_tensor(weight, two, [oc.Replicate()])).sum().backward()
    assert_close(y.full_tensor(), whole)
    assert_close(x.grad.full_tensor(), weight)
    forth, back = (m for m in report.messages if m.step.kind == "transfer")
    # 48 bytes cross, half of them to each rank of the second host, which gives it to the other.
    assert forth.step.bytes == 24
    assert forth.reason == (
        "changes the mesh: all ranks send 96 bytes, at least 96 are needed; between hosts 48, at least 48; "
        "within hosts 48, at least 48"
    )
    assert f"between hosts {48:,}, at least {48:,}" in back.reason


@multirank(4)
def test_hosts_are_asked_for_once():
    pretend_two_hosts()
    assert hosts.among(range(4)) == ((0, 1), (2, 3))
    os.environ["GROUP_RANK"] = "7"  # they are known by now
    assert hosts.among([0, 1, 2]) == (((0, 1), (2,)) if oc.get_rank() < 3 else ())
    assert hosts.among([0, 1]) == ()
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    assert hosts.among(range(4)) == ()


class Stages(nn.Module):
    """Seed 002, 4.4: two stages; each of a 2x2 mesh with data and tensor parallelism, or one card (no meshes)."""

    def __init__(self, w0, w1, mesh0=None, mesh1=None):
        super().__init__()
        self.mesh1 = mesh1
        self.w0, self.w1 = nn.Parameter(w0.clone()), nn.Parameter(w1.clone())
        if mesh0 is not None:
            self.w0 = oc.shard_tensor(self.w0, mesh0, [oc.Replicate(), oc.Shard(1)])
            self.w1 = oc.shard_tensor(self.w1, mesh1, [oc.Replicate(), oc.Shard(0)])

    def forward(self, x):
        y = torch.matmul(x, self.w0)
        if self.mesh1 is not None:
            y = oc.reshard(y, self.mesh1, [oc.Shard(0), oc.Shard(2)])
        return torch.matmul(y, self.w1)


def train(model, batches, foreach):
    optimizer = oc.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach))
    losses = []
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(oc.unshard(loss.detach())))
    return losses


@multirank(8, timeout=150)
def test_the_3d_program_of_seed_002_equals_one_card():
    mesh0 = oc.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
    mesh1 = oc.ProcessMesh([[4, 5], [6, 7]], dim_names=["x", "y"])
    generator = torch.Generator().manual_seed(0)
    w0, w1 = torch.randn(16, 24, generator=generator), torch.randn(24, 16, generator=generator)
    data = [torch.randn(2, 8, 16, generator=generator) for _ in range(5)]
    for foreach in (False, True):
        expected = train(Stages(w0, w1), data, foreach)
        batches = [oc.shard_tensor(d, mesh0, [oc.Shard(0), oc.Replicate()]) for d in data]
        assert_close(torch.tensor(train(Stages(w0, w1, mesh0, mesh1), batches, foreach)), torch.tensor(expected))


class SimpleNet(nn.Module):
    """Seed 003, 2.2.4.2.3: stages by shard_op on sub-meshes; the parameters stay plain."""

    def __init__(self, mesh=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear1, self.linear2, self.linear3 = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 4)
        self.relu, self.mesh = nn.ReLU(), mesh

    def forward(self, x):
        first, last = self.linear1, self.linear3
        if self.mesh is not None:
            first, last = oc.shard_op(first, self.mesh[0]), oc.shard_op(last, self.mesh[1])
        return self.relu(last(self.linear2(first(x))))


@multirank(2)
def test_the_pipeline_of_seed_003_equals_one_card():
    losses = []
    for mesh in (None, oc.ProcessMesh([0, 1], dim_names=["pp"])):
        model = SimpleNet(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        generator = torch.Generator().manual_seed(1)
        losses.append([])
        for _ in range(10):
            x = torch.rand(6, 8, generator=generator)
            label = torch.randint(0, 4, (6,), generator=generator)
            loss = nn.functional.cross_entropy(model(x), label)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(float(oc.unshard(loss.detach())))
    assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]))


@multirank(2)
def test_outside_the_mesh_an_operator_computes_its_shape_only():
    """A rank that had to hold or make a part of these would need terabytes."""
    if oc.get_rank() == 1:
        mesh = oc.ProcessMesh([0], ["stage"])
        x = oc.from_local(torch.empty(0, 0), mesh, [oc.Shard(0)], shape=(2**20, 2**20)).requires_grad_()
        with oc.explain() as report:
            loss = torch.softmax(nn.functional.gelu(x @ x.t()), -1).square().mean()
            loss.backward()
        assert loss.shape == () and x.grad.shape == (2**20, 2**20) and x.grad.mesh is mesh
        assert x.grad.to_local().numel() == 0 and not report.bytes


@multirank(3, timeout=20)
@pytest.mark.parametrize("taken", ["it", "a view", "a part"])
def test_outside_the_mesh_layouts_follow_what_is_settled_inside(taken):
    """A rank that took the sum for pending would plan another transfer than those that hold it, and wait for ever."""
    one, two = oc.ProcessMesh([0, 1], ["x"]), oc.ProcessMesh([2], ["y"])
    p = oc.shard_tensor(torch.ones(4, 6), one, [oc.Shard(1)]) @ oc.shard_tensor(torch.ones(6, 4), one, [oc.Shard(0)])
    assert p.placements == (oc.Partial(),)
    seen = {"it": lambda: p, "a view": lambda: p.view(-1), "a part": lambda: p.unbind(0)[1]}[taken]()
    torch.relu(seen)  # settles the sum
    assert seen.placements == (oc.Replicate(),)
    assert_close(oc.reshard(p, two, [oc.Replicate()]).full_tensor(), torch.full((4, 4), 6.0))


# ---- ranks that do not come


def on_the_mesh_only():
    """The mistake: the ranks of the mesh ask for the whole value, the others do not."""
    x = oc.shard_tensor(torch.ones(3), oc.ProcessMesh([0], ["pp"]), [oc.Replicate()])
    if oc.get_rank() == 0:
        x.full_tensor()


def test_full_tensor_on_the_mesh_only_ends_with_the_missing_rank():
    with pytest.raises(RankError, match=r"(?s)rank 0 waits in transfer #1 of ranks 0, 1.*missing: rank 1"):
        run_ranks(on_the_mesh_only, 2, timeout=30)


@multirank(2, timeout=20)
def test_a_rank_that_does_not_come_is_named_in_time(tmp_path):
    rank, backend = oc.get_rank(), dist.get_backend()
    dist.destroy_process_group()
    short = timedelta(seconds=2)
    dist.init_process_group(backend, f"file://{tmp_path}/store", short, rank=rank, world_size=2)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 knows"])
        return
    with pytest.raises(CommunicationError) as caught:
        on_the_mesh_only()
    store.set("rank 0 knows", "")
    for part in ("to [world=Replicate] on", "rank 0 waited for rank(s) [1]", "these are all ranks of the world"):
        assert part in str(caught.value)


@multirank(3)
def test_a_rank_that_does_not_say_its_host_is_named():
    os.environ.update(GROUP_RANK=str(oc.get_rank()), LOCAL_WORLD_SIZE="1")
    if oc.get_rank() == 0:
        world.TIMEOUT = timedelta(seconds=1)
        with pytest.raises(
            CommunicationError, match=r"with ranks \[0, 1, 2\], but rank\(s\) \[1, 2\] did not come within 1 s"
        ):
            hosts.among(range(3))
