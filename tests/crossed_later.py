"""More habits of other libraries' users (see `crossed_habits`): optimizers that evaluate elsewhere, what changes in mid-run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from crossed_habits import STEPS, Words, habit, loop, texts
from habits_levels import At, LoRA, Net, Seen, adamw, sgd
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint


class ScheduleFree(torch.optim.Optimizer):
    """As Defazio et al. have it: parameters are interpolated between an average and what is stepped; evaluated at the average.

    Source: https://arxiv.org/abs/2405.15682.
    """

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    @torch.no_grad()
    def _moved(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], 1 - group["beta"] if training else 1 - 1 / group["beta"])
                group["training"] = training

    def train(self) -> None:
        self._moved(True)

    def eval(self) -> None:
        self._moved(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            share, lr, beta = 1 / (group["k"] + 1), group["lr"], group["beta"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.detach().clone())
                    p.lerp_(z, share)
                    p.add_(p.grad, alpha=lr * (beta * (1 - share) - 1))
                    z.sub_(p.grad, alpha=lr)
            group["k"] += 1


@habit()
def schedule_free(at: At) -> Seen:
    net, opt = at.wrap(Net(), lambda net: ScheduleFree(net.parameters()))
    seen = loop(at, net, opt)
    opt.eval()
    there = {f"evaluated {n}": at.whole(p) for n, p in net.named_parameters()}
    opt.train()
    return at.ended(net, *seen, *loop(at, net, opt, steps=2)) | there


@habit()
def schedule_free_evaluated(at: At) -> Seen:
    """The model is called with the averaged parameters after each step."""
    net, opt = at.wrap(Net(), lambda net: ScheduleFree(net.parameters()))
    held: list[Tensor] = []
    x0, y0 = next(at.batches(1))

    def outside(i: int, loss: Any) -> None:
        net.eval()
        opt.eval()
        with torch.no_grad():
            held.append(at.mean(F.cross_entropy(net(x0), y0)))
        net.train()
        opt.train()

    return at.ended(net, *loop(at, net, opt, outside=outside), *held)


@habit()
def sam_by_an_optimizer(at: At) -> Seen:
    """Two backward passes; the weights in between are perturbed by the norm of all gradients, and put back from a copy."""
    net, opt = at.wrap(Net(), adamw)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None])
        with torch.no_grad():
            old = {n: p.detach().clone() for n, p in net.named_parameters() if p.grad is not None}
            for p in net.parameters():
                if p.grad is not None:
                    p.add_(p.grad * (0.05 / (norm + 1e-12)))
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for n, p in net.named_parameters():
                if n in old:
                    p.copy_(old[n])
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run = at.step(step)
    return at.ended(net, *[at.mean(run(x, y)) for x, y in at.batches(STEPS)])


class Checkpointed(Net):
    """Blocks run again in backward, with no state of the generator kept."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.at_stage(0, x))
        for i, block in enumerate(self.blocks):
            h = self.at_stage(i, h)
            h = h + checkpoint(block, h, use_reentrant=False, preserve_rng_state=False)
        return self.head(self.norm(h))


@habit()
def checkpointed_without_states(at: At) -> Seen:
    net, opt = at.wrap(Checkpointed(), adamw)
    return at.ended(net, *loop(at, net, opt))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(0, 1)


@habit(calls=True)
def parametrized_head(at: At) -> Seen:
    net: Any = Net()
    parametrize.register_parametrization(net.head, "weight", Symmetric())
    net, opt = at.wrap(net, adamw)
    return at.ended(net, *loop(at, net, opt))


@habit(whole=True)
def averaged_with_statistics(at: At) -> Seen:
    """``AveragedModel`` and ``update_bn`` over the batches."""
    net: Any = Net()
    net.norm = nn.BatchNorm1d(7)
    net, opt = at.wrap(net, adamw)
    average = swa_utils.AveragedModel(net)
    seen = loop(at, net, opt, outside=lambda i, _: average.update_parameters(net))
    swa_utils.update_bn([x for x, _ in at.batches(2)], average)
    statistics = {f"average {n}": at.whole(b) for n, b in average.module.named_buffers() if "running" in n}
    return at.ended(net, *seen) | {f"average {k}": v for k, v in at.ended(average.module).items()} | statistics


