"""token_mean: ranks and microbatches with different numbers of tokens, by marks and by hand, against one card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_zero import STAGES
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard import fleet
from onecard.errors import FleetError
from onecard.testing import assert_close, run_ranks

R, S = oc.Replicate(), oc.Shard
IGNORED = -100


def microbatches(step: int) -> list[tuple[Tensor, Tensor]]:
    """Two of four sequences; how many labels count differs from one to the next, and one has none."""
    draw = torch.Generator().manual_seed(step)
    made = []
    for micro in range(2):
        x = torch.randn(4, 5, 6, generator=draw)
        y = torch.randint(7, (4, 5), generator=draw)
        for row, length in enumerate([(5, 0, 3, 1), (2, 4, 1, 5)][micro]):
            y[row, length:] = IGNORED
        made.append((x, y))
    return made


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7))


def one_card() -> tuple[list[float], list[Tensor]]:
    """The mean over all tokens of a step, in one batch."""
    model, losses = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for step in range(3):
        x, y = (torch.cat(parts) for parts in zip(*microbatches(step), strict=True))
        loss = cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORED)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


def accumulated(model: Any, optimizer: Any, place: Any) -> list[float]:
    losses = []
    for step in range(3):
        batches = [(place(x), place(y)) for x, y in microbatches(step)]
        masks = [y != IGNORED for _, y in batches]
        total = 0.0
        for (x, y), valid in zip(batches, masks, strict=True):
            per_token = cross_entropy(model(x).transpose(1, 2), y, ignore_index=IGNORED, reduction="none")
            loss = oc.token_mean(per_token, valid, step=masks)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def everywhere() -> None:
    ranks, rank = oc.get_world_size(), oc.get_rank()
    fleet.init(is_collective=True)
    mesh = oc.ProcessMesh(range(ranks), ["dp"])
    expected, weights = one_card()
    for stage in (0, *STAGES):
        model = oc.shard_layer(net(), mesh)
        made: Any = torch.optim.AdamW(model.parameters(), 0.05)
        optimizer = oc.shard_optimizer(made, STAGES[stage]("dp", mesh) if stage else None)
        losses = accumulated(model, optimizer, lambda t: oc.shard_tensor(t, mesh, [S(0)]))
        compare(losses, model, expected, weights, stage)
    for level in ("os", "os_g", "p_g_os"):
        model = net()
        made = torch.optim.AdamW(model.parameters(), 0.05)
        model, optimizer, _ = fleet.group_sharded_parallel(model, made, level)
        losses = accumulated(model, optimizer, lambda t: t.chunk(ranks)[rank])
        compare(losses, model, expected, weights, level)


def compare(losses: list[float], model: Any, expected: list[float], weights: list[Tensor], what: object) -> None:
    assert losses == pytest.approx(expected, rel=1e-5), what
    for p, weight in zip(model.parameters(), weights, strict=True):
        assert_close(oc.unshard(p.detach()), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.proof
def test_mean_over_the_tokens_of_a_step():
    run_ranks(everywhere, 2)


def test_words():
    with pytest.raises(FleetError, match=r"valid \[2\] says of each loss whether it counts, and losses are \[3\]"):
        oc.token_mean(torch.ones(3), torch.ones(2))


def in_a_pipeline(by_rank: bool) -> float | str:
    """How far a pipeline beside dp is from one card after two steps; or what is said of ``token_mean`` with ``loss_weight``."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
    fleet.init(strategy=strategy)
    mine = fleet.get_hybrid_communicate_group().data().index

    def summed(out: Tensor, labels: Any) -> Tensor:
        y, tokens = labels
        return cross_entropy(out, y, reduction="sum", ignore_index=IGNORED) * 2 / tokens[0]

    def averaged(out: Tensor, labels: Any) -> Tensor:
        losses = cross_entropy(out, labels[0].clamp_min(0), reduction="none")
        return fleet.token_mean(losses, labels[0] != IGNORED)

    torch.manual_seed(0)
    plain = nn.Linear(6, 5)
    torch.manual_seed(0)
    more = {"loss_fn": averaged, "loss_weight": lambda labels: (labels[0] != IGNORED).sum()}
    model = fleet.distributed_model(
        fleet.PipelineLayer([nn.Linear(6, 5)], **(more if by_rank else {"loss_fn": summed}))
    )
    ours = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(2):
        draw = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=draw), torch.randint(5, (8,), generator=draw)
        y[1], y[4:7] = IGNORED, IGNORED
        tokens = (y != IGNORED).sum().expand(4).contiguous()
        try:
            model.train_batch([x.chunk(2)[mine], (y.chunk(2)[mine], tokens)], ours)
        except FleetError as fault:
            return str(fault)
        cross_entropy(plain(x), y, ignore_index=IGNORED).backward()
        theirs.step()
        theirs.zero_grad()
    return max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_mean_over_ranks_in_a_pipeline_is_told_and_what_works_works() -> None:
    for said in run_ranks(in_a_pipeline, 2, True):
        assert (
            "token_mean in the loss of a pipeline" in said and "(losses * valid).sum() * dp_degree / tokens[0]" in said
        )
    assert max(run_ranks(in_a_pipeline, 2, False)) < 1e-6
