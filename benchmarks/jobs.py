"""Jobs on this machine, priced before they run: seconds, bytes and memory of `oc.price` beside what was measured.

    python benchmarks/jobs.py                    # some minutes on 2 idle cores
    python benchmarks/jobs.py --small            # seconds: does all of it run, are bytes exact?
    python benchmarks/jobs.py --only pp zero     # jobs whose names have one of these words

Each job runs on real ranks, as a user would write it; its step is recorded and replayed (but for pipelines), so that Python's
own time does not count. The machine is measured (`Machine.measure()`) on the same ranks just before, anew for each round, as
its speed changes from minute to minute; medians over rounds. Bytes are those that rank 0 sends in a step, memory the most bytes
of tensors alive at once on rank 0.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard import pipeline
from onecard.planning import record
from onecard.testing import run_ranks

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples" / "gpt"), str(ROOT / "tests")]

from live_memory import Counted  # noqa: E402

from model import GPT, GPTConfig, next_byte_loss  # noqa: E402
from placements import TENSOR_PARALLEL, place  # noqa: E402

PLACEMENTS = tuple((f"*{name}", f"tp: Shard({where.dim})") for name, where in TENSOR_PARALLEL.items())
PLAIN = {
    "parameters": "float32", "gradients": "float32", "compute": "float32", "master": False, "overlap": False, "per_host": 0,
}  # fmt: skip


@dataclass(frozen=True)
class JobsArgs:
    """Compare prices of jobs with measured runs."""

    rounds: int = 5
    """how often the machine is measured, and each job run"""
    steps: int = 6
    """steps of a round"""
    only: tuple[str, ...] = ()
    """words; jobs with one of them in their names"""
    small: bool = False
    """tiny sizes"""


@dataclass(frozen=True)
class Job:
    """A job: what it is called, on how many ranks, its plan, and its network."""

    name: str
    plan: dict[str, Any] = field(default_factory=dict)
    network: str = "gpt"

    @property
    def as_plan(self) -> oc.Plan:
        """With what all of them have."""
        return oc.Plan(**PLAIN, placements=PLACEMENTS if self.network == "gpt" else (), **self.plan)


JOBS = [
    Job("one rank", {"microbatch": 4}),
    Job("recompute", {"microbatch": 4, "recompute": "full"}),
    Job("accumulation", {"microbatch": 2, "microbatches": 4}),
    Job("dp=2", {"dp": 2, "microbatch": 4}),
    Job("tp=2", {"tp": 2, "microbatch": 4}),
    Job("zero 1, dp=2", {"dp": 2, "zero": 1, "microbatch": 4}),
    Job("zero 2, dp=2", {"dp": 2, "zero": 2, "microbatch": 4}),
    Job("zero 3, dp=2", {"dp": 2, "zero": 3, "microbatch": 4}),
    Job("pp=2, 1F1B", {"pp": 2, "microbatch": 2, "microbatches": 4, "schedule": "1F1B"}),
    Job("pp=2, F-then-B", {"pp": 2, "microbatch": 2, "microbatches": 4, "schedule": "F-then-B"}),
    Job("pp=2, ZBH1", {"pp": 2, "microbatch": 2, "microbatches": 4, "schedule": "ZBH1"}),
    Job("convolutions, dp=2", {"dp": 2, "microbatch": 8}, "convolutions"),
    Job("dp=2 x tp=2", {"dp": 2, "tp": 2, "microbatch": 4}),
    Job("dp=2 x pp=2", {"dp": 2, "pp": 2, "microbatch": 2, "microbatches": 4, "schedule": "1F1B"}),
    Job("tp=2 x pp=2", {"tp": 2, "pp": 2, "microbatch": 2, "microbatches": 4, "schedule": "1F1B"}),
]


# -- networks --------------------------------------------------------------------------------------------------------------


class Convolutions(nn.Sequential):
    """Four convolutions over images of 32 x 32."""

    def __init__(self, wide: int) -> None:
        sizes = [3, wide, wide, 2 * wide, 2 * wide]
        layers: list[nn.Module] = []
        for given, made in pairwise(sizes):
            layers += [nn.Conv2d(given, made, 3, padding=1), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * wide, 10))


def network(kind: str, small: bool) -> nn.Module:
    if kind == "convolutions":
        return Convolutions(8 if small else 64)
    return GPT(GPTConfig(256, 32 if small else 128, 4, 4, 64 if small else 512))


def example(kind: str, small: bool, rows: int) -> tuple[Tensor, Tensor]:
    if kind == "convolutions":
        return torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,))
    ids = torch.randint(256, (rows, (32 if small else 128) + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(kind: str, model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y) if kind == "convolutions" else next_byte_loss(model(x), y)


# -- the real program ------------------------------------------------------------------------------------------------------


def program(job: Job, small: bool) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """The step as a user writes it, its batch, and what holds its memory."""
    torch.manual_seed(0)
    plan, model = job.as_plan, network(job.network, small)
    if plan.recompute == "full":
        for block in model.blocks:  # type: ignore[union-attr]
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    size = plan.dp * plan.tp
    meshes = [
        oc.ProcessMesh([[at + d * plan.tp + t for t in range(plan.tp)] for d in range(plan.dp)], ["dp", "tp"])
        for at in range(0, size * plan.pp, size)
    ]
    _divide(model, meshes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    optimizer = oc.shard_optimizer(optimizer, *_stage(plan, meshes[0], model))
    rows = plan.microbatch * plan.dp * (plan.microbatches if plan.pp > 1 else 1)
    ends = meshes[0], meshes[-1]
    count = 1 if plan.pp > 1 else plan.microbatches
    # Of a pipeline every rank has the whole batch, and takes its rows of each microbatch.
    rows_lie = {} if plan.pp > 1 else {"dp": oc.Shard(0)}
    parts = [
        tuple(oc.shard_tensor(t, mesh, place(mesh, **rows_lie)) for t, mesh in zip(pair, ends, strict=True))
        for pair in (example(job.network, small, rows) for _ in range(count))
    ]

    def backward(x: Tensor, y: Tensor) -> None:
        if plan.pp > 1:
            pipeline.step_by_marks(
                model,
                partial(_own_rows, mesh=meshes[-1]),
                x,
                y,
                plan.schedule,
                plan.microbatches,
                stages=meshes,
                loss_weight=Tensor.numel,
            )
        else:
            (loss_of(job.network, model, x, y) / plan.microbatches).backward()

    def step(batches: Any) -> None:
        optimizer.zero_grad()
        for x, y in batches:
            backward(x, y)
        optimizer.step()

    return step, (parts,), (optimizer, model)


def _stage(plan: oc.Plan, mesh: oc.ProcessMesh, model: nn.Module) -> list[Any]:
    if not plan.zero:
        return []
    kinds = {1: oc.ShardingStage1, 2: oc.ShardingStage2}
    return [oc.ShardingStage3("dp", mesh, model=model) if plan.zero == 3 else kinds[plan.zero]("dp", mesh)]


def _divide(model: nn.Module, meshes: list[oc.ProcessMesh]) -> None:
    """Parameters on the mesh of their stage, and a move where the next stage begins."""
    blocks = list(getattr(model, "blocks", []))
    homes = {f"blocks.{i}": meshes[i * len(meshes) // len(blocks)] for i in range(len(blocks))}

    def home(name: str) -> oc.ProcessMesh:
        block = ".".join(name.split(".")[:2])
        return homes.get(block, meshes[0] if "embedding" in name else meshes[-1])

    for name, layer in model.named_modules():
        for short, parameter in list(layer.named_parameters(recurse=False)):
            matches = (w for suffix, w in TENSOR_PARALLEL.items() if f"{name}.{short}".endswith(suffix))
            mesh = home(name)
            where = place(mesh, tp=next(matches, oc.Replicate()))
            setattr(layer, short, oc.shard_tensor(parameter, mesh, where))
    if len(meshes) > 1:
        model.register_forward_pre_hook(partial(_moved, mesh=meshes[0]))
    for i, block in enumerate(blocks[1:], 1):
        if homes[f"blocks.{i}"] is not homes[f"blocks.{i - 1}"]:
            block.register_forward_pre_hook(partial(_moved, mesh=homes[f"blocks.{i}"]))


def _moved(module: nn.Module | None, given: tuple[Tensor], mesh: oc.ProcessMesh) -> tuple[Tensor]:
    return (oc.reshard(given[0], mesh, place(mesh, dp=oc.Shard(0))),)


def _own_rows(logits: Tensor, labels: Tensor, mesh: oc.ProcessMesh) -> Tensor:
    return next_byte_loss(logits, *_moved(None, (labels,), mesh))


# -- runs ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What rank 0 found: seconds measured and priced for each round, bytes and memory measured and priced."""

    rounds: tuple[tuple[float, float], ...]
    sent: tuple[dict[str, int], dict[str, int]]
    peak: tuple[int, int]


