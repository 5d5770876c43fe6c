"""A training step, data parallel on 2 or 4 ranks (CPU): onecard's marks and stages of ZeRO, DDP, ZeroRedundancyOptimizer, FSDP2.

    python benchmarks/zero.py                      # some minutes on 2 cores
    python benchmarks/zero.py --model network      # seed 003's 256-102400-256-10, with Momentum
    python benchmarks/zero.py --small              # seconds: do all variants run and agree?
    python benchmarks/zero.py --ranks 4 --overlap  # sums while backward runs
    MALLOC_MMAP_MAX_=65536 python benchmarks/zero.py  # glibc's allocator as it is: more time, less memory at the peak
    ONECARD_BACKEND=gloo python benchmarks/zero.py # onecard over Gloo too, as its peers (--peers-backend shm: all over shm)

Each level stands beside the best peer of its kind: data parallelism beside DDP, stage 1 beside ZeroRedundancyOptimizer, stage
3 beside FSDP2, which reshards after forward as "stage 3" does (by blocks), or keeps. "by hand" is
``fleet.group_sharded_parallel``. Bytes sent are counted in a step and stand beside theory: 2P (n-1)/n, and 3P (n-1)/n where
parameters are gathered twice. All start from the same weights, must give the losses of one card in the first steps (1e-5
relative), and are then timed in turn in the same processes. Peak memory comes from a fresh pair of processes for each
variant. All of them, the peers too, have the allocator that ``onecard run`` gives to ranks on the CPU.
"""

from __future__ import annotations

import copy
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).parents[1] / "examples" / "gpt"), str(Path(__file__).parent)]

from gpt_tp import LOSS_TOLERANCE, N_CHECKED, N_RANKS, peak_rss_mb, say, time_steps  # noqa: E402
from model import GPT, GPTConfig, next_byte_loss  # noqa: E402
from onecard.launch._allocator import allocator  # noqa: E402
from onecard.testing import run_ranks  # noqa: E402

PEERS = {
    "marks": "ddp", "stage 1": "zero redundancy", "stage 2": "zero redundancy", "stage 3": "fsdp", "stage 3, kept": "fsdp, kept",
    "by hand, os": "zero redundancy", "by hand, os_g": "zero redundancy", "by hand, p_g_os": "fsdp",
}  # fmt: skip
LEVELS = {"by hand, os": "os", "by hand, os_g": "os_g", "by hand, p_g_os": "p_g_os"}
VARIANTS = (*PEERS, "ddp", "zero redundancy", "fsdp", "fsdp, kept")


@dataclass(frozen=True)
class BenchArgs:
    """Compare one training step of onecard's data parallelism and ZeRO with torch's."""

    model: Literal["gpt", "network"] = "gpt"
    """a GPT (d512, 4 layers, 256 tokens, batch 8) with AdamW, or seed 003's network (batch 64) with Momentum"""
    ranks: int = N_RANKS
    """how many"""
    overlap: bool = False
    """onecard's variants sum while backward runs, and gather ahead"""
    rounds: int = 7
    """rounds; in each, every variant runs one step"""
    variants: tuple[str, ...] = VARIANTS
    """which"""
    small: bool = False
    """tiny sizes, to see that all runs"""
    memory: bool = True
    """measure peak memory too"""
    peers_backend: Literal["gloo", "shm"] = "gloo"
    """what torch's variants send over"""
    timeout: float = 900.0
    """seconds for each start of the ranks"""


class Network(nn.Sequential):
    """Seed 003's: two products that are nearly all of it."""

    def __init__(self, wide: int) -> None:
        super().__init__(nn.Linear(256, wide), nn.ReLU(), nn.Linear(wide, 256), nn.ReLU(), nn.Linear(256, 10))


def make_model(args: BenchArgs) -> nn.Module:
    torch.manual_seed(0)
    if args.model == "network":
        return Network(1024 if args.small else 102_400)
    if args.small:
        return GPT(GPTConfig(max_seq_len=32, n_layer=1, n_head=4, d_model=64))
    return GPT(GPTConfig(max_seq_len=256, n_layer=4, n_head=8, d_model=512))


def make_batch(args: BenchArgs, step: int) -> tuple[Tensor, Tensor]:
    """Random inputs and targets of a step, equal on all ranks."""
    draw = torch.Generator().manual_seed(step)
    if args.model == "network":
        return torch.randn(64, 256, generator=draw), torch.randint(10, (64,), generator=draw)
    shape = (2, 33) if args.small else (8, 257)
    ids = torch.randint(256, shape, generator=draw)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(args: BenchArgs, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y) if args.model == "network" else next_byte_loss(model(x), y)


