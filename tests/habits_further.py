"""More habits of training loops (see `habits_levels`): memory, layers made late, states edited, what steps and hooks do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from habits_levels import (
    HABITS,
    LEVELS,
    NO_GRAPH,
    NO_SENSE,
    PIPELINES,
    REFUSED,
    STAGES,
    At,
    Level,
    Net,
    Seen,
    adamw,
    habit,
    muon,
    rest,
    sgd,
    trained,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, prune, vector_to_parameters
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint


def with_block(kind: Callable[..., nn.Module]) -> Any:
    """A net whose first block is another one of the same layers."""
    net: Any = Net()
    net.blocks[0] = kind(*net.blocks[0])
    return net


# ---- What autograd keeps


class OnTheHost(nn.Sequential):
    def forward(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(h)


class Packed(nn.Sequential):
    """What is saved for backward is kept in another form."""

    def forward(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.double(), lambda x: x.float()):
            return super().forward(h)


class Compressed(nn.Sequential):
    """The same, with a loss that gradients show."""

    def forward(self, h: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (x * 16).round(), lambda x: x / 16):
            return super().forward(h)


class Reentrant(nn.Sequential):
    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(super().forward, h, use_reentrant=True)


@habit
def saved_on_the_host(at: At) -> Seen:
    net, opt = at.wrap(with_block(OnTheHost), adamw)
    return at.ended(net, *trained(at, net, opt))


@habit
def saved_in_another_form(at: At) -> Seen:
    net, opt = at.wrap(with_block(Packed), adamw)
    return at.ended(net, *trained(at, net, opt))


@habit
def saved_compressed(at: At) -> Seen:
    net, opt = at.wrap(with_block(Compressed), adamw)
    return at.ended(net, *trained(at, net, opt))


@habit
def reentrant_block(at: At) -> Seen:
    net, opt = at.wrap(with_block(Reentrant), adamw)
    return at.ended(net, *trained(at, net, opt))


# ---- Layers that are made, or put together, otherwise


class Listed(nn.Module):
    """Parameters in a list and a dict."""

    def __init__(self, first: nn.Linear, act: nn.Module, last: nn.Linear) -> None:
        super().__init__()
        self.weights = nn.ParameterList([first.weight, last.weight])
        self.biases = nn.ParameterDict({"first": first.bias, "last": last.bias})

    def forward(self, h: Tensor) -> Tensor:
        h = torch.tanh(h @ self.weights[0].t() + self.biases["first"])
        return h @ self.weights[1].t() + self.biases["last"]


@habit
def parameters_in_lists(at: At) -> Seen:
    net, opt = at.wrap(with_block(Listed), adamw)
    return at.ended(net, *trained(at, net, opt))


def lazy() -> Any:
    net: Any = Net()
    net.blocks[0][0] = nn.LazyLinear(9)
    return net


@habit
def lazy_layer_made_first(at: At) -> Seen:
    net = lazy()
    net(torch.zeros(2, 6))
    net, opt = at.wrap(net, adamw)
    return at.ended(net, *trained(at, net, opt))


@habit
def lazy_layer(at: At) -> Seen:
    """Its parameters come to be in the first forward, after optimizers were made of them."""
    net, opt = at.wrap(lazy(), sgd)
    torch.manual_seed(3)
    return at.ended(net, *trained(at, net, opt))


class Positive(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.abs() + 0.1 * w


@habit
def parametrized_block(at: At) -> Seen:
    net: Any = Net()
    parametrize.register_parametrization(net.blocks[0][0], "weight", Positive())
    net, opt = at.wrap(net, adamw)
    return at.ended(net, *trained(at, net, opt))


@habit
def orthogonal_head(at: At) -> Seen:
    net: Any = Net()
    parametrizations.orthogonal(net.head, "weight")
    net, opt = at.wrap(net, sgd)
    return at.ended(net, *trained(at, net, opt))


@habit
def parametrized_later(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    seen = trained(at, net, opt, steps=2)
    parametrize.register_parametrization(net.blocks[0][0], "weight", Positive())
    return at.ended(net, *seen, *trained(at, net, opt))


@habit
def parametrization_taken_off(at: At) -> Seen:
    net: Any = Net()
    parametrize.register_parametrization(net.blocks[0][0], "weight", Positive())
    net, opt = at.wrap(net, sgd)
    seen = trained(at, net, opt, steps=2)
    parametrize.remove_parametrizations(net.blocks[0][0], "weight")
    return at.ended(net, *seen, *trained(at, net, opt))


@habit
def pruned_block(at: At) -> Seen:
    net: Any = Net()
    prune.l1_unstructured(net.blocks[0][0], "weight", amount=0.3)
    net, opt = at.wrap(net, sgd)
    return at.ended(net, *trained(at, net, opt))


@habit
def pruned_between(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    seen = trained(at, net, opt, steps=2)
    prune.l1_unstructured(net.blocks[0][0], "weight", amount=0.3)
    return at.ended(net, *seen, *trained(at, net, opt, steps=2))


@habit
def pruning_made_permanent(at: At) -> Seen:
    net: Any = Net()
    prune.l1_unstructured(net.blocks[0][0], "weight", amount=0.3)
    net, opt = at.wrap(net, sgd)
    seen = trained(at, net, opt, steps=2)
    prune.remove(net.blocks[0][0], "weight")
    return at.ended(net, *seen, *trained(at, net, opt, steps=2))


@habit
def tied_later(at: At) -> Seen:
    """One parameter for two layers, from the third step on."""
    net: Any = Net()
    net.blocks[1][2] = nn.Linear(9, 7)
    net, opt = at.wrap(net, sgd)
    seen = trained(at, net, opt, steps=2)
    net.blocks[1][2].weight = net.blocks[0][2].weight
    return at.ended(net, *seen, *trained(at, net, opt, steps=2))


@habit
def parameter_added(at: At) -> Seen:
    """A layer gets one more parameter, and the optimizer a group for it."""
    net, opt = at.wrap(Net(), sgd)
    seen = trained(at, net, opt, steps=2)
    scale = nn.Parameter(torch.ones_like(net.norm.bias.detach()))
    net.norm.register_parameter("scale", scale)
    net.norm.register_forward_hook(lambda m, args, made: made * m.scale)
    opt.add_param_group({"params": [scale], "lr": 0.1})
    return at.ended(net, *seen, *trained(at, net, opt))


@habit
def converted_later(at: At) -> Seen:
    net, opt = at.wrap(Net(), lambda net: torch.optim.SGD(net.parameters(), 0.2))
    seen = trained(at, net, opt, steps=2)
    net.double()
    return at.ended(net, *seen, *trained(at, net, opt, batches=((x.double(), y) for x, y in at.batches(2))))


@habit
def compiled_model(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    made: Any = torch.compile(net, backend="eager")
    for x, y in at.batches():
        cross_entropy(made(x), y).backward()
        opt.step()
        opt.zero_grad()
    return at.ended(net)


@habit
def compiled_in_place(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    net.compile(backend="eager")
    return at.ended(net, *trained(at, net, opt))


@habit
def compiled_block(at: At) -> Seen:
    net: Any = Net()
    net.blocks[0].compile(backend="eager")
    net, opt = at.wrap(net, adamw)
    return at.ended(net, *trained(at, net, opt))


# ---- Averages


@habit
def averaged_model(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    average = swa_utils.AveragedModel(net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8))
    seen = trained(at, net, opt, outside=lambda i, _: average.update_parameters(net))
    return at.ended(net, *seen) | {f"average {k}": v for k, v in at.ended(average.module).items()}


@habit
def averaged_and_taken(at: At) -> Seen:
    """Stochastic weight averaging: the average is the model of the last steps."""
    net, opt = at.wrap(Net(), sgd)
    average = swa_utils.AveragedModel(net)
    sched = swa_utils.SWALR(opt, swa_lr=0.05, anneal_epochs=2)
    seen = trained(at, net, opt, outside=lambda i, _: (average.update_parameters(net), sched.step()))
    net.load_state_dict(average.module.state_dict())
    return at.ended(net, *seen, *trained(at, net, opt, steps=2))


@habit
def as_one_vector(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def outside(i: int, loss: Tensor) -> None:
        vector_to_parameters(0.9 * parameters_to_vector(net.parameters()), net.parameters())

    return at.ended(net, *trained(at, net, opt, outside=outside))


# ---- Freezing, groups, rates, states


@habit
def thawed_by_and_by(at: At) -> Seen:
    """From the last layer to the first, one more at each step."""
    net, opt = at.wrap(Net(), adamw)
    parts = [net.first, net.blocks[0], net.blocks[1], net.norm]
    for part in parts:
        part.requires_grad_(False)

    def outside(i: int, loss: Tensor) -> None:
        if parts:
            parts.pop().requires_grad_(True)

    return at.ended(net, *trained(at, net, opt, outside=outside, steps=5))


@habit
def toggled_each_step(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def outside(i: int, loss: Tensor) -> None:
        net.blocks[0].requires_grad_(i % 2 == 1)
        net.blocks[1].requires_grad_(i % 2 == 0)

    return at.ended(net, *trained(at, net, opt, outside=outside, steps=5))


@habit
def group_added(at: At) -> Seen:
    net: Any = Net()
    net.first.requires_grad_(False)
    net, opt = at.wrap(
        net, lambda net: torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.02, eps=1e-3)
    )
    seen = trained(at, net, opt, steps=2)
    net.first.requires_grad_(True)
    if mine := [*net.first.parameters()]:
        opt.add_param_group({"params": mine, "lr": 0.01})
    return at.ended(net, *seen, *trained(at, net, opt))


@habit
def schedules_in_turn(at: At) -> Seen:
    """The scheduler's state is kept and put back on the way."""
    net, opt = at.wrap(Net(), sgd)
    warm = lr_scheduler.LinearLR(opt, 0.1, total_iters=2)
    sched = lr_scheduler.SequentialLR(opt, [warm, lr_scheduler.CosineAnnealingLR(opt, 4)], [2])

    def outside(i: int, loss: Tensor) -> None:
        sched.step()
        if i == 2:
            sched.load_state_dict(copy.deepcopy(sched.state_dict()))

    return at.ended(net, *trained(at, net, opt, outside=outside, steps=5))


