"""What training programs do to parameters and buffers besides training them. Twin: the same on one card."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from twins import MESH

import onecard as oc
from onecard.errors import DispatchError
from onecard.testing import multirank

PLACEMENTS = {
    "weight": [oc.Shard(0)],
    "bias": [oc.Shard(0)],
    "running_mean": [oc.Shard(0)],
    "running_var": [oc.Shard(0)],
}


def shard(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    for key, parameter in list(layer.named_parameters(recurse=False)):
        setattr(layer, key, oc.shard_tensor(parameter, mesh, PLACEMENTS.get(key, [oc.Replicate()])))
    for key, buffer in list(layer.named_buffers(recurse=False)):
        setattr(layer, key, oc.shard_tensor(buffer, mesh, PLACEMENTS.get(key, [oc.Replicate()])))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=0.3), nn.Tanh(), nn.Linear(5, 3))


def data(step: int = 0) -> Tensor:
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(step))


def pair() -> tuple[nn.Sequential, nn.Sequential]:
    plain = model()
    return plain, oc.shard_layer(copy.deepcopy(plain), MESH, shard)


def inputs(net: nn.Module, step: int = 0) -> Any:
    first = next(net.parameters())
    whole = data(step).to(first.dtype)
    return oc.shard_tensor(whole, MESH, [oc.Shard(0)]) if isinstance(first, oc.DistTensor) else whole


def train(net: nn.Module, steps: int = 2, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        net(inputs(net, step)).square().mean().backward()
        optimizer.step()


def same(plain: nn.Module, twin: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, a), (other, b) in zip(plain.state_dict().items(), twin.state_dict().items(), strict=True):
        assert name == other and a.dtype == b.dtype, (name, other)
        torch.testing.assert_close(
            b.full_tensor() if isinstance(b, oc.DistTensor) else b, a, rtol=tolerance, atol=tolerance
        )


# ---- parameters and buffers, changed in the ways that training programs do


def ema_by_hand(net: nn.Module) -> nn.Module:
    average = copy.deepcopy(net)
    for _ in range(2):
        train(net, 1)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), net.parameters(), strict=True):
                mean.mul_(0.9).add_(p, alpha=0.1)
            for mean, b in zip(average.buffers(), net.buffers(), strict=True):
                mean.copy_(b)
    return average


def averaged_model(net: nn.Module) -> nn.Module:
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        train(net, 1)
        average.update_parameters(net)
    return average


def swa(net: nn.Module) -> nn.Module:
    average = torch.optim.swa_utils.AveragedModel(net)
    for _ in range(2):
        train(net, 1)
        average.update_parameters(net)
    torch.optim.swa_utils.update_bn([inputs(net, 5), inputs(net, 6)], average)
    return average


def load(net: nn.Module) -> nn.Module:
    train(net)
    fresh = copy.deepcopy(net)
    nn.init.zeros_(fresh[0].weight)
    fresh.load_state_dict(net.state_dict())
    nn.init.ones_(fresh[3].weight)  # which is no other name of the first one's
    fresh.load_state_dict(model().state_dict(), strict=True)  # plain tensors
    return nn.ModuleList([net, fresh])


def slices(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        net[0].weight[1:3] = 0
        net[0].weight[[0, 4], 2] = 1
        net[0].weight[:, 1].mul_(2)
        net[0].bias[-1].fill_(3)
        net[3].weight.copy_(torch.arange(15.0).view(3, 5) / 10)
        net[3].weight.data[2].sub_(1)
        net[0].weight.view(-1)[7] += 1
    train(net)
    return net


def data_assigned(net: nn.Module) -> nn.Module:
    net[0].weight.data = net[0].weight.data * 2
    net[0].bias.data = torch.zeros_like(net[0].bias)
    shared = net[3].weight.detach().clone()
    net[3].weight.data = shared
    shared.add_(1)
    train(net)
    net.shared = nn.Parameter(shared, requires_grad=False)
    return net


def vectors(net: nn.Module) -> nn.Module:
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters((vector * 0.5).detach(), net.parameters())
    train(net)
    return net


def dtypes(net: nn.Module) -> nn.Module:
    train(net.double(), 1)
    copied = copy.deepcopy(net).to(torch.bfloat16)
    halved = copy.deepcopy(net).half()
    return nn.ModuleList([net, copied, halved, copy.deepcopy(halved).float()])


def gradients(net: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step, none in enumerate((True, False, True)):
        for micro in range(2):  # accumulated
            net(inputs(net, 2 * step + micro)).square().sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=step != 1)
        nn.utils.clip_grad_value_(net.parameters(), 0.1, foreach=step != 1)
        net[0].weight.grad[1:3].mul_(0.5)
        net[3].weight.grad = net[3].weight.grad * 2
        optimizer.step()
        optimizer.zero_grad(set_to_none=none)
    return net


def frozen_statistics(net: nn.Module) -> nn.Module:
    train(net)
    net.eval()
    train(net)
    net[1].reset_running_stats()
    net.train()
    net[1].momentum = None  # a cumulative mean
    train(net)
    return net


def weight_norm(net: nn.Module) -> nn.Module:
    parametrizations.weight_norm(net[0])
    train(net)
    parametrize.remove_parametrizations(net[0], "weight")
    return net


def spectral_norm(net: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    with oc.one_card_random():
        parametrizations.spectral_norm(net[3], n_power_iterations=2)
    train(net)
    return net


def old_weight_norm(net: nn.Module) -> nn.Module:
    warnings.simplefilter("ignore", FutureWarning)
    nn.utils.weight_norm(net[3])
    train(net)
    return net


def buffers(net: nn.Module) -> nn.Module:
    net.register_buffer("seen", torch.zeros_like(net[0].bias))
    for _ in range(2):
        train(net, 1)
        net.seen += net[0].bias.detach().abs()
        net.seen[1:] *= 0.5
    return net


TOOLS = [
    ema_by_hand, averaged_model, swa, load, slices, data_assigned, vectors, dtypes, gradients, frozen_statistics, weight_norm,
    spectral_norm, old_weight_norm, buffers,
]  # fmt: skip


@pytest.mark.share(1)
@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
@multirank(2)
def test_tool(tool: Any) -> None:
    if tool not in (weight_norm, old_weight_norm):
        warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    plain, twin = pair()
    same(tool(plain), tool(twin))


@multirank(2)
def test_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids))

    for when in ("before", "after"):
        torch.manual_seed(0)
        plain = Tied()
        twin = copy.deepcopy(plain)
        if when == "before":
            twin.head.weight = twin.table.weight
        twin = oc.shard_layer(twin, MESH, shard)
        plain.head.weight = plain.table.weight
        twin.head.weight = twin.table.weight
        again = copy.deepcopy(twin)
        assert again.head.weight is again.table.weight
        ids = torch.tensor([[0, 8, 3], [3, 2, 1]])
        for net in (plain, twin):
            optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
                optimizer.step()
        assert len(list(twin.parameters())) == 1 and twin.head.weight is twin.table.weight
        same(plain, twin)


@multirank(2)
def test_what_is_saved_by_pickle_is_refused(tmp_path: Any = None) -> None:
    _, twin = pair()
    for save in (lambda x: pickle.dumps(x), lambda x: torch.save(x, "/dev/null")):
        for what in (twin[0].weight, twin.state_dict(), twin):
            with pytest.raises(DispatchError, match=r"full_tensor\(\)"):
                save(what)
