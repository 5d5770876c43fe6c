"""shard_layer and shard_op: what is laid out how. Twin: plain torch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecard as oc
from onecard.errors import LayoutError, MeshError
from onecard.testing import assert_close, multirank

MESH = oc.ProcessMesh([0, 1], ["x"])
ONE = oc.ProcessMesh([0], ["x"])


# shard_layer


class Net(nn.Module):
    """Two linear layers with tied weights, a buffer that two modules share, and a parameter that is absent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(4, 6, bias=False)
        self.down.weight = self.up.weight
        self.norm = nn.BatchNorm1d(6)
        table = torch.arange(6.0)
        self.up.register_buffer("table", table)
        self.norm.register_buffer("table", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x) + self.down(x) * self.up.table)


def cut_weight(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    if isinstance(layer, nn.Linear):
        layer.weight = oc.shard_tensor(layer.weight, mesh, [oc.Shard(0)])


@multirank(2)
def test_shard_layer() -> None:
    plain = Net()
    twin = copy.deepcopy(plain)
    called: list[tuple[str, str, Any]] = []

    def shard_fn(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
        called.append((name, type(layer).__name__, mesh))
        cut_weight(name, layer, mesh)

    assert oc.shard_layer(twin, MESH, shard_fn) is twin
    assert called == [
        ("", "Net", MESH), ("up", "Linear", MESH), ("down", "Linear", MESH), ("norm", "BatchNorm1d", MESH),
    ]  # fmt: skip
    assert isinstance(twin.up.weight, nn.Parameter) and twin.up.weight.placements == (oc.Shard(0),)
    assert twin.up.weight.to_local().shape == (3, 4)
    assert isinstance(twin.up.bias, nn.Parameter) and twin.up.bias.placements == (oc.Replicate(),)
    assert twin.norm.running_mean.placements == twin.norm.num_batches_tracked.placements == (oc.Replicate(),)
    x = torch.randn(5, 4)
    for model, data in ((plain, x), (twin, oc.shard_tensor(x, MESH, [oc.Replicate()]))):
        (model(data) ** 3).sum().backward()
    assert list(twin.state_dict()) == list(plain.state_dict())
    assert_close(twin.state_dict(), plain.state_dict())  # running statistics included
    for p, q in zip(twin.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad, atol=1e-4)


@multirank(2)
def test_what_is_shared_stays_shared() -> None:
    for shard_fn in (None, cut_weight):
        twin = oc.shard_layer(Net(), MESH, shard_fn)
        assert twin.down.weight is twin.up.weight
        assert twin.norm.table is twin.up.table
        assert len(list(twin.parameters())) == len(list(Net().parameters())) == 4
        twin.up.table.add_(1)
        assert_close(twin.norm.table, torch.arange(1.0, 7.0))


def test_a_shared_parameter_has_one_layout() -> None:
    """A shard_fn that goes by names, and lays out all that it does not know as replicated, must not untie weights."""

    def by_name(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
        for key, parameter in list(layer.named_parameters(recurse=False)):
            placement = oc.Shard(0) if f"{name}.{key}" == "up.weight" else oc.Replicate()
            setattr(layer, key, oc.shard_tensor(parameter, mesh, [placement]))

    def at_the_root(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
        if isinstance(layer, Net):
            cut_weight("up", layer.up, mesh)
            cut_weight("down", layer.down, mesh)

    for shard_fn in (by_name, at_the_root):
        with pytest.raises(LayoutError, match=r"'up.weight' and 'down.weight' were one tensor.*trained apart"):
            oc.shard_layer(Net(), ONE, shard_fn)


def test_requires_grad_and_dtype_are_kept() -> None:
    layer = nn.Linear(2, 2).to(torch.float64)
    layer.bias.requires_grad_(False)
    twin = oc.shard_layer(layer, ONE)
    assert twin.weight.requires_grad and not twin.bias.requires_grad
    assert twin.weight.dtype is torch.float64
    weight = twin.weight
    assert oc.shard_layer(twin, ONE).weight is weight  # again: nothing left to do


@multirank(2)
def test_input_and_output_functions() -> None:
    plain = nn.Linear(4, 3)
    nn.init.constant_(plain.weight, 0.5)
    nn.init.constant_(plain.bias, 1.0)

    def cut(inputs: tuple[Any, ...], mesh: oc.ProcessMesh) -> tuple[Any, ...]:
        assert mesh is MESH and len(inputs) == 1
        return (oc.shard_tensor(inputs[0], mesh, [oc.Shard(0)]),)

    def whole(outputs: Any, mesh: oc.ProcessMesh) -> Any:
        assert outputs.placements == (oc.Shard(0),)
        return oc.reshard(outputs, mesh, [oc.Replicate()])

    twin = oc.shard_layer(copy.deepcopy(plain), MESH, input_fn=cut, output_fn=whole)
    x = torch.randn(5, 4)
    out = twin(x)
    assert out.placements == (oc.Replicate(),)
    assert_close(out, plain(x))
    # What is not a tuple is the only input.
    twin = oc.shard_layer(copy.deepcopy(plain), MESH, input_fn=lambda inputs, mesh: inputs[0] * 2)
    assert_close(twin(x), plain(x * 2))


# shard_op


def matrices() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, generator=generator), torch.randn(6, 5, generator=generator)


@multirank(2)
def test_shard_op_lays_out_inputs_and_outputs() -> None:
    a, b = matrices()
    expected = a @ b
    cuts = oc.shard_op(torch.matmul, MESH, [[oc.Shard(1)], [oc.Shard(0)]])
    assert cuts(a, b).placements == (oc.Partial(),)
    assert_close(cuts(a, b), expected)
    result = oc.shard_op(torch.matmul, MESH, [[oc.Shard(1)], [oc.Shard(0)]], [oc.Shard(1)])(a, b)
    assert result.placements == (oc.Shard(1),)
    assert_close(result, expected)
    # Left out: plain tensors are replicated, distributed ones stay as they are.
    as_they_are = oc.shard_op(torch.matmul, MESH)(oc.shard_tensor(a, MESH, [oc.Shard(0)]), b)
    assert as_they_are.placements == (oc.Shard(0),)
    assert_close(as_they_are, expected)


@multirank(2)
def test_shard_op_with_dims_mappings() -> None:
    a, b = matrices()
    columns = oc.shard_op(torch.matmul, MESH, [[None, None], [None, "x"]])(a, b)
    assert columns.placements == (oc.Shard(1),)
    rows = oc.shard_op(torch.matmul, MESH, [["x", None], None], ["x", None])(a, b)
    assert rows.placements == (oc.Shard(0),)
    whole = oc.shard_op(torch.matmul, MESH, [["x", None], None], [[None, None]])(a, b)
    assert whole.placements == (oc.Replicate(),)
    for result in (columns, rows, whole):
        assert_close(result, a @ b)


@multirank(2)
def test_shard_op_is_differentiable_and_takes_modules_and_other_arguments() -> None:
    a, b = (x.requires_grad_() for x in matrices())
    (a @ b).square().sum().backward()
    expected = [a.grad, b.grad]
    a.grad = b.grad = None
    oc.shard_op(torch.matmul, MESH, [[oc.Shard(0)], [oc.Shard(1)]], [oc.Replicate()])(a, b).square().sum().backward()
    assert_close([a.grad, b.grad], expected)
    assert not isinstance(a.grad, oc.DistTensor)

    layer = nn.Linear(6, 3)
    nn.init.constant_(layer.weight, 0.1)
    nn.init.zeros_(layer.bias)
    x = a.detach()
    assert_close(oc.shard_op(layer, MESH, [[oc.Shard(0)]])(x), layer(x).detach())
    # Placements count tensors: numbers and keywords pass through.
    summed = oc.shard_op(torch.sum, MESH, [[oc.Shard(0)]])(x, 1, keepdim=True)
    assert_close(summed, x.sum(1, keepdim=True))
    values, indices = oc.shard_op(torch.topk, MESH, [[oc.Shard(0)]], [[oc.Replicate()], None])(x, 2)
    assert values.placements == (oc.Replicate(),) and indices.placements == (oc.Shard(0),)
    assert_close([values, indices], list(x.topk(2)))


def test_shard_op_says_what_does_not_fit() -> None:
    a, b = torch.ones(2, 2), torch.ones(2, 2)
    whole = [oc.Replicate()]
    with pytest.raises(LayoutError, match=r"3 entries in in_placements for 2 tensor\(s\); give one for each, None"):
        oc.shard_op(torch.matmul, ONE, [whole, whole, whole])(a, b)
    with pytest.raises(LayoutError, match=r"1 entries in in_placements for 2 tensor\(s\)"):
        oc.shard_op(torch.matmul, ONE, [whole])(a, b)
    with pytest.raises(LayoutError, match=r"2 entries in out_placements for 1 tensor\(s\)"):
        oc.shard_op(torch.matmul, ONE, None, [whole, whole])(a, b)
    with pytest.raises(LayoutError, match=r"2 placement\(s\).*mesh with 1 axes"):
        oc.shard_op(torch.matmul, ONE, [[oc.Shard(0), oc.Shard(1)], whole])(a, b)
    with pytest.raises(MeshError, match=r"has no axis 'tp'"):
        oc.shard_op(torch.matmul, ONE, [["tp", None], None])(a, b)


@multirank(4)
def test_clipping_reduces_the_norms_in_one_message():
    """Of parameters cut and whole. A whole value never becomes a summand of a norm: that would lose its sign."""
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    cut = [oc.Replicate(), oc.Shard(0)]
    weights = [torch.linspace(-2, 1, 12).view(6, 2) * k for k in (1, 2, 3)]
    parts = [oc.shard_tensor(w, mesh, cut if i else [oc.Replicate()] * 2) for i, w in enumerate(weights)]
    with oc.explain() as report:
        stacked = torch.stack([*(torch.linalg.vector_norm(p) for p in parts), parts[0].sum()])
    assert [m.step.kind for m in report.messages if m.step.bytes] == ["all_reduce"]
    assert_close(stacked, torch.stack([*(torch.linalg.vector_norm(w) for w in weights), weights[0].sum()]))
