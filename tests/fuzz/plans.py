"""Random plans of programs of one card, applied in place on real ranks: as on one card?

Each program trains under plans that are drawn: how ranks are divided, where each parameter is cut, ZeRO, copies, recomputation.
One again: ``python -m fuzz.plans --seed 17 --count 1``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from model_programs import library
from plan_programs import Program, optimizer_of, small
from torch import nn

import onecard as oc
from onecard.errors import OnecardError
from onecard.planning.fold import blocks_of
from onecard.testing import run_ranks

STEPS = 10
CLOSE = 1e-5


def trained(program: Program, plan: oc.Plan | None, steps: int = STEPS) -> list[float]:
    """Losses; under a plan, or on one card."""
    torch.manual_seed(0)
    model = program.build().train()
    optimizer = optimizer_of(program, model)
    if plan is not None:
        oc.parallelize(model, optimizer, plan=plan)
    found = []
    for i in range(steps):
        torch.manual_seed(i)
        loss = program.loss(model, *program.batch())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def drawn(seed: int, ranks: int, name: str = "") -> tuple[str, oc.Plan]:
    """A program, or the one of a name, and a plan for it."""
    draw = random.Random(seed)
    name = name or draw.choice(sorted(small()))
    with torch.device("meta"):
        model = program_of(name).build()
    tp = draw.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    dp = ranks // tp
    zero = draw.choice((0, 1, 2, 3)) if dp > 1 else 0
    replicas = draw.choice((1, dp)) if zero and draw.random() < 0.3 else 1
    again = "full" if blocks_of(model) and draw.random() < 0.3 else "none"
    placements = []
    for path, parameter in model.named_parameters():
        if tp > 1 and draw.random() < 0.6:
            ways = [d for d, size in enumerate(parameter.shape) if size >= tp]
            if ways:
                placements.append((path, f"tp: Shard({draw.choice(ways)})"))
    plan = oc.Plan(
        dp=dp, tp=tp, per_host=0, zero=zero, replicas=replicas, recompute=again, placements=tuple(placements),
        parameters="float32", compute="float32",
    )  # fmt: skip
    return name, plan


def program_of(name: str) -> Program:
    """One of the eight, or of a library's models."""
    return small().get(name) or library()[name]


def compared(seeds: Sequence[int], ranks: int, fault: str = "", name: str = "") -> list[str]:
    """For each seed what came out: "right", "refused: ...", "wrong: ...". On a rank. ``name``: of the program; drawn, if none."""
    said = []
    for seed in seeds:
        chosen, plan = drawn(seed, ranks, name)
        program = program_of(chosen)
        wanted = trained(program, None)
        try:
            found = trained(program, plan)
        except OnecardError as why:
            said.append(f"refused: {chosen}: {why}")
            continue
        if fault == "loss":
            found[-1] *= 1.0001
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
        said.append("right" if worst <= CLOSE else f"wrong: seed {seed}: {chosen} by {worst:.1e} under {plan}")
    return said


@dataclass(frozen=True)
class Options:
    """Random plans of plain programs on ranks; exit status 1 if any is wrong."""

    seed: int = 0
    """the first one's seed"""
    count: int = 200
    """how many"""
    ranks: int = 2
    """on so many ranks"""


def main(options: Options) -> int:
    """Runs them and prints what was wrong."""
    seeds = range(options.seed, options.seed + options.count)
    said: list[str] = []
    for at in range(0, len(seeds), 20):
        part = seeds[at : at + 20]
        found: list[Any] = run_ranks(compared, options.ranks, part, options.ranks, timeout=30.0 * len(part))
        said += found[0]
        for line in found[0]:
            if line != "right":
                print(line)
    wrong = sum(line.startswith("wrong") for line in said)
    print(f"{len(said)} plans: {sum(line == 'right' for line in said)} right, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Options)))
