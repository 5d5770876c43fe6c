"""A training step of a GPT, tensor parallel on 2 ranks (CPU): onecard, by hand as Megatron-LM, torch DTensor.

    python benchmarks/gpt_tp.py                          # a minute or two on 2 cores
    python benchmarks/gpt_tp.py --small                  # seconds: do all variants run and agree?
    ONECARD_BACKEND=gloo python benchmarks/gpt_tp.py     # not over shared memory

A step is forward, backward and AdamW (foreach). The variants start from the same weights, must give the losses of the
one-card model in the first steps (1e-5 relative), and are then timed in turn in the same processes. Peak memory comes
from a fresh pair of processes for each variant.
"""

from __future__ import annotations

import copy
import resource
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parents[1] / "examples" / "gpt"), str(Path(__file__).parent)]

from model import GPT, GPTConfig, next_byte_loss  # noqa: E402
from onecard.testing import run_ranks  # noqa: E402

Name = Literal["onecard", "megatron", "dtensor"]
N_RANKS = 2
LOSS_TOLERANCE = 1e-5  # relative
N_CHECKED = 3  # steps whose losses are compared; they warm the variants up as well
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # unit of ru_maxrss in bytes


@dataclass(frozen=True)
class BenchArgs:
    """Compare one training step of onecard with hand-written tensor parallelism and with torch DTensor."""

    rounds: int = 7
    """rounds; in each, every variant runs `steps` steps"""
    steps: int = 1
    """steps of each variant in a round"""
    variants: tuple[Name, ...] = ("onecard", "megatron", "dtensor")
    small: bool = False
    """tiny sizes, to see that all runs"""
    memory: bool = True
    """measure peak memory too"""
    timeout: float = 900.0
    """seconds for each start of the ranks"""

    @property
    def model(self) -> GPTConfig:
        if self.small:
            return GPTConfig(max_seq_len=32, n_layer=1, n_head=4, d_model=64)
        return GPTConfig(max_seq_len=256, n_layer=4, n_head=8, d_model=512)

    @property
    def batch_size(self) -> int:
        return 2 if self.small else 8


@dataclass
class Variant:
    """A model, its loss of (ids, targets), its optimizer, and the context it must run in."""

    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Forward, backward, AdamW; returns the loss before the step, in the variant's own kind of tensor."""
        with self.context():
            loss = self.loss(ids, targets)
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        return loss.detach()


def adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def build_onecard(gpt: GPT) -> Variant:
    import onecard as oc
    from placements import shard_model

    model = shard_model(gpt, oc.ProcessMesh(range(N_RANKS), ["tp"]))
    return Variant(lambda x, y: next_byte_loss(model(x), y), oc.shard_optimizer(adamw(model.parameters())))


def build_megatron(gpt: GPT) -> Variant:
    from peers.megatron_tp import MegatronGPT

    model = MegatronGPT(gpt, dist.group.WORLD)
    return Variant(model.loss, adamw(model.parameters()))


def build_dtensor(gpt: GPT) -> Variant:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    from peers.dtensor_tp import parallelize, parameter_groups

    model = parallelize(gpt, init_device_mesh("cpu", (N_RANKS,), mesh_dim_names=("tp",)))
    return Variant(lambda x, y: next_byte_loss(model(x), y), adamw(parameter_groups(model)), loss_parallel)


BUILDERS: dict[Name, Callable[[GPT], Variant]] = {
    "onecard": build_onecard,
    "megatron": build_megatron,
    "dtensor": build_dtensor,
}


def make_gpt(args: BenchArgs) -> GPT:
    torch.manual_seed(0)
    return GPT(args.model)


def make_batch(args: BenchArgs, step: int) -> tuple[Tensor, Tensor]:
    """Random inputs and targets of a step, equal on all ranks."""
    generator = torch.Generator().manual_seed(step)
    shape = (args.batch_size, args.model.max_seq_len + 1)
    ids = torch.randint(args.model.vocab_size, shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def as_number(loss: Tensor) -> float:
    return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss)


def one_card_losses(args: BenchArgs) -> list[float]:
    """The reference: the plain model in one process."""
    gpt = make_gpt(args)
    variant = Variant(lambda x, y: next_byte_loss(gpt(x), y), adamw(gpt.parameters()))
    return [as_number(variant.step(*make_batch(args, i))) for i in range(N_CHECKED)]