def optimizer_of(args: BenchArgs, parameters: object, kind: type | None = None) -> torch.optim.Optimizer:
    """Fused, but where the peer cannot (ZeroRedundancyOptimizer hands them on, FSDP2 has no fused SGD)."""
    options: dict[str, object] = {"lr": 0.01, "momentum": 0.9} if args.model == "network" else {"lr": 1e-3}
    made = torch.optim.SGD if args.model == "network" else torch.optim.AdamW
    if kind is not None:
        return kind(parameters, optimizer_class=made, foreach=True, **options)
    fused = not (args.model == "network" and _is_fsdp(parameters))
    return made(parameters, fused=fused, foreach=None if fused else True, **options)


def _is_fsdp(parameters: object) -> bool:
    from torch.distributed.tensor import DTensor

    return isinstance(parameters, list) and any(isinstance(p, DTensor) for p in parameters)


@dataclass
class Variant:
    """A step of (x, y) as all ranks know them; gives the loss of the whole batch."""

    args: BenchArgs
    model: nn.Module
    optimizer: torch.optim.Optimizer
    place: Callable[[Tensor], Tensor]
    whole: Callable[[Tensor], float]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(self.args, self.model, self.place(x), self.place(y))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def build(args: BenchArgs, name: str, model: nn.Module) -> Variant:
    return _onecard(args, name, model) if name in PEERS else _peer(args, name, model)


def _onecard(args: BenchArgs, name: str, model: nn.Module) -> Variant:
    import onecard as oc

    if name in LEVELS:
        return _by_hand(args, name, model)
    mesh = oc.ProcessMesh(range(args.ranks), ["dp"])
    oc.shard_layer(model, mesh)
    stages = {
        "stage 1": oc.ShardingStage1("dp", mesh),
        "stage 2": oc.ShardingStage2("dp", mesh),
        "stage 3": oc.ShardingStage3("dp", mesh, model=model),
        "stage 3, kept": oc.ShardingStage3("dp", mesh, model=model, reshard_after_forward=False),
    }
    optimizer = oc.shard_optimizer(optimizer_of(args, [*model.parameters()]), stages.get(name), overlap=args.overlap)
    return Variant(args, model, optimizer, lambda t: oc.shard_tensor(t, mesh, [oc.Shard(0)]), lambda loss: loss.item())


def _by_hand(args: BenchArgs, name: str, model: nn.Module) -> Variant:
    import onecard as oc
    from onecard import fleet

    optimizer = optimizer_of(args, [*model.parameters()])
    made, optimizer, _ = fleet.group_sharded_parallel(model, optimizer, LEVELS[name], overlap=args.overlap)

    def whole(loss: Tensor) -> float:
        total = loss.clone()
        oc.all_reduce(total, oc.ReduceOp.AVG)
        return float(total)

    return Variant(args, made, optimizer, lambda t: t.chunk(args.ranks)[dist.get_rank()].contiguous(), whole)


def _peer(args: BenchArgs, name: str, model: nn.Module) -> Variant:
    group = _group(args.peers_backend)
    if name.startswith("fsdp"):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        for block in model.blocks if hasattr(model, "blocks") else []:
            fully_shard(block, mesh=mesh, reshard_after_forward=name == "fsdp")
        fully_shard(model, mesh=mesh, reshard_after_forward=name == "fsdp")
        optimizer = optimizer_of(args, [*model.parameters()])
    else:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
        kind = None if name == "ddp" else lambda p, **more: ZeroRedundancyOptimizer(p, process_group=group, **more)
        optimizer = optimizer_of(args, [*model.parameters()], kind)

    def whole(loss: Tensor) -> float:
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return float(total / args.ranks)

    return Variant(args, model, optimizer, lambda t: t.chunk(args.ranks)[dist.get_rank()].contiguous(), whole)


def _group(backend: str) -> dist.ProcessGroup:
    if backend not in _groups:
        _groups[backend] = dist.new_group(backend=backend)
    return _groups[backend]


_groups: dict[str, dist.ProcessGroup] = {}