def run(job: Job, rounds: int, steps: int, small: bool) -> Ran:
    """On each rank."""
    torch.set_num_threads(1)
    plan = job.as_plan
    step, batch, _ = program(job, small)
    step(*batch)
    sent = _sent(step, batch)
    peak = _peak(*program(job, small))
    static = oc.to_static(step) if plan.pp == 1 else step
    for _ in range(3):
        static(*batch)
    found, machine = [], oc.Machine()
    for _ in range(rounds):
        machine = replace(oc.Machine.measure().recorded(), per_host=0)
        took = statistics.median(_seconds(static, batch) for _ in range(steps))
        found.append((took, priced(job, machine, small).seconds))
    cost = priced(job, machine, small)
    place_of = dist.get_rank() // (plan.dp * plan.tp)
    return Ran(
        tuple(found), (sent, dict(cost.ranks[place_of].sent)), (peak, _of_tensors(job, machine, small, place_of))
    )


def _of_tensors(job: Job, machine: oc.Machine, small: bool, place: int) -> int:
    """The peak without the copies that kernels make, which are no tensors: the run counts tensors."""
    with patch("onecard.planning.pieces.workspace", lambda node: 0):
        record._known.clear()
        found = priced(job, machine, small).ranks[place].peak
    record._known.clear()
    return found


