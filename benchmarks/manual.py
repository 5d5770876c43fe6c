"""The manual level on 2 ranks (CPU): fleet's layers, the same by hand as Megatron-LM, torch DTensor.

    python benchmarks/manual.py                          # some two minutes on 2 cores
    python benchmarks/manual.py --small                  # seconds: do all variants run and agree?
    ONECARD_BACKEND=gloo python benchmarks/manual.py     # not over shared memory

Two models: the GPT of `examples/gpt`, and the network of seed 003 (256-102400-256-10). All variants start from the same
weights and must give one card's losses (1e-5 relative) before they are timed, in turn, in the same processes. Then what
sequence parallelism and recomputation cost a stack of fleet's transformer layers.
"""

from __future__ import annotations

import copy
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "examples" / "gpt"), str(ROOT / "examples" / "seeds"), str(Path(__file__).parent)]

import gpt_tp  # noqa: E402
from gpt_tp import N_CHECKED, N_RANKS, Variant, adamw, as_number, disagreements, say, time_steps, time_table  # noqa: E402
from model import GPT, Block  # noqa: E402
from onecard import fleet  # noqa: E402
from onecard.fleet.layers.transformer import ParallelTransformerLayer  # noqa: E402
from onecard.testing import run_ranks  # noqa: E402

layers = fleet.meta_parallel


@dataclass(frozen=True)
class Args(gpt_tp.BenchArgs):
    """Compare the manual level with hand-written tensor parallelism and with torch DTensor."""

    inner: int = 102400
    """hidden units of seed 003's network"""
    memory: bool = False


def begin(mp: int) -> None:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": mp}
    fleet.init(is_collective=True, strategy=strategy)


class ManualBlock(nn.Module):
    """A block of the GPT from fleet's layers, with the weights of a plain one."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        a, d = block.attention, block.attention.q.in_features
        self.attention_norm, self.mlp_norm = block.attention_norm, block.mlp_norm
        weight = torch.cat([a.q.weight, a.k.weight, a.v.weight]).detach()
        bias = torch.cat([a.q.bias, torch.zeros(d), a.v.bias]).detach()
        width = d // a.n_head
        self.qkv = layers.QKVParallelLinear(
            d, width, a.n_head, weight_attr=fleet.Assign(weight), has_bias=True, bias_attr=fleet.Assign(bias)
        )
        # The plain model has no key bias; its gradient is round-off, which AdamW would make steps of.
        part = self.qkv.bias.shape[0] // 3
        self.qkv.bias.register_hook(lambda grad: torch.cat([grad[:part], torch.zeros(part), grad[2 * part :]]))
        self.out = row(a.out, unit=width)
        self.fc = column(block.mlp.fc)
        self.proj = row(block.mlp.proj)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in self.qkv.split(self.qkv(self.attention_norm(x))))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.proj(F.gelu(self.fc(self.mlp_norm(x)), approximate="tanh"))


def column(linear: nn.Linear) -> nn.Module:
    given: dict[str, Any] = {"weight_attr": fleet.Assign(linear.weight.detach()), "has_bias": linear.bias is not None}
    if linear.bias is not None:
        given["bias_attr"] = fleet.Assign(linear.bias.detach())
    return layers.ColumnParallelLinear(linear.in_features, linear.out_features, gather_output=False, **given)


def row(linear: nn.Linear, unit: int = 1) -> nn.Module:
    return layers.RowParallelLinear(
        linear.in_features,
        linear.out_features,
        weight_attr=fleet.Assign(linear.weight.detach()),
        bias_attr=fleet.Assign(linear.bias.detach()),
        input_is_parallel=True,
        unit=unit,
    )


class ManualGPT(nn.Module):
    """The GPT of `examples/gpt` from fleet's layers, with the weights of a plain one."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        table = gpt.token_embedding
        self.token_embedding = layers.VocabParallelEmbedding(*table.weight.shape, fleet.Assign(table.weight.detach()))
        self.position_embedding = gpt.position_embedding
        self.blocks = nn.ModuleList(ManualBlock(block) for block in gpt.blocks)
        self.norm = gpt.norm
        self.lm_head = column(gpt.lm_head)
        self.loss_fn = layers.ParallelCrossEntropy(reduction="mean")

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.token_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.loss_fn(self.lm_head(self.norm(x)), targets)


def build_gpt(gpt: GPT) -> Variant:
    begin(dist.get_world_size())
    model = ManualGPT(gpt)
    return Variant(model.loss, fleet.distributed_optimizer(adamw(model.parameters())))


# The network of seed 003


def net_of_003(args: Args) -> nn.Module:
    from single_card_003 import SimpleNet

    torch.manual_seed(0)
    return SimpleNet(256, args.inner if not args.small else 64, 10)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4, foreach=True)


def loss_of(net: nn.Module) -> Any:
    return lambda x, y: F.cross_entropy(net(x), y)


