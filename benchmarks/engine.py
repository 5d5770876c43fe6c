"""A training step of a GPT on 2 ranks (CPU) as a pipeline cut from its recording, with stages made by hand, and torch's.

    python benchmarks/engine.py            # some minutes on 2 cores
    python benchmarks/engine.py --small    # seconds: do all variants run and agree?

The same model, cut alike, forward, backward, clipping by the norm of all gradients, AdamW (fused). "recorded" is
``to_static(step, stages=Stages(...))`` of a step written for one card; "by hand" is ``pipeline.Runner`` on stages; "torch" is
torch.distributed.pipelining on the same stages. All must give one card's losses and norms in the first steps (1e-5) and are
then timed in turn in the same processes; ratios are medians over rounds. All send over shared memory. Held: parameters,
states and gradients of the rank that has more. Live: the most bytes of tensors alive at once in a step. Peak: the most resident
memory of three later steps, from fresh processes. Simulated: by ``pipeline.simulate``, with measured times of F, I, W.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples" / "gpt"), str(ROOT / "tests"), str(Path(__file__).parent)]

from live_memory import Counted  # noqa: E402

import onecard as oc  # noqa: E402
from gpt_tp import N_RANKS, say  # noqa: E402
from model import GPT, GPTConfig, next_byte_loss  # noqa: E402
from onecard import pipeline  # noqa: E402
from onecard.comm.shm.messages import Messages  # noqa: E402
from onecard.launch._allocator import allocator  # noqa: E402
from onecard.testing import run_ranks  # noqa: E402
from pipeline import Front  # noqa: E402

TOLERANCE, N_CHECKED = 1e-5, 3
MAKERS = {"1F1B": pipeline.one_f_one_b, "ZBV": pipeline.zb_v, "VPP": pipeline.interleaved}
TORCH = {"1F1B": "Schedule1F1B", "ZBV": "ScheduleZBVZeroBubble", "VPP": "ScheduleInterleaved1F1B"}
SIMULATED = ("recorded ZBV", "recorded 1F1B")
StageTimes = dict[str, list[list[float]]]
VARIANTS = ("recorded 1F1B", "recorded ZBV", "by hand 1F1B", "by hand ZBV", "torch 1F1B", "torch ZBV", "torch VPP")


@dataclass(frozen=True)
class EngineArgs:
    """Compare one training step of a GPT (d256, 8 layers, 128 tokens, batch 16, 8 microbatches) in pipelines."""

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

    @property
    def config(self) -> GPTConfig:
        size = (32, 4, 4, 64) if self.small else (128, 8, 8, 256)
        return GPTConfig(max_seq_len=size[0], n_layer=size[1], n_head=size[2], d_model=size[3])

    def schedule(self, name: str) -> pipeline.Schedule:
        return MAKERS[name.split()[-1]](N_RANKS, self.microbatches)

    def bounds(self, stages: int) -> list[int]:
        """The blocks with which the later stages begin."""
        return [self.config.n_layer // stages * i for i in range(1, stages)]


def make_gpt(args: EngineArgs) -> GPT:
    torch.manual_seed(0)
    return GPT(args.config)


def batch(args: EngineArgs, step: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, equal on all ranks."""
    ids = torch.randint(256, (16, args.config.max_seq_len + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


@dataclass
class Variant:
    """A step; its loss (None: of another rank) and the norm of all gradients."""

    step: Callable[[Tensor, Tensor], tuple[Tensor | None, Tensor]]
    optimizer: torch.optim.Optimizer

    def held(self) -> int:
        """Bytes of parameters, states and gradients here."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        kept = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parameters}
        states = [s for each in self.optimizer.state.values() for s in each.values() if isinstance(s, Tensor)]
        return 2 * sum(kept.values()) + sum(s.untyped_storage().nbytes() for s in states)


def build(args: EngineArgs, name: str) -> Variant:
    return _recorded(args, name) if name.startswith("recorded") else _by_stages(args, name)


def one_card(args: EngineArgs) -> Variant:
    model = make_gpt(args)
    optimizer = adamw(model.parameters())

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = next_byte_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return Variant(step, optimizer)


def _recorded(args: EngineArgs, name: str) -> Variant:
    plain, schedule = one_card(args), args.schedule(name)
    at = tuple(f"blocks.{i}" for i in args.bounds(schedule.num_stages))
    plain.step = oc.to_static(plain.step, stages=oc.Stages(args.microbatches, schedule=name.split()[-1], at=at))
    return plain


def stages_of(args: EngineArgs, name: str) -> tuple[pipeline.Schedule, dict[int, nn.Sequential]]:
    """The schedule of a variant and this rank's stages."""
    gpt, schedule = make_gpt(args), args.schedule(name)
    whole = [Front(gpt), *gpt.blocks, nn.Sequential(gpt.norm, gpt.lm_head)]
    bounds = [0, *(1 + i for i in args.bounds(schedule.num_stages)), len(whole)]
    mine = [stage for stage, rank in schedule.stage_to_rank.items() if rank == dist.get_rank()]
    return schedule, {stage: nn.Sequential(*whole[bounds[stage] : bounds[stage + 1]]) for stage in mine}


def _by_stages(args: EngineArgs, name: str) -> Variant:
    schedule, stages = stages_of(args, name)
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    optimizer = adamw(parameters)
    if name.startswith("by hand"):
        runner = pipeline.Runner(stages, next_byte_loss)

        def run(x: Tensor, y: Tensor) -> Tensor | None:
            return runner.step(schedule, x, y, share=False)
    else:
        run = _torch_runner(args, name, schedule, stages)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor | None, Tensor]:
        loss = run(x, y)
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).square()
        dist.all_reduce(norm)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, norm.sqrt_())
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return Variant(step, optimizer)


