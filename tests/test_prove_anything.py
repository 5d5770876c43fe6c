"""What can be recorded can be proved: of each way to train on many ranks a right program is equal, a planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from amounts import share
from pipeline_programs import begin
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard import fleet

R, S = oc.Replicate(), oc.Shard
WIDTH = 8


class Block(nn.Module):
    """Attention and a small network; ``around`` runs the latter, ``cut`` lays the sequence out between the two."""

    def __init__(self, around: Callable[..., Any], cut: Callable[[Any], Any]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm, self.around, self.cut = nn.LayerNorm(WIDTH), around, cut

    def forward(self, x: Any) -> Any:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        x = self.cut(x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return x + self.around(lambda x: self.down(F.gelu(self.up(x))), self.norm(x))


def as_it_is(function: Callable[[Any], Any], x: Any) -> Any:
    return function(x)


def again(function: Callable[[Any], Any], x: Any) -> Any:
    return checkpoint(function, x, use_reentrant=False)


def once_more(function: Callable[[Any], Any], x: Any) -> Any:
    """Recomputed, and on the ranks not as it was."""
    calls: list[int] = []

    def other(x: Any) -> Any:
        calls.append(1)
        return function(x * 1.01 if len(calls) > 1 and oc.get_world_size() > 1 else x)

    return checkpoint(other, x, use_reentrant=False)


def program(
    axis: str = "dp",
    dim: int = 0,
    tp: bool = False,
    sp: bool = False,
    zero: int = 0,
    around: Any = as_it_is,
    autocast: bool = False,
    scaler: bool = False,
    clip: float = 0.0,
    k_steps: int = 1,
    fault: str = "",
) -> list[Any]:  # fmt: skip
    """Two steps or more of a block, its batch (or its sequence) cut along one axis, its weights along another."""
    torch.manual_seed(0)
    n, fault = oc.get_world_size(), fault if oc.get_world_size() > 1 else ""
    mesh = oc.ProcessMesh([[*range(n)]] if tp else [[i] for i in range(n)], [axis, "tp"])
    lie = [R, S(1)]
    model = Block(around, (lambda x: oc.reshard(x, mesh, lie)) if sp else lambda x: x)
    if tp:
        for layer, at in ((model.up, 0), (model.down, 1)):
            layer.weight = nn.Parameter(oc.shard_tensor(layer.weight.data, mesh, [R, S(at)]))
    oc.shard_layer(model, mesh)
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    if zero:
        stage = (oc.ShardingStage1, oc.ShardingStage2, oc.ShardingStage3)[zero - 1]
        optimizer = oc.shard_optimizer(optimizer, stage(axis, mesh))
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaler)
    losses = []
    for _ in range(2):
        for part in range(k_steps):
            x, y = (oc.shard_tensor(torch.randn(4, 6, WIDTH), mesh, [S(dim), R]) for _ in range(2))
            if fault == "positions":
                x = oc.shard_tensor(x.full_tensor().roll(1, dim), mesh, [S(dim), R])
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = F.mse_loss(model(x).float(), y) / (1 if fault == "merge" and part else k_steps)
            scale.scale(loss).backward()
        scale.unscale_(optimizer)
        if fault in ("unscaled", "scaled", "gradient"):
            model.out.weight.grad *= {"unscaled": 1024.0, "scaled": 0.5, "gradient": 1.001}[fault]
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip * (1.01 if fault == "clip" else 1.0))
            losses.append(norm.full_tensor() if isinstance(norm, oc.DistTensor) else norm)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cp": ({"axis": "cp", "dim": 1}, {"fault": "positions"}),
    "cp with ZeRO 1": ({"axis": "cp", "dim": 1, "zero": 1, "clip": 0.1}, {"fault": "clip"}),
    "tp": ({"tp": True}, {"fault": "gradient"}),
    "sp": ({"tp": True, "sp": True}, {"fault": "gradient"}),
    "ZeRO 1": ({"zero": 1}, {"fault": "gradient"}),
    "ZeRO 2": ({"zero": 2}, {"fault": "gradient"}),
    "ZeRO 3": ({"zero": 3}, {"fault": "gradient"}),
    "clipping": ({"clip": 0.1}, {"fault": "clip"}),
    "recompute": ({"around": again, "tp": True}, {"around": once_more}),
    "gradient merge": ({"k_steps": 3}, {"fault": "merge"}),
    "autocast": ({"autocast": True}, {"fault": "gradient"}),
    "scaler": ({"scaler": True, "clip": 0.1}, {"fault": "scaled"}),
    "all of them": (
        {"zero": 1, "around": again, "clip": 0.1, "autocast": True, "scaler": True, "k_steps": 2}, {"fault": "merge"},
    ),
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("case", share(CASES, 2))
def test_each_way_to_train_is_one_cards_and_its_fault_is_found(case):
    right, wrong = CASES[case]
    proof = oc.prove(partial(program, **right), world=2, rounding=False)
    assert proof and proof.exact, str(proof)
    assert proof.share > 0.9, f"{proof.share:.1%}"
    proof = oc.prove(partial(program, **{**right, **wrong}), world=2, rounding=False)
    assert not proof and proof.first is not None, str(proof)


@pytest.mark.proof
def test_under_autocast_both_round_alike():
    proof = oc.prove(partial(program, autocast=True), world=2)
    assert proof and proof.rounding is not None and proof.rounding[0] < 2e-2, str(proof)


class Lost(torch.autograd.Function):
    """What it is given; the gradient of the second microbatch is lost, on more ranks than one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, calls: list[int]) -> torch.Tensor:
        calls.append(1)
        ctx.lost = len(calls) == 2 and oc.get_world_size() > 1
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return torch.zeros_like(grad) if ctx.lost else grad, None