@habit()
def clipped_by_value(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    return at.ended(net, *loop(at, net, opt, between=lambda: nn.utils.clip_grad_value_(net.parameters(), 0.02)))


@habit(calls=True)
def noise_in_a_hook(at: At) -> Seen:
    """A hook of each gradient adds noise to it, one seed for each."""
    net, opt = at.wrap(Net(), sgd)
    for i, (_, p) in enumerate(net.named_parameters()):
        made = torch.Generator().manual_seed(i)
        noise = 0.01 * torch.randn(p.shape, generator=made)
        p.register_hook(lambda g, noise=noise: g + noise)
    return at.ended(net, *loop(at, net, opt))


@habit()
def rates_by_layer(at: At) -> Seen:
    """A rate for each layer, changed at each step."""
    net, opt = at.wrap(
        Net(), lambda net: torch.optim.AdamW([{"params": [p], "lr": 0.02} for p in net.parameters()], eps=1e-3)
    )

    def outside(i: int, loss: Any) -> None:
        for depth, group in enumerate(opt.param_groups):
            group["lr"] = 0.02 * 0.8**depth * (1 - 0.1 * i)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit()
def stopped_by_the_loss(at: At) -> Seen:
    """Patience over ``loss.item()``."""
    net, opt = at.wrap(Net(), adamw)
    best, bad, seen = float("inf"), 0, list[Any]()
    while bad < 2 and len(seen) < 8:
        (found,) = loop(at, net, opt, batches=[[*at.batches(len(seen) + 1)][-1]])
        value = found.item()
        best, bad = (value, 0) if value < best else (best, bad + 1)
        seen.append(found)
    return at.ended(net, *seen)


@habit()
def longer_and_longer(at: At) -> Seen:
    """A curriculum: sentences grow."""
    net, opt = at.wrap(Words(), adamw)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        made = net(x)
        return F.cross_entropy(made.flatten(0, 1), x.flatten())

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield from texts(at, steps=6, lengths=(3, 3, 4, 4, 6, 6))

    return at.ended(net, *loop(at, net, opt, loss_of, batches=batches()))


@habit(whole=True)
def smoothed_with_weights(at: At) -> Seen:
    weight = torch.linspace(0.5, 2.0, 7)
    net, opt = at.wrap(Net(), adamw)
    return at.ended(
        net, *loop(at, net, opt, lambda x, y: F.cross_entropy(net(x), y, weight=weight, label_smoothing=0.1))
    )


@habit(calls=True)
def pruned(at: At) -> Seen:
    """Masks of ``nn.utils.prune``, put on before training and made permanent after it."""
    net: Any = Net()
    prune.l1_unstructured(net.first, "weight", amount=0.3)
    prune.random_structured(net.blocks[0][0], "weight", amount=2, dim=0)
    net, opt = at.wrap(net, adamw)
    seen = loop(at, net, opt)
    return at.ended(net, *seen)


@habit(calls=True)
def pruned_later(at: At) -> Seen:
    """A layer is pruned in mid-run."""
    net, opt = at.wrap(Net(), sgd)
    seen = loop(at, net, opt, steps=2)
    prune.l1_unstructured(net.head, "weight", amount=0.3)
    return at.ended(net, *seen, *loop(at, net, opt, steps=2))


@habit(calls=True)
def low_rank_later(at: At) -> Seen:
    """Small layers are put around a model's that is laid out already, and trained by an optimizer of their own."""
    net, opt = at.wrap(Net(), sgd)
    seen = loop(at, net, opt, steps=2)
    net.requires_grad_(False)
    torch.manual_seed(2)
    net.first, net.head = LoRA(net.first), LoRA(net.head)
    own = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.05, eps=1e-3)
    return at.ended(net, *seen, *loop(at, net, own, steps=3))


@habit(calls=True)
def group_added(at: At) -> Seen:
    """Thawed layers come to the optimizer in mid-run."""
    net: Any = Net()
    net.first.requires_grad_(False)
    net, opt = at.wrap(
        net, lambda net: torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.02, eps=1e-3)
    )
    seen = loop(at, net, opt, steps=2)
    net.first.requires_grad_(True)
    opt.add_param_group({"params": [*net.first.parameters()], "lr": 0.01})
    return at.ended(net, *seen, *loop(at, net, opt, steps=3))


@habit()
def frozen_later(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def outside(i: int, loss: Any) -> None:
        if i == 2:
            net.first.requires_grad_(False)
            net.blocks[0].requires_grad_(False)

    return at.ended(net, *loop(at, net, opt, outside=outside))


@habit()
def decay_by_name(at: At) -> Seen:
    def make(net: nn.Module) -> torch.optim.Optimizer:
        plain = [p for n, p in net.named_parameters() if n.endswith("bias") or "norm" in n]
        rest = [p for n, p in net.named_parameters() if not (n.endswith("bias") or "norm" in n)]
        return torch.optim.AdamW(
            [{"params": rest, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], 0.02, eps=1e-3
        )

    net, opt = at.wrap(Net(), make)
    return at.ended(net, *loop(at, net, opt))


class Lookahead:
    """A wrapper that is no optimizer: every second step the slow weights go half the way, and are copied back."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt, self.steps, self.slow = opt, 0, dict[Any, Tensor]()

    @torch.no_grad()
    def done(self) -> None:
        params = [p for group in self.opt.param_groups for p in group["params"]]
        self.slow = self.slow or {p: p.detach().clone() for p in params}
        self.steps += 1
        if self.steps % 2 == 0:
            for p in params:
                self.slow[p].lerp_(p.detach(), 0.5)
                p.copy_(self.slow[p])


@habit()
def lookahead_around(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    around = Lookahead(opt)
    return at.ended(net, *loop(at, net, opt, outside=lambda i, _: around.done()))


@habit()
def centralised_by_a_hook(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    for p in net.parameters():
        if p.dim() > 1:
            p.register_hook(lambda g: g - g.mean(1, keepdim=True))
    return at.ended(net, *loop(at, net, opt))


@habit(calls=True)
def compiled_in_the_loss(at: At) -> Seen:
    """A function of the step is compiled, no module."""
    net, opt = at.wrap(Net(), adamw)

    @torch.compile(backend="eager")
    def loss_of(made: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(made, y) + 0.01 * made.square().mean()

    return at.ended(net, *loop(at, net, opt, lambda x, y: loss_of(net(x), y)))
