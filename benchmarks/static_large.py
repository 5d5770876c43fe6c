"""The larger half of benchmarks/static.py: products, memory, the cost of recording, and how much of the messages is hidden."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecard as oc

for folder in ("../examples/gpt", "../examples/seeds", "."):
    sys.path.insert(0, str(Path(__file__).parent / folder))
Step = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """The GPT, and the inner size of seed 003's network."""

    width: int = 512
    layers: int = 4
    length: int = 256
    batch: int = 8
    inner: int = 102400
    rounds: int = 5


SMALL = Sizes(64, 1, 32, 4, 512, 2)


def seconds(steps: dict[str, Step], rounds: int, meet: Callable[[], Any] = lambda: None) -> dict[str, float]:
    """Median wall seconds of a step; rounds of all variants in turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(3):
            step()
    for _ in range(rounds):
        for name, step in steps.items():
            meet()
            start = time.perf_counter()
            step()
            meet()
            found[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in found.items()}


def gpt(sizes: Sizes) -> Any:
    """The model of examples/gpt, the same on all ranks."""
    from model import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(256, sizes.length, sizes.layers, 8, sizes.width))


def tokens(sizes: Sizes) -> tuple[Tensor, Tensor]:
    """A batch."""
    ids = torch.randint(0, 256, (sizes.batch, sizes.length + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def training(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """One step of training."""

    def step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def gpt_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    from model import next_byte_loss

    return next_byte_loss(model(x), y)


def net_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)


def net(sizes: Sizes) -> nn.Module:
    from single_card_003 import SimpleNet

    torch.manual_seed(0)
    return SimpleNet(256, sizes.inner, 10)


def net_batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(32, 256, generator=generator), torch.randint(0, 10, (32,), generator=generator)


def one_process(sizes: Sizes, threads: int) -> dict[str, Any]:
    """Plain torch and its recordings in one process, with all cores; products; the cost of recording."""
    torch.set_num_threads(threads)
    found: dict[str, Any] = {}
    for name, make, optimizer, loss, batch in (
        ("GPT", gpt, adamw, gpt_loss, tokens(sizes)),
        ("seed 003's network", net, momentum, net_loss, net_batch()),
    ):
        made = {k: make(sizes) for k in ("plain torch", "replayed", "replayed, fastest kernels")}
        steps = {k: training(m, optimizer(m.parameters()), loss) for k, m in made.items()}
        eager = oc.to_static(steps["replayed"])
        fastest = oc.to_static(steps["replayed, fastest kernels"], kernels="fastest")
        eager(*batch)
        start = time.perf_counter()
        eager(*batch)
        recording = time.perf_counter() - start
        run: dict[str, Callable[..., Any]] = {"plain torch": steps["plain torch"], "replayed": eager}
        run["replayed, fastest kernels"] = fastest
        times = seconds({k: (lambda f=f, b=batch: f(*b)) for k, f in run.items()}, sizes.rounds)
        from onecard.static.passes.kernel import table

        found[name] = (times, recording, table(eager.recordings[0].graph))
    return found


def two_ranks(sizes: Sizes) -> dict[str, dict[str, float]]:
    """dp=2 and tp=2 as they are, replayed, and beside DDP and layers by hand as Megatron-LM's."""
    from torch.nn.parallel import DistributedDataParallel

    from peers.megatron_tp import MegatronGPT
    from placements import shard_batch, shard_model

    torch.set_num_threads(1)
    batch, rank = tokens(sizes), oc.get_rank()
    half = tuple(t.chunk(2)[rank].contiguous() for t in batch)
    found = {}
    for axis in ("dp", "tp"):
        mesh = oc.ProcessMesh([0, 1], [axis])
        given = shard_batch(batch, mesh)
        steps: dict[str, Step] = {}
        for name, options in (
            ("onecard", None),
            ("replayed", {}),
            ("replayed, fastest kernels", {"kernels": "fastest"}),
        ):
            model = shard_model(gpt(sizes), mesh)
            step = training(model, oc.shard_optimizer(adamw(model.parameters())), gpt_loss)
            run = step if options is None else oc.to_static(step, **options)
            steps[name] = lambda run=run, given=given: run(*given)
        if axis == "dp":
            ddp = DistributedDataParallel(gpt(sizes))
            step = training(ddp, adamw(ddp.parameters()), gpt_loss)
            steps["DDP"] = lambda step=step: step(*half)
        else:
            by_hand = MegatronGPT(gpt(sizes), dist.group.WORLD)
            optimizer = adamw(by_hand.parameters())
            step = training(by_hand, optimizer, lambda m, x, y: m.loss(x, y))
            steps["by hand, as Megatron-LM"] = lambda step=step: step(*batch)
        found[axis] = seconds(steps, sizes.rounds, dist.barrier)
    return found


def peak(sizes: Sizes, replayed: bool, name: str) -> float:
    """MB above the start at the peak of a few steps, in a fresh process."""
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model, batch = (gpt(sizes), tokens(sizes)) if name == "GPT" else (net(sizes), net_batch())
    optimizer = (adamw if name == "GPT" else momentum)(model.parameters())
    step = training(model, optimizer, gpt_loss if name == "GPT" else net_loss)
    run = oc.to_static(step) if replayed else step
    for _ in range(4):
        run(*batch)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
