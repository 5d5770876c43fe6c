"""Habits between steps: what a program does with all of its parameters outside of the step's function."""

from __future__ import annotations

import copy
from typing import Any

import torch
from crossed_habits import habit, loop
from habits_levels import At, Net, Seen, adamw, sgd
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


class Shadow:
    """An average of all weights, as many repositories have it."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay, self.kept, self.backup = decay, dict[str, Tensor](), dict[str, Tensor]()
        for name, p in net.named_parameters():
            self.kept[name] = p.data.clone()

    def update(self, net: nn.Module) -> None:
        for name, p in net.named_parameters():
            self.kept[name] = (1.0 - self.decay) * p.data + self.decay * self.kept[name]

    def swap(self, net: nn.Module) -> None:
        for name, p in net.named_parameters():
            self.backup[name] = p.data
            p.data = self.kept[name]

    def back(self, net: nn.Module) -> None:
        for name, p in net.named_parameters():
            p.data = self.backup[name]


def _with(at: At, shadow: Shadow, net: Any, seen: list[Any]) -> Seen:
    return at.ended(net, *seen) | {f"shadow {n}": x for n, p in shadow.kept.items() if (x := at.whole(p)) is not None}


@habit(calls=True)
def shadow_made_first(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    shadow = Shadow(net, 0.8)
    seen = loop(at, net, opt, outside=lambda i, _: shadow.update(net))
    return _with(at, shadow, net, seen)


@habit(calls=True)
def shadow_made_later(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    seen = loop(at, net, opt, steps=2)
    shadow = Shadow(net, 0.8)
    seen += loop(at, net, opt, outside=lambda i, _: shadow.update(net))
    return _with(at, shadow, net, seen)


@habit(calls=True)
def shadow_swapped_in(at: At) -> Seen:
    """Steps go on with the averaged weights, and later with the old ones."""
    net, opt = at.wrap(Net(), sgd)
    shadow = Shadow(net, 0.5)

    def outside(i: int, loss: Any) -> None:
        shadow.update(net)
        if i == 2:
            shadow.swap(net)
            shadow.back(net)

    return _with(at, shadow, net, loop(at, net, opt, outside=outside))


@habit(calls=True)
def shadow_in_place(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    kept = [p.detach().clone() for p in net.parameters()]

    @torch.no_grad()
    def outside(i: int, loss: Any) -> None:
        torch._foreach_lerp_(kept, [p.detach() for p in net.parameters()], 0.2)

    seen = loop(at, net, opt, outside=outside)
    return at.ended(net, *seen) | {f"kept {i}": x for i, p in enumerate(kept) if (x := at.whole(p)) is not None}


@habit(calls=True)
def best_weights_back(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    best: list[Any] = []

    def outside(i: int, loss: Any) -> None:
        if i == 1:
            best.append((copy.deepcopy(net.state_dict()), copy.deepcopy(opt.state_dict())))
        if i == 3:
            net.load_state_dict(best[0][0])
            opt.load_state_dict(best[0][1])

    return at.ended(net, *loop(at, net, opt, outside=outside, steps=6))


@habit(calls=True)
def slow_weights(at: At) -> Seen:
    """Lookahead by hand."""
    net, opt = at.wrap(Net(), sgd)
    slow = [p.detach().clone() for p in net.parameters()]

    @torch.no_grad()
    def outside(i: int, loss: Any) -> None:
        if i % 2:
            for s, p in zip(slow, net.parameters(), strict=True):
                s += 0.5 * (p - s)
                p.copy_(s)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def norms_bounded(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    @torch.no_grad()
    def outside(i: int, loss: Any) -> None:
        for p in net.parameters():
            p.mul_(0.8 / p.norm().clamp(min=0.8))

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def as_one_vector(at: At) -> Seen:
    """Needs all parameters in one place."""
    net, opt = at.wrap(Net(), sgd)

    def outside(i: int, loss: Any) -> None:
        vector_to_parameters(0.9 * parameters_to_vector(net.parameters()), net.parameters())

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def norm_of_all_decides(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def outside(i: int, loss: Any) -> None:
        if float(sum(p.detach().square().sum() for p in net.parameters()).sqrt()) > 1.0:
            for p in net.parameters():
                p.data.mul_(0.5)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def moments_reset(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def outside(i: int, loss: Any) -> None:
        if i == 2:
            for state in opt.state.values():
                state["exp_avg"].zero_()
                state["exp_avg_sq"].mul_(0.5)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def pulled_to_the_start(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    start = copy.deepcopy(net)

    @torch.no_grad()
    def outside(i: int, loss: Any) -> None:
        for p, q in zip(net.parameters(), start.parameters(), strict=True):
            p.data = p.data + 0.1 * (q.data - p.data)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def signs_flipped_where_small(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    @torch.no_grad()
    def outside(i: int, loss: Any) -> None:
        for p in net.parameters():
            p[p.abs() < 0.02] = 0.0
            p.copy_(torch.where(p > 0.3, -p, p))

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def interpolated_models(at: At) -> Seen:
    """A copy in mid-run, halfway to which the weights go later."""
    net, opt = at.wrap(Net(), adamw)
    seen = loop(at, net, opt, steps=2)
    other = copy.deepcopy(net)
    seen += loop(at, net, opt, steps=3)
    with torch.no_grad():
        for p, q in zip(net.parameters(), other.parameters(), strict=True):
            p.add_(q).mul_(0.5)
    return at.ended(net, *seen, *loop(at, net, opt, steps=2))


@habit(calls=True)
def shrunk_and_perturbed(at: At) -> Seen:
    """Draws for each parameter between steps."""
    net, opt = at.wrap(Net(), sgd)

    @torch.no_grad()
    def outside(i: int, loss: Any) -> None:
        if i == 2:
            for p in net.parameters():
                p.mul_(0.5).add_(torch.randn_like(p), alpha=0.01)

    return at.ended(net, *loop(at, net, opt, outside=outside))
