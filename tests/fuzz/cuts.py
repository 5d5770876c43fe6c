"""Random programs cut at random places into stages, under random schedules, in one process: as on one card?

One again: ``python -m fuzz.cuts --seed 17 --count 1``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from lockstep import Cut
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError, ScheduleError
from onecard.pipeline.cut.starts import forward_of
from onecard.pipeline.schedule.modes import plan
from onecard.static.passes.once import Once

WIDTH = 6
MODES = ["F-then-B", "1F1B", "ZBH1", "ZB1P", "VPP", "BFS", "ZBV", "VHalf", "DualPipeV"]
Layer = Callable[[Tensor, list[Tensor], Tensor], Tensor]


class Net(nn.Module):
    """A random net: what its layers are is drawn when it is made."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw, self.held = draw, nn.ModuleList()
        self.weights = nn.ParameterList()
        self.register_buffer("count", torch.zeros(1))
        self.layers: list[Layer] = [self._layer() for _ in range(draw.randint(4, 10))]
        self.norm_in_loss = draw.random() < 0.2

    def _linear(self) -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH, bias=self.draw.random() < 0.7)
        linears = [m for m in self.held if isinstance(m, nn.Linear) and m.in_features == WIDTH]
        if linears and self.draw.random() < 0.35:
            layer.weight = self.draw.choice(linears).weight  # shared, perhaps over stages
        elif self.draw.random() < 0.15:
            layer.requires_grad_(False)
        self.held.append(layer)
        return layer

    def _layer(self) -> Layer:
        draw = self.draw
        kind = draw.choice(
            ["linear"] * 5 + ["norm", "batch", "relu_", "gelu", "skip", "skip_", "mask", "cat", "chunk", "number", "table",
            "turned", "arange", "scale", "count", "aside", "conv", "view_"]
        )  # fmt: skip
        back = draw.randint(1, 6)
        if kind in ("linear", "aside", "turned"):
            layer = self._linear()
            if kind == "aside":  # no gradient comes back this way
                return lambda x, seen, batch: x + layer(seen[-back % len(seen)]).detach().tanh()
            if kind == "turned":
                return lambda x, seen, batch: layer((x.t() * 0.5).t())
            return lambda x, seen, batch: layer(x)
        if kind in ("norm", "batch"):
            norm = nn.LayerNorm(WIDTH) if kind == "norm" else nn.BatchNorm1d(WIDTH)
            self.held.append(norm)
            return lambda x, seen, batch: norm(x)
        if kind == "conv":
            conv = nn.Conv1d(1, 2, 3, padding=1)
            self.held.append(conv)
            return lambda x, seen, batch: conv(x[:, None]).sum(1)
        if kind == "cat":
            wide = nn.Linear(2 * WIDTH, WIDTH)
            self.held.append(wide)
            return lambda x, seen, batch: wide(torch.cat([x, seen[-back % len(seen)]], 1))
        if kind in ("scale", "table"):
            weight = nn.Parameter(torch.ones(()) if kind == "scale" else torch.randn(3, WIDTH))
            self.weights.append(weight)
            if kind == "scale":
                return lambda x, seen, batch: x * weight
            return lambda x, seen, batch: x + weight[(batch[:, 0] > 0).long()]
        return {
            "relu_": lambda x, seen, batch: (x * 1.5).relu_(),
            "gelu": lambda x, seen, batch: F.gelu(x),
            "skip": lambda x, seen, batch: x + seen[-back % len(seen)],
            "skip_": lambda x, seen, batch: (x * 0.5).add_(seen[-back % len(seen)]),
            "mask": lambda x, seen, batch: x.masked_fill(batch > 0.5, 0.0),
            "chunk": lambda x, seen, batch: torch.cat([b * a.sigmoid() for a, b in [x.chunk(2, 1)]] * 2, 1),
            "number": lambda x, seen, batch: x * (x.argmax(1, keepdim=True) + 1) * 0.3,
            "arange": lambda x, seen, batch: x + torch.arange(WIDTH) * 0.1,
            "count": self._counted,
            "view_": lambda x, seen, batch: _through_a_view(x, seen[-back % len(seen)]),
        }[kind]

    def _counted(self, x: Tensor, seen: list[Tensor], batch: Tensor) -> Tensor:
        self.count.add_(1)
        return x * 0.9

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        batch, seen = x, [x]
        for layer in self.layers:
            x = layer(x, seen, batch)
            seen.append(x)
        return x, seen


def _put(value: Tensor, how: str, made: Tensor | None) -> Tensor:
    """A result by way of memory, which may have been made before the net has run."""
    made = torch.zeros(2, *value.shape) if made is None else made
    if how == "copied":
        return made[0].copy_(value)
    if how == "added":
        total = torch.zeros(value.shape)
        total += value
        return total
    made[1] = value
    return made[1]


