"""The programs in which ``fuzz.faults`` plants its faults: right ones, but those that are wrong by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fleet_programs import begin
from torch import Tensor, nn
from torch.nn import functional as F

import onecard as oc
from onecard import fleet

R, S = oc.Replicate(), oc.Shard
mp = fleet.meta_parallel


def _mesh(name: str = "x") -> oc.ProcessMesh:
    return oc.ProcessMesh(range(oc.get_world_size()), [name])


# -- one operator ------------------------------------------------------------------------------------------------------------


def pending(function: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    """A product over a cut dim, of which each rank has a summand, and an operator on it."""

    def program() -> Any:
        torch.manual_seed(0)
        mesh = _mesh()
        x, w = (
            oc.shard_tensor(torch.rand(4, 6) + 0.2, mesh, [S(1)]),
            oc.shard_tensor(torch.rand(6, 4) / 4, mesh, [S(0)]),
        )
        y = function(x @ w)
        return (2.0 * y).sum()

    return program


def pending_pair(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """The same of two."""

    def program() -> Any:
        torch.manual_seed(0)
        mesh = _mesh()
        x, w = oc.shard_tensor(torch.rand(4, 6), mesh, [S(1)]), oc.shard_tensor(torch.rand(6, 4) + 0.3, mesh, [S(0)])
        y = function(x @ w, (x + 0.5) @ w)
        return (2.0 * y).sum()

    return program


def along(function: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    """An operator along a dim that is cut."""

    def program() -> Any:
        torch.manual_seed(0)
        x = oc.shard_tensor(torch.randn(4, 6), _mesh(), [S(1)])
        return 2.0 * function(x)

    return program


def reduced(name: str) -> Callable[[], Any]:
    """A reduction over a cut dim."""

    def program() -> Any:
        torch.manual_seed(0)
        mesh = _mesh()
        if name in ("mm", "bmm"):
            more = (3,) * (name == "bmm")
            x = oc.shard_tensor(torch.randn(*more, 4, 6), mesh, [S(1 + len(more))])
            w = oc.shard_tensor(torch.randn(*more, 6, 4), mesh, [S(len(more))])
            return 2.0 * (torch.bmm(x, w) if more else torch.mm(x, w))
        x = oc.shard_tensor(torch.randn(4, 6), mesh, [S(1)])
        return 2.0 * getattr(torch, name)(x, 1)

    return program


NONLINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(torch, name)
    for name in ("tanh", "exp", "sigmoid", "sin", "cos", "sqrt", "log1p", "expm1", "erf", "atan", "reciprocal", "rsqrt",
                 "sinh", "log", "tan", "exp2", "asinh")
} | {
    "gelu": F.gelu, "silu": F.silu, "softplus": F.softplus, "elu": lambda x: F.elu(-x), "mish": F.mish,
    "hardswish": F.hardswish, "hardtanh": lambda x: F.hardtanh(x, 0.0, 0.3),
}  # fmt: skip
PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "maximum": lambda a, b: torch.maximum(a, b.flip(0) * 0.5), "mul": torch.mul, "div": torch.div, "atan2": torch.atan2,
    "hypot": torch.hypot,
}  # fmt: skip
ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "_softmax": lambda x: x.softmax(1), "_log_softmax": lambda x: x.log_softmax(1), "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1), "logcumsumexp": lambda x: x.logcumsumexp(1), "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
}  # fmt: skip
LOCAL: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(1), "tril": lambda x: x.tril(), "mse_loss": lambda x: F.mse_loss(x, x * 0.5 + 1),
}  # fmt: skip


# -- programs that send ------------------------------------------------------------------------------------------------------


def _steps(model: Any, optimizer: Any, loss: Callable[[], Tensor], clip: Any = None, steps: int = 2) -> list[Any]:
    found = []
    for _ in range(steps):
        value = loss()
        value.backward()
        found.append(value.detach())
        if clip is not None:
            clip(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return found


def marked(stage: int = 0) -> Any:
    """Two layers cut over tp, a batch over dp."""
    torch.manual_seed(0)
    n = oc.get_world_size()
    mesh = oc.ProcessMesh(torch.arange(n).view(-1, 2).tolist() if n > 1 else [[0]], ["dp", "tp"])
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6))
    model[0].weight = nn.Parameter(oc.shard_tensor(model[0].weight.data, mesh, [R, S(0)]))
    model[2].weight = nn.Parameter(oc.shard_tensor(model[2].weight.data, mesh, [R, S(1)]))
    oc.shard_layer(model, mesh)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = oc.shard_optimizer(optimizer, *([oc.ShardingStage1("dp", mesh)] if stage else []))
    x, y = (oc.shard_tensor(torch.randn(8, 6), mesh, [S(0), R]) for _ in range(2))
    return _steps(model, optimizer, lambda: F.mse_loss(model(x), y), nn.utils.clip_grad_norm_)


def zero(stage: int) -> Any:
    """ZeRO over dp alone."""
    torch.manual_seed(0)
    mesh = _mesh("dp")
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    oc.shard_layer(model, mesh)
    kind = {1: oc.ShardingStage1, 2: oc.ShardingStage2, 3: oc.ShardingStage3}[stage]
    optimizer: Any = oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), kind("dp", mesh))
    x = oc.shard_tensor(torch.randn(8, 6), mesh, [S(0)])
    return _steps(model, optimizer, lambda: model(x).square().mean())


def layers(sequence: bool = False) -> Any:
    """fleet's embedding, column, row and loss over mp."""
    begin(mp=2)
    torch.manual_seed(0)
    seq = fleet.utils.sequence_parallel_utils if hasattr(fleet.utils, "sequence_parallel_utils") else None
    del seq, sequence

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = mp.VocabParallelEmbedding(12, 6)
            self.up = mp.ColumnParallelLinear(6, 8, has_bias=True, gather_output=False)
            self.down = mp.RowParallelLinear(8, 6, has_bias=True, input_is_parallel=True)
            self.head = mp.ColumnParallelLinear(6, 12, has_bias=True, gather_output=False)
            self.loss = mp.ParallelCrossEntropy(num_classes=12)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            x = x + self.down(torch.tanh(self.up(x)))
            return self.loss(self.head(x), ids.roll(1)).mean()

    model: Any = fleet.distributed_model(Net())
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    ids = torch.randint(12, (10,))
    return _steps(model, optimizer, lambda: model(ids), fleet.clip_grad_norm_)


