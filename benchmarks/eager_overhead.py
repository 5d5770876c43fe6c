"""What a layer costs in Python: linear + relu + sum, 16x16, forward and backward, on a "fake" group of 8 ranks.

    python benchmarks/eager_overhead.py

The group sends nothing and the kernels are tiny, so that the time is that of the dispatch. Plain torch, torch DTensor
and onecard run in turn in one thread of one process; medians over rounds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import onecard as oc

N_RANKS = 8
SIZE = 16
Step = Callable[[], None]
Place = Callable[[Tensor, Placement], Tensor]


@dataclass(frozen=True)
class OverheadArgs:
    """Compare the time of a small layer in plain torch, torch DTensor and onecard."""

    rounds: int = 15
    seconds: float = 0.05
    """of each library in a round, for each case"""
    input_grad: bool = False
    """take the gradient of the input too, as a layer within a model does"""


@dataclass(frozen=True)
class Case:
    """Placements of the input and of the weight; the bias goes with the weight's outputs."""

    name: str
    x: Placement
    weight: Placement


CASES = (
    Case("data: x Shard(0)", Shard(0), Replicate()),
    Case("column: weight Shard(0)", Replicate(), Shard(0)),
    Case("all Replicate", Replicate(), Replicate()),
)


def make_step(case: Case, place: Place, input_grad: bool) -> Step:
    """The layer on tensors that `place` has distributed."""
    torch.manual_seed(0)
    x = place(torch.randn(SIZE, SIZE), case.x).requires_grad_(input_grad)
    weight = place(torch.randn(SIZE, SIZE), case.weight).requires_grad_()
    bias = place(torch.randn(SIZE), case.weight).requires_grad_()
    leaves = (x, weight, bias)

    def step() -> None:
        F.linear(x, weight, bias).relu().sum().backward()
        for leaf in leaves:
            leaf.grad = None

    return step


def libraries() -> dict[str, Place]:
    """How each library places a tensor on the mesh."""
    device_mesh = init_device_mesh("cpu", (N_RANKS,), mesh_dim_names=("x",))
    mesh = oc.ProcessMesh(range(N_RANKS), ["x"])
    return {
        "torch": lambda tensor, placement: tensor,
        "DTensor": lambda tensor, placement: distribute_tensor(tensor, device_mesh, [placement]),
        "onecard": lambda tensor, placement: oc.shard_tensor(tensor, mesh, [placement]),
    }


def microseconds(step: Step, n: int) -> float:
    """Microseconds a step over `n` steps."""
    start = time.perf_counter()
    for _ in range(n):
        step()
    return (time.perf_counter() - start) / n * 1e6


def measure(steps: dict[str, Step], args: OverheadArgs) -> dict[str, float]:
    """Median microseconds a step, by library, the rounds of all of them interleaved."""
    counts = {name: max(1, int(args.seconds * 1e6 / microseconds(step, 20))) for name, step in steps.items()}
    samples: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    try:
        for _ in range(args.rounds):
            for name, step in steps.items():
                samples[name].append(microseconds(step, counts[name]))
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in samples.items()}


def main(args: OverheadArgs) -> None:
    """Print microseconds a step for each case, and onecard's as a multiple of DTensor's."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=N_RANKS)
    placers = libraries()
    table = Table(
        "us a step", *placers, "onecard / DTensor", title=f"linear + relu + sum, {SIZE}x{SIZE}, forward + backward"
    )
    for case in CASES:
        print(f"measuring {case.name}", flush=True)
        steps = {name: make_step(case, place, args.input_grad) for name, place in placers.items()}
        medians = measure(steps, args)
        ratio = medians["onecard"] / medians["DTensor"]
        table.add_row(case.name, *(f"{value:.1f}" for value in medians.values()), f"{ratio:.2f}")
    Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(tyro.cli(OverheadArgs))