def time_variants(args: BenchArgs) -> dict[str, tuple[list[float], list[float]]]:
    """On each rank: losses of the first steps, then seconds a step in each round, by variant."""
    torch.set_num_threads(1)
    gpt = make_gpt(args)
    variants = {name: BUILDERS[name](copy.deepcopy(gpt)) for name in args.variants}
    losses = {}
    for name, variant in variants.items():
        say(f"{name}: first {N_CHECKED} steps")
        losses[name] = [as_number(variant.step(*make_batch(args, i))) for i in range(N_CHECKED)]
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    batch = make_batch(args, N_CHECKED)
    for i in range(args.rounds):
        say(f"timing, round {i + 1} of {args.rounds}")
        names = list(variants)
        for name in names[i % len(names) :] + names[: i % len(names)]:  # no variant always follows the same one
            seconds[name].append(time_steps(variants[name], batch, args.steps))
    return {name: (losses[name], seconds[name]) for name in variants}


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text)


def time_steps(variant: Variant, batch: tuple[Tensor, Tensor], n: int) -> float:
    """Seconds a step, until the slowest rank is done."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(n):
        variant.step(*batch)
    dist.barrier()
    return (time.perf_counter() - start) / n


def peak_memory(args: BenchArgs, name: Name) -> tuple[float, float]:
    """On each rank: resident MB before the model is built, and at the peak of a few steps."""
    torch.set_num_threads(1)
    say(f"{name}: peak memory of {N_CHECKED} steps")
    before = peak_rss_mb()
    variant = BUILDERS[name](make_gpt(args))
    for i in range(N_CHECKED):
        variant.step(*make_batch(args, i))
    return before, peak_rss_mb()


def peak_rss_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / 1e6


def disagreements(losses: dict[str, list[float]]) -> list[str]:
    """What differs from the one-card losses by more than the tolerance, in words."""
    reference = losses["one card"]
    return [
        f"{name}, step {step}: {loss:.7f} instead of {expected:.7f}"
        for name, values in losses.items()
        for step, (loss, expected) in enumerate(zip(values, reference, strict=True))
        if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected)
    ]


def time_table(seconds: dict[str, list[float]]) -> Table:
    """Median seconds of each variant's step, and onecard's as a multiple of it."""
    table = Table("variant", "ms a step, median", "least", "most", "onecard / it", title="Time")
    own = statistics.median(seconds["onecard"]) if "onecard" in seconds else None
    for name, values in seconds.items():
        median = statistics.median(values)
        milliseconds = [f"{x * 1e3:.1f}" for x in (median, min(values), max(values))]
        table.add_row(name, *milliseconds, multiple(own, median))
    return table


def memory_table(memory: dict[str, tuple[float, float]]) -> Table:
    """Peak resident memory of the larger rank, and onecard's as a multiple of it; also without the empty process."""
    columns = ("variant", "peak MB", "onecard / it", "of it above the start", "onecard / it")
    table = Table(*columns, title="Memory of a rank")
    before, peak = memory.get("onecard", (None, None))
    own_growth = None if before is None or peak is None else peak - before
    for name, (its_before, its_peak) in memory.items():
        growth = its_peak - its_before
        table.add_row(name, f"{its_peak:.0f}", multiple(peak, its_peak), f"{growth:.0f}", multiple(own_growth, growth))
    return table


def multiple(own: float | None, other: float) -> str:
    return "-" if own is None else f"{own / other:.3f}"


def main(args: BenchArgs) -> int:
    """Run all, print the comparison; returns the exit code."""
    console = Console()
    torch.set_num_threads(1)
    timed = run_ranks(time_variants, N_RANKS, args, timeout=args.timeout)[0]
    console.print(f"one card: first {N_CHECKED} steps")
    losses = {"one card": one_card_losses(args), **{name: values for name, (values, _) in timed.items()}}
    wrong = disagreements(losses)
    if wrong:
        console.print(f"[bold red]losses differ by more than {LOSS_TOLERANCE:g} relative[/]:", *wrong, sep="\n  ")
        return 1
    console.print(f"{N_CHECKED} losses of {', '.join(losses)} agree to {LOSS_TOLERANCE:g} relative")
    console.print(time_table({name: values for name, (_, values) in timed.items()}))
    if args.memory:
        memory = {}
        for name in args.variants:
            ranks = run_ranks(peak_memory, N_RANKS, args, name, timeout=args.timeout)
            memory[name] = max(ranks, key=lambda of_rank: of_rank[1])
        console.print(memory_table(memory))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(BenchArgs)))