def sent_by(args: BenchArgs, variant: Variant) -> tuple[int, int]:
    """Messages of a step of onecard's, and their bytes; those of a few bytes (the loss) are left out."""
    import onecard as oc

    with oc.explain() as report:
        variant.step(*make_batch(args, N_CHECKED))
    large = [m.step.bytes for m in report.messages if m.step.kind != "slice" and m.step.bytes > 64]
    return len(large), sum(large)


def theory(args: BenchArgs, name: str) -> int:
    """Bytes that a rank sends in a step."""
    parameters = 4 * sum(p.numel() for p in make_model(args).parameters())
    gathered_twice = name in ("stage 3", "by hand, p_g_os")
    return (3 if gathered_twice else 2) * parameters * (args.ranks - 1) // args.ranks


def time_variants(args: BenchArgs) -> dict[str, tuple[list[float], list[float], tuple[int, int]]]:
    """On each rank: losses of the first steps, seconds of a step in each round, and messages, by variant."""
    torch.set_num_threads(1)
    model = make_model(args)
    variants = {name: build(args, name, copy.deepcopy(model)) for name in args.variants}
    losses = {}
    for name, variant in variants.items():
        say(f"{name}: first {N_CHECKED} steps")
        losses[name] = [variant.whole(variant.step(*make_batch(args, i))) for i in range(N_CHECKED)]
    messages = {name: sent_by(args, variant) if name in PEERS else (0, 0) for name, variant in variants.items()}
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    batch = make_batch(args, N_CHECKED)
    for i in range(args.rounds):
        say(f"timing, round {i + 1} of {args.rounds}")
        names = list(variants)
        for name in names[i % len(names) :] + names[: i % len(names)]:  # no variant always follows the same one
            seconds[name].append(time_steps(variants[name], batch, 1))  # type: ignore[arg-type]
    return {name: (losses[name], seconds[name], messages[name]) for name in variants}


def peak_memory(args: BenchArgs, name: str) -> float:
    """On each rank: resident MB at the peak of a few steps, above the start."""
    torch.set_num_threads(1)
    say(f"{name}: peak memory of {N_CHECKED} steps")
    before = peak_rss_mb()
    variant = build(args, name, make_model(args))
    for i in range(N_CHECKED):
        variant.step(*make_batch(args, i))
    return peak_rss_mb() - before


def table(
    args: BenchArgs, seconds: dict[str, list[float]], memory: dict[str, float], sent: dict[str, tuple[int, int]]
) -> Table:
    made = Table(
        "variant",
        "ms a step, median",
        "least",
        "most",
        "peer",
        "time / peer's",
        "peak MB",
        "peak / peer's",
        "messages",
        "bytes / theory",
    )
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        peer = PEERS.get(name, "")
        ratios = [
            f"{known[name] / known[peer]:.3f}" if peer in known and name in known else "-" for known in (middle, memory)
        ]
        milliseconds = [f"{x * 1e3:.1f}" for x in (middle[name], min(values), max(values))]
        peak = f"{memory[name]:.0f}" if name in memory else "-"
        number, size = sent[name]
        bytes_sent = f"{size / theory(args, name):.3f}" if number else "-"
        made.add_row(name, *milliseconds, peer, ratios[0], peak, ratios[1], str(number or "-"), bytes_sent)
    return made


def main(args: BenchArgs) -> int:
    """Run all, print the comparison; returns the exit code."""
    os.environ |= allocator(os.environ)
    console = Console()
    torch.set_num_threads(1)
    timed = run_ranks(time_variants, args.ranks, args, timeout=args.timeout)[0]
    model = make_model(args)
    alone = Variant(args, model, optimizer_of(args, [*model.parameters()]), lambda t: t, float)
    expected = [float(alone.step(*make_batch(args, i))) for i in range(N_CHECKED)]
    for name, (losses, *_) in timed.items():
        for step, (loss, wanted) in enumerate(zip(losses, expected, strict=True)):
            if not abs(loss - wanted) <= LOSS_TOLERANCE * abs(wanted):
                console.print(f"[bold red]{name}, step {step}: {loss:.7f} instead of {wanted:.7f}[/]")
                return 1
    console.print(f"{N_CHECKED} losses of {', '.join(timed)} are those of one card to {LOSS_TOLERANCE:g} relative")
    memory = {}
    for name in args.variants if args.memory else ():
        memory[name] = max(run_ranks(peak_memory, args.ranks, args, name, timeout=args.timeout))
    seconds = {name: values for name, (_, values, _) in timed.items()}
    console.print(table(args, seconds, memory, {name: sent for name, (*_, sent) in timed.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(BenchArgs)))
