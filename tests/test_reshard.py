"""Reshard on real ranks: every pair of placements, several axes, uneven and empty shards, and gradients."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import onecard as oc
from onecard._torch import names as _torch
from onecard.comm import Group, group
from onecard.comm.issue import collectives
from onecard.errors import CommunicationError, LayoutError, MeshError
from onecard.testing import assert_close, multirank

PLACEMENTS = [oc.Replicate(), oc.Shard(0), oc.Shard(1), oc.Partial(), oc.Partial("max")]


def value(shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (1, 2)])
def test_every_pair_on_one_axis(shape):
    mesh = oc.ProcessMesh([0, 1], ["x"])
    whole = value(shape)
    for source, target in product(PLACEMENTS, PLACEMENTS):
        x = oc.shard_tensor(whole, mesh, [source])
        y = oc.reshard(x, mesh, [target])
        assert y.placements == (target,)
        if not y.layout.pending:
            assert_close(y.to_local(), whole[y.layout.local_slices(shape)])
        assert_close(y.full_tensor(), whole)
        assert_close(x.full_tensor(), whole)


@multirank(3)
def test_sums_are_made_in_the_order_of_the_mesh():
    """Also where ranks count otherwise: the bits are those of the same mesh on any ranks."""
    mesh = oc.ProcessMesh([2, 0, 1], ["x"])
    summands = [1e8, -1e8, 1.0]  # in another order they give 0
    mine = torch.full((4, 2), summands[[2, 0, 1].index(dist.get_rank())])
    x = oc.from_local(mine, mesh, [oc.Partial()])
    for target in (oc.Shard(0), oc.Shard(1)):
        assert torch.equal(oc.reshard(x, mesh, [target]).full_tensor(), torch.ones(4, 2))
        started = oc.reshard(x, mesh, [target], async_op=True)
        assert torch.equal(started.full_tensor(), torch.ones(4, 2))


@multirank(4)
def test_pairs_on_a_two_by_two_mesh():
    mesh = oc.ProcessMesh([[3, 1], [0, 2]], ["a", "b"])
    whole = value((5, 3))
    kinds = PLACEMENTS[:4]
    for source in product(kinds, kinds):
        x = oc.shard_tensor(whole, mesh, source)
        for target in product(kinds[:3], kinds[:3]):
            y = oc.reshard(x, mesh, target)
            assert_close(y.to_local(), whole[y.layout.local_slices((5, 3))])


@multirank(3)
def test_gradients_come_back_where_the_input_lives():
    mesh = oc.ProcessMesh([0, 1, 2], ["x"])
    whole = value((4, 5))
    weight = torch.linspace(-1, 1, 20).reshape(4, 5)
    for source, target in product(PLACEMENTS[:4], PLACEMENTS[:4]):
        x = oc.shard_tensor(whole, mesh, [source]).detach().requires_grad_()
        y = oc.reshard(x, mesh, [target])
        (y * oc.shard_tensor(weight, mesh, [oc.Replicate()])).sum().backward()
        assert_close(x.grad.full_tensor(), weight)
        if source == oc.Shard(0) != target:
            assert x.grad.placements == (oc.Shard(0),)


@multirank(2)
def test_plain_tensors_stay_connected():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    plain = value((4, 3)).requires_grad_()
    x = oc.shard_tensor(plain * 2, mesh, [oc.Shard(0)])
    (oc.unshard(x * x)).sum().backward()
    assert type(plain.grad) is torch.Tensor
    assert_close(plain.grad, 8 * plain.detach())


@multirank(2)
def test_one_ranks_value_counts():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    mine = torch.full((4,), float(dist.get_rank()))
    assert_close(oc.shard_tensor(mine, mesh, [oc.Shard(0)], src=1).full_tensor(), torch.ones(4))
    with pytest.raises(MeshError, match="src=7"):
        oc.shard_tensor(mine, mesh, [oc.Shard(0)], src=7)


@multirank(2)
def test_local_parts():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    part = torch.full((2 - dist.get_rank(), 2), float(dist.get_rank())).requires_grad_()
    x = oc.from_local(part, mesh, [oc.Shard(0)], shape=(3, 2))
    assert x.shape == (3, 2)
    (x * 3).sum().backward()
    assert_close(part.grad, torch.full_like(part, 3.0))
    with pytest.raises(LayoutError, match="shape="):
        oc.from_local(part, mesh, [oc.Shard(0)], shape=(5, 2))
    y = oc.shard_tensor(value((3, 2)), mesh, [oc.Shard(0)], requires_grad=True)
    (y.to_local() * 2).sum().backward()
    assert_close(y.grad.full_tensor(), torch.full((3, 2), 2.0))


@multirank(2)
def test_settling_leaves_a_borrowed_local_alone():
    """A pending sum is made where it lies only if nobody else sees the memory; its layout changes all the same."""
    mesh = oc.ProcessMesh([0, 1], ["x"])
    mine = torch.ones(3)
    x = oc.from_local(mine, mesh, [oc.Partial()])
    assert_close(torch.relu(x).full_tensor(), torch.full((3,), 2.0))
    assert_close(mine, torch.ones(3))
    assert x.placements == (oc.Replicate(),)
    x = oc.from_local(mine, mesh, [oc.Partial()])
    y = x + x
    assert y.placements == (oc.Partial(),)
    torch.relu(y)
    assert y.placements == (oc.Replicate(),)
    assert_close(y.full_tensor(), torch.full((3,), 4.0))


@multirank(2)
def test_to_and_from_dtensor_share_memory():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    x = oc.shard_tensor(value((5, 2)), mesh, [oc.Shard(0)])
    d = x.to_dtensor()
    assert d.placements == x.placements and d.shape == x.shape
    assert_close(d.full_tensor(), value((5, 2)))
    d.to_local().zero_()
    assert_close(x.full_tensor(), torch.zeros(5, 2))
    back = oc.from_dtensor(d)
    assert back.mesh is mesh and back.to_local().data_ptr() == x.to_local().data_ptr()


@pytest.mark.proof
@multirank(4)
def test_dtensor_takes_every_ascending_layout_exactly_and_no_other():
    """torch joins parts by the ranks of its groups, which ascend: what it would join otherwise is refused."""
    refused = []
    for ranks in ([0, 1, 2, 3], [3, 0, 1, 2], [[0, 1], [2, 3]], [[2, 3], [0, 1]], [[1, 0], [3, 2]]):
        mesh = oc.ProcessMesh(ranks, ["a", "b"][: 1 + isinstance(ranks[0], list)])
        whole = value((5, 3))
        for places in product(PLACEMENTS[: 5 - mesh.ndim], repeat=mesh.ndim):
            x = oc.shard_tensor(whole, mesh, places)
            cuts = {axis for axis, p in enumerate(places) if isinstance(p, oc.Shard)}
            turned = {0: ranks in ([3, 0, 1, 2], [[2, 3], [0, 1]]), 1: ranks == [[1, 0], [3, 2]]}
            if any(turned[axis] for axis in cuts):
                refused.append(places)
                with pytest.raises(
                    LayoutError, match=r"do not ascend.*onecard\.reshard\(x, onecard\.ProcessMesh"
                ) as fault:
                    x.to_dtensor()
                again = eval(str(fault.value).split("first: ")[1], {"onecard": oc, "x": x, **vars(oc)})
                assert_close(again.full_tensor(), whole)
                theirs = DTensor.from_local(
                    x.to_local(), oc.to_device_mesh(mesh), places, run_check=False, shape=whole.shape, stride=(3, 1)
                )
                with pytest.raises(LayoutError, match="do not ascend") as fault:
                    oc.from_dtensor(theirs)
                back = eval("onecard.from_local" + str(fault.value).split("onecard.from_local")[1], {
                    "onecard": oc, "x": theirs, **vars(oc)
                })  # fmt: skip
            else:
                back = oc.from_dtensor(x.to_dtensor())
                assert_close(x.to_dtensor().full_tensor(), whole)
            assert back.layout is x.layout
            assert_close(back.full_tensor(), whole)
    assert len(refused) == 14


def test_a_world_of_one_needs_no_launcher():
    mesh = oc.ProcessMesh([0], ["x"])
    x = oc.shard_tensor([[1.0, 2.0], [3.0, 4.0]], mesh, [oc.Shard(0)])
    y = oc.reshard(torch.relu(x @ x), mesh, [oc.Shard(1)])
    assert_close(y.full_tensor(), torch.tensor([[7.0, 10.0], [15.0, 22.0]]))


def test_errors_name_the_call_that_works():
    with pytest.raises(CommunicationError, match="onecard run --nproc_per_node 2"):
        oc.shard_tensor(torch.ones(2), oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(0)])
    mesh = oc.ProcessMesh([[0]], ["x", "y"])
    with pytest.raises(LayoutError, match=r"\[Shard\(0\), Replicate\(\)\]"):
        oc.shard_tensor(torch.ones(2), mesh, [oc.Shard(0)])
    with pytest.raises(LayoutError, match="-1 to 0 are possible"):
        oc.shard_tensor(torch.ones(2), mesh, [oc.Shard(1), oc.Replicate()])
    with pytest.raises(LayoutError, match="want a ProcessMesh"):
        oc.shard_tensor(torch.ones(2), [0, 1], [oc.Shard(1), oc.Replicate()])


@multirank(2)
def test_an_object_is_the_same_on_all_ranks():
    line = group(oc.ProcessMesh([0, 1], ["x"]), 0)
    said = {"epoch": 3, "name": "x"} if oc.get_rank() == 0 else None
    assert collectives.broadcast_object(said, line, 0) == {"epoch": 3, "name": "x"}


def test_an_object_travels_on_the_device_that_the_group_has(monkeypatch):
    """NCCL alone has no way for CPU tensors. Twin: meta stands for the GPU; the sender needs nothing back."""
    used = []
    monkeypatch.setattr(_torch, "object_device", lambda pg: "meta")
    monkeypatch.setattr(collectives, "broadcast", lambda tensor, *_: used.append(tensor.device.type) or tensor)
    assert collectives.broadcast_object("value", Group((0, 1), 0, object()), 0) == "value"
    assert used == ["meta", "meta"]
