"""Habits of other libraries' users, as functions of a level (`habits_levels.At`); each step is a function of its batch."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from habits_levels import At, Net, Seen, adamw, sgd
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

HABITS: dict[str, Callable[[At], Seen]] = {}
WHOLE: set[str] = set()
"""Habits whose loss compares rows, or counts them: another program where a rank has rows of its own."""
CALLS: set[str] = set()
"""Habits that make tensors of their own beside the model: a program for levels that see one card."""
CLOSE: dict[str, float] = {}
STEPS = 5


def habit(whole: bool = False, calls: bool = False, close: float = 1e-4) -> Callable[..., Any]:
    def noted(f: Callable[[At], Seen]) -> Callable[[At], Seen]:
        HABITS[f.__name__] = f
        if whole:
            WHOLE.add(f.__name__)
        if calls:
            CALLS.add(f.__name__)
        if close != 1e-4:
            CLOSE[f.__name__] = close
        return f

    return noted


def loop(
    at: At,
    net: Any,
    opts: Iterable[Any] | Any,
    loss_of: Callable[[Any, Any], Tensor] | None = None,
    between: Callable[[], Any] = lambda: None,
    after: Callable[[], Any] = lambda: None,
    outside: Callable[[int, Any], Any] = lambda i, loss: None,
    batches: Any = None,
    steps: int = STEPS,
    result: Callable[[Tensor], Any] | None = None,
    read: Callable[[Any], Tensor] = lambda found: found,
) -> list[Any]:
    """``between``: backward and step, ``after``: the step, inside of the step's function; ``outside`` of it, after each."""
    opts = [opts] if isinstance(opts, torch.optim.Optimizer) else [*opts]
    loss_of = loss_of or (lambda x, y: F.cross_entropy(net(x), y))

    def step(x: Any, y: Any) -> Any:
        loss = loss_of(x, y)
        loss.backward()
        between()
        for opt in opts:
            opt.step()
        for opt in opts:
            opt.zero_grad()
        after()
        return loss.detach() if result is None else result(loss)

    run = at.fitted(net, opts, loss_of, between, after) if result is None else None
    run, seen = run or at.step(step), []
    for i, (x, y) in enumerate(batches if batches is not None else at.batches(steps)):
        found = at.mean(read(run(x, y)))
        seen.append(found)
        outside(i, found)
    return seen


# ---- Results


@dataclass
class Out:
    loss: Tensor
    hits: Tensor
    rows: int = 0


