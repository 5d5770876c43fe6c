"""One training program with a mixture of experts, for any layout: in a world of one it is its own reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from fleet_programs import begin
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.fleet.layers import sequence

mp = fleet.meta_parallel
WIDTH, HIDDEN, CLASSES = 8, 12, 5


@dataclass(frozen=True)
class Mixture:
    """What is trained and how it lies.

    Attributes:
        degrees: of the axes, "ep" among them.
        kind: of experts: "modules", "parallel" (cut along mp), "stacked", "stacked parallel".
        sequence: each rank along mp has a part of the sequence.
        zero: "sharding" (an axis of the grid), or a level of group_sharded_parallel.
    """

    degrees: dict[str, int] = field(default_factory=dict)
    gate: dict[str, Any] = field(default_factory=lambda: {"type": "gshard"})
    kind: str = "modules"
    experts: int = 4
    sequence: bool = False
    padded: bool = False
    shared: bool = False
    overlap: bool = False
    recompute: str = ""
    zero: str = ""
    micro: int = 1
    steps: int = 3
    clip: float = 0.1
    optimizer: str = "adamw"
    batch: int = 4
    time: int = 8
    dtype: str = "float32"

    @property
    def ranks(self) -> int:
        """How many it needs."""
        n = 1
        for axis, size in self.degrees.items():
            n *= size if axis != "ep" else 1
        return n


class Expert(nn.Module):
    def __init__(self, cut: bool) -> None:
        super().__init__()
        group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
        self.up: nn.Module = nn.Linear(WIDTH, HIDDEN)
        self.down: nn.Module = nn.Linear(HIDDEN, WIDTH)
        if cut:
            self.up = mp.ColumnParallelLinear(WIDTH, HIDDEN, gather_output=False, mp_group=group)
            self.down = mp.RowParallelLinear(HIDDEN, WIDTH, input_is_parallel=True, mp_group=group, has_bias=False)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Shared(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Net(nn.Module):
    def __init__(self, what: Mixture) -> None:
        super().__init__()
        self.what = what
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.moe = layer(what)
        if what.sequence:
            for module in (self.first, self.last, self.moe.shared_experts or nn.Identity()):
                for p in module.parameters():
                    fleet.mark_as_sequence_parallel_parameter(p)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """(batch, time, width) -> logits of the same tokens."""
        if self.what.sequence:
            x = sequence.scatter(x.transpose(0, 1))
            valid = None if valid is None else sequence.scatter(valid.transpose(0, 1).to(x.dtype)) > 0.5
        h = torch.tanh(self.first(x))
        if self.what.recompute == "layer":
            h = h + fleet.recompute(self.moe, h, valid)
        else:
            h = h + self.moe(h, valid)
        logits = self.last(h)
        return sequence.gather(logits).transpose(0, 1) if self.what.sequence else logits


def layer(what: Mixture) -> nn.Module:
    group = fleet.get_hybrid_communicate_group().get_model_parallel_group()
    if what.kind.startswith("stacked"):
        cut = group if what.kind == "stacked parallel" else None
        experts: Any = mp.GroupedExperts(what.experts, WIDTH, HIDDEN, mp_group=cut)
    else:
        experts = [fleet.LayerDesc(Expert, what.kind == "parallel") for _ in range(what.experts)]
    return mp.MoELayer(
        WIDTH, experts, dict(what.gate), mp_group=group, recompute_interval=int(what.recompute == "experts"),
        shared_experts=Shared() if what.shared else None, sequence_parallel=what.sequence, overlap=what.overlap,
    )  # fmt: skip


def optimizer_of(what: Mixture, parameters: Any) -> torch.optim.Optimizer:
    if what.optimizer == "momentum":
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(parameters, lr=0.02, eps=1e-3)


def batches(what: Mixture) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The microbatches of a step, each of all ranks."""
    g = torch.Generator().manual_seed(7)
    dtype, shape = getattr(torch, what.dtype), (what.batch, what.time)
    return [
        (
            torch.randn(*shape, WIDTH, generator=g).to(dtype),
            torch.randint(CLASSES, shape, generator=g),
            torch.rand(shape, generator=g) < 0.75,
        )
        for _ in range(what.micro)
    ]


