"""Plain tensors that are assigned distributed data, and the other way round: objects stay, values are one card's."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onecard as oc
from onecard.errors import DispatchError
from onecard.testing import run_ranks


def momentum_encoder(mesh: oc.ProcessMesh | None) -> list[float]:
    """MoCo's second network: frozen, never marked, moved by hand towards the first one."""
    torch.manual_seed(0)
    query = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
    key = copy.deepcopy(query).requires_grad_(False)
    held, queue = [*key.parameters()], F.normalize(torch.randn(8, 32), dim=0)
    if mesh is not None:
        oc.shard_layer(query, mesh)
    optimizer, losses = torch.optim.SGD(query.parameters(), 0.1), []
    for _ in range(3):
        x = torch.randn(8, 6)
        if mesh is not None:
            x = oc.shard_tensor(x, mesh, [oc.Shard(0)])
        q = F.normalize(query(x), dim=1)
        with torch.no_grad():
            for a, b in zip(query.parameters(), key.parameters(), strict=True):
                b.data = b.data * 0.9 + a.data * 0.1
            k = F.normalize(key(x), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p is q for p, q in zip(held, key.parameters(), strict=True))
    return [*losses, *(float(p.sum()) for p in key.parameters())]


def on_ranks() -> tuple[list[float], list[float]]:
    return momentum_encoder(None), momentum_encoder(oc.ProcessMesh([0, 1], ["dp"]))


def test_a_momentum_encoder_is_one_cards():
    for one, marked in run_ranks(on_ranks, 2):
        assert torch.allclose(torch.tensor(one), torch.tensor(marked), rtol=1e-5)


MESH = oc.ProcessMesh([0], ["x"])


def distributed(*shape: int, where: object = None) -> oc.DistTensor:
    return oc.shard_tensor(torch.randn(*shape), MESH, [where or oc.Replicate()])


def test_a_parameter_stays_the_object_with_its_hooks_and_gradient():
    p = nn.Parameter(torch.ones(3))
    seen: list[float] = []
    p.register_hook(lambda g: seen.append(1.0))
    p.note, p.grad = "mine", torch.full((3,), 2.0)
    optimizer = torch.optim.SGD([p], 0.1)
    p.data = value = distributed(3)
    assert isinstance(p, nn.Parameter) and isinstance(p, oc.DistTensor) and p.note == "mine" and p.requires_grad
    (p * 3).sum().backward()
    assert seen == [1.0] and torch.equal(oc.unshard(p.grad), torch.full((3,), 5.0))
    optimizer.step()
    assert torch.allclose(oc.unshard(p), oc.unshard(value))  # what was assigned shares its memory


def test_what_cannot_be_assigned_says_so():
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(DispatchError, match=r"data of a plain tensor of \[3\]"):
        p.data = distributed(4)
    p.register_hook(lambda g: g * 0)
    p.grad, held = torch.ones(3), weakref.ref(p)
    with pytest.raises(DispatchError, match=r"a weak reference.*tensor.copy_\(onecard.unshard\(value\)\)"):
        p.data = distributed(3)
    assert held() is p and type(p) is nn.Parameter and torch.equal(p.grad, torch.ones(3))
    del held
    (p * 2).sum().backward()
    assert torch.equal(p.grad, torch.ones(3))  # its hooks are still there
    y = (p * 2).sum()
    p.data = distributed(3)  # the graph is one of what the parameter was
    with pytest.raises(RuntimeError, match="made before it became a distributed tensor"):
        y.backward()
    z = distributed(4, where=oc.Shard(0))
    with pytest.raises(DispatchError, match="want a DistTensor of the same shape"):
        z.data = torch.ones(4)


def test_plain_data_of_a_tensor_that_each_rank_has_whole():
    """The best weights put back; pieces of one flat tensor."""
    model = oc.shard_layer(nn.Linear(3, 2), MESH)
    flat = torch.arange(8.0)
    model.weight.data, model.bias.data = flat[:6].view(2, 3), flat[6:]
    flat += 1
    assert torch.equal(oc.unshard(model.weight), torch.arange(1.0, 7.0).view(2, 3))
    assert torch.equal(oc.unshard(model.bias), torch.tensor([7.0, 8.0]))
    with pytest.raises(DispatchError, match="of the same shape"):
        model.bias.data = torch.ones(3)


class Scaled(nn.Module):
    """Parameters with a dim of one element, as class tokens and depthwise kernels have it."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.deep = nn.Parameter(torch.randn(1, 1, 6)), nn.Conv1d(4, 4, 3, groups=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.deep(x * self.token)


def dims_of_one(plan: bool) -> list[float]:
    torch.manual_seed(0)
    model = Scaled()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    if plan:
        cuts = (("token", "tp: Shard(0)"), ("deep.weight", "tp: Shard(1)"))
        oc.parallelize(model, optimizer, plan=oc.Plan(tp=2, placements=cuts))
        assert tuple(model.token.placements) == tuple(model.deep.weight.placements) == (oc.Replicate(),)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4, 6)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_dim_of_one_element_that_a_plan_cuts_is_whole():
    for found in run_ranks(dims_of_one, 2, True):
        assert found == pytest.approx(dims_of_one(False), rel=1e-5)
