"""Programs of the manual level, recorded: five steps with a schedule and clipping, bit for bit, on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import amount, share
from fleet_programs import begin, seeded
from test_fleet_training import Mixed
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.fleet.layers import context
from onecard.fleet.layers.transformer import ParallelTransformerLayer
from onecard.testing import run_ranks

mp = fleet.meta_parallel
Made = tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]


def ids_of(step: int, *shape: int) -> Tensor:
    return torch.randint(12, shape, generator=torch.Generator().manual_seed(step))


class Layers(nn.Module):
    """Two layers, with dropout from the named states, recomputed or not."""

    def __init__(self, how: str, **options: Any) -> None:
        super().__init__()
        self.table = mp.VocabParallelEmbedding(12, 8)
        self.layers = nn.ModuleList(
            ParallelTransformerLayer(8, 2, attention_dropout=0.3, hidden_dropout=0.3, recompute=how, **options)
            for _ in range(2)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids.t())
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.table.weight)


class Ring(nn.Module):
    """Attention along the sep axis."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend, self.table, self.qkv = attend, nn.Embedding(12, 8), nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.table(context.cut(ids, 1))).view(*ids.shape[:1], -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.linear(self.attend(q, k, v).transpose(1, 2).flatten(2), self.table.weight)


def parallel_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids)
    return mp.ParallelCrossEntropy(num_classes=12, reduction="mean")(logits, ids.t().roll(1, 0))


def ring_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), context.cut(ids.roll(1, 1), 1).flatten())


def programs() -> Iterator[tuple[str, dict[str, int], Callable[[], nn.Module], Callable[[nn.Module, Tensor], Tensor]]]:
    yield "tp", {"mp": 2}, lambda: Mixed(True), parallel_loss
    yield "sp", {"mp": 2}, lambda: Mixed(True, True), parallel_loss
    yield "dp", {"dp": 2}, lambda: Mixed(True), parallel_loss
    for how in ("none", "selective", "full"):
        yield f"dropout, recompute {how}", {"mp": 2}, lambda how=how: Layers(how), parallel_loss
    yield "ring", {"sep": 2}, lambda: Ring(fleet.ring_attention), ring_loss
    yield "ulysses", {"sep": 2}, lambda: Ring(fleet.ulysses_attention), ring_loss


def train(make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, Tensor], Tensor], static: bool) -> list[Tensor]:
    fleet.model_parallel_random_seed(3)
    model = fleet.distributed_model(seeded(make))
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def step(*batches: Tensor) -> Tensor:
        total = torch.zeros(())
        for ids in batches:
            loss = loss_of(model, ids) / len(batches)
            loss.backward()
            total = total + loss.detach()
        fleet.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return total

    run = oc.to_static(step) if static else step
    losses = []
    for i in range(5):
        losses.append(run(ids_of(2 * i, 2, 8), ids_of(2 * i + 1, 2, 8)).clone())
        schedule.step()
    if static:
        assert len(run.recordings) == 1
    states = fleet.get_rng_state_tracker().state_dict()
    return [*losses, *(p.detach().clone() for p in model.parameters()), *states.values(), torch.get_rng_state()]


def all_programs() -> dict[str, str]:
    said = {}
    for name, degrees, make, loss_of in share(programs(), 2):
        begin(**degrees)
        try:
            pairs = zip(train(make, loss_of, False), train(make, loss_of, True), strict=True)
            said[name] = "" if all(torch.equal(a, b) for a, b in pairs) else "other numbers"
        except Exception as fault:
            said[name] = f"{type(fault).__name__}: {fault}"
    return said


@pytest.mark.proof
def test_manual_programs_replay_bit_for_bit() -> None:
    found = run_ranks(all_programs, 2)
    assert [{name: why for name, why in each.items() if why} for each in found] == [{}, {}]
    assert len(found[0]) == amount(2, 8)


def ids_out_of_range() -> None:
    begin(mp=2)
    table = seeded(mp.VocabParallelEmbedding, 12, 8)
    static = oc.to_static(lambda ids: table(ids).detach())
    for _ in range(3):
        assert torch.equal(static(torch.arange(12)), table(torch.arange(12)))
    with pytest.raises(RuntimeError, match="ids; its 12 rows are 0 to 11"):
        static(torch.arange(1, 13))


def test_a_replay_looks_at_its_ids() -> None:
    run_ranks(ids_out_of_range, 2)
