"""Between meshes on real ranks, with gradients; pipelines by marks; ranks that do not come."""

import os
from datetime import timedelta
from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import onecard as oc
from onecard.comm.world import hosts, world
from onecard.errors import CommunicationError
from onecard.testing import RankError, assert_close, multirank, run_ranks

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


@pytest.mark.share(1)
@multirank(4)
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


@pytest.mark.share(1)
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


@pytest.mark.proof
@multirank(8)
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


@multirank(2)
@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_of_a_mesh_that_is_smaller_than_the_world(foreach):
    norms = []
    for place in (lambda x: x, lambda x: oc.shard_tensor(x, oc.ProcessMesh([0], ["dp"]), [oc.Shard(0)])):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(place(torch.randn(4, 2))) for _ in range(2)]
        sum((w * w).sum() for w in weights).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(weights, 0.5, foreach=foreach))
        torch.nn.utils.clip_grad_value_(weights, 0.1, foreach=foreach)
        clipped = [w.grad for w in weights]
    if oc.get_rank() == 0:
        torch.testing.assert_close(norms[1].to_local(), norms[0])
    assert all((g.to_local().numel() == 8) is (oc.get_rank() == 0) for g in clipped)


@pytest.mark.share(1)
@multirank(3)
@pytest.mark.parametrize("taken", ["it", "a view", "a part"])
def test_outside_the_mesh_layouts_follow_what_is_settled_inside(taken):
    """A rank that took the sum for pending would plan another transfer than those that hold it, and wait for ever."""
    one, two = oc.ProcessMesh([0, 1], ["x"]), oc.ProcessMesh([2], ["y"])
    p = oc.shard_tensor(torch.ones(4, 6), one, [oc.Shard(1)]) @ oc.shard_tensor(torch.ones(6, 4), one, [oc.Shard(0)])
    assert p.placements == (oc.Partial(),)
    seen = {"it": lambda: p, "a view": lambda: p.view(-1), "a part": lambda: p.unbind(0)[1]}[taken]()
    torch.relu(seen)  # reduces the sum
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
        run_ranks(on_the_mesh_only, 2)


@multirank(2)
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


@multirank(3)
def test_gradients_that_nobody_asks_for_outside_the_mesh():
    """Operators that leave gradients out give the others in their places also where only shapes are known."""
    mesh = oc.ProcessMesh([0, 1], ["x"])
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    for frozen in ("x", "weight", "bias"):
        for layer in (nn.Conv2d(3, 2, 3), nn.Linear(6, 5), nn.LayerNorm(6), nn.GroupNorm(3, 3)):
            leaves = {"x": x.clone(), "weight": layer.weight.detach().clone(), "bias": layer.bias.detach().clone()}
            given = {
                n: oc.shard_tensor(t, mesh, [oc.Shard(0) if n == "x" else oc.Replicate()]) for n, t in leaves.items()
            }
            for values in (leaves, given):
                for name, value in values.items():
                    value.requires_grad_(name != frozen)
                parameters = {n: values[n] for n in ("weight", "bias")}
                torch.func.functional_call(layer, parameters, values["x"]).sin().sum().backward()
            for name in set(leaves) - {frozen}:
                assert given[name].grad.shape == leaves[name].shape
                assert_close(given[name].grad, leaves[name].grad, rtol=1e-5, atol=1e-5)
