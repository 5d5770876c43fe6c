"""Fit what no data sheet tells of an A100's kernels to the published times of one layer, and print what comes out.

    python benchmarks/calibrate.py            # the fit, each time beside the published one, and the constants
    python benchmarks/calibrate.py --check    # with the constants that the package has, nothing fitted

The layer is that of the 22B model (``published/layers.json``): five ways to save memory, forward and backward, ten times. Three
constants are fitted: the share of the peak bandwidth that memory-bound kernels reach, the same of dropout, which draws numbers,
and the share of a started message's time that hides beside a product. All others are as the data file has them, each with its
source: what products and NVLink reach was measured by others. No time of a whole job has any part in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor

import onecard as oc
from onecard import fleet
from onecard.fleet.layers.transformer import ParallelTransformerLayer
from onecard.static.passes.awaited import awaited
from onecard.static.passes.fused import fused

LAYERS = json.loads((Path(__file__).parent / "published" / "layers.json").read_text())


@dataclass(frozen=True)
class Options:
    """What to do."""

    check: bool = False
    """no fit: the package's own constants"""


def recorded(sequence_parallel: bool, recompute: Any) -> oc.Recording:
    """The layer's forward and backward on one of eight ranks, with Megatron-LM's fused kernels."""
    sizes, t = LAYERS["layer"], LAYERS["layer"]["tensor_parallel"]
    with oc.pretend(t, fake=True):
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"mp_degree": t}
        fleet.init(is_collective=True, strategy=strategy)
        dropout = {"attention_dropout": sizes["dropout"], "hidden_dropout": sizes["dropout"]}
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "recompute": recompute, **dropout}
        layer = ParallelTransformerLayer(sizes["hidden"], sizes["heads"], dtype=torch.bfloat16, **options)
        shape = (sizes["sequence"] // (t if sequence_parallel else 1), sizes["batch"], sizes["hidden"])
        x, grad = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True), torch.zeros(shape, dtype=torch.bfloat16)

        def step(x: Tensor, grad: Tensor) -> Tensor:
            y = layer(x)
            y.backward(grad)
            return y.detach()

        recording = oc.record(step)(x, grad)
        return recording.with_graph(fused(awaited(recording.graph)))


def seconds(recording: oc.Recording, machine: oc.Machine) -> tuple[float, float]:
    """Of forward and backward."""
    price = recording.cost(machine)
    begin = next(node.start for node in price.nodes if node.phase == "backward")
    return begin, price.seconds - begin


def priced(recordings: list[oc.Recording], machine: oc.Machine) -> list[tuple[float, float]]:
    """(ours, published) seconds of forward and backward of each row."""
    found = []
    for row, recording in zip(LAYERS["rows"], recordings, strict=True):
        forward, backward = seconds(recording, machine)
        found += [(forward, row["forward"] / 1e3), (backward, row["backward"] / 1e3)]
    return found


def with_constants(machine: oc.Machine, constants: Any) -> oc.Machine:
    """The machine with these three shares, given as logarithms."""
    memory, dropout, beside = (exp(c) for c in constants)
    assert machine.kernels is not None
    kernels = machine.kernels
    made = replace(
        kernels,
        memory={**kernels.memory, "": memory, "dropout": dropout},
    )
    return replace(machine, kernels=made, beside=beside)


def fitted(off: Callable[[Any], Any], start: Any) -> Any:
    """Least squares by Gauss and Newton, with differences for derivatives."""
    now = np.array(start)
    for _ in range(12):
        here = off(now)
        slopes = np.stack([(off(now + step) - here) / 1e-3 for step in np.eye(len(now)) * 1e-3], 1)
        now = now - np.linalg.lstsq(slopes, here, rcond=None)[0]
    return now


def fit(recordings: list[oc.Recording], machine: oc.Machine) -> Any:
    """Shares: of memory, of dropout, of what hides beside products."""

    def off(constants: Any) -> Any:
        return np.array([log(a / b) for a, b in priced(recordings, with_constants(machine, constants))])

    return np.exp(fitted(off, np.log([0.8, 0.6, 0.4])))


def main(options: Options) -> None:
    """Fit and print."""
    machine = oc.Machine.preset(LAYERS["machine"])
    recordings = [recorded(row["sequence_parallel"], row["recompute"]) for row in LAYERS["rows"]]
    if not options.check:
        constants = fit(recordings, machine)
        machine = with_constants(machine, np.log(constants))
        for name, value in zip(("memory", "dropout", "beside"), constants, strict=True):
            print(f"{name}: {value:.3f}")
    times = priced(recordings, machine)
    for i, row in enumerate(LAYERS["rows"]):
        told = "  ".join(
            f"{a * 1e3:6.2f} ms, published {b * 1e3:4.1f}: {a / b - 1:+.1%}" for a, b in times[2 * i : 2 * i + 2]
        )
        print(f"{row['name']:40} {told}")
    print(f"mean {np.mean([abs(a / b - 1) for a, b in times]):.1%}, worst {max(abs(a / b - 1) for a, b in times):.1%}")


if __name__ == "__main__":
    main(tyro.cli(Options))
