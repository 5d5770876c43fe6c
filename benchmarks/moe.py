"""A mixture of experts, forward and backward, on 2 or 4 ranks (CPU): onecard by hand and by marks, beside its peers.

    python benchmarks/moe.py                         # about a minute on 2 cores
    python benchmarks/moe.py --ranks 4
    python benchmarks/moe.py --small                 # seconds: do all variants run and agree?
    ONECARD_BACKEND=gloo python benchmarks/moe.py    # over Gloo

8 experts of two products with a GELU between them, the best 2 for each token, d 512, 2,048 tokens of all ranks together.
"fleet" is ``MoELayer`` with ``GroupedExperts``, "marks" the one-card program with its experts cut along an axis, "recorded" the
same as a recorded step. Peers:
DeepSpeed's ``MOELayer`` where it is installed (nothing dropped, no random choice), torch's grouped products between
all-to-alls by hand, and experts cut as tensors with all tokens on each rank. All send over the same backend, start from the
same weights, and must give one card's loss and gradients of tokens and experts (1e-5 relative); then they are timed in turn
in the same processes. Peak memory comes from fresh processes for each variant, above what was there before its first step;
there AdamW takes a step, too, and the bytes of the experts' parameters, gradients and states on a rank are counted.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent)]

from gpt_tp import N_CHECKED, peak_rss_mb, say  # noqa: E402
from onecard.launch._allocator import allocator  # noqa: E402
from onecard.testing import run_ranks  # noqa: E402
from peers.grouped_moe import as_tensors, by_hand, choose, cut  # noqa: E402

OWN = ("fleet", "marks", "recorded")
PEERS = ("by hand", "dtensor", "deepspeed")
TOLERANCE = 1e-5


@dataclass(frozen=True)
class BenchArgs:
    """Compare a mixture's forward and backward with its peers'."""

    ranks: int = 2
    """how many"""
    tokens: int = 2048
    """of all ranks together"""
    d_model: int = 512
    hidden: int = 2048
    """between an expert's two products"""
    experts: int = 8
    k: int = 2
    """experts for each token"""
    rounds: int = 9
    """rounds; in each, every variant runs one step"""
    variants: tuple[str, ...] = (*OWN, *PEERS)
    """which"""
    small: bool = False
    """tiny sizes, to see that all runs"""
    cpu: bool = False
    """seconds of each rank's processor in place of the clock's: for a machine that does other work, too"""
    memory: bool = True
    """measure peak memory too"""
    timeout: float = 600.0
    """seconds for each start of the ranks"""


def sized(args: BenchArgs) -> BenchArgs:
    small = {"tokens": 64, "d_model": 16, "hidden": 32, "rounds": 2}
    return BenchArgs(**{**vars(args), **small, "small": False}) if args.small else args


def weights(args: BenchArgs) -> tuple[Tensor, Tensor, Tensor]:
    """(experts, d), (experts, d, hidden), (experts, hidden, d), equal on all ranks."""
    draw = torch.Generator().manual_seed(0)
    shapes = (
        (args.experts, args.d_model),
        (args.experts, args.d_model, args.hidden),
        (args.experts, args.hidden, args.d_model),
    )
    return tuple(torch.randn(shape, generator=draw) * 0.05 for shape in shapes)  # type: ignore[return-value]


def tokens(args: BenchArgs) -> Tensor:
    return torch.randn(args.tokens, args.d_model, generator=torch.Generator().manual_seed(1))


