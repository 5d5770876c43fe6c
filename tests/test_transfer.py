"""Between meshes: plans against a naive reference in one process, then on real ranks, with gradients; pipelines by marks."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import onecard as oc
from onecard.layout import Layout
from onecard.testing import assert_close, multirank
from onecard.transfer import box_of, lower_bound, plan_transfer, settled_source


@st.composite
def meshes(draw, world=8):
    shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3), (1, 2), (2, 1, 2)]))
    ranks = draw(st.permutations(range(world)))[: int(np.prod(shape))]
    return oc.ProcessMesh(np.array(ranks).reshape(shape), [f"a{i}" for i in range(len(shape))])


@st.composite
def layouts(draw, ndim, pending=()):
    mesh = draw(meshes())
    dims = [[] for _ in range(ndim)]
    marks = []
    for axis in draw(st.permutations(range(mesh.ndim))):
        use = draw(st.sampled_from([None, *range(ndim), *pending]))
        if isinstance(use, str):
            marks.append((axis, use))
        elif use is not None:
            dims[use].append(axis)
    return Layout.make(mesh, tuple(map(tuple, dims)), tuple(sorted(marks)))


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=0, max_size=3)))
    return shape, draw(layouts(len(shape))), draw(layouts(len(shape), pending=("sum", "max")))


def parts(whole, layout):
    return {r: whole[tuple(slice(a, b) for a, b in box_of(layout, whole.shape, r))] for r in layout.mesh.process_ids}


@settings(max_examples=2000, deadline=None)
@given(cases())
def test_plans_move_each_element_once(case):
    shape, source, target = case
    whole = np.arange(1.0, 1 + np.prod(shape, dtype=int)).reshape(shape)
    plan = plan_transfer(shape, 4, source, target)
    assert plan.bytes == lower_bound(shape, 4, source, target)
    have = parts(whole, source)
    wanted = parts(whole, target)
    got = {rank: np.zeros_like(part) for rank, part in wanted.items()}
    for piece in plan.pieces:
        sent = have[piece.sender][inside(piece.box, box_of(source, shape, piece.sender))]
        assert sent.size, "no empty message"
        got[piece.receiver][inside(piece.box, box_of(target, shape, piece.receiver))] += sent
    for rank, part in got.items():
        place = target.mesh.coordinate(rank)
        holds = all(op != "sum" or place[axis] == 0 for axis, op in target.pending)
        np.testing.assert_array_equal(part, wanted[rank] if holds else 0 * part)


def inside(box, held):
    return tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(box, held, strict=True))


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
