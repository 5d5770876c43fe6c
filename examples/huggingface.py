"""Train a LLaMA of Hugging Face transformers, untouched, on one card or on a mesh. Small and random: nothing is downloaded.

    python examples/huggingface.py --one-card
    onecard run --nproc_per_node 2 examples/huggingface.py

Both print the same losses. The three lines marked "onecard" are all that divides the batch over the ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import rich
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import onecard as oc


def batches(steps: int, size: int = 8, length: int = 16) -> Iterator[Tensor]:
    """Sequences that count upwards, from anywhere: each token is the one before it, plus one."""
    for _ in range(steps):
        yield (torch.randint(64, (size, 1)) + torch.arange(length)) % 64


def train(one_card: bool, steps: int = 8) -> list[float]:
    torch.manual_seed(0)  # the same weights and the same data on every rank
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if not one_card:
        mesh = oc.ProcessMesh(range(oc.get_world_size()), dim_names=["dp"])  # onecard: a mesh of all ranks
        oc.shard_layer(model, mesh)  # onecard: the parameters are on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with oc.explain() as report:
        for step, ids in enumerate(batches(steps)):
            if not one_card:
                ids = oc.shard_tensor(ids, mesh, [oc.Shard(0)])  # onecard: each rank takes its part of the batch
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())  # on every rank: it is a sum over ranks
            if oc.get_rank() == 0:
                print(f"step {step}  loss {losses[-1]:.5f}")
            report.next_step()
    if oc.get_rank() == 0 and not one_card:
        rich.print(report.totals())
        print(f"sent {report.bytes:,} bytes, about {report.seconds * 1e6:.0f} us")
    return losses


if __name__ == "__main__":
    train("--one-card" in sys.argv[1:])
