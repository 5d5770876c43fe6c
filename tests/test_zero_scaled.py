"""ZeRO by marks over dp x tp x sp: a scaler that meets an infinity on one rank, token means, accumulation, clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_zero import STAGES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard.testing import assert_close, run_ranks

R, S = oc.Replicate(), oc.Shard
IGNORED, STEPS, MICROBATCHES = -100, 4, 4
LENGTHS = [
    (6, 0, 3, 1),
    (2, 4, 1, 5),
    (0, 0, 6, 6),
    (1, 1, 0, 2),
]  # tokens that count, by sample: no two ranks have as many
BURST = {1: (2, 3), 2: (0, 0)}  # in these steps the loss of one token is infinite: (microbatch, sample)


def microbatches(step: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Inputs, labels, and what the loss of each token is multiplied by."""
    draw = torch.Generator().manual_seed(step)
    made = []
    for micro, lengths in enumerate(LENGTHS):
        x, y, weight = torch.randn(4, 6, 8, generator=draw), torch.randint(7, (4, 6), generator=draw), torch.ones(4, 6)
        for row, length in enumerate(lengths):
            y[row, length:] = IGNORED
        if BURST.get(step, ())[:1] == (micro,):
            weight[BURST[step][1], 0] = float("inf")
        made.append((x, y, weight))
    return made


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 7)
    )


def plain_mean(per_token: Tensor, valid: Tensor, step: list[Tensor]) -> Tensor:
    return per_token[valid].sum() / sum(int(mask.sum()) for mask in step)


def trained(
    model: Any, optimizer: Any, scaler: Any, place: Any, mean: Any = oc.token_mean
) -> tuple[list[float], list[float]]:
    """Losses, and scales after each step."""
    losses, scales = [], []
    for step in range(STEPS):
        batches = [tuple(map(place, each)) for each in microbatches(step)]
        masks = [y != IGNORED for _, y, _ in batches]
        total = 0.0
        for (x, y, weight), valid in zip(batches, masks, strict=True):
            per_token = cross_entropy(model(x).transpose(1, 2), y, ignore_index=IGNORED, reduction="none") * weight
            loss = mean(per_token, valid, step=masks)
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total)
        scales.append(scaler.get_scale())
    return losses, scales


def made_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.05)


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)


def on_mesh(mesh: oc.ProcessMesh) -> Any:
    """Column and row parallel along tp; norms see a part of each sequence."""
    model = net()
    oc.shard_layer(model, mesh)
    model[1].weight = oc.shard_tensor(model[1].weight, mesh, [R, S(0)])
    model[3].weight = oc.shard_tensor(model[3].weight, mesh, [R, S(1)])
    for norm in (model[0], model[4]):
        norm.register_forward_pre_hook(lambda _, args: (oc.reshard(args[0], mesh, [S(0), S(1)]),))
    return model


def everywhere() -> None:
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
    alone = net()
    losses, scales = trained(alone, made_of(alone), scaler(), lambda t: t, plain_mean)
    assert scales == [2.0**11, 2.0**10, 2.0**9, 2.0**10], "both infinities skip their step"
    for stage in (0, *STAGES, "blocks"):
        model = on_mesh(mesh)
        kind: Any = oc.ShardingStage3("dp", mesh, model=model) if stage == "blocks" else None
        kind = STAGES[stage]("dp", mesh) if stage in STAGES else kind  # type: ignore[index]
        optimizer = oc.shard_optimizer(made_of(model), kind)
        found = trained(model, optimizer, scaler(), lambda t: oc.shard_tensor(t, mesh, [S(0), R]))
        assert found[0] == pytest.approx(losses, rel=1e-5, nan_ok=True) and found[1] == scales, (stage, found)
        for p, weight in zip(model.parameters(), alone.parameters(), strict=True):
            assert_close(oc.unshard(p.detach()), weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.proof
def test_scaled_means_over_tokens_are_one_card() -> None:
    run_ranks(everywhere, 4)
