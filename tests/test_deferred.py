"""deferred_init: shards only, with the values of the one-card initialisation, under a limit that the whole would break."""

from __future__ import annotations

import copy
import pickle
import resource
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import onecard as oc
from onecard.errors import DispatchError
from onecard.tensor.deferred.calls import record_of
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


@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [[0], [0, 1], [[0, 1], [2, 3]]])
def test_modules_of_every_kind(ranks):
    count = torch.tensor(ranks).numel()
    multirank(count)(every_kind)(ranks)


def every_kind(ranks):
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)  # orthogonal_: a QR decomposition has no rule
    mesh = oc.ProcessMesh(ranks)
    compare(Zoo, mesh)
    module = compare(Zoo, mesh, first_dim)
    assert module.tied is module.linear.weight


def test_meta_tensors_of_elsewhere_are_told():
    with pytest.raises(DispatchError, match="deferred_init"):
        oc.shard_tensor(torch.empty(3, device="meta"), oc.ProcessMesh([0], ["x"]), [oc.Shard(0)])


class Late(nn.Module):
    """Everything that is usual to do to a module after it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 6), nn.Linear(6, 4, bias=False), nn.LayerNorm(4)
        self.embedding = nn.Embedding(9, 4)
        self.register_buffer(
            "frequency", 1.0 / 10000 ** (torch.arange(0, 4, 2, dtype=torch.float) / 4), persistent=False
        )


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(0.0, 0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.data.zero_()
    if isinstance(module, nn.Embedding):
        module.weight.data[3].zero_()
    if isinstance(module, nn.LayerNorm):
        nn.init.trunc_normal_(module.weight, std=0.5)


def prepare(model: Late) -> Late:
    model.apply(init_weights)
    with torch.no_grad():
        model.a.bias.copy_(torch.arange(6.0))
        model.b.weight.mul_(2).add_(model.a.weight.t())
        model.norm.bias.copy_(model.norm.weight)
        model.embedding.weight[1:3].uniform_()
        model.embedding.weight[:, 2].normal_()
    model.b = nn.utils.parametrizations.weight_norm(model.b)
    model.a = nn.utils.parametrizations.spectral_norm(model.a)
    model.embedding = copy.deepcopy(model.embedding).to(torch.bfloat16)
    return model


def later(ranks):
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)  # what weight_norm and spectral_norm compute
    mesh = oc.ProcessMesh(ranks)
    for shard_fn in (None, first_dim):
        oc.manual_seed(3)
        with oc.one_card_random():
            expected = prepare(Late())
            oc.manual_seed(3)
            with oc.deferred_init():
                module = Late()
            prepare(module)
            assert all(p.device.type == "meta" for p in module.parameters())
        oc.shard_layer(module, mesh, shard_fn)
        found = tensors(module)
        for name, value in tensors(expected).items():
            assert torch.equal(oc.unshard(found[name]), value), name
            assert found[name].dtype == value.dtype


@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [[0], [0, 1, 2]])
def test_what_is_done_after_deferred_init_counts_too(ranks):
    multirank(len(ranks))(later)(ranks)


def test_a_change_that_would_be_lost_is_an_error():
    mesh = oc.ProcessMesh([0], ["x"])
    with oc.deferred_init():
        layer = nn.Linear(3, 3)
    kept = layer.weight
    oc.shard_layer(layer, mesh)
    assert kept is not layer.weight
    for change in (lambda: kept.data.zero_(), lambda: nn.init.ones_(kept), lambda: kept[0].detach().normal_()):
        with pytest.raises(DispatchError, match="was laid out before"):
            change()
    with pytest.raises(DispatchError, match="shard_tensor"), torch.no_grad(), oc.deferred_init():
        torch.ones(3, 3).copy_(layer.weight)


def test_values_that_leave_are_made():
    x = torch.zeros(3)
    with oc.deferred_init():
        made = torch.full((3,), 2.0)
        x.copy_(made)
    made.add_(1)
    assert x.tolist() == [2, 2, 2] and made.sum().item() == 9
    with oc.deferred_init():
        assert (torch.ones(3) * made).sum().item() == 9  # of another deferred_init


def test_values_are_made_where_they_are_asked_for():
    oc.manual_seed(0)
    with oc.one_card_random():
        expected = torch.randn(3, 2)
    oc.manual_seed(0)
    with oc.deferred_init():
        x = torch.randn(3, 2)
    assert x.tolist() == expected.tolist() and x.numpy().sum() == expected.numpy().sum()
    assert (
        torch.equal(x, x) and torch.equal(x[x > 0], expected[expected > 0]) and float(x.sum()) == float(expected.sum())
    )
    assert repr(x) == "DeferredTensor([3, 2], torch.float32, requires_grad=False)"
    with pytest.raises(DispatchError, match="cannot be saved"):
        pickle.dumps(x)


def rows_and_columns(mesh):
    """Writes to parts of cut tensors are done in parts: none of these may be made whole."""

    def make():
        parameter = nn.Parameter(torch.empty(7, 6))
        nn.init.normal_(parameter)
        parameter.data[2].fill_(3)
        parameter.data[1:5, 4].uniform_(2, 3)
        parameter.data[-1, 0] = 9
        parameter.data[3:6][1:][:, 1:3].zero_()
        like = nn.Parameter(torch.rand_like(parameter.data.narrow(0, 0, 7)))  # reads a part, and draws
        dirac = nn.Parameter(torch.empty(6, 6, 3))
        nn.init.dirac_(dirac)
        eye = nn.Parameter(torch.empty(7, 6))
        nn.init.eye_(eye)
        return nn.ParameterList([parameter, like, dirac, eye, nn.Embedding(10, 4, padding_idx=3).weight])

    for placements in ([oc.Shard(0), oc.Shard(1)], [oc.Shard(1), oc.Shard(1)], [oc.Shard(0), oc.Shard(0)]):
        oc.manual_seed(3)
        with oc.one_card_random():
            expected = make()
        oc.manual_seed(3)
        with oc.deferred_init():
            found = make()
        for one, deferred in zip(expected, found, strict=True):
            assert torch.equal(oc.shard_tensor(deferred, mesh, placements).full_tensor(), one)


@pytest.mark.proof
@multirank(4)
def test_rows_and_columns_are_written_in_parts():
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr("onecard.tensor.deferred.replay.LARGE", 0)
        rows_and_columns(oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"]))


TRUNCATED = [{}, {"std": 0.6}, {"mean": 1.0, "std": 0.5, "a": 0.0, "b": 1.2}, {"a": 1.5, "b": 3.0}]


@pytest.mark.share(1)
@multirank(2)
@pytest.mark.parametrize("kwargs", TRUNCATED)
def test_truncated_normals_are_never_whole(kwargs):
    """Whether all are in range is asked of one stretch after another."""

    def make():
        oc.manual_seed(1)
        return nn.init.trunc_normal_(torch.empty(9, 31), **kwargs)

    with oc.one_card_random():
        expected = make()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr("onecard.tensor.deferred.replay.LARGE", 0)
        patch.setattr("onecard.tensor.deferred.pieces.PIECE", 50)
        with oc.deferred_init():
            deferred = make()
        x = oc.shard_tensor(deferred, oc.ProcessMesh([0, 1], ["x"]), [oc.Shard(1)])
    assert torch.equal(x.full_tensor(), expected)


def test_questions_are_answered_by_every_stretch(monkeypatch):
    monkeypatch.setattr("onecard.tensor.deferred.pieces.PIECE", 7)
    monkeypatch.setattr("onecard.tensor.deferred.replay.LARGE", 0)
    with oc.deferred_init():
        x = torch.zeros(5, 9)
        x.bernoulli_(1.0)
        y = torch.full((5, 9), 2.0).add_(x)
        assert (y == 3).all() and not (y != 3).any() and not (y == 2).any() and (x + y > 3).all()
        assert (torch.randint(0, 9, (5, 9)) < 9).all()
    x.data[4, 8] = 0  # no longer on each element alone
    with pytest.warns(oc.GatheredOperatorWarning, match="its value is asked for"):
        assert not (x == 1).all()


def test_making_large_tensors_whole_is_told(monkeypatch):
    monkeypatch.setattr("onecard.tensor.deferred.replay.LARGE", 0)
    mesh = oc.ProcessMesh([0], ["x"])
    with oc.deferred_init():
        x, y = torch.randn(4, 4), torch.randn(4, 4)
        y[1].copy_(x[2])
    with pytest.warns(oc.GatheredOperatorWarning, match="its value is asked for"):
        assert x.max().item() < 100
    oc.shard_tensor(x, mesh, [oc.Replicate()])


def hugging_face():
    import transformers

    options = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 11}
    mesh = oc.ProcessMesh([0, 1])
    for kind, config in (
        (transformers.LlamaForCausalLM, transformers.LlamaConfig(**options, intermediate_size=12, pad_token_id=3)),
        (transformers.BertForMaskedLM, transformers.BertConfig(**options, intermediate_size=12)),
    ):
        compare(lambda kind=kind, config=config: kind(config), mesh, first_dim)


@pytest.mark.proof
def test_models_of_hugging_face():
    pytest.importorskip("transformers")
    multirank(2)(hugging_face)()


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
    record = record_of(layer.weight)
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


@pytest.mark.proof
def test_a_model_larger_than_the_limit():
    """128 MiB over four ranks with room for 64 MiB each; benchmarks/random_numbers.py does 2 GiB."""
    multirank(4)(build_a_model_larger_than_the_limit)(1024, 32, 64)