def priced(job: Job, machine: oc.Machine, small: bool) -> oc.JobCost:
    """Without devices, in the same process."""
    make, loss = partial(network, job.network, small), partial(loss_of, job.network)
    return oc.price(make, job.as_plan, machine, batch=example(job.network, small, 2), loss=loss)


def _seconds(step: Callable[..., Any], batch: tuple[Any, ...]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step(*batch)
    dist.barrier()
    return time.perf_counter() - start


def _sent(step: Callable[..., Any], batch: tuple[Any, ...]) -> dict[str, int]:
    with oc.explain() as report:
        step(*batch)
    found: dict[str, int] = {}
    for message in report.messages:
        mesh = message.step.source.mesh
        axis = mesh.dim_names[message.step.axis] if message.step.kind != "transfer" else "pp"
        found[axis] = found.get(axis, 0) + message.step.bytes
    return {axis: count for axis, count in found.items() if count}


def _peak(step: Callable[..., Any], batch: tuple[Any, ...], held: Any) -> int:
    optimizer, model = held
    step(*batch)
    optimizer.zero_grad()
    counted = Counted([[p for p in model.parameters()], [*optimizer.state.values()], batch])
    with counted:
        step(*batch)
    return counted.peak


def main(args: JobsArgs) -> None:
    """Print a table: each job measured and priced."""
    table = Table(title="jobs on this machine: priced / measured")
    for column in ("job", "ms", "priced ms", "ratio", "bytes", "peak MB", "priced / measured"):
        table.add_column(column, justify="left" if column == "job" else "right")
    times = []
    for job in JOBS:
        if args.only and not any(word in job.name for word in args.only):
            continue
        rounds, steps = (1, 1) if args.small else (args.rounds, args.steps)
        ranks = run_ranks(run, job.as_plan.world, job, rounds, steps, args.small, timeout=900)
        ran: Ran = ranks[0]
        took, price = (statistics.median(pair[i] for pair in ran.rounds) for i in (0, 1))
        ratio = statistics.median(b / a for a, b in ran.rounds)
        exact = all(sent[0] == sent[1] for sent in (rank.sent for rank in ranks))
        times.append((took, price))
        table.add_row(
            job.name, f"{took * 1e3:.2f}", f"{price * 1e3:.2f}", f"{ratio:.3f}",
            "exact" if exact else f"{[rank.sent for rank in ranks]}",
            f"{ran.peak[0] / 1e6:.2f}", f"{ran.peak[1] / ran.peak[0]:.3f}",
        )  # fmt: skip
    Console(width=140).print(table)
    print(f"Kendall's tau of the two orders: {kendall(times):.3f}")


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Of pairs that two orders sort alike, less those that they do not, as a share.

    >>> kendall([(1, 1), (2, 3), (3, 2)])
    0.3333333333333333
    """
    signs = [1 if (a - c) * (b - d) > 0 else -1 for i, (a, b) in enumerate(pairs) for c, d in pairs[:i]]
    return sum(signs) / len(signs) if signs else 1.0


if __name__ == "__main__":
    main(tyro.cli(JobsArgs))