def net_by_fleet(net: Any) -> Variant:
    begin(dist.get_world_size())
    net.linear1, net.linear2 = column(net.linear1), row(net.linear2)
    return Variant(loss_of(net), fleet.distributed_optimizer(sgd(net.parameters())))


def net_by_hand(net: Any) -> Variant:
    from peers.megatron_tp import ColumnParallelLinear, RowParallelLinear

    group = dist.group.WORLD
    net.linear1, net.linear2 = ColumnParallelLinear(net.linear1, group), RowParallelLinear(net.linear2, group)
    return Variant(loss_of(net), sgd(net.parameters()))


def net_by_dtensor(net: Any) -> Variant:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from peers.dtensor_tp import parameter_groups

    mesh = init_device_mesh("cpu", (N_RANKS,), mesh_dim_names=("tp",))
    parallelize_module(net, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
    return Variant(loss_of(net), sgd(parameter_groups(net)))


def batch_of_003(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.rand(32, 256, generator=generator), torch.randint(9, (32,), generator=generator)


# Running


def time_gpt(args: Args) -> Any:
    """Losses and seconds of the variants of the GPT, on each rank."""
    gpt_tp.BUILDERS["onecard"] = build_gpt
    return gpt_tp.time_variants(args)


def time_nets(args: Args) -> dict[str, tuple[list[float], list[float]]]:
    """The same for the network of seed 003."""
    torch.set_num_threads(1)
    builders = {"onecard": net_by_fleet, "megatron": net_by_hand, "dtensor": net_by_dtensor}
    net = net_of_003(args)
    variants = {name: builders[name](copy.deepcopy(net)) for name in args.variants}
    losses = {
        name: [as_number(variant.step(*batch_of_003(i))) for i in range(N_CHECKED)]
        for name, variant in variants.items()
    }
    seconds = timed(
        args, {name: (lambda v=v: time_steps(v, batch_of_003(9), args.steps)) for name, v in variants.items()}
    )
    return {name: (losses[name], seconds[name]) for name in variants}


def timed(args: Args, runs: dict[str, Any]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(args.rounds):
        say(f"timing, round {i + 1} of {args.rounds}")
        for name in names[i % len(names) :] + names[: i % len(names)]:
            seconds[name].append(runs[name]())
    return seconds


WAYS: dict[str, dict[str, Any]] = {
    "tensor parallel": {},
    "+ sequence parallel": {"sequence_parallel": True},
    "+ sequence parallel, selective": {"sequence_parallel": True, "recompute": "selective"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}


def time_ways(args: Args) -> dict[str, list[float]]:
    """Seconds a step of four transformer layers under each way to save memory."""
    torch.set_num_threads(1)
    begin(N_RANKS)
    runs = {}
    hidden, heads, time, batch, n = (64, 4, 32, 2, 1) if args.small else (512, 8, 256, 8, 4)
    for name, options in WAYS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*(ParallelTransformerLayer(hidden, heads, **options) for _ in range(n)))
        rows = time // N_RANKS if options.get("sequence_parallel") else time
        x = torch.randn(rows, batch, hidden)
        variant = Variant(lambda x, _, model=model: model(x).square().mean(), adamw(model.parameters()))
        variant.step(x, x)
        runs[name] = lambda v=variant, x=x: time_steps(v, (x, x), args.steps)
    return timed(args, runs)


def ways_table(seconds: dict[str, list[float]]) -> Table:
    """Median seconds, and what each adds to tensor parallelism alone."""
    table = Table("way", "ms a step, median", "of tensor parallel alone", title="What saving memory costs")
    base = statistics.median(seconds["tensor parallel"])
    for name, values in seconds.items():
        table.add_row(name, f"{statistics.median(values) * 1e3:.1f}", f"{statistics.median(values) / base:.3f}")
    return table


def one_card_losses(args: Args) -> list[float]:
    net = net_of_003(args)
    variant = Variant(loss_of(net), sgd(net.parameters()))
    return [as_number(variant.step(*batch_of_003(i))) for i in range(N_CHECKED)]


def main(args: Args) -> int:
    """Run all; returns the exit code."""
    console = Console()
    torch.set_num_threads(1)
    for title, run, reference in (
        ("GPT", time_gpt, gpt_tp.one_card_losses),
        ("network of seed 003", time_nets, one_card_losses),
    ):
        found = run_ranks(run, N_RANKS, args, timeout=args.timeout)[0]
        losses = {"one card": reference(args), **{name: values for name, (values, _) in found.items()}}
        if wrong := disagreements(losses):
            console.print(f"[bold red]{title}: losses differ[/]:", *wrong, sep="\n  ")
            return 1
        console.print(f"{title}: {N_CHECKED} losses of {', '.join(losses)} agree")
        console.print(time_table({name: values for name, (_, values) in found.items()}))
    console.print(ways_table(run_ranks(time_ways, N_RANKS, args, timeout=args.timeout)[0]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Args)))