@habit()
def result_dict(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    seen = loop(at, net, opt, result=lambda made: {"loss": made.detach(), "lr": 0.1}, read=lambda d: d["loss"])
    return at.ended(net, *seen)


@habit()
def result_dataclass(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    seen = loop(at, net, opt, result=lambda made: Out(made.detach(), 2 * made.detach(), 8), read=lambda d: d.hits)
    return at.ended(net, *seen)


@habit()
def result_namespace(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    seen = loop(at, net, opt, result=lambda made: SimpleNamespace(loss=made.detach()), read=lambda d: d.loss)
    return at.ended(net, *seen)


@habit()
def result_with_graph(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    return at.ended(net, *[s.detach() for s in loop(at, net, opt, result=lambda made: made)])


@habit(calls=True)
def logits_returned(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    held: dict[str, Tensor] = {}

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        held["o"] = net(x)
        return F.cross_entropy(held["o"], y)

    seen = loop(at, net, opt, loss_of, result=lambda made: (made.detach(), held["o"].detach()), read=lambda f: f[1])
    return at.ended(net, *seen)


@habit(calls=True)
def accuracy_in_step(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    held: dict[str, Tensor] = {}

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        o = net(x)
        held["hits"] = (o.argmax(1) == y).float().mean()
        return F.cross_entropy(o, y)

    seen = loop(at, net, opt, loss_of, result=lambda made: (made.detach(), held["hits"]), read=lambda f: f[1])
    return at.ended(net, *seen)


@habit(calls=True)
def hits_counted_in_step(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    held: dict[str, Tensor] = {}

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        o = net(x)
        held["hits"] = (o.argmax(1) == y).sum()
        return F.cross_entropy(o, y)

    seen = loop(at, net, opt, loss_of, result=lambda made: (made.detach(), held["hits"]), read=lambda f: f[1])
    return at.ended(net, *seen)


# ---- What Python says, and changes


@habit()
def weight_scheduled_outside(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    state = {"w": 0.1}
    seen = loop(
        at, net, opt, lambda x, y: F.cross_entropy(net(x), y) + state["w"] * net(x).square().mean(),
        outside=lambda i, _: state.update(w=state["w"] * 2),
    )  # fmt: skip
    return at.ended(net, *seen)


@habit()
def weight_scheduled_inside(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    net.w = 0.1

    def after() -> None:
        net.w *= 2

    seen = loop(at, net, opt, lambda x, y: F.cross_entropy(net(x), y) + net.w * net(x).square().mean(), after=after)
    return at.ended(net, *seen)


@habit()
def temperature_attribute(at: At) -> Seen:
    class Hot(Net):
        temperature = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / self.temperature

    net, opt = at.wrap(Hot(), adamw)

    def outside(i: int, loss: Any) -> None:
        Hot.temperature *= 0.8

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit()
def step_counter(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    count = [0]

    def between() -> None:
        count[0] += 1
        if count[0] % 2 == 0:
            for p in net.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)

    return at.ended(net, *loop(at, net, opt, between=between))


@habit()
def warmup_by_hand_inside(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    count = [0]

    def between() -> None:
        count[0] += 1
        for group in opt.param_groups:
            group["lr"] = 0.2 * min(1.0, count[0] / 4)

    return at.ended(net, *loop(at, net, opt, between=between))


@habit()
def one_cycle(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=12)
    return at.ended(net, *loop(at, net, opt, outside=lambda i, _: sched.step()))


@habit()
def one_cycle_inside(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=12)
    return at.ended(net, *loop(at, net, opt, after=sched.step))


@habit()
def warm_restarts(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    sched = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, 2, 2)
    return at.ended(net, *loop(at, net, opt, outside=lambda i, _: sched.step(i + 0.5)))


@habit()
def on_plateau(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5, threshold=0.1)
    return at.ended(net, *loop(at, net, opt, outside=lambda i, _: sched.step(float(_))))


@habit()
def stopped_early(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    best: list[float] = []

    def outside(i: int, loss: Tensor) -> None:
        if best and float(loss) > best[-1] - 0.05:
            for g in opt.param_groups:
                g["lr"] = 0.01
        best.append(float(loss))

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit()
def frozen_then_thawed(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    net.blocks[0].requires_grad_(False)

    def outside(i: int, loss: Any) -> None:
        if i == 1:
            net.blocks[0].requires_grad_(True)
        if i == 3:
            net.head.requires_grad_(False)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit()
def dropout_scheduled(at: At) -> Seen:
    class Dropped(Net):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.drop(x))

    net, opt = at.wrap(Dropped(), adamw)

    def outside(i: int, loss: Any) -> None:
        net.drop.p = 1.0 if i == 2 else 0.0

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit()
def rate_changed_by_hand(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def outside(i: int, loss: Any) -> None:
        opt.param_groups[0]["lr"] = 0.02 / (i + 2)
        opt.param_groups[0]["weight_decay"] = 0.1 * i
        opt.param_groups[0]["betas"] = (0.9 - 0.1 * i, 0.99)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def manual_update(at: At) -> Seen:
    net, _ = at.wrap(Net(), sgd)
    state = {"lr": 0.2}

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= state["lr"] * p.grad
                    p.grad = None
        return loss.detach()

    run, seen = at.step(step), []
    for x, y in at.batches(STEPS):
        seen.append(at.mean(run(x, y)))
        state["lr"] *= 0.7
    return at.ended(net, *seen)


@habit(calls=True)
def manual_adam(at: At) -> Seen:
    net, _ = at.wrap(Net(), sgd)
    m: dict[Any, Tensor] = {}
    v: dict[Any, Tensor] = {}
    t = [0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        t[0] += 1
        with torch.no_grad():
            for n, p in net.named_parameters():
                if p.grad is not None:
                    m[n] = 0.9 * m.get(n, torch.zeros_like(p)) + 0.1 * p.grad
                    v[n] = 0.99 * v.get(n, torch.zeros_like(p)) + 0.01 * p.grad**2
                    a, b = m[n] / (1 - 0.9 ** t[0]), v[n] / (1 - 0.99 ** t[0])
                    p.sub_(0.02 * a / (b.sqrt() + 1e-2))
                    p.grad = None
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit(calls=True)
def momentum_in_a_dict(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    kept: dict[str, Tensor] = {n: torch.zeros_like(p) for n, p in net.named_parameters()}

    def between() -> None:
        for n, p in net.named_parameters():
            if p.grad is not None:
                kept[n] = 0.5 * kept[n] + p.grad
                p.grad.copy_(kept[n])

    return at.ended(net, *loop(at, net, opt, between=between))


@habit(calls=True)
def momentum_in_a_list(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    kept = [torch.zeros_like(p) for p in net.parameters()]

    def between() -> None:
        for i, p in enumerate(net.parameters()):
            if p.grad is not None:
                kept[i].mul_(0.5).add_(p.grad)
                p.grad = kept[i].clone()

    return at.ended(net, *loop(at, net, opt, between=between))


class Slow(torch.optim.Optimizer):
    """A user's own: a count in Python, states that are replaced."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                state["m"] = p.grad.clone() if "m" not in state else 0.9 * state["m"] + p.grad
                p.add_(state["m"], alpha=-group["lr"] / math.sqrt(state["step"]))


@habit()
def own_optimizer_class(at: At) -> Seen:
    net, opt = at.wrap(Net(), lambda net: Slow(net.parameters()))
    return at.ended(net, *loop(at, net, opt))


class Lookahead(torch.optim.SGD):
    """Slow weights each third step."""

    k = 0

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.k += 1
        with torch.no_grad():
            for p in (p for g in self.param_groups for p in g["params"]):
                state = self.state[p]
                if "slow" not in state:
                    state["slow"] = p.detach().clone()
                if self.k % 2 == 0:
                    state["slow"].add_(p - state["slow"], alpha=0.5)
                    p.copy_(state["slow"])
        return found


@habit()
def lookahead(at: At) -> Seen:
    net, opt = at.wrap(Net(), lambda net: Lookahead(net.parameters(), 0.2))
    return at.ended(net, *loop(at, net, opt))


# ---- Gradients by hand


@habit(calls=True)
def noise_on_gradients(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def between() -> None:
        for p in net.parameters():
            if p.grad is not None:
                p.grad += 0.01 * torch.randn_like(p)

    return at.ended(net, *loop(at, net, opt, between=between))


@habit(calls=True)
def noise_by_a_generator(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    made = torch.Generator().manual_seed(3)

    def between() -> None:
        for p in net.parameters():
            if p.grad is not None:
                p.grad += 0.01 * torch.randn(p.shape, generator=made)

    return at.ended(net, *loop(at, net, opt, between=between))


@habit()
def some_gradients_dropped(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def between() -> None:
        for n, p in net.named_parameters():
            if "bias" in n:
                p.grad = None

    return at.ended(net, *loop(at, net, opt, between=between))


@habit()
def norm_by_hand(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def between() -> None:
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
        for g in grads:
            g.mul_(torch.clamp(0.3 / (norm + 1e-6), max=1.0))

    return at.ended(net, *loop(at, net, opt, between=between))


@habit()
def clipped_each(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def between() -> None:
        for p in net.parameters():
            if p.grad is not None:
                nn.utils.clip_grad_norm_(p, 0.05)

    return at.ended(net, *loop(at, net, opt, between=between))


@habit()
def clipped_inf(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    norms = []
    seen = loop(
        at, net, opt, between=lambda: norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.02, float("inf")))
    )
    return at.ended(net, *seen)


@habit()
def decay_into_gradients(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def between() -> None:
        for n, p in net.named_parameters():
            if p.grad is not None and "bias" not in n:
                p.grad.add_(p.detach(), alpha=0.1)

    return at.ended(net, *loop(at, net, opt, between=between))


@habit()
def centralised(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def between() -> None:
        for p in net.parameters():
            if p.grad is not None and p.dim() > 1:
                p.grad.sub_(p.grad.mean(1, keepdim=True))

    return at.ended(net, *loop(at, net, opt, between=between))


@habit()
def skipped_when_large(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def between() -> None:
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        scale = torch.where(norm < 0.9, 1.0, 0.0)
        for p in net.parameters():
            if p.grad is not None:
                p.grad.mul_(scale)

    return at.ended(net, *loop(at, net, opt, between=between))


@habit()
def not_finite_put_right(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def between() -> None:
        for p in net.parameters():
            if p.grad is not None:
                torch.nan_to_num_(p.grad, nan=0.0)
                p.grad = torch.where(p.grad.abs() > 0.05, torch.zeros_like(p.grad), p.grad)

    return at.ended(net, *loop(at, net, opt, between=between))


@habit()
def zeros_kept(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad(set_to_none=False)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit()
def zero_first(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def step(x: Tensor, y: Tensor) -> Tensor:
        net.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit()
def accumulated_last_partial(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    many, k = [*at.batches(5)], 2

    def step(x: Tensor, y: Tensor, i: int) -> Tensor:
        loss = F.cross_entropy(net(x), y) / k
        loss.backward()
        if (i + 1) % k == 0 or i == len(many) - 1:
            opt.step()
            opt.zero_grad()
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y, i)) for i, (x, y) in enumerate(many)])


@habit()
def accumulated_inside(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = 0.0
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = F.cross_entropy(net(a), b) / 2
            loss.backward()
            total = total + loss.detach()
        opt.step()
        opt.zero_grad()
        return total

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


# ---- Several passes


@habit()
def sam(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        with torch.no_grad():
            grads = [(p, p.grad) for p in net.parameters() if p.grad is not None]
            norm = torch.stack([g.norm() for _, g in grads]).norm()
            moved = [(p, g * (0.05 / (norm + 1e-12))) for p, g in grads]
            for p, e in moved:
                p.add_(e)
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for p, e in moved:
                p.sub_(e)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit()
def closure_in_step(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def step(x: Tensor, y: Tensor) -> Tensor:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        return opt.step(closure).detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit(calls=True)
def input_penalty(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        out = net(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + 0.1 * (g.flatten(1).norm(dim=1) - 1).square().mean()

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def r1_penalty(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        out = net(x)
        loss = F.cross_entropy(out, y)
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + g.square().sum()

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def adversarial(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a = x.detach().requires_grad_(True)
        (g,) = torch.autograd.grad(F.cross_entropy(net(a), y), a)
        return F.cross_entropy(net(x + 0.1 * g.sign()), y)

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def adversarial_fgm(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a = x.detach().requires_grad_(True)
        (g,) = torch.autograd.grad(F.cross_entropy(net(a), y), a)
        return F.cross_entropy(net(x + 0.1 * g / (g.norm() + 1e-8)), y)

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def projected_gradients(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def step(x: Tensor, y: Tensor) -> Tensor:
        params = [p for n, p in net.named_parameters() if "unused" not in n]
        out = net(x)
        a, b = F.cross_entropy(out, y), out.square().mean()
        ga = torch.autograd.grad(a, params, retain_graph=True)
        gb = torch.autograd.grad(b, params)
        dot = sum((p * q).sum() for p, q in zip(ga, gb, strict=True))
        n2 = sum((q * q).sum() for q in gb)
        for p, g, h in zip(params, ga, gb, strict=True):
            p.grad = g + h - torch.clamp(dot, max=0.0) / (n2 + 1e-6) * h
        opt.step()
        opt.zero_grad()
        return (a + b).detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit(calls=True)
def two_losses_two_backwards(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = net(x)
        a, b = F.cross_entropy(out, y), 0.3 * out.square().mean()
        a.backward(retain_graph=True)
        b.backward()
        opt.step()
        opt.zero_grad()
        return (a + b).detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit(calls=True)
def input_gradient_returned(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def step(x: Tensor, y: Tensor) -> Any:
        x = x.detach().requires_grad_(True)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach(), x.grad

    run = at.step(step)
    return at.ended(net, *[at.whole(run(x, y)[1]) for x, y in at.batches(STEPS)])


# ---- Copies and averages


@habit(calls=True)
def averaged_model(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
    seen = loop(at, net, opt, outside=lambda i, _: average.update_parameters(net))
    return at.ended(net, *seen) | {f"average {k}": v for k, v in at.ended(average.module).items()}


@habit(calls=True)
def averaged_model_inside(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    average = torch.optim.swa_utils.AveragedModel(net)
    seen = loop(at, net, opt, after=lambda: average.update_parameters(net))
    return at.ended(net, *seen) | {f"average {k}": v for k, v in at.ended(average.module).items()}


@habit(calls=True)
def teacher_inside(at: At) -> Seen:
    """Mean teacher: the copy gives targets, and follows at a rate that Python counts."""
    net, opt = at.wrap(Net(), adamw)
    teacher = copy.deepcopy(net).requires_grad_(False)
    count = [0]

    def after() -> None:
        count[0] += 1
        rate = min(1 - 1 / (count[0] + 1), 0.9)
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), net.parameters(), strict=True):
                t.lerp_(p, 1 - rate)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            goal = teacher(x)
        out = net(x)
        return F.cross_entropy(out, y) + F.mse_loss(out, goal)

    seen = loop(at, net, opt, loss_of, after=after)
    return at.ended(net, *seen) | {f"teacher {k}": v for k, v in at.ended(teacher).items()}


class Byol(nn.Module):
    """The target network is a part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.online = Net()
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        a = F.normalize(self.predictor(self.online(x)), dim=1)
        with torch.no_grad():
            b = F.normalize(self.target(x.flip(1)), dim=1)
        return 2 - 2 * (a * b).sum(1).mean()

    @torch.no_grad()
    def follow(self) -> None:
        for t, p in zip(self.target.parameters(), self.online.parameters(), strict=True):
            t.data = 0.9 * t.data + 0.1 * p.data


@habit(calls=True)
def byol(at: At) -> Seen:
    net, opt = at.wrap(
        Byol(), lambda net: torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.02, eps=1e-3)
    )
    return at.ended(net, *loop(at, net, opt, lambda x, y: net(x), after=net.follow))


@habit(calls=True)
def byol_followed_outside(at: At) -> Seen:
    net, opt = at.wrap(
        Byol(), lambda net: torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.02, eps=1e-3)
    )
    return at.ended(net, *loop(at, net, opt, lambda x, y: net(x), outside=lambda i, _: net.follow()))


class Queue(nn.Module):
    """MoCo: a queue of keys in a buffer, and where it is written next."""

    def __init__(self, replaced: bool = False) -> None:
        super().__init__()
        self.net, self.replaced = Net(), replaced
        torch.manual_seed(9)
        self.register_buffer("queue", F.normalize(torch.randn(32, 7), dim=1))
        self.register_buffer("ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.net(x), dim=1)
        k = F.normalize(self.net(x + 0.1), dim=1).detach()
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.clone().t()], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        with torch.no_grad():
            if self.replaced:
                self.queue = torch.cat([k, self.queue[: -len(k)]])
            else:
                at = (self.ptr + torch.arange(len(k))) % 32
                self.queue[at] = k
                self.ptr.copy_((self.ptr + len(k)) % 32)
        return loss


@habit(whole=True, calls=True)
def moco_queue(at: At) -> Seen:
    net, opt = at.wrap(Queue(), adamw)
    seen = loop(at, net, opt, lambda x, y: net(x))
    return at.ended(net, *seen)


@habit(whole=True, calls=True)
def moco_queue_replaced(at: At) -> Seen:
    net, opt = at.wrap(Queue(True), adamw)
    seen = loop(at, net, opt, lambda x, y: net(x))
    return at.ended(net, *seen)


@habit(whole=True, calls=True)
def moco_ptr_int(at: At) -> Seen:
    net, opt = at.wrap(Queue(), adamw)

    def forward(x: Tensor) -> Tensor:
        q = F.normalize(net.net(x), dim=1)
        loss = F.cross_entropy(q @ net.queue.t(), torch.zeros(len(x), dtype=torch.long))
        with torch.no_grad():
            ptr = int(net.ptr)
            net.queue[ptr : ptr + len(x)] = q.detach()
            net.ptr[0] = (ptr + len(x)) % 32
        return loss

    return at.ended(net, *loop(at, net, opt, lambda x, y: forward(x)))


# ---- Models of other kinds


class Normed(nn.Module):
    """Statistics of the batch, in a layer and by hand."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(6, 8), layer(), nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.first(x))))


class Standard(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3)


class Running(nn.Module):
    """A running mean that is replaced, and a count in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.mean = self.mean + (x.detach().mean(0) - self.mean) / self.seen
        return x - self.mean


class RunningInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x - self.mean


def _normed(layer: Callable[[], nn.Module]) -> Callable[[At], Seen]:
    def run(at: At) -> Seen:
        net, opt = at.wrap(Normed(layer), adamw)
        seen = loop(at, net, opt)
        return at.ended(net, *seen) | {f"buffer {n}": at.whole(b) for n, b in net.named_buffers()}

    return run


for name, layer in {
    "batch_norm": lambda: nn.BatchNorm1d(8),
    "batch_norm_cumulative": lambda: nn.BatchNorm1d(8, momentum=None),
    "batch_standardized": Standard,
    "running_replaced": Running,
    "running_in_place": RunningInPlace,
    "group_norm": lambda: nn.GroupNorm(2, 8),
}.items():
    made = _normed(layer)
    made.__name__ = name
    habit(whole=name != "group_norm", calls="running" in name)(made)


@habit()
def spectral(at: At) -> Seen:
    net = Net()
    parametrizations.spectral_norm(net.head)
    net, opt = at.wrap(net, sgd)
    return at.ended(net, *loop(at, net, opt))


@habit()
def weight_normed(at: At) -> Seen:
    net = Net()
    parametrizations.weight_norm(net.blocks[0][0])
    net, opt = at.wrap(net, sgd)
    return at.ended(net, *loop(at, net, opt))


@habit()
def orthogonal(at: At) -> Seen:
    net = Net()
    parametrizations.orthogonal(net.head)
    net, opt = at.wrap(net, sgd)
    return at.ended(net, *loop(at, net, opt))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


@habit()
def parametrized(at: At) -> Seen:
    net = Net()
    parametrize.register_parametrization(net.head, "weight", Symmetric())
    net, opt = at.wrap(net, sgd)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with parametrize.cached():
            return F.cross_entropy(net(x), y)

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit()
def double_head(at: At) -> Seen:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head = self.head.double()

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for block in self.blocks:
                h = h + block(h)
            return self.head(self.norm(h).double())

    net, opt = at.wrap(Wide(), adamw)
    return at.ended(net, *loop(at, net, opt))


@habit(calls=True)
def complex_weights(at: At) -> Seen:
    class Complex(Net):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(7, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h = torch.fft.ifft(torch.fft.fft(h) * self.phase).real
            return self.head(self.norm(self.blocks[0](h)))

    net, opt = at.wrap(Complex(), adamw)
    return at.ended(net, *loop(at, net, opt))


@habit(close=3e-2)
def autocast_scaled(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit()
def checkpointed(at: At) -> Seen:
    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for block in self.blocks:
                h = h + checkpoint(block, h, use_reentrant=False)
            return self.head(self.norm(h))

    net, opt = at.wrap(Again(), adamw)
    return at.ended(net, *loop(at, net, opt))


@habit()
def checkpointed_reentrant(at: At) -> Seen:
    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for block in self.blocks:
                h = h + checkpoint(block, h, use_reentrant=True)
            return self.head(self.norm(h))

    net, opt = at.wrap(Again(), adamw)
    return at.ended(net, *loop(at, net, opt))


@habit(calls=True)
def functional(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        params = {n: p * 1.0 for n, p in net.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(net, params, (x,)), y)

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def maml(at: At) -> Seen:
    """An inner step on one half, the loss on the other."""
    net, opt = at.wrap(Net(), sgd)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        params = {n: p for n, p in net.named_parameters() if "unused" not in n}
        inner = F.cross_entropy(torch.func.functional_call(net, params, (x,)), y)
        grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(params.items(), grads, strict=True)}
        return F.cross_entropy(torch.func.functional_call(net, fast, (x.flip(0),)), y.flip(0))

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def grad_transform(at: At) -> Seen:
    net, _ = at.wrap(Net(), sgd)
    names = [n for n, _ in net.named_parameters() if "unused" not in n]

    def step(x: Tensor, y: Tensor) -> Tensor:
        params = {n: p.detach() for n, p in net.named_parameters()}
        grads, loss = torch.func.grad_and_value(
            lambda ps: F.cross_entropy(torch.func.functional_call(net, ps, (x,)), y)
        )(params)
        with torch.no_grad():
            for n, p in net.named_parameters():
                if n in names:
                    p.sub_(0.1 * grads[n])
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit(calls=True)
def per_sample_clipped(at: At) -> Seen:
    """DP-SGD: gradients of each sample by vmap, clipped, summed."""
    net, opt = at.wrap(Net(), sgd)

    def one(ps: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(net, ps, (x[None],)), y[None])

    def step(x: Tensor, y: Tensor) -> Tensor:
        ps = {n: p.detach() for n, p in net.named_parameters() if "unused" not in n}
        grads = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(ps, x, y)
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        scale = (0.5 / (norm + 1e-6)).clamp(max=1.0)
        for n, p in net.named_parameters():
            if n in grads:
                p.grad = torch.einsum("n,n...->...", scale, grads[n]) / len(x)
        opt.step()
        opt.zero_grad()
        return norm.mean()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.GRUCell) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = kind(6, 8), nn.Linear(8, 7)


@habit(calls=True)
def state_carried(at: At) -> Seen:
    """Truncated backpropagation: the state of the last batch, detached, begins the next."""
    net, opt = at.wrap(Recurrent(), adamw)
    held = {"h": torch.zeros(8, 8)}

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = net.cell(x, held["h"])
        held["h"] = h.detach()
        return F.cross_entropy(net.head(h), y)

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def state_carried_through_results(at: At) -> Seen:
    net, opt = at.wrap(Recurrent(), adamw)

    def step(x: Tensor, y: Tensor, h: Tensor) -> Any:
        h = net.cell(x, h)
        loss = F.cross_entropy(net.head(h), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach(), h.detach()

    run, h, seen = at.step(step), torch.zeros(8, 8), []
    for x, y in at.batches(STEPS):
        loss, h = run(x, y, h)
        seen.append(at.mean(loss))
    return at.ended(net, *seen)


@habit(calls=True)
def state_in_a_buffer(at: At) -> Seen:
    net = Recurrent()
    net.register_buffer("h", torch.zeros(8, 8))
    net, opt = at.wrap(net, adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        h = net.cell(x, net.h.clone())
        net.h.copy_(h.detach())
        return F.cross_entropy(net.head(h), y)

    return at.ended(net, *loop(at, net, opt, loss_of))


class Words(nn.Module):
    def __init__(self, sparse: bool = False, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 8, sparse=sparse, **more)
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(self.table(x))))


def texts(at: At, steps: int = STEPS, lengths: tuple[int, ...] = (5,), rows: tuple[int, ...] = (8,)) -> Any:
    made = torch.Generator().manual_seed(6)
    for i in range(steps):
        n = (rows[i % len(rows)], lengths[i % len(lengths)])
        x = torch.randint(1, 12, n, generator=made)
        keep = torch.arange(n[1]) < torch.randint(1, n[1] + 1, (n[0], 1), generator=made)
        yield at.data(torch.where(keep, x, 0)), at.data(torch.where(keep, x.roll(-1, 1), -100))


def token_loss(net: Any) -> Callable[..., Tensor]:
    return lambda x, y: F.cross_entropy(net(x).flatten(0, 1), y.flatten())


@habit(whole=True)
def sparse_embedding(at: At) -> Seen:
    net, a, b = at.wrap(
        Words(True),
        lambda net: torch.optim.SparseAdam(net.table.parameters(), 0.02, eps=1e-3),
        lambda net: torch.optim.AdamW([*net.first.parameters(), *net.head.parameters()], 0.02, eps=1e-3),
    )
    return at.ended(net, *loop(at, net, [a, b], token_loss(net), batches=texts(at)))


@habit(whole=True)
def padding_embedding(at: At) -> Seen:
    net, opt = at.wrap(Words(padding_idx=0, max_norm=None), adamw)
    return at.ended(net, *loop(at, net, opt, token_loss(net), batches=texts(at, lengths=(5, 4, 6), rows=(8, 8, 4))))


@habit(whole=True)
def embedding_max_norm(at: At) -> Seen:
    net, opt = at.wrap(Words(max_norm=1.0), adamw)
    return at.ended(net, *loop(at, net, opt, token_loss(net), batches=texts(at)))


@habit(whole=True)
def embedding_by_frequency(at: At) -> Seen:
    net, opt = at.wrap(Words(scale_grad_by_freq=True), adamw)
    return at.ended(net, *loop(at, net, opt, token_loss(net), batches=texts(at)))


@habit(whole=True)
def batches_of_other_sizes(at: At) -> Seen:
    net, opt = at.wrap(Words(), adamw)
    batches = texts(at, 6, lengths=(5, 3, 7), rows=(4, 8))
    return at.ended(net, *loop(at, net, opt, token_loss(net), batches=batches))


@habit()
def compiled_part(at: At) -> Seen:
    net = Net()
    net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
    net, opt = at.wrap(net, adamw)
    return at.ended(net, *loop(at, net, opt))


@habit()
def swapped_head(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    first = loop(at, net, opt, steps=3)
    torch.manual_seed(4)
    net.head.weight.data.copy_(torch.randn(7, 7))
    return at.ended(net, *first, *loop(at, net, opt, steps=3))


@habit(calls=True)
def parameter_replaced(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    first = loop(at, net, opt, steps=3)
    torch.manual_seed(4)
    net.head = nn.Linear(7, 7)
    opt.add_param_group({"params": net.head.parameters(), "lr": 0.05})
    return at.ended(net, *first, *loop(at, net, opt, steps=3))


@habit(calls=True)
def optimizer_made_again(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    held = [opt]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        held[0].step()
        held[0].zero_grad()
        return loss.detach()

    run, seen = at.step(step), []
    for i, (x, y) in enumerate(at.batches(6)):
        if i == 3:
            held[0] = torch.optim.SGD(net.parameters(), 0.1)
        seen.append(at.mean(run(x, y)))
    return at.ended(net, *seen)


@habit(calls=True)
def loaded_mid_training(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    kept = copy.deepcopy(net.state_dict())
    first = loop(at, net, opt, steps=3)
    net.load_state_dict(kept)
    return at.ended(net, *first, *loop(at, net, opt, steps=3))


@habit(calls=True)
def both_states_back(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    first = loop(at, net, opt, steps=2)
    kept = copy.deepcopy((net.state_dict(), opt.state_dict()))
    more = loop(at, net, opt, steps=2)
    net.load_state_dict(kept[0])
    opt.load_state_dict(kept[1])
    return at.ended(net, *first, *more, *loop(at, net, opt, steps=2))


@habit(calls=True)
def same_step_loaded_between(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    torch.manual_seed(2)
    kept = {n: torch.randn_like(v) / 3 for n, v in Net().state_dict().items()}

    def outside(i: int, loss: Any) -> None:
        if i == 2:
            net.load_state_dict(kept)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def states_cleared(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def outside(i: int, loss: Any) -> None:
        if i == 2:
            opt.state.clear()

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def states_reset_each(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def outside(i: int, loss: Any) -> None:
        if i == 2:
            for s in opt.state.values():
                s["exp_avg"].zero_()

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit(calls=True)
def weights_clamped_outside(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def outside(i: int, loss: Any) -> None:
        with torch.no_grad():
            for p in net.parameters():
                p.clamp_(-0.2, 0.2)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit()
def weights_clamped_inside(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def after() -> None:
        for p in net.parameters():
            p.data.clamp_(-0.2, 0.2)

    return at.ended(net, *loop(at, net, opt, after=after))


@habit(calls=True)
def evaluated_between(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    held: list[Tensor] = []
    x0, y0 = next(at.batches(1))

    def outside(i: int, loss: Any) -> None:
        net.eval()
        with torch.no_grad():
            held.append(at.whole(F.cross_entropy(net(x0), y0)))
        net.train()

    return at.ended(net, *loop(at, net, opt, outside=outside), *held)


# ---- Losses over the batch


def loss_habit(f: Callable[..., Tensor]) -> None:
    """A loss of outputs, labels and the batch, on one model."""

    def run(at: At) -> Seen:
        net, opt = at.wrap(Net(), adamw)
        return at.ended(net, *loop(at, net, opt, lambda x, y: f(net(x), y, x)))

    run.__name__ = f.__name__
    habit(whole=True, calls=True)(run)


@loss_habit
def info_nce(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    z = F.normalize(o, dim=1)
    return F.cross_entropy(z @ z.roll(1, 1).t() / 0.2, torch.arange(len(z)))


@loss_habit
def clip_both_ways(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    a, b = F.normalize(o, dim=1), F.normalize(x @ torch.ones(6, 7).tril(), dim=1)
    logits, goal = a @ b.t() / 0.2, torch.arange(len(o))
    return (F.cross_entropy(logits, goal) + F.cross_entropy(logits.t(), goal)) / 2


@loss_habit
def simclr(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    z = F.normalize(torch.cat([o, o.flip(1)]), dim=1)
    n = len(o)
    sim = z @ z.t() / 0.3
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(sim, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


@loss_habit
def triplet_hard(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    d = torch.cdist(o, o)
    same = y[:, None] == y[None]
    far = d.masked_fill(~same, -1e9).amax(1)
    near = d.masked_fill(same, 1e9).amin(1)
    return F.relu(far - near + 0.5).mean()


@loss_habit
def triplet_topk(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    d = (o[:, None] - o[None]).square().sum(-1)
    return d.topk(3, dim=1, largest=False).values.mean() + F.cross_entropy(o, y)


@loss_habit
def hardest_examples(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="none").topk(4).values.mean()


@loss_habit
def hardest_share(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    return each.sort(descending=True).values[: len(each) // 2].mean()


@loss_habit
def above_the_mean(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    return (each * (each > each.mean()).float()).mean()


@loss_habit
def weighted_by_softmax(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    return (each * each.detach().softmax(0)).sum()


@loss_habit
def worst_row(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="none").max()


@loss_habit
def vicreg(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    z = o - o.mean(0)
    cov = z.t() @ z / (len(z) - 1)
    return (
        F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + cov.fill_diagonal_(0).square().sum() / 7 + F.cross_entropy(o, y)
    )


@loss_habit
def barlow(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    a, b = (o - o.mean(0)) / (o.std(0) + 1e-3), (o.flip(1) - o.flip(1).mean(0)) / (o.flip(1).std(0) + 1e-3)
    c = a.t() @ b / len(a)
    return (c - torch.eye(7)).square().sum() / 49


@loss_habit
def focal(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    each = F.cross_entropy(o, y, reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


@loss_habit
def focal_by_positives(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    goal = F.one_hot(y, 7).float() * (y > 2)[:, None]
    each = F.binary_cross_entropy_with_logits(o, goal, reduction="none")
    return each.sum() / goal.sum().clamp(min=1)


@loss_habit
def dice(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    p, g = o.softmax(1), F.one_hot(y, 7).float()
    return 1 - (2 * (p * g).sum() + 1) / (p.sum() + g.sum() + 1)


@loss_habit
def dice_by_class(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    p, g = o.softmax(1), F.one_hot(y, 7).float()
    return 1 - ((2 * (p * g).sum(0) + 1) / (p.sum(0) + g.sum(0) + 1)).mean()


@loss_habit
def smoothed(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y, label_smoothing=0.1, weight=torch.linspace(0.5, 2, 7))


@loss_habit
def ignored_by_value(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y, ignore_index=3)


@loss_habit
def sum_over_rows(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="sum")


@loss_habit
def sum_over_length(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="sum") / len(x)


@loss_habit
def sum_over_shape(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.nll_loss(o.log_softmax(1), y, reduction="sum") / o.shape[0] + 1e-3 * o.square().sum() / o.numel()


@loss_habit
def sum_over_constant(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y, reduction="sum") / 8


@loss_habit
def root_of_mean(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return (o.square().mean() + 1e-6).sqrt() + F.cross_entropy(o, y)


@loss_habit
def ratio_of_means(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y) / (1 + o.square().mean())


@loss_habit
def ratio_detached(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    a, b = F.cross_entropy(o, y), o.square().mean()
    return a + b * (a.detach() / (b.detach() + 1e-3))


@loss_habit
def log_of_sum(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return torch.logsumexp(F.cross_entropy(o, y, reduction="none"), 0)


@loss_habit
def masked_rows(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o[y > 1], y[y > 1])


@loss_habit
def masked_mean(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    mask = (x[:, 0] > 0).float()
    return (F.cross_entropy(o, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1.0)


@loss_habit
def two_masked_means(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    mask = (x[:, 0] > 0).float()
    each = F.cross_entropy(o, y, reduction="none")
    return (each * mask).sum() / (mask.sum() + 1) + (each * (1 - mask)).sum() / ((1 - mask).sum() + 1)


@loss_habit
def class_balanced(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=7).float()
    return F.cross_entropy(o, y, weight=1 / (counts + 1))


@loss_habit
def class_means(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    sums = torch.zeros(7, 7).index_add(0, y, o)
    means = sums / torch.bincount(y, minlength=7).clamp(min=1)[:, None]
    return (o - means[y]).square().mean() + F.cross_entropy(o, y)


@loss_habit
def mixup_numpy(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    lam = np.random.beta(0.4, 0.4)
    return lam * F.cross_entropy(o, y) + (1 - lam) * F.cross_entropy(o, y.flip(0))


@loss_habit
def mixup_permuted(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    other = y[torch.randperm(len(y))]
    return 0.7 * F.cross_entropy(o, y) + 0.3 * F.cross_entropy(o, other)


@loss_habit
def chance_by_python(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y) * (2.0 if random.random() < 0.5 else 1.0)


@loss_habit
def noisy_labels(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o + 0.1 * torch.randn_like(o), torch.where(torch.rand(len(y)) < 0.3, 0, y))


@loss_habit
def sampled_classes(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    drawn = torch.multinomial(o.detach().softmax(1), 1)[:, 0]
    return -(o.log_softmax(1).gather(1, drawn[:, None])[:, 0] * x[:, 0]).mean()


@loss_habit
def policy_gradient(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Advantages that are normalized over the batch."""
    reward = (o.detach().argmax(1) == y).float() + x[:, 0]
    advantage = (reward - reward.mean()) / (reward.std() + 1e-3)
    return -(o.log_softmax(1).gather(1, y[:, None])[:, 0] * advantage).mean()


@loss_habit
def baseline_subtracted(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    reward = x[:, 0]
    return -(o.log_softmax(1).gather(1, y[:, None])[:, 0] * (reward - reward.mean())).mean()


@loss_habit
def ppo(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    lp = o.log_softmax(1).gather(1, y[:, None])[:, 0]
    ratio = (lp - lp.detach() * 0.9).exp()
    return (
        -torch.min(ratio * x[:, 0], ratio.clamp(0.8, 1.2) * x[:, 0]).mean()
        - 0.01 * torch.distributions.Categorical(logits=o).entropy().mean()
    )


@loss_habit
def dpo(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """The first half is chosen, the second rejected."""
    lp = o.log_softmax(1).gather(1, y[:, None])[:, 0]
    a, b = lp.chunk(2)
    return -F.logsigmoid(a - b).mean()


@loss_habit
def pairwise_ranking(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    s = o[:, 0]
    return F.relu(0.5 - (s[:, None] - s[None]) * torch.sign(x[:, 0][:, None] - x[:, 0][None])).mean()


@loss_habit
def neighbours(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y) + (o[1:] - o[:-1]).square().mean()


@loss_habit
def first_row_special(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y) + o[0].square().mean()


@loss_habit
def batch_scaled(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o / (o.abs().max() + 1e-3), y)


@loss_habit
def correlation(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    a, b = o[:, 0] - o[:, 0].mean(), x[:, 0] - x[:, 0].mean()
    return 1 - (a * b).sum() / (a.norm() * b.norm() + 1e-3)


@loss_habit
def load_balanced(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """A mixture's auxiliary loss: a share of rows times a mean of gates."""
    p = o.softmax(1)
    share = F.one_hot(p.argmax(1), 7).float().mean(0)
    return F.cross_entropy(o, y) + 7 * (share * p.mean(0)).sum()


@loss_habit
def entropy_of_mean(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    m = o.softmax(1).mean(0)
    return F.cross_entropy(o, y) + (m * m.log()).sum()


@loss_habit
def sinkhorn(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        q = (o / 0.5).exp()
        for _ in range(2):
            q = q / q.sum(0)
            q = q / q.sum(1, keepdim=True)
    return -(q * o.log_softmax(1)).sum(1).mean()


@loss_habit
def mmd(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    a, b = o.chunk(2)
    k = lambda p, q: torch.exp(-torch.cdist(p, q).square()).mean()  # noqa: E731
    return k(a, a) + k(b, b) - 2 * k(a, b)


@loss_habit
def quantile(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    e = x[:, 0] - o[:, 0]
    return torch.max(0.9 * e, -0.1 * e).mean() + torch.quantile(o[:, 1], 0.5)


@loss_habit
def cumulative(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Cox: risks are summed over rows that come later."""
    risk = o[:, 0][torch.argsort(x[:, 0])]
    return -(risk - torch.logcumsumexp(risk.flip(0), 0).flip(0)).mean()


@loss_habit
def listwise(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return -(x[:, 0].softmax(0) * o[:, 0].log_softmax(0)).sum()


@loss_habit
def ctc(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    t = torch.stack([o, o.flip(1), o.roll(1, 1), o.roll(2, 1)]).log_softmax(2)
    goal = torch.stack([y % 6 + 1, (y + 2) % 6 + 1], 1)
    n = len(o)
    return F.ctc_loss(t, goal, torch.full((n,), 4), torch.full((n,), 2) - (y > 3).long())


@loss_habit
def clipped_to_norm_of_batch(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o * (1.0 / o.norm()).clamp(max=1.0), y)


@loss_habit
def penalty_with_constant(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y) + 0.5


@loss_habit
def reversed_rows(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.mse_loss(o, o.flip(0).detach()) + F.cross_entropy(o, y)


@loss_habit
def rows_reshaped(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o.view(2, -1, 7).mean(0), y.view(2, -1)[0])


@loss_habit
def transposed_softmax(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o.softmax(0), y)


@loss_habit
def unique_labels(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y) * len(torch.unique(y))


@loss_habit
def branch_on_batch(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y) * (2.0 if bool(x[:, 0].mean() > 0) else 1.0)


@loss_habit
def branch_by_where(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    return torch.where(loss > 1.9, loss, 0.5 * loss)


@loss_habit
def squared_loss(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y) ** 2


@loss_habit
def clamped_loss(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return (F.cross_entropy(o, y) - 0.3).abs() + 0.3  # flooding


@loss_habit
def stop_gradient_norm(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    loss = F.cross_entropy(o, y)
    return loss / loss.detach()


@loss_habit
def one_hot_mean_over_all(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.mse_loss(o, F.one_hot(y, 7).to(o))


@loss_habit
def loss_times_rows(o: Tensor, y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(o, y) * o.size(0) / 8


# ---- Several models and optimizers


@habit(calls=True)
def gan(at: At) -> Seen:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.g, self.d = (
                nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)),
                nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)),
            )

    net, a, b = at.wrap(
        Both(),
        lambda net: torch.optim.AdamW(net.g.parameters(), 0.02, eps=1e-3),
        lambda net: torch.optim.AdamW(net.d.parameters(), 0.02, eps=1e-3),
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        fake = net.g(x.flip(1))
        d = F.softplus(-net.d(x)).mean() + F.softplus(net.d(fake.detach())).mean()
        d.backward()
        b.step()
        b.zero_grad()
        g = F.softplus(-net.d(fake)).mean()
        g.backward()
        a.step()
        a.zero_grad()
        b.zero_grad()
        return (d + g).detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit()
def two_optimizers_in_step(at: At) -> Seen:
    net, a, b = at.wrap(
        Net(),
        lambda net: torch.optim.SGD([p for p in net.parameters() if p.dim() > 1], 0.1, momentum=0.9),
        lambda net: torch.optim.AdamW([p for p in net.parameters() if p.dim() < 2], 0.02, eps=1e-3),
    )
    return at.ended(net, *loop(at, net, [a, b]))


@habit(calls=True)
def optimizer_in_backward(at: At) -> Seen:
    net, _ = at.wrap(Net(), sgd)
    opts = {p: torch.optim.AdamW([p], 0.02, eps=1e-3) for p in net.parameters()}

    def hook(p: Any) -> None:
        opts[p].step()
        opts[p].zero_grad()

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit()
def learned_weights_of_losses(at: At) -> Seen:
    class Weighed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.logs = nn.Parameter(torch.zeros(2))

    net, opt = at.wrap(Weighed(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        o = net(x)
        each = torch.stack([F.cross_entropy(o, y), o.square().mean()])
        return (each * (-net.logs).exp() + net.logs).sum()

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def loss_module_with_parameters(at: At) -> Seen:
    """Centre loss: the centres are another module's, with the same optimizer."""
    net, criterion = Net(), nn.Embedding(7, 7)
    both = nn.ModuleDict({"net": net, "criterion": criterion})
    opt = torch.optim.SGD([*net.parameters(), *criterion.parameters()], 0.1)
    if type(at).__name__ == "Planned":
        import onecard as oc

        oc.parallelize(both, opt, plan=at.plan)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        o = net(x)
        return F.cross_entropy(o, y) + (o - criterion(y)).square().mean()

    seen = loop(at, net, opt, loss_of)
    return at.ended(both, *seen)


@habit()
def groups_decayed(at: At) -> Seen:
    def made(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [
                {"params": [p for p in net.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 0.05},
            ],
            0.02,
            eps=1e-3,
        )

    net, opt = at.wrap(Net(), made)

    def outside(i: int, loss: Any) -> None:
        for g in opt.param_groups:
            g["lr"] *= 0.8

    return at.ended(net, *loop(at, net, opt, outside=outside))


# ---- Hooks


@habit()
def features_by_hook(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    kept: dict[str, Tensor] = {}
    net.blocks[0].register_forward_hook(lambda m, a, out: kept.update(h=out))
    return at.ended(net, *loop(at, net, opt, lambda x, y: F.cross_entropy(net(x), y) + 0.1 * kept["h"].square().mean()))


@habit()
def pre_hook_changes_input(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    net.head.register_forward_pre_hook(lambda m, a: (a[0] * 1.5,))
    return at.ended(net, *loop(at, net, opt))


@habit(calls=True)
def hook_within_forward(at: At) -> Seen:
    class Hooked(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if h.requires_grad:
                h.register_hook(lambda g: 0.5 * g)
            for block in self.blocks:
                h = h + block(h)
            return self.head(self.norm(h))

    net, opt = at.wrap(Hooked(), adamw)
    return at.ended(net, *loop(at, net, opt))


@habit(calls=True)
def hook_normalizes(at: At) -> Seen:
    """Gradients of activations are divided by their norm."""

    class Hooked(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            if h.requires_grad:
                h.register_hook(lambda g: g / (g.norm() + 1e-6))
            for block in self.blocks:
                h = h + block(h)
            return self.head(self.norm(h))

    net, opt = at.wrap(Hooked(), adamw)
    return at.ended(net, *loop(at, net, opt))


WHOLE.add("hook_normalizes")


@habit()
def backward_hook_scales(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    net.blocks[1].register_full_backward_hook(lambda m, gi, go: tuple(0.5 * g for g in gi))
    net.head.register_full_backward_pre_hook(lambda m, go: tuple(2 * g for g in go))
    return at.ended(net, *loop(at, net, opt))


@habit()
def hook_taken_off(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    handle = net.head.register_forward_hook(lambda m, a, o: 1.5 * o)
    held = [handle]

    def outside(i: int, loss: Any) -> None:
        if i == 2:
            held.pop().remove()

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit()
def hook_put_on_later(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def outside(i: int, loss: Any) -> None:
        if i == 2:
            net.first.weight.register_hook(lambda g: 0.1 * g)
            net.blocks[0].register_forward_hook(lambda m, a, o: 1.5 * o)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit()
def gradient_reversal(at: At) -> Seen:
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
            ctx.scale = scale
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return -ctx.scale * g, None

    class Domain(Net):
        scale = 0.1

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            h = self.blocks[0](h) + self.blocks[1](Reverse.apply(h, self.scale))
            return self.head(self.norm(h))

    net, opt = at.wrap(Domain(), adamw)

    def outside(i: int, loss: Any) -> None:
        net.scale += 0.1

    return at.ended(net, *loop(at, net, opt, outside=outside))


# ---- In forward


@habit(calls=True)
def stochastic_depth(at: At) -> Seen:
    class Deep(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            for block in self.blocks:
                if random.random() < 0.7:
                    h = h + block(h)
            return self.head(self.norm(h))

    net, opt = at.wrap(Deep(), adamw)
    return at.ended(net, *loop(at, net, opt))


@habit(calls=True, whole=True)
def vector_quantized(at: At) -> Seen:
    """A codebook that follows means of what chose it, in forward."""

    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.enc, self.dec = nn.Linear(6, 4), nn.Linear(4, 7)
            self.register_buffer("codes", torch.randn(5, 4))
            self.register_buffer("counts", torch.ones(5))

        def forward(self, x: Tensor) -> Tensor:
            z = self.enc(x)
            one = F.one_hot(torch.cdist(z, self.codes).argmin(1), 5).float().detach()
            q = one @ self.codes
            with torch.no_grad():
                self.counts.mul_(0.9).add_(one.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_(0.1 * one.t() @ z.detach() / self.counts[:, None])
            return self.dec(z + (q - z).detach())

    net, opt = at.wrap(Quantized(), adamw)
    seen = loop(at, net, opt)
    return at.ended(net, *seen) | {f"buffer {n}": at.whole(b) for n, b in net.named_buffers()}


@habit(calls=True)
def r_drop(at: At) -> Seen:
    class Dropped(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.dropout(x, 0.3, self.training))

    net, opt = at.wrap(Dropped(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a, b = net(x), net(x)
        return F.cross_entropy(a, y) + F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean")

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def inputs_joined(at: At) -> Seen:
    """Two views in one forward, cut again: rows of the model are twice those of the batch."""
    net, opt = at.wrap(Net(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a, b = net(torch.cat([x, x + 0.1])).chunk(2)
        return F.cross_entropy(a, y) + F.mse_loss(a, b)

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def rows_repeated(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        o = net(x.repeat_interleave(2, 0))
        return F.cross_entropy(o, y.repeat_interleave(2))

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def batch_of_dicts(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def step(batch: dict[str, Any]) -> Any:
        loss = F.cross_entropy(net(batch["x"]), batch["more"][0])
        loss.backward()
        opt.step()
        opt.zero_grad()
        return {"loss": loss.detach()}

    run = at.step(step)
    return at.ended(net, *[at.mean(run({"x": x, "more": [y]})["loss"]) for x, y in at.batches(STEPS)])


@habit(calls=True)
def batch_with_a_table(at: At) -> Seen:
    """A tensor of the batch that has no rows: class weights, given each time."""
    net, opt = at.wrap(Net(), adamw)

    def step(x: Tensor, y: Tensor, w: Tensor) -> Any:
        loss = F.cross_entropy(net(x), y, weight=w)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y, torch.linspace(0.5, 2, 7))) for x, y in at.batches(STEPS)])


@habit(calls=True)
def batch_with_a_table_of_rows(at: At) -> Seen:
    """The same, with as many entries as there are rows."""
    net, opt = at.wrap(Net(), adamw)

    def step(x: Tensor, y: Tensor, w: Tensor) -> Any:
        o = net(x)
        loss = F.cross_entropy(torch.cat([o, o[:, :1]], 1), y, weight=w)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y, torch.linspace(0.5, 2, 8))) for x, y in at.batches(STEPS)])


@habit(calls=True)
def losses_logged(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    log: list[Tensor] = []

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        log.append(loss.detach())
        return loss

    seen = loop(at, net, opt, loss_of)
    return at.ended(net, *seen, *[at.mean(v) for v in log])


@habit(calls=True)
def moving_loss(at: At) -> Seen:
    """A loss that is divided by its own moving average, a tensor in an attribute."""
    net, opt = at.wrap(Net(), adamw)
    held = SimpleNamespace(mean=torch.tensor(1.0))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        held.mean = 0.9 * held.mean + 0.1 * loss.detach()
        return loss / held.mean

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def memory_of_outputs(at: At) -> Seen:
    """The last outputs, in a deque."""
    net, opt = at.wrap(Net(), adamw)
    kept: deque[Tensor] = deque(maxlen=2)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        o = net(x)
        loss = F.cross_entropy(o, y)
        for k in kept:
            loss = loss + 0.1 * F.mse_loss(o, k)
        kept.append(o.detach())
        return loss

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def masks_of_pruning(at: At) -> Seen:
    """Weights are masked after each step; masks follow magnitudes."""
    net, opt = at.wrap(Net(), adamw)

    def after() -> None:
        with torch.no_grad():
            for p in net.parameters():
                if p.dim() > 1:
                    p.mul_((p.abs() > p.abs().flatten().median()).float())

    return at.ended(net, *loop(at, net, opt, after=after))


@habit(calls=True)
def quantization_aware(at: At) -> Seen:
    class Fake(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            scale = h.detach().abs().amax(1, keepdim=True) / 7 + 1e-3
            return h + ((h / scale).round() * scale - h).detach()

    net, opt = at.wrap(Fake(), sgd)
    return at.ended(net, *loop(at, net, opt))


@habit()
def contexts_in_step(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    sync: Any = getattr(net, "no_sync", nullcontext)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with nullcontext(), torch.enable_grad():
            return F.cross_entropy(net(x), y)

    del sync
    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def tied_in_forward(at: At) -> Seen:
    class Tied(Words):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.first(self.table(x))), self.table.weight)

    net, opt = at.wrap(Tied(), adamw)
    return at.ended(net, *loop(at, net, opt, token_loss(net), batches=texts(at)))


WHOLE.add("tied_in_forward")


@habit(calls=True)
def flooding_by_python(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        if loss.item() > 1.9:
            loss = 0.5 * loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


@habit(calls=True)
def rate_of_batch(at: At) -> Seen:
    """The rate follows the batch's size, in the step."""
    net, opt = at.wrap(Net(), sgd)

    def between() -> None:
        pass

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        for g in opt.param_groups:
            g["lr"] = 0.02 * len(x)
        return F.cross_entropy(net(x), y)

    return at.ended(net, *loop(at, net, opt, loss_of, between))


WHOLE.add("rate_of_batch")


@habit(calls=True)
def weights_penalized(at: At) -> Seen:
    """A penalty on weights that does not depend on the batch."""
    net, opt = at.wrap(Net(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y) + 1e-2 * sum(p.square().sum() for p in net.parameters())

    return at.ended(net, *loop(at, net, opt, loss_of))


@habit(calls=True)
def elastic_weights(at: At) -> Seen:
    """EWC: distances to weights that were kept, as plain tensors in a dict."""
    net, opt = at.wrap(Net(), adamw)
    old = {n: p.detach().clone() + 0.1 for n, p in net.named_parameters()}

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        far = sum((p - old[n]).square().sum() for n, p in net.named_parameters())
        return F.cross_entropy(net(x), y) + 0.1 * far

    return at.ended(net, *loop(at, net, opt, loss_of))


CLOSE |= dict.fromkeys(("cumulative", "listwise"), 3e-4)
CLOSE |= dict.fromkeys(("barlow", "correlation", "mmd", "triplet_hard"), 1e-3)
"""A bias that every row has alike has a gradient of rounding alone there, which AdamW makes as large as another."""


@habit(calls=True)
def momentum_by_get(at: At) -> Seen:
    """A dict that the first step fills."""
    net, opt = at.wrap(Net(), sgd)
    kept: dict[str, Tensor] = {}

    def between() -> None:
        for n, p in net.named_parameters():
            if p.grad is not None:
                kept[n] = 0.5 * kept.get(n, torch.zeros_like(p)) + p.grad.detach()
                p.grad.copy_(kept[n])

    return at.ended(net, *loop(at, net, opt, between=between))
