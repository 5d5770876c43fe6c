"""Train a small mixture of experts on the Python documentation, on one card or with its experts divided over ranks.

    python examples/moe/train.py
    onecard run --nproc_per_node 2 examples/moe/train.py

Both print the same. ``divide`` is all that puts experts on different ranks; tokens are divided, too, and each is sent to its
experts and back. How well the router balances is drawn: bars in the terminal, and a picture over all steps in
``runs/moe/balance.svg``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
import tyro
from balance import bars, picture
from mixture import Mixture, Model
from torch import Tensor, nn

import onecard as oc


@dataclass(frozen=True)
class TrainArgs:
    """Train a small mixture of experts on the text of Python's ``help()``."""

    steps: int = 60
    batch_size: int = 8
    """sequences in the whole batch, over all ranks"""
    time: int = 64
    experts: int = 8
    k: int = 2
    """experts for each token"""
    balance: float = 0.01
    """what the balance loss is multiplied with; 0 lets the router do as it likes"""
    lr: float = 3e-3
    every: int = 10
    """steps between two lines"""
    out: Path = Path("runs/moe")


def text() -> Tensor:
    """What ``help("TOPIC")`` says of all topics, as bytes."""
    return torch.frombuffer(bytearray("".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)


def divide(model: Model, mesh: oc.ProcessMesh) -> None:
    """Each rank has some of the experts; all else is on every rank."""

    def place(name: str, module: nn.Module, mesh: oc.ProcessMesh) -> None:
        if isinstance(module, Mixture):
            module.up = oc.shard_tensor(module.up, mesh, [oc.Shard(0)])
            module.down = oc.shard_tensor(module.down, mesh, [oc.Shard(0)])

    oc.shard_layer(model, mesh, place)


def train(args: TrainArgs) -> list[float]:
    """Losses of all steps."""
    torch.manual_seed(0)  # the same weights and batches on every rank
    model = Model(experts=args.experts, k=args.k, time=args.time)
    ranks, first = oc.get_world_size(), oc.get_rank() == 0
    mesh = oc.ProcessMesh(range(ranks), ["ep"]) if ranks > 1 else None
    if mesh is not None:
        divide(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    known, losses = text(), []
    shares: list[list[Tensor]] = []
    for step in range(args.steps):
        begin = torch.randint(len(known) - args.time, (args.batch_size,)).tolist()
        batch = torch.stack([known[i : i + args.time + 1] for i in begin]).long()
        if mesh is not None:
            batch = oc.shard_tensor(batch, mesh, [oc.Shard(0)])
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        balance = torch.stack([mixture.loss for mixture in model.mixtures()]).sum()
        (loss + args.balance * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        evenness = balance.item() / len(model.blocks)  # on every rank: values are asked of all of them
        shares.append([torch.tensor(mixture.share.tolist()) for mixture in model.mixtures()])
        if first and (step % args.every == 0 or step == args.steps - 1):
            print(f"step {step}  loss {losses[-1]:.3f}  balance {evenness:.3f}")
    if first:
        for layer, of_experts in enumerate(shares[-1]):
            print(f"layer {layer}: tokens of the last step\n{bars(of_experts)}")
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "balance.svg").write_text(picture(shares))
        print(f"{args.out / 'balance.svg'}: the share of each expert in every step")
    return losses


if __name__ == "__main__":
    train(tyro.cli(TrainArgs))
