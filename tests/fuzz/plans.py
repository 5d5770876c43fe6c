"""Random plans of programs of one card, on real ranks: as on one card?

Each program trains under plans that are drawn: how ranks are divided, where each parameter is cut, ZeRO, copies, recomputation,
microbatches, stages and their schedule. Without the last three it runs in a loop of its own, laid out in place; with them its
step is recorded. The programs are eight known ones, and random nets. One again: ``python -m fuzz.plans --seed 17 --count 1``.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from model_programs import library
from plan_programs import Program, small, step_of
from torch import nn

import onecard as oc
from fuzz.cuts import WIDTH, Net
from onecard.errors import OnecardError
from onecard.machine.cost import Machine
from onecard.planning.fold import blocks_of
from onecard.testing import run_ranks

STEPS = 10
CLOSE = 1e-5
ROWS = 8
"""Of each program's batch."""


def trained(program: Program, plan: oc.Plan | None, steps: int = STEPS) -> list[float]:
    """Losses; under a plan, or on one card."""
    model, optimizer, step = step_of(program)
    run: Any = step
    if plan is not None and (plan.pp > 1 or plan.microbatches > 1):
        run = oc.to_static(step, plan=plan)
    elif plan is not None:
        oc.parallelize(model, optimizer, plan=plan)
    found = []
    for i in range(steps):
        torch.manual_seed(i)
        found.append(run(*program.batch()).item())
    return found