def data(clip: bool = True) -> Any:
    """fleet over dp."""
    begin(dp=2)
    torch.manual_seed(0)
    model: Any = fleet.distributed_model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    group = fleet.get_hybrid_communicate_group()
    x = torch.randn(8, 6).chunk(group.get_data_parallel_world_size())[group.get_data_parallel_rank()]
    _steps(model, optimizer, lambda: model(x).square().mean(), fleet.clip_grad_norm_ if clip else None)
    return None


def stages(mode: str = "1F1B") -> Any:
    """A pipeline of two ranks."""
    import pipeline_programs

    pipeline_programs.begin(mode, 2, 2, pp=2)
    torch.manual_seed(0)
    descs: list[Any] = [
        fleet.SharedLayerDesc("tied", nn.Linear, lambda layer, x: layer(x), "weight", 6, 6),
        fleet.LayerDesc(nn.Tanh), fleet.LayerDesc(nn.Linear, 6, 6), fleet.LayerDesc(nn.LayerNorm, 6),
        fleet.LayerDesc(nn.Linear, 6, 6), fleet.SharedLayerDesc("tied", nn.Linear, lambda layer, x: layer(x), "weight", 6, 6),
    ]  # fmt: skip
    model: Any = fleet.distributed_model(fleet.PipelineLayer(descs, loss_fn=nn.MSELoss()))
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    for _ in range(2):
        model.forward_backward_pipeline([x, y])
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return None


SENDING: dict[str, tuple[Callable[[], Any], int, int]] = {
    "marks on dp x tp": (marked, 4, 12), "marks, ZeRO 1 on dp x tp": (partial(marked, 1), 4, 10),
    "ZeRO 1": (partial(zero, 1), 2, 6), "ZeRO 2": (partial(zero, 2), 2, 6), "ZeRO 3": (partial(zero, 3), 2, 8),
    "fleet's layers": (layers, 2, 16), "fleet's data parallelism": (data, 2, 4),
}  # fmt: skip


# -- plain collectives, with the bugs of Megatron-LM issue 7452 and others ----------------------------------------------------


class _Sum(torch.autograd.Function):
    """A sum over the ranks, whose gradient every rank has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class _Copy(torch.autograd.Function):
    """What every rank has, for parts: gradients are summed, so many times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Any:
        ctx.times = times
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        grad = grad.clone()
        for _ in range(ctx.times):
            dist.all_reduce(grad)
        return grad, None


def _place() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


class _Cut(nn.Module):
    """Two layers cut as Megatron cuts them, a norm, and a loss that is parallel over the vocabulary."""

    def __init__(self, bug: str) -> None:
        super().__init__()
        self.bug, (n, rank) = bug, _place()
        up, down, head = torch.randn(8, 6) / 2, torch.randn(6, 8) / 2, torch.randn(12, 6) / 2
        self.up = nn.Parameter(up.chunk(n)[rank].clone())
        self.down = nn.Parameter(down.chunk(n, 1)[rank].clone())
        self.head = nn.Parameter(head.chunk(n)[rank].clone())
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        bug, (n, _) = self.bug, _place()
        x = _Copy.apply(x if n == 1 else self.norm(x), _times(bug, "input")) if n > 1 else self.norm(x)
        h = torch.tanh(x @ self.up.t())
        y = h @ self.down.t()
        if n > 1 and bug != "no sum after the row layer":
            y = _Sum.apply(y)
        if n > 1 and bug == "two sums after the row layer":
            y = _Sum.apply(y)
        y = torch.sigmoid(y)
        aux = 0.1 * y.square().mean()
        if n > 1:
            y = _Copy.apply(y, _times(bug, "head"))
            aux = _Doubled.apply(aux) if bug == "auxiliary loss doubled" else aux
        logits = y @ self.head.t()
        return self.loss(logits, target) + aux

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        bug, (n, rank) = self.bug, _place()
        if n > 1 and bug == "gathered logits":
            parts = [torch.empty_like(logits) for _ in range(n)]
            dist.all_gather(parts, logits.detach())
            parts[rank] = logits
            logits = torch.cat(parts, 1)
        width = logits.shape[1]
        start = rank * width if bug != "gathered logits" else 0
        if bug == "vocabulary off by one":
            start = start + 1
        total = torch.exp(logits).sum(1)
        if n > 1 and bug != "denominator of one rank":
            total = _Sum.apply(total)
        inside = (target >= start) & (target < start + width)
        picked = torch.where(inside, logits.gather(1, (target - start).clamp(0, width - 1)[:, None])[:, 0], 0.0)
        if n > 1 and bug not in ("target of one rank", "gathered logits"):
            picked = _Sum.apply(picked)
        each = torch.log(total) - picked
        return each.mean()


