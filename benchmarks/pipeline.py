"""A training step of a GPT in pipeline stages on 2 ranks (CPU): onecard's runtime and torch.distributed.pipelining.

    python benchmarks/pipeline.py                      # some minutes on 2 cores
    python benchmarks/pipeline.py --small              # seconds: do all variants run and agree?
    ONECARD_BACKEND=gloo python benchmarks/pipeline.py # both over Gloo; else both over shared memory

The same stages, cut alike, from the same weights, under the same schedule, forward and backward without an optimizer. All must
give one card's loss and gradients (1e-5) and are then timed in turn in the same processes. Peak memory comes from fresh processes
for each variant. All have the allocator that ``onecard run`` gives to ranks on the CPU. *Compute only*: the busier rank's
forwards and backwards of its stages alone, without messages or waiting.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parents[1] / "examples" / "gpt"), str(Path(__file__).parent)]

import onecard as oc  # noqa: E402
from gpt_tp import N_RANKS, peak_rss_mb, say  # noqa: E402
from model import GPT, GPTConfig, next_byte_loss  # noqa: E402
from onecard import pipeline  # noqa: E402
from onecard.launch._allocator import allocator  # noqa: E402
from onecard.testing import run_ranks  # noqa: E402

TOLERANCE = 1e-5
PEERS = {  # onecard's schedule, torch's class, stages for each rank
    "GPipe": (pipeline.gpipe, "ScheduleGPipe", 1),
    "1F1B": (pipeline.one_f_one_b, "Schedule1F1B", 1),
    "interleaved 1F1B": (pipeline.interleaved, "ScheduleInterleaved1F1B", 2),
    "ZB-V": (pipeline.zb_v, "ScheduleZBVZeroBubble", 2),
}
ALONE = {  # that torch has not, or has with other stages
    "ZB-H1": (pipeline.zb_h1, "", 1),
    "ZB-2p": (pipeline.zb_2p, "", 1),
    "V-Half": (pipeline.v_half, "", 2),
    "DualPipe-V": (pipeline.dualpipe_v, "", 2),
}
PLAIN = "plain GPipe"
"""The whole model in its own loop, laid out by a plan with stages: every rank runs the program."""
VARIANTS = (
    *(f"{who} {name}" for name in PEERS for who in ("onecard", "torch")), *(f"onecard {n}" for n in ALONE), PLAIN
)  # fmt: skip


@dataclass(frozen=True)
class BenchArgs:
    """Compare one pipelined step of a GPT (d256, 8 layers, 128 tokens, batch 16, 8 microbatches)."""

    rounds: int = 9
    """rounds; in each, every variant runs one step"""
    variants: tuple[str, ...] = VARIANTS
    """which"""
    small: bool = False
    """tiny sizes, to see that all runs"""
    memory: bool = True
    """measure peak memory too"""
    microbatches: int = 8
    """how many"""
    timeout: float = 900.0
    """seconds for each start of the ranks"""


class Front(nn.Module):
    """Tokens to vectors."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.tokens, self.places = gpt.token_embedding, gpt.position_embedding

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))


def layers(args: BenchArgs) -> list[nn.Module]:
    """The whole model as a list."""
    torch.manual_seed(0)
    size = (32, 4, 4, 64) if args.small else (128, 8, 8, 256)
    gpt = GPT(GPTConfig(max_seq_len=size[0], n_layer=size[1], n_head=size[2], d_model=size[3]))
    return [Front(gpt), *gpt.blocks, nn.Sequential(gpt.norm, gpt.lm_head)]


