"""Jobs of one rank on this GPU, priced before they run: seconds and memory of `oc.price` beside what was measured.

    python benchmarks/jobs_gpu.py                          # a minute and a half on an idle GPU
    python benchmarks/jobs_gpu.py --device cpu --small     # does it run?

Each job is a plain program, as its user has it. It is priced on the preset of this GPU's kind, and on what `Machine.measure()`
finds; neither has seen it. It is run as it is, and recorded and replayed. Memory is the most that torch's
allocator has given out.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard.machine.cost import PRESETS

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "gpt")]

from jobs import Convolutions  # noqa: E402
from model import GPT, GPTConfig, next_byte_loss  # noqa: E402

PURE = {"parameters": "bfloat16", "gradients": "bfloat16", "states": "bfloat16", "compute": "bfloat16", "master": False}
AUTOCAST = {
    "parameters": "float32",
    "gradients": "float32",
    "states": "float32",
    "compute": "bfloat16",
    "master": False,
}


@dataclass(frozen=True)
class GpuJobsArgs:
    """Compare prices of jobs with runs on a GPU."""

    device: str = "cuda"
    """cuda or cpu"""
    steps: int = 10
    """steps that are timed"""
    only: tuple[str, ...] = ()
    """words; jobs with one of them in their names"""
    small: bool = False
    """tiny sizes"""


@dataclass(frozen=True)
class GpuJob:
    """A job: what it is called, its network, its precision, and the rest of its plan."""

    name: str
    network: str
    precision: dict[str, Any]
    plan: dict[str, Any] = field(default_factory=dict)

    @property
    def as_plan(self) -> oc.Plan:
        return oc.Plan(**self.precision, **self.plan)


JOBS = [
    GpuJob("GPT, 2,048 wide, bfloat16", "gpt", PURE, {"microbatch": 4}),
    GpuJob("the same, recompute", "gpt", PURE, {"microbatch": 4, "recompute": "full"}),
    GpuJob("the same, 4 microbatches", "gpt", PURE, {"microbatch": 2, "microbatches": 4}),
    GpuJob("the same, autocast", "gpt", AUTOCAST, {"microbatch": 4}),
    GpuJob("LLaMA, 4,096 wide, bfloat16", "llama", PURE, {"microbatch": 1}),
    GpuJob("the same, recompute", "llama", PURE, {"microbatch": 2, "recompute": "full"}),
    GpuJob("convolutions, bfloat16", "convolutions", PURE, {"microbatch": 128}),
]


# -- the plain program -----------------------------------------------------------------------------------------------------


def network(kind: str, small: bool) -> nn.Module:
    if kind == "convolutions":
        return Convolutions(8 if small else 128)
    if kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        wide, hidden, heads, of_keys = (128, 448, 4, 2) if small else (4096, 14336, 32, 8)
        config = LlamaConfig(
            hidden_size=wide, intermediate_size=hidden, num_attention_heads=heads, num_key_value_heads=of_keys,
            num_hidden_layers=4, vocab_size=32000, max_position_embeddings=4096, use_cache=False,
        )  # fmt: skip
        return LlamaForCausalLM(config)
    return GPT(GPTConfig(256, 64, 4, 4, 64) if small else GPTConfig(32000, 2048, 12, 16, 2048))


def example(kind: str, small: bool, rows: int) -> tuple[Tensor, Tensor]:
    if kind == "convolutions":
        return torch.randn(rows, 3, *([32, 32] if small else [64, 64])), torch.randint(10, (rows,))
    length = 32 if small else 4096 if kind == "llama" else 2048
    ids = torch.randint(256, (rows, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(kind: str, model: Any, x: Tensor, y: Tensor) -> Tensor:
    if kind == "llama":
        logits = model(input_ids=x).logits
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())
    return F.cross_entropy(model(x), y) if kind == "convolutions" else next_byte_loss(model(x), y)


def program(job: GpuJob, small: bool, device: torch.device) -> tuple[Callable[..., Any], list[Any]]:
    """The step as a user writes it, and its microbatches."""
    torch.manual_seed(0)
    plan = job.as_plan
    model = network(job.network, small).to(device, getattr(torch, plan.parameters))
    if plan.recompute == "full":
        for block in getattr(model, "blocks", None) or model.model.layers:  # type: ignore[union-attr]
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    mixed = plan.compute != plan.parameters
    parts = [
        tuple(t.to(device, getattr(torch, plan.parameters) if t.is_floating_point() else t.dtype) for t in pair)
        for pair in (example(job.network, small, plan.microbatch) for _ in range(plan.microbatches))
    ]

    def step(batches: Any) -> None:
        for x, y in batches:
            with torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext():
                loss = loss_of(job.network, model, x, y)
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, parts


# -- runs ------------------------------------------------------------------------------------------------------------------


def seconds(step: Callable[..., Any], parts: Any, steps: int, sync: Callable[[], Any]) -> float:
    found = []
    for _ in range(steps + 3):
        sync()
        begin = time.perf_counter()
        step(parts)
        sync()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[3:])


def run(job: GpuJob, args: GpuJobsArgs, device: torch.device) -> tuple[float, float, int]:
    """Seconds of the program and of its replay, bytes at the peak."""
    gpu = device.type == "cuda"
    sync = torch.cuda.synchronize if gpu else lambda: None
    gc.collect()  # the job before, whose model is in cycles
    before = torch.cuda.memory_allocated() if gpu else 0
    step, parts = program(job, args.small, device)
    step(parts)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    step(parts)
    peak = torch.cuda.max_memory_allocated() - before if gpu else 1
    eager = seconds(step, parts, args.steps, sync)
    return eager, seconds(oc.to_static(step), parts, args.steps, sync), peak


def priced(job: GpuJob, machine: oc.Machine, small: bool) -> oc.JobCost:
    make, loss = partial(network, job.network, small), partial(loss_of, job.network)
    return oc.price(make, job.as_plan, machine, batch=example(job.network, small, 2), loss=loss)


def main(args: GpuJobsArgs) -> None:
    """Print a table: each job measured and priced."""
    device = torch.device(args.device)
    here = torch.cuda.get_device_name() if device.type == "cuda" else "H100"
    machines = {
        "preset": oc.Machine.preset(next((name for name in PRESETS if name in here), "H100")),
        "measured": oc.Machine.measure() if device.type == "cuda" else oc.Machine(),
    }
    machines = {name: replace(machine, per_host=0) for name, machine in machines.items()}
    table = Table(title=f"jobs on one {here}: priced / measured")
    for column in ("job", "ms", "replayed", "preset", "measured", "peak MiB", "priced"):
        table.add_column(column, justify="left" if column == "job" else "right")
    for job in JOBS:
        if args.only and not any(word in job.name for word in args.only):
            continue
        costs = {name: priced(job, machine, args.small) for name, machine in machines.items()}
        eager, replayed, peak = run(job, args, device)
        ratios = [f"{costs[name].seconds / min(eager, replayed):.3f}" for name in machines]
        peaks = f"{peak / 2**20:,.0f}", f"{costs['preset'].ranks[0].peak / peak:.3f}"
        table.add_row(job.name, f"{eager * 1e3:.2f}", f"{replayed * 1e3:.2f}", *ratios, *peaks)
        print(
            {name: {k: round(v * 1e3, 2) for k, v in cost.terms.items() if v} for name, cost in costs.items()},
            flush=True,
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    Console(width=140).print(table)


if __name__ == "__main__":
    main(tyro.cli(GpuJobsArgs))
