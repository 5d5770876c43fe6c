"""ZeRO along dp over experts that marks cut along ep: steps of AdamW beside one card, and what a rank keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from experts_programs import LAYERS
from torch import Tensor, nn

import onecard as oc
from onecard.testing import run_ranks

R, S = oc.Replicate(), oc.Shard
STAGES: dict[str, Callable[[oc.ProcessMesh, nn.Module], oc.ShardingStage1]] = {
    "1": lambda mesh, _: oc.ShardingStage1("dp", mesh),
    "2": lambda mesh, _: oc.ShardingStage2("dp", mesh),
    "3": lambda mesh, _: oc.ShardingStage3("dp", mesh),
    "3 by blocks": lambda mesh, model: oc.ShardingStage3("dp", mesh, model=model),
}
STEPS = 4


class Block(nn.Module):
    """A mixture in one style; its experts are stacks."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        shapes = {"router": (8, 16), "up": (8, 24, 16), "down": (8, 16, 12)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) * 0.4))

    def forward(self, x: Tensor) -> Tensor:
        return x + LAYERS[self.style](x, self.router, self.up, self.down, 2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, place: Callable[[Tensor], Tensor]) -> list[float]:
    found = []
    for step in range(STEPS):
        x = place(torch.randn(24, 16, generator=torch.Generator().manual_seed(step)))
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def model_of(style: str) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(Block(style), Block(style))


def all_stages(style: str, fault: bool) -> dict[str, tuple[float, int]]:
    """For each stage the largest error of losses and parameters, and the elements of states that this rank has."""
    warnings.simplefilter("ignore")
    plain = model_of(style)
    wanted = trained(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), lambda x: x)
    expected = {name: p.detach() for name, p in plain.named_parameters()}
    found = {}
    for stage, make in STAGES.items():
        mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "ep"])

        def lie(name: str, block: nn.Module, mesh: oc.ProcessMesh) -> None:
            for key, p in list(block.named_parameters(recurse=False)):
                setattr(block, key, oc.shard_tensor(p, mesh, [R, R if key == "router" else S(0)]))

        model = oc.shard_layer(model_of(style), mesh, lie)
        optimizer = oc.shard_optimizer(
            torch.optim.AdamW(model.parameters(), lr=2e-2 if fault else 1e-2), make(mesh, model)
        )
        losses = trained(model, optimizer, lambda x, mesh=mesh: oc.shard_tensor(x, mesh, [S(0), S(0)]))  # type: ignore[misc]
        worst = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
        for name, p in model.named_parameters():
            far = (oc.unshard(p.detach()) - expected[name]).abs().max() / expected[name].abs().max()
            worst = max(worst, float(far))
        states = [state["exp_avg"] for state in optimizer.state.values()]
        found[stage] = worst, sum(t.to_local().numel() if isinstance(t, oc.DistTensor) else t.numel() for t in states)
    return found


@pytest.mark.proof
def test_zero_over_experts_is_one_cards() -> None:
    experts = 2 * (8 * 24 * 16 + 8 * 16 * 12)
    for style in ("grouped", "dense"):
        for found in run_ranks(all_stages, 4, style, False, timeout=300):
            for stage, (worst, count) in found.items():
                assert worst < 1e-5, (style, stage, worst)
                assert count <= (experts + 2 * 8 * 16) // 4 + 2 * 8 * 16, (stage, count)


@pytest.mark.proof
def test_another_update_is_seen() -> None:
    assert all(worst > 1e-4 for worst, _ in run_ranks(all_stages, 4, "dense", True, timeout=300)[0].values())
