"""A mixture with every loss that routers have, as one writes it for one card, trained on any mesh; and faults of such routers."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc

EXPERTS, TOP, WIDTH, INNER, BATCH, TIME = 8, 2, 16, 12, 4, 6
R, S = oc.Replicate(), oc.Shard

# The mesh; how tokens (batch, time, width) lie; how the stacks (experts, width, inner) and (experts, inner, width) lie.
LAYOUTS: dict[str, tuple[tuple[int, ...], list[str], list[Any], list[Any], list[Any]]] = {
    "ep=2": ((2,), ["ep"], [S(0)], [S(0)], [S(0)]),
    "tp=2": ((2,), ["tp"], [R], [S(2)], [S(1)]),
    "sp=2": ((2,), ["sp"], [S(1)], [R], [R]),
    "dp=2": ((2,), ["dp"], [S(0)], [R], [R]),
    "ep=4": ((4,), ["ep"], [S(0)], [S(0)], [S(0)]),
    "dp=2 ep=2": ((2, 2), ["dp", "ep"], [S(0), S(0)], [R, S(0)], [R, S(0)]),
    "ep=2 tp=2": ((2, 2), ["ep", "tp"], [S(0), R], [S(0), S(2)], [S(0), S(1)]),
}


@dataclass(frozen=True)
class Routed:
    """What is trained.

    Attributes:
        layout: of ``LAYOUTS``; "": one card.
        score: "softmax" with a balance loss and a z-loss, or "sigmoid" with a bias that is moved without a loss.
        zero: ZeRO-1 along dp; fault: of ``FAULTS``, planted where there are ranks.
    """

    layout: str = ""
    score: str = "softmax"
    jitter: float = 0.1
    padded: bool = True
    micro: int = 2
    steps: int = 2
    zero: bool = False
    fault: str = ""


FAULTS = {
    "the balance loss of each rank's tokens": "dp=2",
    "the balance loss' gradient doubled": "tp=2",
    "padding counted": "ep=2",
    "padding in the mean": "ep=2",
    "the z-loss once for each rank": "dp=2",
    "the router in bfloat16": "ep=2",
    "losses of microbatches not divided": "dp=2",
}


TOLD = {"the bias moved by each rank's counts": "ep=2", "other random numbers on each rank": "tp=2"}
"""Faults that the library itself tells of: copies that should be equal are not."""


class Doubled(torch.autograd.Function):
    """A value whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Router(nn.Module):
    """(batch, time, width) -> weights and experts of each token, (tokens, k); losses and counts without padding."""

    loss: Tensor
    counts: Tensor

    def __init__(self, what: Routed) -> None:
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) * 0.4)
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        what, fault = self.what, self.what.fault
        if what.jitter:
            noise = torch.rand_like(x.detach()) * 2 * what.jitter + 1 - what.jitter
            x = x * (noise + (0.01 * oc.get_rank() if fault == "other random numbers on each rank" else 0.0))
        x, valid = x.flatten(0, 1), valid.flatten()
        weight = self.weight
        if fault == "the router in bfloat16":
            x, weight = x.bfloat16(), weight.bfloat16()
        scores = F.linear(x, weight).float()
        probabilities = scores.softmax(-1) if what.score == "softmax" else scores.sigmoid()
        numbers = (probabilities.detach() + self.bias).topk(TOP, -1).indices
        weights = probabilities.gather(-1, numbers)
        counted = valid if fault != "padding counted" else torch.ones_like(valid)
        self.counts = (F.one_hot(numbers, EXPERTS) * counted[:, None, None]).sum((0, 1))
        count = valid.sum() if fault != "padding in the mean" else len(valid)
        self.loss = self._losses(scores, probabilities, valid, count)
        return weights / weights.sum(-1, keepdim=True), numbers

    def _losses(self, scores: Tensor, probabilities: Tensor, valid: Tensor, count: Any) -> Tensor:
        fault, mean = self.what.fault, (probabilities * valid[:, None]).sum(0) / count
        if fault == "the balance loss' gradient doubled":
            mean = Doubled.apply(mean)
        balance = (self.counts / (count * TOP) * mean).sum() * EXPERTS
        if fault == "the balance loss of each rank's tokens":
            balance = _local(self.counts / (count * TOP) * mean).sum() * EXPERTS
        z = (scores.logsumexp(-1).square() * valid).sum() / count
        if fault == "the z-loss once for each rank":
            z = z * oc.get_world_size()
        return 0.5 * balance + 0.1 * z

    @torch.no_grad()
    def move_bias(self, counts: Tensor) -> None:
        """Towards experts that were chosen too rarely."""
        if self.what.score == "sigmoid":
            if self.what.fault == "the bias moved by each rank's counts":
                counts = _own(counts)
            self.bias += 0.05 * (counts.float().mean() - counts).sign()


def _own(x: Tensor) -> Tensor:
    """What this rank alone has counted, as if it were all."""
    return oc.shard_tensor(x._local.clone() + oc.get_rank(), x.process_mesh, [R] * x.process_mesh.ndim)


