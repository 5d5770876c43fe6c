"""A recorded forward and backward, accumulated over calls: a replay adds to gradients as backward does (``train.unreduced``)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet_programs import begin, seeded
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.fleet.utils import sequence_parallel_utils
from onecard.testing import run_ranks

Step = Callable[[Tensor], Tensor]


class Normed(nn.Module):
    """A layer cut over mp in sequence parallelism: the norm before it sees a part of the rows, its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.inner = sequence_parallel_utils.ColumnSequenceParallelLinear(4, 6, gather_output=False)
        sequence_parallel_utils.mark_as_sequence_parallel_parameter(self.norm.weight)
        sequence_parallel_utils.mark_as_sequence_parallel_parameter(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.norm(x)).square()


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh()).square()


def half() -> nn.Module:
    return Plain().bfloat16()


MODELS: dict[str, tuple[dict[str, int], Any]] = {
    "dp": ({"dp": 2}, Plain),
    "sharding": ({"sharding": 2}, Plain),
    "sequence": ({"mp": 2}, Normed),
    "wide": ({"dp": 2}, half),
    "os": ({"dp": 2}, Plain),
    "os_g": ({"dp": 2}, Plain),
    "p_g_os": ({"dp": 2}, Plain),
}


def plain(step: Step, rows: list[Tensor], optimizer: Any, weights: list[Tensor]) -> None:
    for x in rows:
        step(x)


def looked(step: Step, rows: list[Tensor], optimizer: Any, weights: list[Tensor]) -> None:
    for x in rows:
        step(x)
        [None if p.grad is None else p.grad.norm() for p in weights]


def looked_once(step: Step, rows: list[Tensor], optimizer: Any, weights: list[Tensor]) -> None:
    step(rows[0])
    [p.grad for p in weights]
    step(rows[1])
    step(rows[2])


def clipped(step: Step, rows: list[Tensor], optimizer: Any, weights: list[Tensor]) -> None:
    step(rows[0])
    torch.nn.utils.clip_grad_norm_(weights, 0.1)
    step(rows[1])


def edited(step: Step, rows: list[Tensor], optimizer: Any, weights: list[Tensor]) -> None:
    step(rows[0])
    for p in weights:
        p.grad = p.grad * 0.5 if p.grad is not None else None
    step(rows[1])


def of_eager(step: Step, rows: list[Tensor], optimizer: Any, weights: list[Tensor]) -> None:
    """Eager backwards between recorded ones: reached by the undecorated function."""
    step(rows[0])
    getattr(step, "__wrapped__", step)(rows[1])
    step(rows[2])


def dropped(step: Step, rows: list[Tensor], optimizer: Any, weights: list[Tensor]) -> None:
    """Gradients of which one is given up."""
    step(rows[0])
    weights[0].grad = None
    step(rows[1])


WAYS = {f.__name__: f for f in (plain, looked, looked_once, clipped, edited, of_eager, dropped)}


def trained(level: str, way: str, recorded: str, keeps: bool) -> list[Tensor]:
    _, make = MODELS[level]
    wide = torch.float32 if level == "wide" else None
    model: Any = fleet.distributed_model(seeded(make), grad_accum_dtype=wide)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    if level.endswith(("os", "os_g")):
        model, optimizer, _ = fleet.group_sharded_parallel(model, optimizer, level)
    else:
        optimizer = fleet.distributed_optimizer(optimizer)
    weights = [*model.parameters()]
    rank = torch.distributed.get_rank() if level != "sequence" else 0

    def forward_and_backward(x: Tensor) -> Tensor:
        loss: Tensor = model(x).mean()
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keeps)

    step: Any = oc.to_static(forward_and_backward) if recorded else forward_and_backward
    end = oc.to_static(update) if recorded == "both" else update
    draws = torch.Generator().manual_seed(3)
    for _ in range(4):
        rows = [torch.randn(2, 4, 3, 4, generator=draws).to(weights[0].dtype)[rank] for _ in range(3)]
        if level == "sequence":
            rows = [x.chunk(2)[torch.distributed.get_rank()] for x in rows]
        WAYS[way](step, rows, optimizer, weights)
        end()
    return [
        oc.unshard_dtensor(p.detach()).clone() if isinstance(p, oc.DistTensor) else p.detach().clone() for p in weights
    ]


def accumulated(level: str) -> None:
    begin(**MODELS[level][0])
    warnings.filterwarnings("ignore", ".*is recorded anew")  # once for each state in which a call finds the gradients
    wrong = []
    for way, keeps in itertools.product(WAYS, (False, True)):
        expected = trained(level, way, "", keeps)
        for form in ("backward", "both"):
            found = trained(level, way, form, keeps)
            far = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
            if far > 1e-6:
                wrong.append((way, form, keeps, far))
    assert not wrong, wrong


def one_records_anew() -> None:
    """A rank that meets another shape runs as it is, while the other one replays: both have the same gradients to sum."""
    begin(dp=2)
    warnings.filterwarnings("ignore", ".*is recorded anew")
    rank, found = torch.distributed.get_rank(), []
    for recorded in (False, True):
        model: Any = fleet.distributed_model(seeded(Plain))

        def of_part(x: Tensor, inner: Any = model.module) -> Tensor:
            loss: Tensor = inner.a(x).square().mean()
            loss.backward()
            return loss.detach()

        part: Any = oc.to_static(of_part) if recorded else of_part
        model(torch.ones(2, 4)).mean().backward()
        [p.grad for p in model.parameters()]
        for i in range(6):
            part(torch.full((2 + (i == 5) * rank, 4), 1.0 + rank))
            found.append([p.grad.clone() for p in model.parameters()])
    for eager, mine in zip(found[:6], found[6:], strict=True):
        for a, b in zip(eager, mine, strict=True):
            assert (a - b).abs().max().item() <= 1e-6


def test_a_rank_that_records_anew_has_as_much_to_sum() -> None:
    run_ranks(one_records_anew, 2)


@pytest.mark.share(1)
@pytest.mark.parametrize("level", MODELS)
def test_accumulated_over_recorded_calls(level: str) -> None:
    run_ranks(accumulated, 2, level)