def one_card(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, k: int) -> Tensor:
    """The program that "marks" runs as it is: tokens in the order of their experts, grouped products, and back."""
    weights, chosen = choose(x, gate, k)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    ends = F.one_hot(flat, up.shape[0]).sum(0).cumsum(0).int()
    rows = x[order // k]
    made = F.grouped_mm(F.gelu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)
    weighed = made * weights.flatten()[order, None]
    return weighed[order.argsort()].view(-1, k, x.shape[1]).sum(1)


def mine(args: BenchArgs, x: Tensor) -> Tensor:
    return x.chunk(args.ranks)[dist.get_rank()].clone()


@dataclass
class Variant:
    """``run(x)`` for this rank's tokens, or all of them as a tensor that is cut; ``parts``: the experts' weights that it has."""

    x: Tensor
    run: Callable[[Tensor], Tensor]
    parts: Callable[[], tuple[list[Tensor], list[Tensor]]]
    """gradients of up and down, each as a list of what concatenates to this rank's part"""
    all: list[Tensor]
    experts: list[Tensor]
    cut: int = 0
    """the dim of up that is cut; down's is the other one"""
    whole: Callable[[Tensor], Tensor] | None = None
    recorded: Callable[[], Tensor] | None = None

    def step(self) -> Tensor:
        return self.once() if self.recorded is None else self.recorded()

    def once(self) -> Tensor:
        for each in (self.x, *self.all):
            each.grad = None
        loss = self.run(self.x).square().sum()
        loss.backward()
        return loss.detach()


def build(args: BenchArgs, name: str) -> Variant:
    builders = {"fleet": _fleet, "marks": _marks, "recorded": _recorded}
    builders |= {"by hand": _hand, "dtensor": _dtensor, "deepspeed": _deepspeed}
    return builders[name](args)


def _local(args: BenchArgs, weight: Tensor) -> Tensor:
    return weight.chunk(args.ranks)[dist.get_rank()].clone().requires_grad_()


def _grads(*weights: Any) -> tuple[list[Tensor], list[Tensor]]:
    up, down = ([w.grad] for w in weights)
    return up, down


def _fleet(args: BenchArgs) -> Variant:
    import onecard as oc
    from onecard import fleet

    gate, up, down = weights(args)
    group = oc.new_group(list(range(args.ranks)))
    experts = fleet.meta_parallel.GroupedExperts(args.experts, args.d_model, args.hidden, "gelu", moe_group=group)
    layer = fleet.meta_parallel.MoELayer(args.d_model, experts, {"type": "topk", "top_k": args.k}, moe_group=group)
    with torch.no_grad():
        layer.gate.gate.weight.copy_(gate)
        experts.w_up.copy_(up.chunk(args.ranks)[dist.get_rank()])
        experts.w_down.copy_(down.chunk(args.ranks)[dist.get_rank()])
    x = mine(args, tokens(args)).requires_grad_()
    return Variant(
        x, layer, lambda: _grads(experts.w_up, experts.w_down), [*layer.parameters()], [*experts.parameters()]
    )


def _marks(args: BenchArgs) -> Variant:
    import onecard as oc

    mesh = oc.ProcessMesh(range(args.ranks), ["ep"])
    gate, up, down = weights(args)
    gate = oc.shard_tensor(gate, mesh, [oc.Replicate()]).detach().requires_grad_()
    up, down = (oc.shard_tensor(w, mesh, [oc.Shard(0)]).detach().requires_grad_() for w in (up, down))
    x = oc.shard_tensor(tokens(args), mesh, [oc.Shard(0)]).detach().requires_grad_()

    def parts() -> tuple[list[Tensor], list[Tensor]]:
        return [up.grad.to_local()], [down.grad.to_local()]

    def whole(value: Tensor) -> Tensor:
        return value.full_tensor() if value.dim() == 0 else value.to_local()

    return Variant(x, lambda x: one_card(x, gate, up, down, args.k), parts, [gate, up, down], [up, down], whole=whole)


def _recorded(args: BenchArgs) -> Variant:
    import onecard as oc

    made = _marks(args)
    made.recorded = oc.to_static(made.once)
    return made


def _hand(args: BenchArgs) -> Variant:
    gate, *experts = weights(args)
    up, down = (_local(args, w) for w in experts)
    gate.requires_grad_()
    x = mine(args, tokens(args)).requires_grad_()
    return Variant(
        x,
        lambda x: by_hand(x, gate, up, down, args.k, args.experts),
        lambda: _grads(up, down),
        [gate, up, down],
        [up, down],
    )


def _dtensor(args: BenchArgs) -> Variant:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (args.ranks,))
    gate, up, down = weights(args)
    up, down = cut(up, 2, mesh).requires_grad_(), cut(down, 1, mesh).requires_grad_()
    gate.requires_grad_()
    x = mine(args, tokens(args)).requires_grad_()

    def parts() -> tuple[list[Tensor], list[Tensor]]:
        return [up.grad.to_local()], [down.grad.to_local()]

    return Variant(x, lambda x: as_tensors(x, gate, up, down, args.k, mesh), parts, [gate, up, down], [up, down], cut=2)


def _deepspeed(args: BenchArgs) -> Variant:
    from peers.deepspeed_moe import layer

    made = layer(*weights(args), args.k)
    x = mine(args, tokens(args)).requires_grad_()

    def parts() -> tuple[list[Tensor], list[Tensor]]:
        experts = made.experts.deepspeed_experts
        return [torch.stack([e.up.weight.grad.T for e in experts])], [
            torch.stack([e.down.weight.grad.T for e in experts])
        ]

    return Variant(x, lambda x: made(x, None), parts, [*made.parameters()], [*made.experts.parameters()])


# -- one card ----------------------------------------------------------------------------------------------------------