@habit
def on_plateau(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    sched = lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5, threshold=0.2)
    return at.ended(net, *trained(at, net, opt, outside=lambda i, loss: sched.step(float(loss)), steps=5))


@habit
def rate_in_a_tensor(at: At) -> Seen:
    net, opt = at.wrap(Net(), lambda net: torch.optim.AdamW(net.parameters(), torch.tensor(0.02), eps=1e-3))
    return at.ended(net, *trained(at, net, opt, outside=lambda i, _: opt.param_groups[0]["lr"].mul_(0.5), steps=5))


@habit
def moments_reset(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def outside(i: int, loss: Tensor) -> None:
        for state in opt.state.values() if i == 2 else ():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].mul_(0.5)
            state["step"].fill_(1.0)

    return at.ended(net, *trained(at, net, opt, outside=outside, steps=5))


@habit
def moments_replaced(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)

    def outside(i: int, loss: Tensor) -> None:
        for state in opt.state.values() if i == 2 else ():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])

    return at.ended(net, *trained(at, net, opt, outside=outside, steps=5))


@habit
def optimizer_rewound(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    seen = trained(at, net, opt, steps=2)
    kept = copy.deepcopy(opt.state_dict())
    seen += trained(at, net, opt, steps=2)
    opt.load_state_dict(kept)
    return at.ended(net, *seen, *trained(at, net, opt, steps=2))


@habit
def both_states_rewound(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    seen = trained(at, net, opt, steps=2)
    kept = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
    seen += trained(at, net, opt, steps=2)
    opt.load_state_dict(kept[0])
    net.load_state_dict(kept[1])
    return at.ended(net, *seen, *trained(at, net, opt, steps=2))


# ---- Losses and batches


def batches_of(at: At, sizes: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(7)
    for n in sizes:
        x, y = torch.randn(n, 6, generator=made), torch.randint(7, (n,), generator=made)
        yield at.data(x), at.data(y)


@habit
def batches_of_other_sizes(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    return at.ended(net, *trained(at, net, opt, batches=batches_of(at, (8, 16, 8, 24, 16))))


def _weighted(at: At) -> Iterator[tuple[Tensor, Any]]:
    made = torch.Generator().manual_seed(7)
    for x, y in at.batches(4):
        yield x, (y, at.data(torch.rand(8, generator=made)))


def weighted_rows(out: Tensor, given: Any) -> Tensor:
    return (cross_entropy(out, given[0], reduction="none") * given[1]).mean()


@habit
def rows_with_weights(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    return at.ended(net, *trained(at, net, opt, loss_fn=weighted_rows, batches=_weighted(at)))


def weighted_mean(out: Tensor, given: Any) -> Tensor:
    return (cross_entropy(out, given[0], reduction="none") * given[1]).sum() / given[1].sum()


@habit
def mean_with_weights(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    return at.ended(net, *trained(at, net, opt, loss_fn=weighted_mean, batches=_weighted(at)))


def counted_by_hand(out: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(out, y, ignore_index=-100, reduction="sum") / (y != -100).sum()


@habit
def labels_counted_by_hand(at: At) -> Seen:
    ignored = torch.tensor([0, 1, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
    net, opt = at.wrap(Net(), sgd)
    batches = ((x, torch.where(at.data(ignored), -100, y)) for x, y in at.batches())
    return at.ended(net, *trained(at, net, opt, loss_fn=counted_by_hand, batches=batches))


@habit
def two_losses_in_turn(at: At) -> Seen:
    """Two passes before a step, of which the second has another loss."""
    net, opt = at.wrap(Net(), adamw)
    seen = []
    for x, y in at.batches():
        a = at.backward(net, x, y)
        b = at.backward(net, x, y, lambda out, y: 0.3 * out.square().mean())
        opt.step()
        opt.zero_grad()
        seen += [at.mean(a), at.mean(b)]
    return at.ended(net, *seen)


@habit
def graph_kept(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    for x, y in at.batches():
        loss = at.loss(net, x, y)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        opt.step()
        opt.zero_grad()
    return at.ended(net)


@habit
def scaled_by_hand(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def unscale() -> None:
        for p in net.parameters():
            if p.grad is not None:
                p.grad.div_(64.0)

    seen = trained(at, net, opt, between=unscale, loss_fn=lambda out, y: 64.0 * cross_entropy(out, y))
    return at.ended(net, *seen)


@habit
def norm_of_gradients(at: At) -> Seen:
    """The norm of the loss's gradient is part of the loss."""
    net, opt = at.wrap(Net(), sgd)
    for x, y in at.batches():
        loss = at.loss(net, x, y)
        params = [p for n, p in net.named_parameters() if "unused" not in n]
        slopes = torch.autograd.grad(loss, params, create_graph=True)
        (loss + 0.1 * sum(g.square().sum() for g in slopes)).backward()
        opt.step()
        opt.zero_grad()
    return at.ended(net)


@habit
def curvature(at: At) -> Seen:
    """A product of the Hessian and a direction, by which each gradient is divided."""
    net, opt = at.wrap(Net(), sgd)
    for x, y in at.batches():
        params = [p for n, p in net.named_parameters() if "unused" not in n]
        slopes = torch.autograd.grad(at.loss(net, x, y), params, create_graph=True)
        directions = [torch.ones_like(p) for p in params]
        curved = torch.autograd.grad(slopes, params, directions)
        for p, g, h in zip(params, slopes, curved, strict=True):
            p.grad = g.detach() / (1.0 + h.abs())
        opt.step()
        opt.zero_grad()
    return at.ended(net)


# ---- Hooks, functions of one's own


class Scaled(torch.autograd.Function):
    """Backward takes a number of Python from the module, and counts."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, module: Any) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(h)
        return h.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        (h,) = ctx.saved_tensors
        return slope * ctx.module.factor * (h.abs() < 1.0), None


class WithState(nn.Sequential):
    factor = 1.0

    def forward(self, h: Tensor) -> Tensor:
        return Scaled.apply(super().forward(h), self)


@habit
def function_with_state(at: At) -> Seen:
    net, opt = at.wrap(with_block(WithState), adamw)

    def outside(i: int, loss: Tensor) -> None:
        net.blocks[0].factor = 0.5 / (i + 1)

    return at.ended(net, *trained(at, net, opt, outside=outside, steps=5))


class HookOnValue(nn.Sequential):
    def forward(self, h: Tensor) -> Tensor:
        h = super().forward(h)
        if h.requires_grad:
            h.register_hook(lambda g: 0.3 * g)
        return h


@habit
def hook_on_a_value(at: At) -> Seen:
    net, opt = at.wrap(with_block(HookOnValue), adamw)
    return at.ended(net, *trained(at, net, opt))


@habit
def hook_before_backward(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    net.head.register_full_backward_pre_hook(lambda m, made: tuple(0.5 * g for g in made))
    return at.ended(net, *trained(at, net, opt))


@habit
def hooks_after_steps(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    @torch.no_grad()
    def clamp(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.clamp_(-0.2, 0.2)

    opt.register_step_post_hook(clamp)
    return at.ended(net, *trained(at, net, opt))


@habit
def rows_kept_by_a_mask(at: At) -> Seen:
    """A hook with a tensor of its own: some rows are not trained."""
    net, opt = at.wrap(Net(), sgd)
    for p in net.parameters():
        mask = torch.ones(p.shape)
        mask[0] = 0.0
        p.register_hook(lambda g, mask=mask: g * mask)
    return at.ended(net, *trained(at, net, opt))


@habit
def noise_of_a_generator(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    made = torch.Generator().manual_seed(4)
    noise = {n: 0.01 * torch.randn(p.shape, generator=made) for n, p in Net().named_parameters()}

    def between() -> None:
        for n, p in net.named_parameters():
            if p.grad is not None:
                p.grad.add_(noise[n])

    return at.ended(net, *trained(at, net, opt, between=between))


@habit
def gradient_of_a_row_zeroed(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def between() -> None:
        for p in net.parameters():
            if p.grad is not None:
                p.grad[0] = 0.0

    return at.ended(net, *trained(at, net, opt, between=between))


# ---- Weights of another kind


@habit
def own_wide_weights(at: At) -> Seen:
    """Wide copies are trained, by hand, and written back."""
    held: list[Any] = []

    def make(net: nn.Module) -> torch.optim.Optimizer:
        held.extend((p, p.detach().double().clone().requires_grad_(True)) for p in net.parameters())
        return torch.optim.AdamW([wide for _, wide in held], 0.02, eps=1e-3)

    net, opt = at.wrap(Net(), make)

    def before(*_: Any) -> None:
        for p, wide in held:
            wide.grad = None if p.grad is None else p.grad.double()

    @torch.no_grad()
    def after(*_: Any) -> None:
        for p, wide in held:
            p.copy_(wide)
            p.grad = None

    return at.ended(net, *trained(at, net, opt, between=before, after=after))


@habit
def closure_with_penalty(at: At) -> Seen:
    """ZeRO's weights are distributed tensors, and so is a loss that they are added to: its mean is of all ranks' data."""
    net, opt = at.wrap(Net(), sgd)
    losses = []
    for x, y in at.batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            loss = at.loss(net, x, y) + 0.05 * sum(p.square().sum() for p in net.parameters())
            loss.backward()
            return loss.detach()

        losses.append(at.mean(opt.step(closure)))
    return at.ended(net, *losses)


@habit
def other_mode_later(at: At) -> Seen:
    """``eval`` in the middle of training: dropout ends."""
    net: Any = Net()
    net.blocks[0][1] = nn.Dropout(1.0)
    net, opt = at.wrap(net, adamw)

    def outside(i: int, loss: Tensor) -> None:
        if i == 1:
            net.eval()
        if i == 3:
            net.train()

    return at.ended(net, *trained(at, net, opt, outside=outside, steps=5))


@habit
def layer_exchanged_in_evaluation(at: At) -> Seen:
    """A head takes the place of another one while the model is in evaluation, and is trained in that mode."""
    net, opt = at.wrap(Net(), sgd)
    seen = trained(at, net, opt, steps=2)
    net.eval()
    torch.manual_seed(9)
    net.head = at.beside(nn.Linear(7, 7, bias=False))
    own = torch.optim.SGD(net.parameters(), 0.1)
    return at.ended(net, *seen, *trained(at, net, own))


@habit
def two_optimizers_in_turn(at: At) -> Seen:
    """One of two optimizers steps at odd batches, both gradients are cleared."""
    net, a, b = at.wrap(Net(), muon, rest)
    for i, (x, y) in enumerate(at.batches(4)):
        at.backward(net, x, y)
        (a if i % 2 else b).step()
        net.zero_grad()
    return at.ended(net)


# ---- What levels refuse

FURTHER = tuple(name for name, made in HABITS.items() if made.__module__ == __name__)
_HANDS = tuple(level for level in LEVELS if isinstance(LEVELS[level.removesuffix(" recorded")](), Level))
_SHARDED = tuple(level for level in _HANDS if not level.startswith("dp"))
_BY_MARKS = tuple(level for level in LEVELS if level not in (*_HANDS, *PIPELINES))
_GATHERED = ("p_g_os", "p_g_os blocks", "p_g_os kept")
_EXCHANGED = "is (set|removed) after group_sharded_parallel"
_CUT_BLOCKS = ("plan ZeRO 3", "ZeRO 3 blocks", "ZeRO 3 blocks recorded")
_ADDED = "parametrized_later parametrization_taken_off pruned_between pruning_made_permanent tied_later parameter_added"
_TABLE: list[tuple[str, tuple[str, ...], str]] = [
    ("lazy_layer", (*_BY_MARKS, *_HANDS), "has no shape before its first forward"),
    ("compiled_model compiled_in_place", _BY_MARKS, "cannot trace distributed tensors"),
    ("compiled_in_place compiled_block", _GATHERED, "cannot trace distributed tensors"),
    ("norm_of_gradients curvature", _HANDS, "create_graph=True"),
    ("norm_of_gradients curvature graph_kept", (*PIPELINES, *STAGES[1:]), NO_GRAPH),
    ("norm_of_gradients tied_later as_one_vector", STAGES[:1], "operands live on two meshes"),
    ("closure_with_penalty", STAGES, "operands live on two meshes"),
    ("tied_later as_one_vector", STAGES[1:], "operands live on two meshes"),
    (f"{_ADDED} layer_exchanged_in_evaluation", _SHARDED, "is (set|removed) after group_sharded_parallel"),
    ("converted_later", (*_SHARDED, *_CUT_BLOCKS), "is now .*float64|would become .*float64|keeps its dtype"),
    ("own_wide_weights", (*_SHARDED, "plan ZeRO 3"), "are not the model's|holds plain parameters only"),
    ("orthogonal_head", ("plan tp",), "Net has no such parameter"),
    ("batches_of_other_sizes", PIPELINES, "is not accumulate_steps"),
]
REFUSED |= {(name, level): words for names, levels, words in _TABLE for name in names.split() for level in levels}
NO_SENSE |= {("closure_with_penalty", level): "a rank's penalty is of its own stage's weights" for level in PIPELINES}
NO_SENSE |= {("layer_exchanged_in_evaluation", level): "the new layer is on no mesh" for level in STAGES}
_ONE_RANK = "one rank has the layer, and refuses it for all: its end is theirs"
NO_SENSE |= {
    **{
        (name, level): "a rank's mean over its own rows"
        for level in _HANDS
        for name in ("mean_with_weights", "labels_counted_by_hand")
    },
    **{
        (name, level): _ONE_RANK if name == "lazy_layer" else "the list of layers is the model"
        for level in PIPELINES
        for name in ("lazy_layer", "tied_later", "layer_exchanged_in_evaluation", "compiled_model", "compiled_in_place")
    },
}
