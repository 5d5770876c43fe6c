"""Programs of an Engine, and the same as plain loops of one card."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import onecard as oc

CLASSES, WIDTH, BATCH, STEPS = 6, 8, 8, 5
RTOL = 1e-5


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are functions of their index; labels have a last dim of 1, as the seeds' do."""

    def __init__(self, count: int = BATCH * STEPS) -> None:
        self.count = count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=random), torch.randint(CLASSES, (1,), generator=random)

    def __len__(self) -> int:
        return self.count


class Net(nn.Module):
    """Two blocks that are alike, a tied weight, a frozen layer, a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(2)
        )
        self.blocks[1][0].weight = self.blocks[0][0].weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.frozen(x))


def make_net(seed: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net()


def batches(count: int = BATCH * STEPS, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
    data = Samples(count)
    for start in range(0, count, size):
        rows = [data[i] for i in range(start, min(start + size, count))]
        yield torch.stack([x for x, _ in rows]), torch.stack([y for _, y in rows])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def plain_loop(
    model: nn.Module,
    around: Callable[[], Any] = contextlib.nullcontext,
    clip: float | None = None,
    parts: int = 1,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> tuple[list[float], dict[str, Tensor]]:
    """The one-card program: losses, and the parameters afterwards."""
    model = copy.deepcopy(model)
    optimizer, losses = make(model), []
    for x, y in batches():
        total = 0.0
        for xs, ys in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with around():
                loss = nn.functional.cross_entropy(model(xs), ys.squeeze(1))
            (loss / parts).backward()
            total += loss.item() / parts
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def tensor_parallel(model: Net, mesh: oc.ProcessMesh, axis: str = "mp") -> None:
    """Both blocks, which share a weight, cut by their outputs."""
    where = [oc.Shard(0) if name == axis else oc.Replicate() for name in mesh.dim_names]
    first, second = (block[0] for block in model.blocks)  # type: ignore[index]
    first.weight = second.weight = oc.shard_tensor(first.weight, mesh, where)


def engine_loop(strategy: Any, marks: Callable[[Net], Any] | None = None, **options: Any) -> dict[str, Any]:
    """The same through an Engine: losses, parameters, how many recordings there are."""
    model = make_net()
    if marks is not None:
        marks(model)
    engine = oc.Engine(model, nn.CrossEntropyLoss(), adamw(model), oc.Accuracy((1, 5)), strategy, **options)
    engine.prepare(oc.InputSpec([None, WIDTH], "float32", "x"), oc.InputSpec([None], "int64", "y"), mode="train")
    found = [engine.run(batch) for batch in engine.dataloader(Samples(), BATCH)]
    held = [p._local if isinstance(p, oc.DistTensor) else p for p in model.parameters()]
    here = {
        name: p for (name, p), x in zip(model.named_parameters(), held, strict=True) if x.untyped_storage().nbytes()
    }
    return {
        "losses": [float(out["loss"]) for out in found],
        "accuracy": [(out["acc_top1"], out["acc_top5"]) for out in found],
        "parameters": {name: oc.unshard(p).detach().float().clone() for name, p in here.items()},
        "recordings": sum(len(static.recordings) for static in engine._steps["train"].values()),
        "held": sum(x.numel() for x in held if x.untyped_storage().nbytes()),
    }