def check(args: BenchArgs, name: str, variant: Variant) -> None:
    """Raise unless loss and gradients are one card's."""
    gate, up, down = (w.requires_grad_() for w in weights(args))
    x = tokens(args).requires_grad_()
    wanted = one_card(x, gate, up, down, args.k).square().sum()
    wanted.backward()
    loss = variant.step()
    if variant.whole is None:
        dist.all_reduce(loss)
    else:
        loss = variant.whole(loss)
    got_x = variant.x.grad if variant.whole is None else variant.whole(variant.x.grad)
    place = dist.get_rank()
    pairs = [("loss", loss, wanted.detach()), ("tokens", got_x, x.grad.chunk(args.ranks)[place])]
    for label, got, weight, dim in zip(
        ("up", "down"), variant.parts(), (up, down), (variant.cut, variant.cut // 2), strict=True
    ):
        pairs.append((label, torch.cat(got), weight.grad.chunk(args.ranks, dim)[place]))
    for label, got, want in pairs:
        off = float((got - want).norm() / want.norm())
        if not off <= TOLERANCE:
            raise SystemExit(f"{name}: {label} differs from one card's by {off:.2e} relative")


def time_variants(args: BenchArgs) -> dict[str, list[float]]:
    """On each rank: seconds of a step in each round, by variant."""
    import time

    torch.set_num_threads(1)
    now = time.process_time if args.cpu else time.perf_counter
    variants = {}
    for name in args.variants:
        say(f"{name}: beside one card")
        variants[name] = build(args, name)
        check(args, name, variants[name])
        for _ in range(N_CHECKED):
            variants[name].step()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(args.rounds):
        names = list(variants)
        for name in names[i % len(names) :] + names[: i % len(names)]:  # no variant always follows the same one
            dist.barrier()
            start = now()
            variants[name].step()
            if not args.cpu:
                dist.barrier()
            seconds[name].append(now() - start)
    return seconds


def peak_memory(args: BenchArgs, name: str) -> tuple[float, float]:
    """On each rank: resident MB at the peak of a few steps, above what the weights and tokens took; MB kept for experts."""
    torch.set_num_threads(1)
    say(f"{name}: peak memory")
    variant = build(args, name)
    before = peak_rss_mb()
    for _ in range(N_CHECKED):
        variant.step()
    return peak_rss_mb() - before, kept(variant)


def kept(variant: Variant) -> float:
    """MB of this rank's experts: parameters, gradients, and what AdamW keeps for them."""
    optimizer = torch.optim.AdamW(variant.experts, lr=0.0)
    optimizer.step()
    states = [s for each in optimizer.state.values() for s in each.values() if isinstance(s, Tensor) and s.dim()]
    every: list[Any] = [*variant.experts, *(p.grad for p in variant.experts), *states]
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in every) / 1e6


def table(
    args: BenchArgs, seconds: dict[str, list[float]], memory: dict[str, float], experts: dict[str, float]
) -> Table:
    whole = 4 * sum(w.nbytes for w in weights(args)[1:]) / 1e6
    made = Table(
        "variant", "ms, median", "least", "most", *(f"{own} / it" for own in OWN), "peak MB", *(f"{own} / it" for own in OWN),
        f"experts MB of {whole:.1f}", title=f"{args.ranks} ranks",
    )  # fmt: skip

    def ratios(known: dict[str, Any], name: str) -> list[str]:
        return [f"{_ratio(known[own], known[name]):.3f}" if own in known and name in known else "-" for own in OWN]

    for name, values in seconds.items():
        milliseconds = [f"{x * 1e3:.1f}" for x in (statistics.median(values), min(values), max(values))]
        peak = f"{memory[name]:.0f}" if name in memory else "-"
        of_experts = f"{experts[name]:.1f}" if name in experts else "-"
        made.add_row(name, *milliseconds, *ratios(seconds, name), peak, *ratios(memory, name), of_experts)
    return made


def _ratio(own: Any, other: Any) -> float:
    """Of two numbers; of two lists the median of the ratios of each round."""
    if isinstance(own, float):
        return own / other
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def main(args: BenchArgs) -> int:
    """Run all, print the comparison; returns the exit code."""
    os.environ |= allocator(os.environ)
    args, console = sized(args), Console(width=None if sys.stdout.isatty() else 150)
    if "deepspeed" in args.variants and importlib.util.find_spec("deepspeed") is None:
        console.print("DeepSpeed is not installed (pip install deepspeed): it is left out")
        args = BenchArgs(**{**vars(args), "variants": tuple(v for v in args.variants if v != "deepspeed")})
    seconds = run_ranks(time_variants, args.ranks, args, timeout=args.timeout)[0]
    console.print(f"loss and gradients of {', '.join(seconds)} are those of one card to {TOLERANCE:g} relative")
    memory, experts = {}, {}
    for name in args.variants if args.memory else ():
        found = run_ranks(peak_memory, args.ranks, args, name, timeout=args.timeout)
        memory[name], experts[name] = (max(each) for each in zip(*found, strict=True))
    console.print(table(args, seconds, memory, experts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(BenchArgs)))