class _Doubled(torch.autograd.Function):
    """The gradient of a loss that all ranks have, once for each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * _place()[0]


def _times(bug: str, where: str) -> int:
    return {f"no sum of the {where}'s gradient": 0, f"two sums of the {where}'s gradient": 2}.get(bug, 1)


def megatron(bug: str = "") -> Any:
    """A step or two of it, with a norm of all gradients that counts what every rank has once."""
    torch.manual_seed(0)
    n, rank = _place()
    model = _Cut(bug)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, target = torch.randn(5, 6), torch.tensor([0, 3, 5, 6, 11])
    losses = []
    for _ in range(2):
        loss = model(x, target)
        loss.backward()
        losses.append(loss.item())
        total = torch.zeros(())
        for name, p in model.named_parameters():
            mine = p.grad.square().sum()
            whole = name.startswith("norm")
            if whole and rank and bug != "what all have counts often in the norm":
                continue
            if name == "up" and bug == "a cut weight counts once in the norm" and rank:
                continue
            total = total + mine
        if n > 1 and bug != "norm of one rank":
            dist.all_reduce(total)
        scale = 0.1 / total.sqrt()
        for p in model.parameters():
            p.grad = p.grad * scale
        optimizer.step()
        optimizer.zero_grad()
    return losses


BUGS = {
    "no sum after the row layer": "sigmoid", "two sums after the row layer": "all_reduce",
    "no sum of the input's gradient": "pow", "two sums of the input's gradient": "all_reduce",
    "no sum of the head's gradient": "add", "two sums of the head's gradient": "all_reduce",
    "auxiliary loss doubled": "mul", "gathered logits": "all_reduce", "vocabulary off by one": "ge",
    "denominator of one rank": "log", "target of one rank": "sub", "norm of one rank": "sqrt",
    "what all have counts often in the norm": "add", "a cut weight counts once in the norm": "add",
}  # fmt: skip


def parallel_data(bug: str = "") -> Any:
    """Data parallelism: gradients are averaged, microbatches added."""
    torch.manual_seed(0)
    n, rank = _place()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, target = torch.randn(8, 6), torch.tensor([0, 1, 2, 2, -100, 0, -100, 1])
    count = (target >= 0).sum()
    for step in range(2):
        mine, labels = x.chunk(n)[rank], target.chunk(n)[rank]
        if n > 1 and bug == "part of another rank":
            mine = x.chunk(n)[(rank + 1) % n]
        if n > 1 and bug == "mean of the rank's own tokens":
            F.cross_entropy(model(mine), labels).div(n).backward()
        else:
            for i, (a, b) in enumerate(zip(mine.chunk(2), labels.chunk(2), strict=True)):
                if not (n > 1 and bug == "a microbatch is lost" and i == 1):
                    (F.cross_entropy(model(a), b, reduction="sum") / count).backward()
        for i, p in enumerate(model.parameters()):
            if n > 1 and not (bug == "one gradient is not summed" and i == 2):
                dist.all_reduce(p.grad)
            if n > 1 and bug == "one gradient is summed twice" and i == 0:
                dist.all_reduce(p.grad)
            if n > 1 and bug == "a mean in place of a sum":
                p.grad = p.grad / n
        if not (n > 1 and bug == "old parameters on a rank" and rank == 1 and step == 0):
            optimizer.step()
        optimizer.zero_grad()
    return None


DATA_BUGS = {
    "part of another rank": "the gradient of 0.weight", "mean of the rank's own tokens": "the gradient of 0.weight",
    "a microbatch is lost": "the gradient of 0.weight", "one gradient is not summed": "the gradient of 2.weight",
    "one gradient is summed twice": "the gradient of 0.weight", "a mean in place of a sum": "the gradient of 0.weight",
}  # fmt: skip


def by_hand() -> Iterator[tuple[str, str, Callable[[], Any], Callable[[], Any] | None, str]]:
    """Family, name, program, what one card runs, what must be named."""
    for bug, named in BUGS.items():
        yield "Megatron by hand", bug, partial(megatron, bug), megatron, named
    for bug, named in DATA_BUGS.items():
        yield "data parallel by hand", bug, partial(parallel_data, bug), parallel_data, named