def batch(args: BenchArgs) -> tuple[Tensor, Tensor]:
    """Inputs and targets, equal on all ranks."""
    ids = torch.randint(256, (16, 33 if args.small else 129), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def stages_of(args: BenchArgs, name: str) -> tuple[pipeline.Schedule, dict[int, nn.Sequential]]:
    """The schedule of a variant and this rank's stages: equally many blocks in each."""
    make = (PEERS | ALONE)[name.split(" ", 1)[1]][0]
    schedule = make(N_RANKS, args.microbatches)
    whole = layers(args)
    blocks = (len(whole) - 2) // schedule.num_stages
    bounds = [0, *(1 + blocks * i for i in range(1, schedule.num_stages)), len(whole)]
    mine = [stage for stage, rank in schedule.stage_to_rank.items() if rank == dist.get_rank()]
    return schedule, {stage: nn.Sequential(*whole[bounds[stage] : bounds[stage + 1]]) for stage in mine}


@dataclass
class Variant:
    """A step that leaves gradients in the stages, and gives the loss where the last stage is."""

    stages: dict[int, nn.Sequential]
    step: Callable[[Tensor, Tensor], Tensor | None]

    def clear(self) -> None:
        for stage in self.stages.values():
            stage.zero_grad()


def plain_loop(args: BenchArgs) -> Variant:
    """The program of one card, with one call more."""
    model = nn.Sequential(*layers(args))
    oc.parallelize(model, plan=oc.Plan(pp=N_RANKS, microbatches=args.microbatches, schedule="F-then-B"))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = next_byte_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return Variant({0: model}, step)


def build(args: BenchArgs, name: str) -> Variant:
    if name == PLAIN:
        return plain_loop(args)
    schedule, stages = stages_of(args, name)
    if name.startswith("onecard"):
        runner = pipeline.Runner(stages, next_byte_loss)
        return Variant(stages, lambda x, y: runner.step(schedule, x, y, share=False))
    return Variant(stages, _torch_step(args, name, schedule, stages))


def _torch_step(
    args: BenchArgs, name: str, schedule: pipeline.Schedule, stages: dict[int, nn.Sequential]
) -> Callable[[Tensor, Tensor], Tensor | None]:
    from torch.distributed import pipelining

    group, count = dist.group.WORLD, schedule.num_stages
    _, kind, chunks = PEERS[name.split(" ", 1)[1]]
    made = [
        pipelining.PipelineStage(module, number, count, torch.device("cpu"), group=group)  # type: ignore[arg-type]
        for number, module in sorted(stages.items())
    ]
    runs = getattr(pipelining, kind)(made[0] if chunks == 1 else made, args.microbatches, loss_fn=next_byte_loss)
    last = count - 1 in stages

    def step(x: Tensor, y: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        runs.step(*([x] if 0 in stages else []), **({"target": y, "losses": losses} if last else {}))
        return torch.stack(losses).mean().detach() if last else None

    return step


def check(args: BenchArgs, name: str, variant: Variant) -> str:
    """What differs from one card, in words; nothing if nothing does."""
    x, y = batch(args)
    whole = layers(args)
    expected = next_byte_loss(nn.Sequential(*whole)(x), y)
    expected.backward()
    count = 1 if name == PLAIN else stages_of(args, name)[0].num_stages
    blocks = (len(whole) - 2) // count
    loss = variant.step(x, y)
    if loss is not None and not abs(loss - expected) <= TOLERANCE * abs(expected):
        return f"{name}: loss {float(loss):.7f} instead of {float(expected):.7f}"
    for number, stage in variant.stages.items():
        first = 1 + blocks * number if number else 0
        for module, twin in zip(stage, whole[first:], strict=False):
            for p, q in zip(module.parameters(), twin.parameters(), strict=True):
                own = oc.unshard(p.grad)
                if own is None or q.grad is None or (own - q.grad).abs().max() > TOLERANCE * q.grad.abs().max():
                    return f"{name}: a gradient of stage {number} differs from one card's"
    variant.clear()
    return ""


def time_variants(args: BenchArgs) -> tuple[list[str], dict[str, list[float]], float]:
    torch.set_num_threads(1)
    variants = {name: build(args, name) for name in args.variants}
    faults = []
    for name, variant in variants.items():
        say(f"{name}: one card's numbers?")
        faults += [fault for fault in [check(args, name, variant)] if fault]
    x, y = batch(args)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(args.rounds):
        say(f"timing, round {i + 1} of {args.rounds}")
        names = list(variants)
        for name in names[i % len(names) :] + names[: i % len(names)]:  # no variant always follows the same one
            dist.barrier()
            start = time.perf_counter()
            variants[name].step(x, y)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            variants[name].clear()
    return faults, seconds, compute_only(args)


def compute_only(args: BenchArgs) -> float:
    """Seconds of the busier rank's share, with nothing sent: the least of some rounds."""
    _, stages = stages_of(args, "onecard 1F1B")
    ((number, stage),) = stages.items()
    x, y = batch(args)
    width = 64 if args.small else 256
    found = []
    for _ in range(max(2, args.rounds // 2)):
        dist.barrier()
        start = time.perf_counter()
        for part, target in zip(x.chunk(args.microbatches), y.chunk(args.microbatches), strict=True):
            given = torch.randn(*part.shape, width, requires_grad=True) if number else part
            out = stage(given)
            next_byte_loss(out, target).backward() if number else out.backward(torch.ones_like(out))
        found.append(time.perf_counter() - start)
    least = torch.tensor([min(found)])
    dist.all_reduce(least, dist.ReduceOp.MAX)
    return float(least)


def peak_memory(args: BenchArgs, name: str) -> float:
    """Resident MB at the peak of some steps, above the start."""
    torch.set_num_threads(1)
    say(f"{name}: peak memory")
    before = peak_rss_mb()
    variant = build(args, name)
    for _ in range(4):
        variant.step(*batch(args))
        variant.clear()
    return peak_rss_mb() - before


def table(seconds: dict[str, list[float]], memory: dict[str, float], bound: float) -> Table:
    made = Table(
        "variant",
        "ms a step, median",
        "least",
        "most",
        "time / torch's",
        "time / compute only",
        "peak MB",
        "peak / torch's",
    )
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        peer = name.replace("onecard", "torch").replace("plain", "torch")
        has = name != peer and peer in middle
        pairs = [mine / theirs for mine, theirs in zip(values, seconds[peer], strict=True)] if has else []
        made.add_row(
            name,
            *(f"{x * 1e3:.1f}" for x in (middle[name], min(values), max(values))),
            f"{statistics.median(pairs):.3f}" if pairs else "",
            f"{middle[name] / bound:.3f}",
            f"{memory[name]:.0f}" if name in memory else "-",
            f"{memory[name] / memory[peer]:.3f}" if has and name in memory and peer in memory else "",
        )
    return made


def main(args: BenchArgs) -> int:
    """Run all, print the comparison; returns the exit code."""
    os.environ |= allocator(os.environ)
    console = Console()
    ranks = run_ranks(time_variants, N_RANKS, args, timeout=args.timeout)
    faults = [fault for found, _, _ in ranks for fault in found]
    for fault in faults:
        console.print(f"[bold red]{fault}[/]")
    if faults:
        return 1
    console.print(f"loss and gradients of {', '.join(args.variants)} are those of one card to {TOLERANCE:g}")
    memory = {
        name: max(run_ranks(peak_memory, N_RANKS, args, name, timeout=args.timeout))
        for name in (args.variants if args.memory else ())
    }
    _, seconds, bound = ranks[0]
    console.print(table(seconds, memory, bound))
    console.print(f"compute only: {bound * 1e3:.1f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(BenchArgs)))
