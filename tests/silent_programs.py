"""Programs with a mistake that one card would not show: each trains a small model, and one rank does something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import onecard as oc

LATE = 5  # the step at which a rank makes its mistake


def samples() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(96, 6), torch.randint(4, (96,)))


def model(mesh: oc.ProcessMesh, cut: bool) -> nn.Module:
    """Two layers: all parameters on every rank, or each layer cut."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    if not cut:
        return oc.shard_layer(plain, mesh)

    def lay_out(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
        if isinstance(layer, nn.Linear):
            wide = layer.out_features == 8
            for key, placement in (
                ("weight", oc.Shard(0 if wide else 1)),
                ("bias", oc.Shard(0) if wide else oc.Replicate()),
            ):
                layer.register_parameter(key, oc.shard_tensor(getattr(layer, key), mesh, [placement]))

    return oc.shard_layer(plain, mesh, lay_out)


class Loop:
    """A training loop with a place for a mistake before each step and between backward and step. Notes how far it came."""

    def __init__(self, cut: bool = False, optimizer: str = "sgd") -> None:
        self.mesh = oc.ProcessMesh([0, 1], ["x"])
        self.net = model(self.mesh, cut)
        make: dict[str, Any] = {
            "sgd": lambda p: torch.optim.SGD(p, 0.1),
            "foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
            "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
            "shard_optimizer": lambda p: oc.shard_optimizer(torch.optim.AdamW(p, 0.01)),
        }
        self.optimizer = make[optimizer](list(self.net.parameters()))
        self.done = 0

    def step(self, x: Tensor, y: Tensor) -> None:
        self.forward(x, y)
        self.update()

    def forward(self, x: Tensor, y: Tensor) -> None:
        nn.functional.cross_entropy(self.net(x), y).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1


def batches(sampler: bool = False) -> Iterator[Any]:
    data = samples()
    apart = DistributedSampler(data, 2, oc.get_rank(), shuffle=False) if sampler else None
    while True:
        yield from DataLoader(data, batch_size=4, sampler=apart)


def distributed_sampler(loop: Loop) -> Iterator[None]:
    for x, y in batches(sampler=True):
        loop.step(x, y)
        yield


def distributed_sampler_cut(loop: Loop) -> Iterator[None]:
    for x, y in batches(sampler=True):
        loop.step(*(oc.shard_tensor(t, loop.mesh, [oc.Shard(0)]) for t in (x, y)))
        yield


def skipped(loop: Loop) -> Iterator[None]:
    """Rank 1 leaves out one batch."""
    for number, (x, y) in enumerate(batches()):
        if number == LATE and oc.get_rank() == 1:
            continue
        loop.step(x, y)
        yield


def skipped_cut(loop: Loop) -> Iterator[None]:
    for number, (x, y) in enumerate(batches()):
        if number == LATE and oc.get_rank() == 1:
            continue
        loop.step(*(oc.shard_tensor(t, loop.mesh, [oc.Shard(0)]) for t in (x, y)))
        yield


def skipped_of_loader(loop: Loop) -> Iterator[None]:
    loader = oc.shard_dataloader(DataLoader(samples(), batch_size=4), loop.mesh, "x")
    for number, (x, y) in enumerate(loader):
        if number == LATE and oc.get_rank() == 1:
            continue
        loop.step(x, y)
        yield


def edited_parameter(loop: Loop) -> Iterator[None]:
    for number, (x, y) in enumerate(batches()):
        loop.step(x, y)
        if number == LATE and oc.get_rank() == 1:
            loop.net[0].bias.data.add_(0.5)
        yield


def edited_gradient(loop: Loop) -> Iterator[None]:
    """Rank 1 doubles a gradient that is whole on every rank."""
    for number, (x, y) in enumerate(batches()):
        loop.forward(x, y)
        if number == LATE and oc.get_rank() == 1:
            loop.net[2].bias.grad.mul_(2)
        loop.update()
        yield


def edited_summand(loop: Loop) -> Iterator[None]:
    """Rank 1 doubles its summand of a gradient that is not summed yet."""
    for number, (x, y) in enumerate(batches()):
        loop.forward(*(oc.shard_tensor(t, loop.mesh, [oc.Shard(0)]) for t in (x, y)))
        if number == LATE and oc.get_rank() == 1:
            loop.net[0].weight.grad.mul_(2)
        loop.update()
        yield


def whole_as_part(loop: Loop) -> Iterator[None]:
    for x, y in batches():
        loop.step(*(oc.from_local(t, loop.mesh, [oc.Shard(0)]) for t in (x, y)))
        yield


def parts_as_copies(loop: Loop) -> Iterator[None]:
    for x, y in batches(sampler=True):
        loop.step(*(oc.from_local(t, loop.mesh, [oc.Replicate()]) for t in (x, y)))
        yield


def other_operator(loop: Loop) -> Iterator[None]:
    """Messages of equal size for different operators pair up."""
    for number, (x, y) in enumerate(batches()):
        loop.step(*(oc.shard_tensor(t, loop.mesh, [oc.Shard(0)]) for t in (x, y)))
        h = oc.shard_tensor(torch.ones(8), loop.mesh, [oc.Shard(0)])
        (h.sum() if number == LATE and oc.get_rank() == 1 else h.prod()).item()
        yield


def run(program: str, steps: int, cut: bool = False, optimizer: str = "sgd") -> int:
    """How many steps passed; an error is told, too."""
    loop = Loop(cut, optimizer)
    try:
        for _, _ in zip(range(steps), globals()[program](loop), strict=False):
            pass
    except (oc.errors.OnecardError, UserWarning) as fault:
        fault.add_note(f"after {loop.done} steps")
        raise
    return loop.done


__all__ = ["LATE", "run"]
