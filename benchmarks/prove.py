"""How long ``onecard.prove`` takes for a GPT by marks, and what memory: python benchmarks/prove.py [--tp 8] [--dp 8] [--layers 4]

It ends with the peak of this process, which holds all ranks and their values.
"""

from __future__ import annotations

import resource
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
    steps: int = 1


def program(sizes: Sizes) -> list[float]:
    """Train a GPT on dp x tp."""
    torch.manual_seed(0)
    mesh = oc.ProcessMesh(torch.arange(sizes.dp * sizes.tp).view(sizes.dp, sizes.tp), ["dp", "tp"])
    model = GPT(GPTConfig(vocab_size=64, max_seq_len=16, n_layer=sizes.layers, n_head=8, d_model=sizes.width))
    shard_model(model, mesh)
    optimizer = oc.shard_optimizer(torch.optim.AdamW(model.parameters(), 1e-3))
    losses = []
    for _ in range(sizes.steps):
        tokens = torch.randint(64, (sizes.dp, 16))
        ids, targets = shard_batch((tokens, tokens.roll(-1, 1)), mesh)
        loss = next_byte_loss(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(sizes: Sizes) -> None:
    """Prove it, and say what it took."""
    began = time.perf_counter()
    proof = oc.prove(program, sizes, world=sizes.dp * sizes.tp, rounding=False)
    print(proof)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{sizes.dp * sizes.tp} ranks, {sizes.layers} layers: {time.perf_counter() - began:.1f} s, {peak:.2f} GiB")


if __name__ == "__main__":
    main(tyro.cli(Sizes))