def _through_a_view(x: Tensor, other: Tensor) -> Tensor:
    """Writes to what it returns under another name."""
    made = x * 0.5
    made[:, 1:].add_(other[:, 1:])
    return made


def _optimizers(draw: random.Random, net: Net) -> list[torch.optim.Optimizer]:
    params = [p for p in net.parameters() if p.requires_grad]
    cut = draw.randint(1, len(params)) if draw.random() < 0.2 else len(params)
    kinds: list[Callable[..., torch.optim.Optimizer]] = [
        lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
        lambda ps: torch.optim.SGD(ps, lr=0.05, foreach=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-3),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-3, foreach=True),
        lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-3, fused=True),
        lambda ps: torch.optim.Adagrad(ps, lr=0.05),
    ]
    return [draw.choice(kinds)(ps) for ps in (params[:cut], params[cut:]) if ps]


def drawn(seed: int, again: int = 0) -> Cut:
    """The program of a seed, cut; ``again``: at other places, the first, second, ... of them.

    Raises:
        RecordingError: it cannot be cut there. Says why.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    net = Net(draw)
    net.train()
    if not net(torch.randn(4, WIDTH))[0].requires_grad:
        net.weights.append(weight := nn.Parameter(torch.ones(())))
        net.layers.append(lambda x, seen, batch: x * weight)
    optimizers, average = _optimizers(draw, net), draw.random() < 0.2
    copies = [p.detach().clone() for p in net.parameters()]
    clip, extra, rows = draw.choice([None, True, False]), draw.random() < 0.3, draw.random() < 0.3

    kept = random.Random(~seed)  # draws of its own, so that a seed's net stays what it was
    how = kept.choice(("", "", "copied", "added", "entry"))
    ahead = kept.random() < 0.1  # mostly refused: the first stage makes it, and the last one writes to it

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        made = torch.zeros(2) if ahead else None
        out, seen = net(x)
        loss = F.mse_loss(out, y) if y.is_floating_point() else F.cross_entropy(out, y)
        if extra:
            loss = loss + 0.1 * seen[len(seen) // 2].square().mean()
        if net.norm_in_loss:
            loss = loss + 0.01 * sum(p.square().sum() for p in net.parameters() if p.requires_grad)
        loss.backward()
        found = [_put(loss.detach(), how, made) if how else loss.detach()]
        if clip is not None:
            found.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5, foreach=clip))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if average:
            with torch.no_grad():
                for copy, p in zip(copies, net.parameters(), strict=True):
                    copy.lerp_(p, 0.1)
        given = _put(out.detach(), how, None) if how else out.detach()
        return (*found, *([given] if rows else []))

    modes = [mode for mode in MODES if mode != "DualPipeV" or draw.random() < 0.5]
    ranks, k = draw.randint(2, 4), draw.choice([1, 2, 3, 4, 6, 8])
    mode = draw.choice(modes)
    schedule = plan(mode, ranks)(k)

    def starts(graph: Any) -> Any:
        nodes = forward_of(graph, Once(graph, training=False))
        if len(nodes) < schedule.num_stages:
            raise RecordingError("more stages than nodes")
        places = random.Random(f"{seed} {again}") if again else draw
        at = sorted(places.sample(range(1, len(nodes)), schedule.num_stages - 1))
        return [nodes[i] for i in at]

    size = 4 * k
    x = torch.randn(size, WIDTH)
    y = torch.randn(size, WIDTH) if draw.random() < 0.5 else torch.randint(WIDTH, (size,))
    first = x[:4], y[:4]
    step(*first)  # states
    recording = oc.record(step)(*first)
    return Cut(recording, (x, y), k, schedule, starts)


@dataclass(frozen=True)
class Options:
    """Random programs cut at random places, in one process; exit status 1 if any is wrong."""

    seed: int = 0
    """the first program's seed"""
    count: int = 300
    """how many"""


def tried(seed: int) -> str:
    """ "right", "refused: why" or "wrong: what". Where places lie within a chain of writes, others are drawn, five times."""
    for again in range(6):
        said = _tried(seed, again)
        if "written in place" not in said:
            break
    return said


def _tried(seed: int, again: int) -> str:
    try:
        found = drawn(seed, again).differences()
    except (RecordingError, ScheduleError) as why:
        return f"refused: {str(why)[:100]}"
    except AssertionError as fault:
        found = [str(fault)]
    return f"wrong: {found[:4]}" if found else "right"


def main(options: Options) -> int:
    """Runs them and prints what failed."""
    outcomes = {seed: tried(seed) for seed in range(options.seed, options.seed + options.count)}
    for seed, said in outcomes.items():
        if said != "right":
            print(seed, said)
    wrong = sum(said.startswith("wrong") for said in outcomes.values())
    print(f"{len(outcomes)} programs, {sum(said == 'right' for said in outcomes.values())} right, {wrong} wrong")
    return min(wrong, 1)


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Options)))