def drawn(seed: int, ranks: int, name: str = "") -> tuple[str, oc.Plan]:
    """A program, or the one of a name, and a plan for it."""
    draw = random.Random(seed)
    name = name or draw.choice([*sorted(small()), *[f"net {seed}"] * 4])
    program = program_of(name)
    model = program.build()
    recorded = not program.statistics and draw.random() < 0.4
    pp = draw.choice(_divisors(ranks)) if recorded else 1
    tp = draw.choice(_divisors(ranks // pp))
    dp = ranks // tp // pp
    zero = draw.choice((0, 1, 2, 3)) if dp > 1 else 0
    replicas = draw.choice((1, dp)) if zero and draw.random() < 0.3 else 1
    again = "full" if blocks_of(model) and draw.random() < 0.3 else "none"
    placements = []
    for path, parameter in model.named_parameters():
        if tp > 1 and draw.random() < 0.6:
            ways = [d for d, size in enumerate(parameter.shape) if size >= tp]
            if ways:
                placements.append((path, f"tp: Shard({draw.choice(ways)})"))
    outputs = _outputs(random.Random(-seed - 1), model, tp)
    plan = oc.Plan(
        dp=dp, tp=tp, per_host=0, zero=zero, replicas=replicas, recompute=again, placements=tuple(placements), outputs=outputs,
        parameters="float32", compute="float32",
    )  # fmt: skip
    return name, _pipelined(draw, plan, pp) if recorded else plan


def _outputs(draw: random.Random, model: nn.Module, tp: int) -> tuple[tuple[str, str], ...]:
    """How some modules' outputs lie."""
    names = [name for name, _ in model.named_modules() if name]
    if tp == 1 or draw.random() < 0.4:
        return ()
    ways = ("tp: Shard(0)", "tp: Shard(1)", "tp: Shard(1)", "tp: Shard(2)", "tp: Replicate()")
    return tuple((name, draw.choice(ways)) for name in names if draw.random() < 0.4)


def _divisors(ranks: int) -> list[int]:
    return [n for n in range(1, ranks + 1) if ranks % n == 0]


def _pipelined(draw: random.Random, plan: oc.Plan, pp: int) -> oc.Plan:
    """The plan with microbatches, and with a pipeline."""
    count = draw.choice([n for n in (2, 4, 8) if ROWS % (n * plan.dp) == 0])
    if pp == 1:
        return replace(plan, microbatches=count)
    schedule, virtual = draw.choice(
        [("1F1B", 1), ("F-then-B", 1), ("ZBH1", 1), ("ZBV", 2), *[("VPP", 2)] * (count % pp == 0)]
    )
    return replace(plan, pp=pp, schedule=schedule, virtual=virtual, microbatches=count)


def program_of(name: str) -> Program:
    """One of the eight, of a library's models, or the random net of a seed ("net 17")."""
    if name.startswith("net "):
        return _net(int(name[4:]))
    return small().get(name) or library()[name]


def _net(seed: int) -> Program:
    def build() -> nn.Module:
        torch.manual_seed(seed)
        net = Net(random.Random(seed))
        if not net(torch.randn(4, WIDTH))[0].requires_grad:
            net.weights.append(weight := nn.Parameter(torch.ones(())))
            net.layers.append(lambda x, seen, batch: x * weight)
        return net

    norms = any(isinstance(m, nn.BatchNorm1d) for m in build().modules())
    batch = lambda: (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))  # noqa: E731
    return Program(build, batch, lambda net, x, y: F.mse_loss(net(x)[0], y), norms)


SLOW = Machine(latency=1e-9, bandwidth=1e12, memory=1e10, flops=1e9)
"""A machine on which it is worth while to divide even small layers."""


def chosen(name: str, ranks: int, **fixed: Any) -> oc.Plan:
    """The best plan of a program, of those that can be applied to it.

    Raises:
        PlanError: there is none.
    """
    program = program_of(name)
    torch.manual_seed(0)
    model, given = program.build(), {"cp": 1, "replicas": 1, **fixed}
    return oc.plan(model, world=ranks, machine=SLOW, batch=program.batch(), loss=program.loss, fixed=given).best


def compared(seeds: Sequence[int], ranks: int, fault: str = "", name: str = "") -> list[str]:
    """For each seed what came out: "right", "refused: ...", "wrong: ...". On a rank. ``name``: of the program; drawn, if none."""
    said = []
    for seed in seeds:
        program, plan = drawn(seed, ranks, name)
        said.append(under(program, plan, fault, f"seed {seed}: "))
    return said


def each_under(name: str, plans: Sequence[oc.Plan]) -> list[str]:
    """The same of one program under given plans."""
    return [under(name, plan) for plan in plans]


def under(name: str, plan: oc.Plan, fault: str = "", head: str = "") -> str:
    """What came out of a program under a plan. What differs in float32 is trained again in float64, where rounding is none."""
    program = program_of(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of microbatches that nobody can tell to be alike
            worst, bar = _worst(program, plan, fault), CLOSE
            if worst > bar:
                with _wide():
                    worst, bar = _worst(program, plan, fault), CLOSE * 1e-4
    except OnecardError as why:
        return f"refused: {head}{name}: {why}"
    return "right" if worst <= bar else f"wrong: {head}{name} by {worst:.1e} under {plan!r}"


def _worst(program: Program, plan: oc.Plan, fault: str) -> float:
    wanted, found = trained(program, None), trained(program, plan)
    if fault == "loss":
        found[-1] *= 1.0001
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


@contextmanager
def _wide() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Options:
    """Random plans of plain programs on ranks; exit status 1 if any is wrong."""

    seed: int = 0
    """the first one's seed"""
    count: int = 200
    """how many"""
    ranks: int = 2
    """on so many ranks"""
    name: str = ""
    """of the program; drawn, if none"""


def main(options: Options) -> int:
    """Runs them and prints what was wrong."""
    seeds = range(options.seed, options.seed + options.count)
    said: list[str] = []
    for at in range(0, len(seeds), 20):
        part = seeds[at : at + 20]
        found: list[Any] = run_ranks(
            compared, options.ranks, part, options.ranks, "", options.name, timeout=60.0 * len(part)
        )
        said += found[0]
        for line in found[0]:
            if line != "right":
                print(line, flush=True)
    wrong = sum(line.startswith("wrong") for line in said)
    print(f"{len(said)} plans: {sum(line == 'right' for line in said)} right, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Options)))
