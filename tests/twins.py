"""A small model on one card and divided in several ways, for the tests of optimizers and training tools."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import onecard as oc
from onecard.testing import assert_close

MESH = oc.ProcessMesh([0, 1], ["x"])
MESH_2D = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
STEPS = 4
HIDDEN = 7  # and a batch of 5: shards of unequal sizes


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)


def loss_of(model: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
    return ((model(data[0]) - data[1]) ** 2).mean()


CUTS = {"0.weight": oc.Shard(0), "0.bias": oc.Shard(0), "2.weight": oc.Shard(1)}


def shard_weights(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    for key, parameter in list(layer.named_parameters(recurse=False)):
        placements = [oc.Replicate()] * mesh.ndim
        placements[-1] = CUTS.get(f"{name}.{key}", oc.Replicate())
        setattr(layer, key, oc.shard_tensor(parameter, mesh, placements))


class Layout:
    """How the twin is divided: "tp" cuts the weights, "dp" the batch, "dp,tp" both, "plain dp" leaves the weights plain."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.mesh = MESH_2D if kind == "dp,tp" else MESH

    def model(self, model: nn.Module) -> nn.Module:
        if self.kind == "plain dp":
            return copy.deepcopy(model)
        return oc.shard_layer(copy.deepcopy(model), self.mesh, shard_weights if "tp" in self.kind else None)

    def data(self, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        placements: list[Any] = [oc.Replicate()] * self.mesh.ndim
        if "dp" in self.kind:
            placements[0] = oc.Shard(0)
        return tuple(oc.shard_tensor(x, self.mesh, placements) for x in data)


def twins(kind: str) -> list[tuple[nn.Module, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]]:
    """The plain model and the distributed one, each with what lays out its batches."""
    layout, plain = Layout(kind), make_model()
    return [(plain, lambda data: data), (layout.model(plain), layout.data)]


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: oc.unshard(p.detach()) for name, p in model.named_parameters()}


def assert_same_parameters(plain: nn.Module, twin: nn.Module, rtol: float = 1e-5) -> None:
    moved = [not torch.equal(p, q) for p, q in zip(plain.parameters(), make_model().parameters(), strict=True)]
    assert any(moved), "nothing was trained"
    assert_close(parameters(twin), parameters(plain), rtol=rtol)


def train(
    model: nn.Module, lay_out: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS, closures: bool = False
) -> None:
    for step in range(steps):
        data = lay_out(batch(step))

        def closure(data: Any = data) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        if closures or isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 2.0}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 3}),
    "LBFGS line search": (torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
    "Muon": (getattr(torch.optim, "Muon", torch.optim.SGD), {"lr": 0.01}),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # those with a fused CPU kernel


def make_optimizer(name: str, model: nn.Module, more: dict[str, Any]) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    trained = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]  # Muon takes matrices only
    return kind(trained, **options, **more)


def forms(name: str) -> list[dict[str, Any]]:
    base = name.split()[0]
    if base in ("LBFGS", "Muon"):
        return [{}]
    fused: list[dict[str, Any]] = [{"fused": True}] if base in FUSED else []
    return [{"foreach": False}, {"foreach": True}, *fused]


def compute_in_its_own_dtype() -> None:
    """Muon orthogonalises in bfloat16, whose rounding shows where a sum was cut: let it do so as its parameters are."""
    torch.Tensor.bfloat16 = lambda x: x  # type: ignore[method-assign]
    torch.Tensor.to = _in_its_own_dtype  # type: ignore[method-assign]  # torch 2.15


def _in_its_own_dtype(x: torch.Tensor, *args: Any, _to: Any = torch.Tensor.to, **kwargs: Any) -> torch.Tensor:
    if kwargs.get("dtype") is torch.bfloat16:
        kwargs["dtype"] = x.dtype
    return _to(x, *args, **kwargs)
