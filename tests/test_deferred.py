"""deferred_init: shards only, with the values of the one-card initialisation, under a limit that the whole would break."""

from __future__ import annotations

import resource
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import onecard as oc
from onecard.errors import DispatchError
from onecard.tensor.deferred import _records
from onecard.testing import multirank


class Zoo(nn.Module):
    """Every way in which a module makes its parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, padding_idx=3)
        self.scaled = nn.Parameter(torch.randn(5, 4) * 0.02)
        self.register_buffer("inverse", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8))
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)))
        self.register_buffer("data", torch.tensor([1.0, 2.0]))
        self.linear = nn.Linear(4, 4)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.trunc_normal_(self.linear.bias, std=0.6)
        self.linear.weight.data.mul_(3)
        self.permutation = nn.Parameter(torch.randperm(9).float())
        self.lstm = nn.LSTM(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.convolution = nn.Conv2d(2, 3, 3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.eye = nn.Parameter(torch.empty(4, 5))
        nn.init.eye_(self.eye)
        self.dirac = nn.Parameter(torch.empty(4, 4, 3))
        nn.init.dirac_(self.dirac)
        self.sparse = nn.Parameter(torch.empty(6, 4))
        nn.init.sparse_(self.sparse, 0.5)
        self.order = nn.Parameter(torch.ones(4))
        self.before = nn.Parameter(self.order.detach() * 2)
        nn.init.normal_(self.order)
        self.after = nn.Parameter(self.order.detach() * 2)
        nn.init.normal_(self.order[:2].detach())
        self.half = nn.Linear(3, 3).to(torch.bfloat16)
        self.tied = self.linear.weight
        if self.scaled.abs().max() < 100:  # a value decides
            nn.init.constant_(self.norm.weight, 2.0)


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def compare(make, mesh, shard_fn=None):
    oc.manual_seed(3)
    with oc.one_card_random():
        expected = make()
    after = torch.get_rng_state()
    oc.manual_seed(3)
    with oc.deferred_init():
        module = make()
    assert all(p.device.type == "meta" for p in module.parameters())
    assert torch.equal(after, torch.get_rng_state())
    oc.shard_layer(module, mesh, shard_fn)
    found, wanted = tensors(module), tensors(expected)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(oc.unshard(found[name]), value), name
        assert found[name].dtype == value.dtype and found[name].requires_grad == value.requires_grad
    assert any(p.layout.dims != ((),) * p.dim() for p in module.parameters()) or shard_fn is None
    return module


def first_dim(name, layer, mesh):
    for key, parameter in list(layer.named_parameters(recurse=False)):
        if not isinstance(parameter, oc.DistTensor):
            setattr(layer, key, oc.shard_tensor(parameter, mesh, [oc.Shard(0)] * mesh.ndim))


@pytest.mark.parametrize("ranks", [[0], [0, 1], [[0, 1], [2, 3]]])
def test_modules_of_every_kind(ranks):
    count = torch.tensor(ranks).numel()
    multirank(count, timeout=120)(every_kind)(ranks)


def every_kind(ranks):
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)  # orthogonal_: a QR decomposition has no rule
    mesh = oc.ProcessMesh(ranks)
    compare(Zoo, mesh)
    module = compare(Zoo, mesh, first_dim)
    assert module.tied is module.linear.weight


def test_meta_tensors_of_elsewhere_are_told():
    mesh = oc.ProcessMesh([0], ["x"])
    with pytest.raises(DispatchError, match="deferred_init"):
        oc.shard_tensor(torch.empty(3, device="meta"), mesh, [oc.Shard(0)])
    with oc.deferred_init():
        layer = nn.Linear(3, 3)
    with pytest.raises(DispatchError, match="dtype in there"):
        oc.shard_layer(layer.to(torch.float64), mesh)


def test_real_tensors_stay_real():
    kept = torch.ones(3)
    with oc.deferred_init():
        kept.mul_(2)
        assert torch.tensor([1.0, 2.0]).sum().item() == 3
        assert (torch.zeros(3) + kept).device.type == "meta"
    assert kept.tolist() == [2, 2, 2]


def test_what_is_overwritten_is_not_made():
    with oc.deferred_init():
        layer = nn.Linear(3, 3)
        nn.init.normal_(layer.weight)
    record = _records[layer.weight.untyped_storage()._cdata][1]
    names = [node.func for node in record.needed(layer.weight.untyped_storage()._cdata)]
    assert torch.ops.aten.normal_.default in names and torch.ops.aten.uniform_.default not in names


MIB = 2**20


def build_a_model_larger_than_the_limit(rows: int, layers: int, limit_mib: int) -> float:
    """Peak resident MiB of a rank that holds a quarter of the model, with its heap limited."""
    status = Path("/proc/self/status").read_text().splitlines()
    used = int(next(line for line in status if line.startswith("VmData")).split()[1]) // 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, ((used + limit_mib) * MIB, before[1]))
    mesh = oc.ProcessMesh(range(4), ["x"])
    oc.manual_seed(0)
    with oc.deferred_init():
        model = nn.Sequential(*[nn.Linear(rows, rows) for _ in range(layers)])
    oc.shard_layer(model, mesh, first_dim)
    held = sum(p.to_local().nbytes for p in model.parameters())
    assert held * 4 == sum(p.nbytes for p in model.parameters())
    with pytest.raises(RuntimeError, match=r"(?i)alloc"):
        torch.empty(rows * rows * layers)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def test_a_model_larger_than_the_limit():
    """128 MiB over four ranks with room for 64 MiB each; benchmarks/random_numbers.py does 2 GiB."""
    multirank(4, timeout=120)(build_a_model_larger_than_the_limit)(1024, 32, 64)