def pipeline(schedule: str, fault: bool = False) -> list[float]:
    """Two steps of a stack of layers in stages, four microbatches each."""
    n, calls = oc.get_world_size(), list[int]()
    begin(schedule if n > 1 else "1F1B", 4, 2, pp=n)
    torch.manual_seed(0)
    layers: list[Any] = []
    for _ in range(4):
        layers += [fleet.LayerDesc(nn.Linear, WIDTH, WIDTH), fleet.LayerDesc(nn.Tanh)]
    if fault:
        layers[5] = lambda x: Lost.apply(torch.tanh(x), calls)
    chunks = {"num_virtual_pipeline_stages": 2} if schedule == "VPP" and n > 1 else {}
    model: Any = fleet.distributed_model(fleet.PipelineLayer(layers, loss_fn=nn.MSELoss(), **chunks))
    optimizer: Any = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), 1e-2))
    return [model.train_batch([torch.randn(8, WIDTH), torch.randn(8, WIDTH)], optimizer).item() for _ in range(2)]


SCHEDULES = ["1F1B", "F-then-B", "VPP", "ZBH1", "ZBV"]


@pytest.mark.proof
@pytest.mark.parametrize("schedule", share(SCHEDULES, 1))
def test_each_schedule_is_one_cards_and_a_lost_microbatch_is_found(schedule):
    proof = oc.prove(partial(pipeline, schedule), world=2, rounding=False)
    assert proof and proof.exact and len(proof.results) > 20, str(proof)
    proof = oc.prove(partial(pipeline, schedule, True), world=2, rounding=False)
    assert not proof and proof.first is not None, str(proof)


def fused(name: str, fault: float = 1.0) -> None:
    """A fused optimizer divides gradients by the scale itself on one card; fleet's scaler has done it before."""
    torch.manual_seed(0)
    model: Any = nn.Linear(WIDTH, 2)
    parallel = oc.get_world_size() > 1
    if parallel:
        fleet.init(is_collective=True)
        model = fleet.distributed_model(model)
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name]
    optimizer: Any = kind(model.parameters(), 1e-2, fused=True)
    optimizer = fleet.distributed_optimizer(optimizer) if parallel else optimizer
    scaler: Any = (fleet if parallel else torch.amp).GradScaler("cpu", init_scale=64.0)
    for _ in range(2):
        x = torch.randn(4, WIDTH).chunk(oc.get_world_size())[oc.get_rank()]
        loss = model(x).square().mean()
        scaler.scale(loss * (fault if parallel else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.share(1)
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_fused_optimizer_is_compared_by_the_gradients_that_it_takes(name):
    proof = oc.prove(partial(fused, name), world=2, rounding=False, against=partial(fused, name))
    assert proof and proof.exact, str(proof)
    proof = oc.prove(partial(fused, name, 64.0), world=2, rounding=False, against=partial(fused, name))
    assert any("gradient of weight in step 1" in result.what for result in proof.wrong)
