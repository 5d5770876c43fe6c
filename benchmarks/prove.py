"""How long ``onecard.prove`` takes for a GPT by marks, and what memory: python benchmarks/prove.py

Without flags: 8 ranks of the GPT of ``make train``, and 64 ranks of one with 4 layers, each in a process of its own, which
holds all ranks and their values. With flags, one of those sizes: ``--tp 8 --dp 8 --layers 4``.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))

import onecard as oc
from model import GPT, GPTConfig, next_byte_loss
from placements import shard_batch, shard_model


@dataclass(frozen=True)
class Sizes:
    """Of the model and the mesh."""

    tp: int = 4
    dp: int = 2
    layers: int = 2
    width: int = 32
    heads: int = 8
    vocabulary: int = 64
    time: int = 16
    batch: int = 8
    steps: int = 1
    rounding: bool = True
    """whether it also runs in float32, as ``prove`` does if nothing is said"""


def program(sizes: Sizes) -> list[float]:
    """Train a GPT on dp x tp."""
    torch.manual_seed(0)
    mesh = oc.ProcessMesh(torch.arange(sizes.dp * sizes.tp).view(sizes.dp, sizes.tp), ["dp", "tp"])
    model = GPT(GPTConfig(sizes.vocabulary, sizes.time, sizes.layers, sizes.heads, sizes.width))
    shard_model(model, mesh)
    optimizer = oc.shard_optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
    losses = []
    for _ in range(sizes.steps):
        tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.time))
        ids, targets = shard_batch((tokens, tokens.roll(-1, 1)), mesh)
        loss = next_byte_loss(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


README = ["--tp=4", "--dp=2", "--width=224", "--heads=4", "--vocabulary=256", "--time=128"]
MANY = ["--tp=8", "--dp=8", "--layers=4"]


def main(sizes: Sizes) -> None:
    """Prove it, and say what it took."""
    began, busy = time.perf_counter(), time.process_time()
    proof = oc.prove(program, sizes, world=sizes.dp * sizes.tp, rounding=sizes.rounding, wide=True)
    print(proof)
    wall, cpu = time.perf_counter() - began, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{sizes.dp * sizes.tp} ranks, {sizes.layers} layers: {cpu:.1f} s of CPU, {wall:.1f} s, {peak:.2f} GiB")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for flags in (README, MANY):
            subprocess.run([sys.executable, __file__, *flags], check=True)
    else:
        main(tyro.cli(Sizes))
