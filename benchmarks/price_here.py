"""Steps on this machine, priced and run: the part ``here`` of benchmarks/price.py."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecard as oc

sys.path[:0] = [str(Path(__file__).parents[1] / "examples" / "gpt"), str(Path(__file__).parent)]

Step = Callable[..., Tensor]
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Found:
    """Seconds of one round: of a step, as it was priced by curves, and with its own operators measured.

    ``parts``: by operator, both prices.
    """

    took: float
    by_curves: float
    by_own: float
    parts: dict[str, tuple[float, float]]


def rounds(name: str, count: int, steps: int, threads: int) -> list[Found]:
    """Measure the machine, then take steps, again and again: the machine's speed changes from minute to minute."""
    _, make = PROGRAMS[name]
    torch.set_num_threads(threads)
    step, batch = make()
    run = oc.to_static(step)
    for _ in range(3):
        run(*batch)
    recording = run.recordings[0]
    found = []
    for _ in range(count):
        own = oc.Machine.measure(recording)
        machine = replace(own, curves={k: v for k, v in own.curves.items() if not k.startswith("=")})
        took = statistics.fmean(sorted(_seconds(run, batch) for _ in range(steps))[: max(1, steps * 9 // 10)])
        curves, exact = recording.cost(machine), recording.cost(own)
        parts = {k: (v, exact.seconds_by("operator")[k]) for k, v in curves.seconds_by("operator").items()}
        found.append(Found(took, curves.seconds, exact.seconds, parts))
    return found


def _seconds(run: Step, batch: Batch) -> float:
    dist.barrier()
    start = time.perf_counter()
    run(*batch)
    return time.perf_counter() - start


# -- programs --------------------------------------------------------------------------------------------------------------


def _gpt(
    width: int, layers: int, sequence: int, batch: int, recompute: bool = False, mesh: Any = None, **options: Any
) -> Any:
    from model import GPT, GPTConfig, next_byte_loss
    from placements import shard_batch, shard_model

    torch.manual_seed(0)
    model = GPT(GPTConfig(256, sequence, layers, 4, width))
    for block in model.blocks if recompute else ():
        block.forward = _again(block.forward)
    ids = torch.randint(256, (batch, sequence + 1))
    data = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    if mesh is not None:
        shape = torch.arange(torch.Size(mesh).numel()).reshape(mesh).tolist()
        on = oc.ProcessMesh(shape, ["dp", "tp"])
        model, data = shard_model(model, on), shard_batch(data, on)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    if mesh is not None:
        optimizer = oc.shard_optimizer(optimizer)
    return _step(model, next_byte_loss, optimizer), data


def _again(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def _mlp(inner: int, batch: int) -> Any:
    """Seed 003's network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, inner), nn.Linear(inner, 256), nn.Linear(256, 10), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    return _step(model, nn.CrossEntropyLoss(), optimizer), (torch.rand(batch, 256), torch.randint(10, (batch,)))


def _step(model: nn.Module, loss_of: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


PROGRAMS: dict[str, tuple[int, Callable[[], tuple[Step, Batch]]]] = {
    "GPT d=256 L=4, dp=2": (2, lambda: _gpt(256, 4, 128, 8, mesh=(2, 1), fused=True)),
    "GPT d=256 L=4, tp=2": (2, lambda: _gpt(256, 4, 128, 8, mesh=(1, 2), fused=True)),
    "GPT d=256 L=4, dp=2 x tp=2": (4, lambda: _gpt(256, 4, 128, 8, mesh=(2, 2), fused=True)),
    "GPT d=256 L=4": (1, lambda: _gpt(256, 4, 128, 8, fused=True)),
    "GPT d=256 L=4, recompute": (1, lambda: _gpt(256, 4, 128, 8, recompute=True, fused=True)),
    "seed 003, inner 102,400": (1, lambda: _mlp(102_400, 32)),
    "seed 003, inner 10,240": (1, lambda: _mlp(10_240, 32)),
    "GPT d=64 L=2": (1, lambda: _gpt(64, 2, 32, 8, fused=True)),
    "GPT d=128 L=2, AdamW one by one": (1, lambda: _gpt(128, 2, 64, 8)),
    "GPT d=512 L=4": (1, lambda: _gpt(512, 4, 256, 8, fused=True)),
}
"""How many ranks, and the step with its batch. The first six are those of which a price has to be within 15 %."""
