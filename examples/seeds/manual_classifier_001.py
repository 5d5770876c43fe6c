"""Seed 001: convolutions data parallel, the classifier's classes divided, from collectives; on scikit-learn's digits.

    onecard run --nproc_per_node 2 examples/seeds/manual_classifier_001.py
    onecard run --nproc_per_node 2 examples/seeds/manual_classifier_001.py --how alltoall
    onecard run --nproc_per_node 2 examples/seeds/manual_classifier_001.py --how never-gathered --margin --samples 4

`gather` is the seed's program, with its mistakes mended: an undefined name, the wrong axis, a forward without self.
`alltoall` sends each rank the logits of its own images only. `never-gathered` is for very many classes: no rank sees
whole logits; `--margin` makes its softmax that of ArcFace, `--samples` keeps so many classes of a rank for each batch.
Needs `pip install scikit-learn`. A process alone is the one-card twin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import onecard as oc
from onecard import fleet

class_num = 10
emb_size = 400
How = Literal["gather", "alltoall", "never-gathered"]
MARGIN = (1.0, 0.2, 0.0)
SCALE = 16.0


class ModelParallelLinear(nn.Module):
    """The last layer: each rank has the rows of its classes."""

    def __init__(self, in_dim: int, rank_num: int, rank_id: int, class_num: int) -> None:
        super().__init__()
        if class_num % rank_num:
            raise ValueError("Number of classes must be divisible by the number of ranks.")
        whole = nn.Linear(in_dim, class_num)  # every rank draws it alike, and keeps its part
        self.linear = nn.Linear(in_dim, class_num // rank_num)
        group = oc.new_group()
        for name, parameter in self.linear.named_parameters():
            parameter.data = whole.get_parameter(name).data.chunk(rank_num)[rank_id].clone()
            fleet.mark(parameter, group, dim=0)  # not a copy: data parallelism must not average it

    def forward(self, x: Tensor) -> Tensor:
        """(images of this rank, in_dim) -> logits (images of all ranks, classes of this rank)."""
        return self.linear(oc.differentiable.all_gather(x, dim=0))


class SimpleModelParallelClassifierNet(nn.Module):
    """The seed's net."""

    def __init__(self, emb_size: int, class_num: int, rank_num: int, rank_id: int, how: How) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels=1, out_channels=6, kernel_size=5, stride=1, padding=2)
        self.max_pool1 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.conv2 = nn.Conv2d(in_channels=6, out_channels=16, kernel_size=5, stride=1)
        self.max_pool2 = nn.MaxPool2d(kernel_size=2, stride=2)
        self.model_parallel_linear = ModelParallelLinear(emb_size, rank_num, rank_id, class_num)
        self.rank_num, self.rank_id, self.how = rank_num, rank_id, how

    def features(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = F.relu(x)
        x = self.max_pool1(x)
        x = F.relu(x)
        x = self.conv2(x)
        x = self.max_pool2(x)
        return torch.flatten(x, start_dim=1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.model_parallel_linear(self.features(x))
        if self.how == "gather":
            all_outs = oc.differentiable.all_gather(out, dim=1)
            return all_outs.chunk(self.rank_num)[self.rank_id]
        if self.how == "alltoall":  # join the classes, cut the images
            return oc.differentiable.all_to_all(out, dim=1, to_dim=0)
        return out


@dataclass(frozen=True)
class Args:
    """A training run."""

    how: How = "gather"
    images: Literal["digits", "random"] = "digits"
    """random: a few, to see that it runs without scikit-learn"""
    epochs: int = 4
    batch_size: int = 30
    lr: float = 0.002
    margin: bool = False
    samples: int = 0
    """never-gathered: how many classes of a rank are kept for a batch; 0: all"""


Data = tuple[Tensor, Tensor]


def digits() -> tuple[Data, Data]:
    """1,797 images of handwritten digits, 8 x 8, enlarged to the seed's 28 x 28; 1,437 to learn from, 360 held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = F.interpolate(torch.from_numpy(found.images).float()[:, None] / 16, size=(28, 28), mode="bilinear")
    labels = torch.from_numpy(found.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    learnt, held_out = order[:1437], order[1437:]
    return (images[learnt], labels[learnt]), (images[held_out], labels[held_out])


def noise(n: int) -> Data:
    """Images of nothing."""
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 1, 28, 28, generator=generator), torch.randint(class_num, (n,), generator=generator)


def loss_of_this_rank(net: SimpleModelParallelClassifierNet, image: Tensor, label: Tensor, args: Args) -> Tensor:
    """What this rank calls backward on; the mean over the ranks is the loss of the batch."""
    if args.how != "never-gathered":
        return F.cross_entropy(net(image), label)
    group = oc.new_group()
    everybody = oc.differentiable.all_gather(label)
    linear = net.model_parallel_linear.linear
    weight, bias = linear.weight, linear.bias
    if args.samples:
        everybody, kept = fleet.meta_parallel.class_center_sample(everybody, len(weight), args.samples, group)
        weight, bias = weight[kept], bias[kept]
    x = oc.differentiable.all_gather(net.features(image))
    if args.margin:
        x, weight, bias = F.normalize(x), F.normalize(weight), None
    loss_fn = fleet.meta_parallel.ParallelCrossEntropy(
        group, margin=MARGIN if args.margin else None, scale=SCALE if args.margin else 1.0
    )
    # One loss, of the whole batch, on every rank: its gradient is a sum over the ranks, of which the mean is taken later.
    return loss_fn(F.linear(x, weight, bias), everybody).mean()


def train_model(args: Args, data: Data | None = None, held_out: Data | None = None) -> tuple[list[float], float]:
    """Train on the ranks of this world; returns the losses of the batches, and the accuracy on held-out images."""
    if data is None:
        data, held_out = digits() if args.images == "digits" else (noise(90), noise(30))
    fleet.init(is_collective=True)
    rank, size = fleet.worker_index(), fleet.worker_num()
    torch.manual_seed(0)
    layer = SimpleModelParallelClassifierNet(emb_size, class_num, size, rank, args.how)
    adam = torch.optim.Adam(layer.parameters(), lr=args.lr)
    adam = fleet.distributed_optimizer(adam)
    dp_layer = fleet.distributed_model(layer)
    losses = []
    for epoch in range(args.epochs):
        order = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(args.batch_size):
            if len(chosen) < args.batch_size:
                continue
            mine = chosen.chunk(size)[rank]
            loss = loss_of_this_rank(layer, data[0][mine], data[1][mine], args)
            total = loss * size if args.how == "never-gathered" else loss
            dp_layer.scale_loss(total).backward()
            dp_layer.apply_collective_grads()
            adam.step()
            adam.clear_grad()
            mean = loss.detach().clone()
            oc.all_reduce(mean, "avg")
            losses.append(mean.item())
        print(f"epoch {epoch}: loss {losses[-1]:.5f}")
    return losses, accuracy(layer, held_out, args.margin) if held_out is not None else 0.0


@torch.no_grad()
def accuracy(net: SimpleModelParallelClassifierNet, held_out: Data, margin: bool = False) -> float:
    """On images that every rank reads: each scores its classes."""
    x, linear = net.features(held_out[0]), net.model_parallel_linear.linear
    scores = F.linear(F.normalize(x), F.normalize(linear.weight)) if margin else linear(x)
    logits = oc.differentiable.all_gather(scores, dim=1)
    right = (logits.argmax(1) == held_out[1]).float().mean().item()
    print(f"accuracy on {len(held_out[1])} held-out images: {right:.4f}")
    return right


if __name__ == "__main__":
    train_model(tyro.cli(Args))