def _local(x: Tensor) -> Tensor:
    """A rank's summand, as if it were all."""
    return x * (1 / oc.get_world_size())


class Mixture(nn.Module):
    """Tokens sorted by expert, grouped products, and back; padding goes to experts, too, and its results are zero."""

    def __init__(self, what: Routed) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.router = Router(what)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.3)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        x = x + self.before(x).tanh()
        weights, numbers = self.router(x, valid)
        flat, tokens = numbers.flatten(), x.flatten(0, 1)
        order = flat.argsort(stable=True)
        ends = F.one_hot(flat, EXPERTS).sum(0).cumsum(0).int()
        rows = F.grouped_mm(F.silu(F.grouped_mm(tokens[order // TOP], self.up, offs=ends)), self.down, offs=ends)
        rows = (rows * weights.flatten()[order, None])[order.argsort()]
        return rows.view(-1, TOP, WIDTH).sum(1).view(x.shape) * valid[..., None]


def train(what: Routed) -> dict[str, Tensor]:
    """Losses, counts, gradients after clipping, parameters and bias at the end; whole, on every rank."""
    oc.manual_seed(0)
    torch.manual_seed(0)
    model = Mixture(what)
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(what.steps, what.micro, BATCH, TIME, WIDTH, generator=draw)
    valid = torch.rand(what.steps, what.micro, BATCH, TIME, generator=draw) > (0.3 if what.padded else -1)
    mesh = _divide(model, what)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if mesh is not None:
        optimizer = oc.shard_optimizer(optimizer, oc.ShardingStage1("dp", mesh) if what.zero else None)
    found: dict[str, Any] = {"losses": [], "router": [], "counts": [], "norms": []}
    for step in range(what.steps):
        total: Any = 0
        for i in range(what.micro):
            x, mask = _placed(data[step, i], mesh, what), _placed(valid[step, i], mesh, what)
            with nullcontext() if what.layout else oc.one_card_random():
                loss = model(x, mask).square().mean()
            divisor = what.micro if what.fault != "losses of microbatches not divided" else 1
            ((loss + model.router.loss) / divisor).backward()
            found["losses"].append(_whole(loss))
            found["router"].append(_whole(model.router.loss))
            total = total + model.router.counts.detach()
        found["counts"].append(_whole(total))
        found["norms"].append(_whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        if step == what.steps - 1:
            found |= {f"grad of {n}": _whole(p.grad) for n, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        model.router.move_bias(total)
    found |= {n: _whole(p) for n, p in (*model.named_parameters(), *model.named_buffers())}
    return {name: torch.stack(v) if isinstance(v, list) else v for name, v in found.items()}


def _divide(model: Mixture, what: Routed) -> oc.ProcessMesh | None:
    if not what.layout:
        return None
    shape, axes, _, up, down = LAYOUTS[what.layout]
    mesh = oc.ProcessMesh(torch.arange(math.prod(shape)).view(shape), axes)

    def place(name: str, module: nn.Module, mesh: oc.ProcessMesh) -> None:
        if isinstance(module, Mixture):
            module.up = oc.shard_tensor(module.up, mesh, up)
            module.down = oc.shard_tensor(module.down, mesh, down)

    oc.shard_layer(model, mesh, place)
    return mesh


def _placed(x: Tensor, mesh: oc.ProcessMesh | None, what: Routed) -> Tensor:
    return x if mesh is None else oc.shard_tensor(x, mesh, LAYOUTS[what.layout][2])


def _whole(x: Tensor) -> Tensor:
    return oc.unshard(x.detach()).clone() if hasattr(x, "process_mesh") else x.detach().clone()


def differences(what: Routed, wanted: dict[str, Tensor]) -> dict[str, float]:
    """What differs by more than 1e-5, relative to the largest number."""
    got, found = train(what), {}
    for name, value in wanted.items():
        error = float((got[name].double() - value.double()).abs().max() / (value.double().abs().max() + 1e-12))
        if not error <= 1e-5:
            found[name] = error
    return found


def held(what: Routed) -> dict[str, int]:
    """Bytes that this rank has of experts: parameters, gradients, states."""
    oc.manual_seed(0)
    torch.manual_seed(0)
    model = Mixture(what)
    mesh = _divide(model, what)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if mesh is not None:
        optimizer = oc.shard_optimizer(optimizer, oc.ShardingStage1("dp", mesh) if what.zero else None)
    x, valid = torch.randn(BATCH, TIME, WIDTH), torch.ones(BATCH, TIME, dtype=torch.bool)
    model(_placed(x, mesh, what), _placed(valid, mesh, what)).square().mean().backward()
    optimizer.step()
    experts = (model.up, model.down)
    states = [t for p in experts for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.numel() > 1]
    kinds = {"parameters": experts, "gradients": [p.grad for p in experts], "states": states}
    return {kind: sum(_local_bytes(t) for t in tensors) for kind, tensors in kinds.items()}


def _local_bytes(t: Any) -> int:
    return (t._local if hasattr(t, "process_mesh") else t).untyped_storage().nbytes()
