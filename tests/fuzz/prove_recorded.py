"""What ``fuzz.prove`` proves by recordings: steps under marks and ZeRO, and stages and microbatches cut out of a step by a plan.

Each rank's step is recorded in a pretended world, one card's alone; their nodes are interpreted together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from plan_programs import step_of
from recorded_programs import alone, on_ranks
from torch import nn
from torch.nn import functional as F

import onecard as oc
from fuzz import plans
from fuzz.cuts import WIDTH


@dataclass(frozen=True)
class Recorded:
    """Recordings of all ranks, and one card's with what it is called with."""

    ranks: list[Any]
    one: Any
    args: tuple[Any, ...]

    def prove(self) -> oc.Proof:
        """Two steps of them."""
        return oc.prove(self.ranks, against=self.one, args=self.args, steps=2, rounding=False)


def _recorded(static: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """The recording of a step whose optimizer has its states."""
    for _ in range(2):
        static(*given)
    return static.recordings[-1]  # type: ignore[attr-defined]


def by_marks(seed: int) -> Recorded:
    """A random net whose batch dp cuts, under a stage of ZeRO or none."""
    draw = random.Random(f"recorded {seed}")
    stage, kind = draw.choice((0, 1, 2, 3)), draw.choice((torch.optim.SGD, torch.optim.AdamW))
    clip, momentum = draw.random() < 0.5, {"momentum": 0.9} if kind is torch.optim.SGD else {"eps": 1e-3}
    torch.manual_seed(seed)
    batch = torch.randn(plans.ROWS, WIDTH), torch.randn(plans.ROWS, WIDTH)

    def rank() -> Any:
        torch.manual_seed(seed)
        net: Any = plans.program_of(f"net {seed}").build()
        mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
        oc.shard_layer(net, mesh)
        optimizer: Any = kind(net.parameters(), lr=0.05, **momentum)
        stages = (oc.ShardingStage1, oc.ShardingStage2, oc.ShardingStage3)
        optimizer = oc.shard_optimizer(optimizer, *([stages[stage - 1]("dp", mesh)] if stage else []))

        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x)[0], y)
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            return loss.detach()

        return _recorded(oc.to_static(step), tuple(oc.shard_tensor(x, mesh, [oc.Shard(0)]) for x in batch))

    return Recorded(on_ranks(rank, (2, 4)[seed % 2]), alone(rank), batch)


def by_plan(seed: int) -> Recorded | None:
    """A random net under a random plan with stages or microbatches; None: its plan has none."""
    ranks = (2, 4)[seed % 2]
    name, plan = plans.drawn(seed, ranks, f"net {seed}")  # small ones: a library's model has thousands of nodes
    if plan.pp == 1 and plan.microbatches == 1:
        return None
    program = plans.program_of(name)
    torch.manual_seed(1)
    batch = program.batch()
    net: Any = program.build()
    if net(batch[0]) and net.count.any():  # how often it is called: once for each microbatch, on one card for all rows
        return None

    def rank(by: oc.Plan | None) -> Any:
        _, _, step = step_of(program)
        return _recorded(oc.to_static(step) if by is None else oc.to_static(step, plan=by), batch)

    return Recorded(on_ranks(rank, ranks, plan), alone(rank, None), batch)


def by_plans(seed: int) -> Recorded:
    """The first such program of a row of seeds."""
    return next(made for n in range(1000) if (made := by_plan(seed * 1000 + n)) is not None)