def _torch_runner(
    args: EngineArgs, name: str, schedule: pipeline.Schedule, stages: dict[int, nn.Sequential]
) -> Callable[[Tensor, Tensor], Tensor | None]:
    from torch.distributed import pipelining

    group, count = dist.group.WORLD, schedule.num_stages
    made = [
        pipelining.PipelineStage(module, number, count, torch.device("cpu"), group=group)  # type: ignore[arg-type]
        for number, module in sorted(stages.items())
    ]
    kind: Any = getattr(pipelining, TORCH[name.split()[-1]])
    runs = kind(made[0] if len(made) == 1 else made, args.microbatches, loss_fn=next_byte_loss)
    last = count - 1 in stages

    def run(x: Tensor, y: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        runs.step(*([x] if 0 in stages else []), **({"target": y, "losses": losses} if last else {}))
        return torch.stack(losses).mean().detach() if last else None

    return run


@dataclass
class Found:
    """What a rank has found of a variant."""

    faults: list[str]
    seconds: list[float]
    held: int
    live: int
    messages: int
    sent: int


@contextmanager
def counted_sends() -> Iterator[list[int]]:
    """The bytes of each message that this rank sends; collectives are not among them."""
    sizes: list[int] = []
    before = Messages.send

    def send(self: Messages, tensor: Tensor, *more: Any) -> Any:
        sizes.append(tensor.nbytes)
        return before(self, tensor, *more)

    Messages.send = send  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        Messages.send = before  # type: ignore[method-assign]


def checked(name: str, variant: Variant, args: EngineArgs, expected: list[tuple[float, float]]) -> list[str]:
    """What differs from one card, in words."""
    faults = []
    for i, wanted in enumerate(expected):
        found = variant.step(*batch(args, i))
        for what, mine, whole in zip(("loss", "norm"), found, wanted, strict=True):
            if mine is not None and not abs(float(mine) - whole) <= TOLERANCE * abs(whole):
                faults.append(f"{name}, step {i}: {what} {float(mine):.7f} instead of {whole:.7f}")
    return faults


def measured(args: EngineArgs, expected: list[tuple[float, float]]) -> tuple[dict[str, Found], list[StageTimes]]:
    """On each rank: of all variants, timed in turn; and the times of all stages (`stage_times`), for each round."""
    torch.set_num_threads(1)
    variants, found = {}, {}
    for name in args.variants:
        say(f"{name}: one card's numbers?")
        variants[name] = build(args, name)
        found[name] = Found(checked(name, variants[name], args, expected), [], 0, 0, 0, 0)
    given = batch(args, N_CHECKED)
    stages = {name: stages_of(args, name) for name in SIMULATED}
    times = []
    for i in range(args.rounds):
        say(f"timing, round {i + 1} of {args.rounds}")
        times.append({name: stage_times(args, *of) for name, of in stages.items()})  # in turn, as what they foretell
        names = list(variants)
        for name in names[i % len(names) :] + names[: i % len(names)]:  # no variant always follows the same one
            dist.barrier()
            start = time.perf_counter()
            variants[name].step(*given)
            dist.barrier()
            found[name].seconds.append(time.perf_counter() - start)
    for name, variant in variants.items():
        with counted_sends() as sizes:
            variant.step(*given)
        groups = variant.optimizer.param_groups, [*variant.optimizer.state.values()]
        with Counted([*groups, given]) as alive:
            variant.step(*given)
        mine = found[name]
        mine.held, mine.live, mine.messages, mine.sent = variant.held(), alive.peak, len(sizes), sum(sizes)
    return found, times


def stage_times(args: EngineArgs, schedule: pipeline.Schedule, stages: dict[int, nn.Sequential]) -> list[list[float]]:
    """Seconds of F, I and W of each stage, in order: the median of three, each stage on its own rank, one after the other."""
    x, y = (t.chunk(args.microbatches)[0] for t in batch(args, 0))
    times = torch.zeros(schedule.num_stages, 3, dtype=torch.float64)
    for number, stage in stages.items():
        last = number == schedule.num_stages - 1
        rows = [_stage_times(stage, number, last, x, y, args.config.d_model) for _ in range(3)]
        times[number] = torch.tensor(rows, dtype=torch.float64).median(0).values
    dist.all_reduce(times)
    return times.tolist()


def _stage_times(stage: nn.Module, number: int, last: bool, x: Tensor, y: Tensor, width: int) -> tuple[float, ...]:
    given = torch.randn(*x.shape, width, requires_grad=True) if number else x
    start = time.perf_counter()
    out = stage(given)
    out = next_byte_loss(out, y) if last else out
    forward = time.perf_counter() - start
    parameters, gradient = [*stage.parameters()], torch.ones_like(out)
    inner = 0.0
    if number:
        start = time.perf_counter()
        torch.autograd.grad(out, given, gradient, retain_graph=True)
        inner = time.perf_counter() - start
    start = time.perf_counter()
    torch.autograd.grad(out, [given, *parameters] if number else parameters, gradient)
    both = time.perf_counter() - start
    return (
        (forward, inner, max(0.0, both - inner)) if number else (forward, both, 0.0)
    )  # nobody waits for the first stage's I


def peak_memory(args: EngineArgs, name: str) -> float:
    """Resident MB at the peak of three later steps, above the start."""
    torch.set_num_threads(1)
    say(f"{name}: peak memory")
    before = _status("VmRSS")
    variant = build(args, name)
    for i in range(N_CHECKED):
        variant.step(*batch(args, i))
    Path("/proc/self/clear_refs").write_text("5")  # from here on
    for i in range(3):
        variant.step(*batch(args, i))
    return _status("VmHWM") - before


def _status(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(what))


def table(args: EngineArgs, ranks: list[dict[str, Found]], memory: dict[str, float]) -> Table:
    columns = ("ms a step, median", "least", "most", "held MB", "live MB", "peak MB", "messages", "MB sent")
    made = Table("variant", *columns)
    for name, mine in ranks[0].items():
        both = [rank[name] for rank in ranks]
        made.add_row(
            name,
            *(f"{s * 1e3:.0f}" for s in (statistics.median(mine.seconds), min(mine.seconds), max(mine.seconds))),
            f"{max(b.held for b in both) / 1e6:.1f}",
            f"{max(b.live for b in both) / 1e6:.1f}",
            f"{memory[name]:.0f}" if name in memory else "-",
            " + ".join(str(b.messages) for b in both),
            f"{sum(b.sent for b in both) / 1e6:.3f}",
        )
    return made


def ratio(found: dict[str, Found], one: str, other: str) -> str:
    """The median over rounds of neighbouring steps' ratios, and half of them lie between."""
    pairs = sorted(a / b for a, b in zip(found[one].seconds, found[other].seconds, strict=True))
    return f"{one} / {other}: {statistics.median(pairs):.3f} ({pairs[len(pairs) // 4]:.3f} to {pairs[-len(pairs) // 4]:.3f})"


def simulated(args: EngineArgs, rounds: list[StageTimes]) -> list[str]:
    """What two schedules take by the stages' times of each round, without messages and what runs once."""
    found = {name: Found([], [], 0, 0, 0, 0) for name in SIMULATED}
    for times in rounds:
        for name, rows in times.items():
            kinds = pipeline.Times(*([*kind] for kind in zip(*rows, strict=True)))
            found[name].seconds.append(pipeline.simulate(args.schedule(name), kinds).step)
    said = []
    for name, of in found.items():
        middle = torch.tensor([times[name] for times in rounds]).median(0).values.tolist()
        each = ", ".join("/".join(f"{t * 1e3:.1f}" for t in row) for row in middle)
        said.append(f"simulated {name}: {statistics.median(of.seconds) * 1e3:.0f} ms of F/I/W {each} ms")
    return [*said, f"simulated: {ratio(found, *SIMULATED)}"]


def main(args: EngineArgs) -> int:
    """Run all, print the comparison; returns the exit code."""
    os.environ |= allocator(os.environ)
    console = Console(width=140)
    torch.set_num_threads(1)
    alone = one_card(args)
    expected = [tuple(float(v) for v in alone.step(*batch(args, i)) if v is not None) for i in range(N_CHECKED)]
    ranks = run_ranks(measured, N_RANKS, args, expected, timeout=args.timeout)
    found = [of_rank for of_rank, _ in ranks]
    if faults := [fault for rank in found for of in rank.values() for fault in of.faults]:
        console.print(*faults, sep="\n", style="bold red")
        return 1
    console.print(f"losses and norms of {', '.join(args.variants)} are those of one card to {TOLERANCE:g}")
    pairs = [(a, b) for i, a in enumerate(args.variants) for b in args.variants[:i] + args.variants[i + 1 :]]
    pairs = [(a, b) for a, b in pairs if a.startswith("recorded") and (b < a or not b.startswith("recorded"))]
    console.print(*(ratio(found[0], a, b) for a, b in pairs), sep="\n")
    console.print(*simulated(args, ranks[0][1]), sep="\n")
    memory = {
        name: max(run_ranks(peak_memory, N_RANKS, args, name, timeout=args.timeout))
        for name in (args.variants if args.memory else ())
    }
    console.print(table(args, found, memory))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(EngineArgs)))