def train(what: Mixture) -> dict[str, Any]:
    """Losses, gradients and parameters, as parts of one card's: {name: (value, part)}."""
    clips = what.zero in ("os", "os_g", "p_g_os")  # the program itself, ahead of the step
    if what.ranks == 1:
        what = replace(what, zero="")
    hcg = begin(**what.degrees)
    oc.manual_seed(3)
    torch.set_default_dtype(getattr(torch, what.dtype))
    try:
        return _trained(what, hcg, clips)
    finally:
        torch.set_default_dtype(torch.float32)


def _trained(what: Mixture, hcg: Any, clips: bool) -> dict[str, Any]:
    net = Net(what)
    optimizer = optimizer_of(what, net.parameters())
    model: Any = net
    if what.zero in ("os", "os_g", "p_g_os"):
        model, optimizer, _ = fleet.group_sharded_parallel(net, optimizer, what.zero)
    else:
        model = fleet.distributed_model(net)
        clip = fleet.ClipGradByGlobalNorm(what.clip)
        optimizer = fleet.distributed_optimizer(optimizer, grad_clip=clip if what.clip and not clips else None)
    data = hcg.data()
    losses, grads = [], {}
    for _ in range(what.steps):
        for x, y, valid in batches(what):
            mine = [each.chunk(data.size)[data.index] for each in (x, y, valid)]
            logits = model(mine[0], mine[2] if what.padded else None)
            loss = F.cross_entropy(logits.flatten(0, 1), mine[1].flatten())
            router = fleet.router_loss(net)
            ((loss + router) / what.micro).backward()
            losses.append([oc.all_reduce(loss.detach().clone(), "avg", group=data).wait().item(), router.item()])
        if clips and what.clip:
            nn.utils.clip_grad_norm_(model.parameters(), what.clip)
        if not what.zero:
            fleet.sync(model.parameters())
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        fleet.update_router_bias(net)
    made: dict[str, Any] = {"losses": losses, "balance": net.moe.statistics()}
    for name, p in net.named_parameters():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        part = replace(fleet.held(p), group=None, sums=(), experts=None)
        made[name] = (whole.detach().clone(), part)
        if name in grads:
            made[f"gradient of {name}"] = (grads[name], part)
    for name, b in net.named_buffers():
        made[name] = (b.clone(), replace(fleet.held(b)))
    return made


def differences(mine: dict[str, Any], single: dict[str, Any], tolerance: float) -> list[str]:
    """What of a rank's results is not its part of one card's."""
    found = []
    for number, (a, b) in enumerate(zip(mine["losses"], single["losses"], strict=True)):
        found += [
            f"loss {number}: {u} {v}" for u, v in zip(a, b, strict=True) if abs(u - v) > tolerance * max(1, abs(v))
        ]
    if mine["balance"] != single["balance"]:
        found.append(f"balance: {mine['balance']} {single['balance']}")
    for name, value in mine.items():
        if name in ("losses", "balance"):
            continue
        if name not in single:
            found.append(f"{name}: not on one card")
            continue
        x, part = value
        want = part.take(single[name][0])
        far = (x - want).abs().max().item() if x.shape == want.shape and x.numel() else float(x.shape != want.shape)
        if not far <= tolerance * max(want.abs().max().item() if want.numel() else 0.0, 1e-2):
            found.append(f"{name}: {far}")
    return found


def missing(ranks: list[dict[str, Any]], single: dict[str, Any]) -> list[str]:
    """What one card has and no rank."""
    has = {name for each in ranks for name in each}
    return [
        name
        for name in single
        if name not in has and (not name.startswith("gradient") or "gradient of first.weight" in has)
    ]
