"""Habits of training loops, each a function of a level's way to make a model and its optimizers parallel.

A habit is an ordinary one-card program. What differs between levels is behind ``At``: ``wrap`` (the model and its optimizers),
``data`` (this rank's part of a batch), ``whole`` (a tensor of this level as one card has it) and ``mean`` (a loss that is a mean
over this rank's samples). ``ONE_CARD`` is the reference. A new level is one more ``At``; a new habit one more function under
``@habit``; what a level refuses stands in ``REFUSED`` with words of the refusal.
"""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from comparing import compared, never
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import onecard as oc
from onecard import fleet, pipeline

Maker = Callable[[nn.Module], torch.optim.Optimizer]
Seen = dict[str, Tensor]
STEPS = 3


class At:
    """One card, and what the levels have in common."""

    def wrap(self, net: nn.Module, *makers: Maker, given: int | None = None) -> list[Any]:
        """The model and its optimizers, the first ``given`` of which the library is told of (all, if left out)."""
        return [net, *[make(net) for make in makers]]

    def step(self, one: Callable[..., Any]) -> Callable[..., Any]:
        """One step of a loop, as this level runs it."""
        return one

    def fitted(self, net: Any, opts: Sequence[Any], loss_of: Any, between: Any, after: Any) -> Any:
        """A function of a batch that trains and gives the loss, where a level has steps of its own; None: ``step`` makes it."""
        return None

    def backward(self, net: Any, x: Any, y: Any, loss_fn: Callable[..., Any] = cross_entropy) -> Tensor:
        """``loss_fn(net(x), y).backward()``, as this level says it; the loss."""
        loss = loss_fn(net(x), y)
        loss.backward()
        return loss.detach()

    def loss(self, net: Any, x: Any, y: Any) -> Tensor:
        """A loss to which a program adds its own, and calls ``backward``."""
        return cross_entropy(net(x), y)

    def joined(self, seen: Seen) -> Seen:
        """What all ranks have seen, where each has seen a part."""
        return seen

    def data(self, x: Tensor) -> Tensor:
        """This rank's part of a batch."""
        return x

    def whole(self, x: Tensor) -> Tensor:
        """As one card has it."""
        return oc.unshard(x.detach()).clone()

    def mean(self, loss: Tensor) -> Tensor:
        """A loss over this rank's samples as that over all."""
        return self.whole(loss)

    def total(self, x: Tensor) -> Tensor:
        """A sum over all samples, of this rank's sum."""
        return self.whole(x)

    def beside(self, net: nn.Module) -> nn.Module:
        """Another model, which is not trained."""
        return net

    def batches(self, steps: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and their classes."""
        made = torch.Generator().manual_seed(5)
        for _ in range(steps):
            x, y = torch.randn(8, 6, generator=made), torch.randint(7, (8,), generator=made)
            yield self.data(x), self.data(y)

    def ended(self, net: Any, *more: Any) -> Seen:
        """All parameters as they are at the end, by name."""
        found = {n: self.whole(p) for n, p in net.named_parameters()}
        seen = {f"seen {i}": x if x is None else torch.as_tensor(x).detach().double() for i, x in enumerate(more)}
        return found | seen


class Marks(At):
    """Placements on parameters, and a stage of ZeRO."""

    def __init__(self, stage: type[oc.ShardingStage1], blocks: bool = False, **options: Any) -> None:
        self.stage, self.blocks, self.options = stage, blocks, options
        self.mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])

    def wrap(self, net: nn.Module, *makers: Maker, given: int | None = None) -> list[Any]:
        oc.shard_layer(net, self.mesh)
        made = [make(net) for make in makers]
        for number, each in enumerate(made[:given]):
            more = {"model": net} if self.blocks and not number else {}
            oc.shard_optimizer(each, self.stage("dp", self.mesh, **self.options, **more))
        return [net, *made]

    def data(self, x: Tensor) -> Tensor:
        return oc.shard_tensor(x, self.mesh, [oc.Shard(0)])

    def beside(self, net: nn.Module) -> nn.Module:
        return oc.shard_layer(net, self.mesh)


class Level(At):
    """``fleet.group_sharded_parallel``."""

    def __init__(self, level: str, **options: Any) -> None:
        self.level, self.options = level, options

    def wrap(self, net: nn.Module, *makers: Maker, given: int | None = None) -> list[Any]:
        made = [make(net) for make in makers]
        for each in made[:given]:
            net = fleet.group_sharded_parallel(net, each, self.level, **self.options)[0]
        return [net, *made]

    def data(self, x: Tensor) -> Tensor:
        return x.chunk(oc.get_world_size())[oc.get_rank()]

    def mean(self, loss: Tensor) -> Tensor:
        found = oc.unshard(loss.detach()).clone()
        if not isinstance(loss, oc.DistTensor):
            oc.all_reduce(found, oc.ReduceOp.AVG)
        return found

    def total(self, x: Tensor) -> Tensor:
        found = oc.unshard(x.detach()).clone()
        if not isinstance(x, oc.DistTensor):
            oc.all_reduce(found)
        return found


class Copies(Level):
    """``fleet.distributed_model`` and ``distributed_optimizer``."""

    def __init__(self) -> None:
        super().__init__("dp")

    def wrap(self, net: nn.Module, *makers: Maker, given: int | None = None) -> list[Any]:
        net = fleet.distributed_model(net)
        made = [make(net) for make in makers]
        for each in made[:given]:
            fleet.distributed_optimizer(each)
        return [net, *made]


class Stages(At):
    """Two meshes, and the program as it is or, with a schedule, ``step_by_marks``."""

    def __init__(self, schedule: str = "") -> None:
        self.schedule = schedule
        self.meshes = [oc.ProcessMesh([rank], ["pp"]) for rank in range(2)]

    def wrap(self, net: Any, *makers: Maker, given: int | None = None) -> list[Any]:
        for stage, parts in enumerate([[net.first, net.blocks[0]], [net.blocks[1], net.norm, net.head, net.unused]]):
            for part in parts:
                oc.shard_layer(part, self.meshes[stage])
        net.moved = lambda stage, h: oc.reshard(h, self.meshes[stage], [oc.Replicate()])
        return [net, *[make(net) for make in makers]]

    def backward(self, net: Any, x: Any, y: Any, loss_fn: Callable[..., Any] = cross_entropy) -> Tensor:
        if not self.schedule:
            return super().backward(net, x, y, loss_fn)
        return pipeline.step_by_marks(net, loss_fn, x, y, self.schedule, microbatches=4)

    def loss(self, net: Any, x: Any, y: Any) -> Tensor:
        return self.backward(net, x, y) if self.schedule else super().loss(net, x, y)

    def joined(self, seen: Seen) -> Seen:
        return _one_name(seen)


def _one_name(seen: Seen) -> Seen:
    """Copies on two stages are one parameter on one card, with the first name; what they are not stays."""
    one, other = seen.get("blocks.0.2.weight"), seen.get("head.weight")
    return (
        seen
        if one is None or other is None or not torch.equal(one, other)
        else {k: v for k, v in seen.items() if k != "head.weight"}
    )


class Last(nn.Module):
    """The layers of a net after its blocks."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.norm, self.head, self.unused = net.norm, net.head, net.unused

    def forward(self, h: Tensor) -> Tensor:
        return self.head(self.norm(h))


class Residual(nn.Module):
    """A block, and what it is added to."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, h: Tensor) -> Tensor:
        return h + self.block(h)


class Layers(fleet.PipelineLayer):
    """A net as a list of layers, with the names that it had."""

    NAMES = (("0.", "first."), ("1.block.", "blocks.0."), ("2.block.", "blocks.1."), ("3.", ""))

    def __init__(self, net: Any, **options: Any) -> None:
        layers = [net.first, *map(Residual, net.blocks), Last(net)]
        super().__init__(layers, **options)
        self.__dict__ |= {"first": net.first, "blocks": net.blocks, "norm": net.norm, "head": net.head}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in super().named_parameters(*args, **kwargs):
            was, now = next(pair for pair in self.NAMES if name.startswith(pair[0]))
            yield now + name.removeprefix(was), p


class Pipeline(At):
    """A ``fleet.PipelineLayer`` of the net's layers: each rank has its own."""

    def __init__(self, mode: str, chunks: int | None = None) -> None:
        self.mode, self.chunks = mode, chunks

    def wrap(self, net: Any, *makers: Maker, given: int | None = None) -> list[Any]:
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"pp_degree": 2}
        strategy.pipeline_configs = {"accumulate_steps": 4, "micro_batch_size": 2, "schedule_mode": self.mode}
        fleet.init(is_collective=True, strategy=strategy)
        self.loss_fn: Callable[..., Any] = cross_entropy
        layers = Layers(net, loss_fn=lambda out, y: self.loss_fn(out, y), num_virtual_pipeline_stages=self.chunks)
        model = fleet.distributed_model(layers)
        made = [make(model) for make in makers]
        for each in made[:given]:
            fleet.distributed_optimizer(each)
        return [model, *made]

    def backward(self, net: Any, x: Any, y: Any, loss_fn: Callable[..., Any] = cross_entropy) -> Tensor:
        self.loss_fn = loss_fn
        return net.forward_backward_pipeline([x, y])

    def loss(self, net: Any, x: Any, y: Any) -> Tensor:
        return self.backward(net, x, y)

    def joined(self, seen: Seen) -> Seen:
        every: list[Any] = []
        oc.all_gather_object(every, seen)
        for name, value in seen.items():  # what several ranks have is one
            if any(not torch.equal(value, other[name]) for other in every if name in other):
                return {f"{name} differs between ranks": value}
        return _one_name({name: value for each in every for name, value in each.items()})


class Planned(At):
    """``oc.parallelize``: a plan on a plain model in place; batches are whole on every rank."""

    def __init__(self, **fields: Any) -> None:
        self.plan = oc.Plan(per_host=0, parameters="float32", compute="float32", **fields)

    def wrap(self, net: nn.Module, *makers: Maker, given: int | None = None) -> list[Any]:
        made = [make(net) for make in makers]
        oc.parallelize(net, made[:given], plan=self.plan)
        return [net, *made]


_COLUMN, _ROW = "tp: Shard(0)", "tp: Shard(1)"
CUT = (("first*", _COLUMN), ("blocks.*.0.*", _COLUMN), ("blocks.*.2.weight", _ROW), ("head.weight", _COLUMN))

ONE_CARD = At()
LEVELS: dict[str, Callable[[], At]] = {
    "ZeRO 1": lambda: Marks(oc.ShardingStage1),
    "ZeRO 2": lambda: Marks(oc.ShardingStage2),
    "ZeRO 3": lambda: Marks(oc.ShardingStage3),
    "ZeRO 1 offload": lambda: Marks(oc.ShardingStage1, offload=True),
    "ZeRO 3 blocks": lambda: Marks(oc.ShardingStage3, blocks=True, overlap=True),
    "dp": Copies,
    "os": lambda: Level("os"),
    "os_g": lambda: Level("os_g"),
    "p_g_os": lambda: Level("p_g_os"),
    "p_g_os blocks": lambda: Level("p_g_os", blocks=[nn.Sequential, "norm"]),
    "os overlap": lambda: Level("os", overlap=True),
    "os_g offload": lambda: Level("os_g", offload=True),
    "stages": Stages,
    "stages 1F1B": lambda: Stages("1F1B"),
    "stages F-then-B": lambda: Stages("F-then-B"),
    "pp 1F1B": lambda: Pipeline("1F1B"),
    "pp VPP": lambda: Pipeline("VPP", 2),
    "pp ZBH1": lambda: Pipeline("ZBH1"),
    "plan dp": lambda: Planned(dp=2),
    "plan ZeRO 1": lambda: Planned(dp=2, zero=1),
    "plan ZeRO 3": lambda: Planned(dp=2, zero=3),
    "plan tp": lambda: Planned(tp=2, placements=CUT),
    "p_g_os kept": lambda: Level("p_g_os", overlap=True, reshard_after_forward=False, offload=True),
}


def _recorded(level: Callable[[], At]) -> Callable[[], At]:
    def made() -> At:
        at = level()
        at.step = oc.to_static  # type: ignore[assignment, method-assign]
        return at

    return made


RECORDED = tuple(f"{name} recorded" for name in ("ZeRO 1", "ZeRO 3 blocks", "dp", "os_g"))
LEVELS |= {name: _recorded(LEVELS[name.removesuffix(" recorded")]) for name in RECORDED}

OPEN: dict[tuple[str, str], str] = {}
"""(habit, level): a cell that is wrong as yet, and why."""

HABITS: dict[str, Callable[[At], Seen]] = {}
REFUSED: dict[tuple[str, str], str] = {
    (name, level): "adds to norms at .* which a replay does not repeat"
    for name in ("clipped_by_norm", "two_optimizers_clipped", "gradients_logged")
    for level in RECORDED
}
"""(habit, level): words that the refusal has. Every other cell is right."""
STAGES = ("stages", "stages 1F1B", "stages F-then-B")
PIPELINES = ("pp 1F1B", "pp VPP", "pp ZBH1")
PLANS = tuple(level for level in LEVELS if level.startswith("plan "))
NO_GRAPH = "has run the backward of its microbatches"
_TWO_MESHES, _TIED = "operands live on two meshes|is not in ProcessMesh", "is one parameter with '2.weight'"
REFUSED |= {
    **{("ignored_labels", level): "the loss divides by a number that is computed from" for level in STAGES[1:]},
    **{(name, level): _TWO_MESHES for level in STAGES for name in ("own_clipping", "lbfgs", "lbfgs_line_search")},
    **{(name, level): _TWO_MESHES for level in STAGES for name in ("penalty_on_weights", "penalty_on_one_weight")},
    **{(name, level): _TIED for level in STAGES for name in ("tied", "tied_outside")},
    **{
        (name, level): "looks at all parameters together"
        for level in PIPELINES
        for name in ("lbfgs", "lbfgs_line_search")
    },
    **{(name, level): NO_GRAPH for level in PIPELINES for name in ("gradients_of_some", "gradients_asked_for")},
    **{("gradient_penalty", level): "requires a gradient, which no one would get" for level in PIPELINES},
}
REFUSED["low_rank", "plan tp"] = "the plan's placements name 'head.weight', and Net has no such parameter"
_OWN_LAYERS = {
    "own_clipping": "a rank has its stage's gradients alone: clip_grad_norm_, or fleet.grad_norm, which go over all",
    "gradients_logged": "one rank has the first layer; where the other asks for its gradient there is none",
    "weights_read_outside": "layers of a list are given values; a layer that reads another's weight is refused, see below",
    "by_the_old_name": "the list of layers is the model, and the net of which they were is not called",
}
NO_SENSE: dict[tuple[str, str], str] = {
    **{(name, level): why for level in PIPELINES for name, why in _OWN_LAYERS.items()},
    **{
        ("tied_outside", level): "a tied parameter has a name on each stage, by one of which the program leaves it out"
        for level in ("pp 1F1B", "pp ZBH1")  # under VPP both are on one rank
    },
    **{
        ("ignored_labels_plainly", level): "a rank's mean over its own labels: oc.token_mean"
        for level in LEVELS
        if isinstance(LEVELS[level](), Level)
    },
}
"""(habit, level): why there is no such cell."""


def habit(f: Callable[[At], Seen]) -> Callable[[At], Seen]:
    """One row of the table."""
    HABITS[f.__name__] = f
    return f


# ---- Models


class Mixture(nn.Module):
    """The expert that a router finds most probable, a matrix of it for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(7, 3, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(3, 7, 9) / 3), nn.Parameter(torch.randn(3, 9, 7) / 3)

    def forward(self, h: Tensor) -> Tensor:
        weight, chosen = self.router(h).softmax(-1).max(-1)
        made = torch.tanh(torch.bmm(h[:, None], self.up[chosen]))
        return weight[:, None] * torch.bmm(made, self.down[chosen])[:, 0]


class Net(nn.Module):
    """Blocks in a list, and a head; ``mixed``: the second block is a mixture of experts."""

    mixed = False

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 7)) for _ in range(2)])
        if self.mixed:
            self.blocks[1] = Mixture()
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 7, bias=False)
        self.unused = nn.Linear(7, 3)
        if tied:
            self.head.weight = self.blocks[0][2].weight = nn.Parameter(torch.randn(7, 7) / 3)
            self.blocks[0][0] = nn.Linear(7, 7)

    def at_stage(self, stage: int, h: Tensor) -> Tensor:
        """A value that goes to a stage."""
        return self.moved(stage, h) if hasattr(self, "moved") else h

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(self.at_stage(0, x))
        for i, block in enumerate(self.blocks):
            h = self.at_stage(i, h)
            h = h + block(h)
        return self.head(self.norm(h))


class Reads(Net):
    """Reads the weights of other modules outside their forward."""

    def forward(self, x: Tensor) -> Tensor:
        h = linear(self.at_stage(0, x), self.first.weight, self.first.bias)
        for i, block in enumerate(self.blocks):
            h = self.at_stage(i, h)
            h = h + block(h) + 0.1 * block[0].weight.mean()
        return self.norm(h) @ self.head.weight.T


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.2, momentum=0.9)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 0.02, eps=1e-3)


def trained(
    at: At,
    net: Any,
    *optimizers: Any,
    between: Callable[[], Any] = lambda: None,
    steps: int = STEPS,
    after: Callable[[], Any] = lambda: None,
    outside: Callable[[int, Tensor], Any] = lambda i, loss: None,
    loss_fn: Callable[..., Tensor] = cross_entropy,
    batches: Any = None,
) -> list[Tensor]:
    """Plain steps; ``between`` is called after backward, ``after`` at a step's end, ``outside`` of it with its loss."""

    def one(x: Any, y: Any) -> Tensor:
        loss = at.backward(net, x, y, loss_fn)
        between()
        for each in optimizers:
            each.step()
        for each in optimizers:
            each.zero_grad()
        after()
        return loss

    run = at.fitted(net, optimizers, lambda x, y: loss_fn(net(x), y), between, after) or at.step(one)
    seen = []
    for i, (x, y) in enumerate(at.batches(steps) if batches is None else batches):
        seen.append(at.mean(run(x, y)))
        outside(i, seen[-1])
    return seen


# ---- Gradients by hand


@habit
def plain(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    return at.ended(net, *trained(at, net, opt))


@habit
def clipped_by_value(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    trained(at, net, opt, between=lambda: nn.utils.clip_grad_value_(net.parameters(), 0.02))
    return at.ended(net)


@habit
def clipped_by_norm(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    norms: list[Any] = []
    trained(at, net, opt, between=lambda: norms.append(at.whole(nn.utils.clip_grad_norm_(net.parameters(), 0.3))))
    return at.ended(net, *norms)


def _each_gradient(at: At, edit: Callable[[Any], Any]) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    trained(at, net, opt, between=lambda: [edit(p) for p in net.parameters() if p.grad is not None])
    return at.ended(net)


@habit
def gradients_replaced(at: At) -> Seen:
    def edit(p: Any) -> None:
        p.grad = p.grad.clamp(-0.02, 0.02)

    return _each_gradient(at, edit)


@habit
def gradients_data_clamped(at: At) -> Seen:
    return _each_gradient(at, lambda p: p.grad.data.clamp_(-0.02, 0.02))


@habit
def gradients_signed(at: At) -> Seen:
    return _each_gradient(at, lambda p: p.grad.sign_().mul_(0.1))


@habit
def gradients_centralised(at: At) -> Seen:
    return _each_gradient(at, lambda p: p.grad.sub_(p.grad.mean()))


@habit
def trust_ratios(at: At) -> Seen:
    return _each_gradient(at, lambda p: p.grad.mul_(p.detach().norm() / (p.grad.norm() + 1e-3)))


@habit
def own_clipping(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def clip() -> None:
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))
        torch._foreach_mul_(grads, torch.clamp(0.3 / (norm + 1e-6), max=1.0))

    trained(at, net, opt, between=clip)
    return at.ended(net)


@habit
def own_optimizer(at: At) -> Seen:
    net, _ = at.wrap(Net(), sgd)
    for x, y in at.batches():
        at.backward(net, x, y)
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p.sub_(0.1 * p.grad.clamp(-0.05, 0.05))
                    p.grad = None
    return at.ended(net)


@habit
def gradients_of_some(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    for x, y in at.batches():
        cross_entropy(net(x), y).backward(inputs=[p for n, p in net.named_parameters() if "unused" not in n])
        opt.step()
        opt.zero_grad()
    return at.ended(net)


@habit
def gradients_asked_for(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    for x, y in at.batches():
        params = [p for n, p in net.named_parameters() if "unused" not in n]
        for p, grad in zip(params, torch.autograd.grad(cross_entropy(net(x), y), params), strict=True):
            p.grad = grad.clamp(-0.02, 0.02)
        opt.step()
        opt.zero_grad()
    return at.ended(net)


@habit
def penalty_on_weights(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    for x, y in at.batches():
        loss = at.loss(net, x, y)
        (loss + 0.05 * sum(p.square().sum() for p in net.parameters())).backward()
        opt.step()
        opt.zero_grad()
    return at.ended(net)


@habit
def penalty_on_one_weight(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    for x, y in at.batches():
        loss = at.loss(net, x, y)
        (loss + 0.05 * net.first.weight.abs().sum() + 0.1 * net.head.weight.square().sum()).backward()
        opt.step()
        opt.zero_grad()
    return at.ended(net)


@habit
def gradient_penalty(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    for x, y in at.batches():
        x.requires_grad_()
        made = net(x)
        (slope,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        (cross_entropy(made, y) + 0.1 * slope.square().sum(1).mean()).backward()
        opt.step()
        opt.zero_grad()
    return at.ended(net)


# ---- Closures


def _closures(at: At, make: Maker, steps: int = STEPS) -> Seen:
    net, opt = at.wrap(Net().double(), make)  # searches decide by small differences
    losses = []
    for x, y in at.batches(steps):

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            opt.zero_grad()
            return at.backward(net, x.double(), y)

        losses.append(at.mean(opt.step(closure)))
    return at.ended(net, *losses)


@habit
def closures(at: At) -> Seen:
    return _closures(at, adamw)


@habit
def lbfgs(at: At) -> Seen:
    return _closures(at, lambda net: torch.optim.LBFGS(net.parameters(), 0.3, max_iter=3), 2)


@habit
def lbfgs_line_search(at: At) -> Seen:
    return _closures(at, lambda net: torch.optim.LBFGS(net.parameters(), max_iter=3, line_search_fn="strong_wolfe"), 2)


# ---- Several optimizers, parameters outside


def _of(name: str, without: bool = False) -> Callable[[nn.Module], list[Any]]:
    return lambda net: [p for n, p in net.named_parameters() if (name in n) != without]


def muon(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(_of("blocks")(net), 0.1, momentum=0.9)


def rest(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_of("blocks", without=True)(net), 0.02, eps=1e-3)


@habit
def two_optimizers(at: At) -> Seen:
    net, *both = at.wrap(Net(), muon, rest)
    return at.ended(net, *trained(at, net, *both))


@habit
def two_optimizers_one_told(at: At) -> Seen:
    net, *both = at.wrap(Net(), muon, rest, given=1)
    return at.ended(net, *trained(at, net, *both))


@habit
def two_optimizers_clipped(at: At) -> Seen:
    net, *both = at.wrap(Net(), muon, rest)
    norms: list[Any] = []
    trained(at, net, *both, between=lambda: norms.append(at.whole(nn.utils.clip_grad_norm_(net.parameters(), 0.3))))
    return at.ended(net, *norms)


@habit
def some_parameters_only(at: At) -> Seen:
    net, opt = at.wrap(Net(), rest)
    norms: list[Any] = []
    for x, y in at.batches():
        at.backward(net, x, y)
        norms.append(at.whole(nn.utils.clip_grad_norm_(net.parameters(), 0.3)))
        opt.step()
        net.zero_grad()
    return at.ended(net, *norms)


@habit
def frozen(at: At) -> Seen:
    net = Net()
    net.blocks.requires_grad_(False)
    net, opt = at.wrap(net, lambda net: torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.02))
    return at.ended(net, *trained(at, net, opt))


@habit
def thawed_later(at: At) -> Seen:
    net = Net()
    net.blocks.requires_grad_(False)
    net, opt = at.wrap(net, sgd)
    trained(at, net, opt)
    for p in net.parameters():
        p.requires_grad_(True)
    trained(at, net, opt)
    return at.ended(net)


class LoRA(nn.Module):
    """A frozen layer and a small trained one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) / 2)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + linear(linear(x, self.down), self.up)


@habit
def low_rank(at: At) -> Seen:
    net: Any = Net().requires_grad_(False)
    net.first, net.head = LoRA(net.first), LoRA(net.head)
    net, opt = at.wrap(net, lambda net: torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.05))
    return at.ended(net, *trained(at, net, opt))


@habit
def tied(at: At) -> Seen:
    net, opt = at.wrap(Net(tied=True), adamw)
    return at.ended(net, *trained(at, net, opt))


@habit
def tied_outside(at: At) -> Seen:
    net, opt = at.wrap(Net(tied=True), lambda net: torch.optim.SGD(_of("blocks", without=True)(net), 0.1))
    return at.ended(net, *trained(at, net, opt))


@habit
def weights_read_outside(at: At) -> Seen:
    net, opt = at.wrap(Reads(), adamw)
    return at.ended(net, *trained(at, net, opt))


def counted(out: Tensor, y: Tensor) -> Tensor:
    return oc.token_mean(cross_entropy(out, y, reduction="none"), y != -100)


@habit
def ignored_labels(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    for x, y in at.batches():
        ignored = torch.tensor([0, 1, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
        y = torch.where(at.data(ignored), -100, y)
        at.backward(net, x, y, counted)
        opt.step()
        opt.zero_grad()
    return at.ended(net)


@habit
def ignored_labels_plainly(at: At) -> Seen:
    """The loss divides by how many labels count, of which microbatches have other numbers, and one has none."""
    net, opt = at.wrap(Net(), sgd)
    for x, y in at.batches():
        ignored = torch.tensor([0, 1, 0, 0, 1, 1, 1, 0], dtype=torch.bool)
        at.backward(net, x, torch.where(at.data(ignored), -100, y))
        opt.step()
        opt.zero_grad()
    return at.ended(net)


def halved(out: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(out, y) / 2


@habit
def accumulated(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    for _ in range(2):
        for x, y in at.batches(2):
            at.backward(net, x, y, halved)
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        opt.step()
        opt.zero_grad()
    return at.ended(net)


# ---- Writes to parameters, averages, copies


@habit
def weights_clamped(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    for _ in range(2):
        trained(at, net, opt, steps=1)
        with torch.no_grad():
            for p in net.parameters():
                p.clamp_(-0.2, 0.2)
        trained(at, net, opt, steps=1)
        for p in net.parameters():
            p.data.mul_(0.9)
        trained(at, net, opt, steps=1)
        for p in net.parameters():
            p.data = p.data.clamp(-0.2, 0.2)
    return at.ended(net)


@habit
def one_weight_written(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    for _ in range(2):
        trained(at, net, opt, steps=1)
        with torch.no_grad():
            net.first.weight.clamp_(-0.2, 0.2)
            net.head.weight.data.mul_(0.9)
            net.norm.weight.data = net.norm.weight.data.clamp(-0.9, 0.9)
            nn.init.zeros_(net.blocks[0][0].bias)
    trained(at, net, opt, steps=1)
    return at.ended(net)


@habit
def loaded_between(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    kept = {n: v.clone() for n, v in net.state_dict().items()}
    trained(at, net, opt)
    net.load_state_dict(kept)
    trained(at, net, opt, steps=2)
    return at.ended(net)


@habit
def averaged_by_hand(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    average = {n: p.detach().clone() for n, p in net.named_parameters()}
    trained(at, net, opt, between=lambda: [average[n].lerp_(p.detach(), 0.1) for n, p in net.named_parameters()])
    return at.ended(net) | {f"average {n}": at.whole(p) for n, p in average.items()}


@habit
def averaged_by_a_copy(at: At) -> Seen:
    net, opt = at.wrap(Net(), adamw)
    average = copy.deepcopy(net)

    @torch.no_grad()
    def update() -> None:
        for p, q in zip(average.parameters(), net.parameters(), strict=True):
            p.mul_(0.9).add_(q, alpha=0.1)

    trained(at, net, opt, between=update)
    (x, _), *_ = at.batches()
    return at.ended(net, at.mean(average(x).square().mean())) | {
        f"average {n}": at.whole(p) for n, p in average.named_parameters()
    }


def distilled(out: Tensor, labels: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(out, labels[0]) + (out - labels[1]).square().mean()


@habit
def copied_before(at: At) -> Seen:
    first = Net()
    teacher = copy.deepcopy(first).requires_grad_(False)
    net, opt = at.wrap(first, adamw)
    teacher = at.beside(teacher)
    for x, y in at.batches():
        at.backward(net, x, (y, teacher(x).detach()), distilled)
        opt.step()
        opt.zero_grad()
    return at.ended(net)


@habit
def rewound(at: At) -> Seen:
    """Weights are kept and put back (a search for a learning rate, SAM's second step)."""
    net, opt = at.wrap(Net(), sgd)
    for x, y in at.batches():
        at.backward(net, x, y)
        kept = {p: p.detach().clone() for p in net.parameters()}
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p.add_(0.05 * p.grad)
        opt.zero_grad()
        at.backward(net, x, y)
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(kept[p])
        opt.step()
        opt.zero_grad()
    return at.ended(net)


# ---- Hooks, old names, messages of one's own


@habit
def hooks_on_parameters(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    for p in net.parameters():
        p.register_hook(lambda g: g.clamp(-0.02, 0.02))
    return at.ended(net, *trained(at, net, opt))


@habit
def hooks_before(at: At) -> Seen:
    net, before = Net(), type(at) in (At, Level, Copies, Planned)
    for p in net.parameters() if before else ():
        p.register_hook(lambda g: g.clamp(-0.02, 0.02))
    net, opt = at.wrap(net, sgd)
    for p in net.parameters() if not before else ():  # shard_layer makes new ones
        p.register_hook(lambda g: g.clamp(-0.02, 0.02))
    return at.ended(net, *trained(at, net, opt))


@habit
def hooks_after_accumulation(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def after(p: Any) -> None:
        p.grad.mul_(0.5)

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(after)
    return at.ended(net, *trained(at, net, opt))


@habit
def hooks_on_modules(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    net.norm.register_forward_hook(lambda m, args, made: made * 1.5)
    net.head.register_full_backward_hook(lambda m, grads, made: tuple(0.5 * g for g in grads))
    return at.ended(net, *trained(at, net, opt))


@habit
def hooks_on_steps(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)

    def halve(optimizer: Any, *_: Any) -> None:
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            p.grad.mul_(0.5)

    opt.register_step_pre_hook(halve)
    return at.ended(net, *trained(at, net, opt))


@habit
def hooks_on_steps_by_the_model(at: At) -> Seen:
    """What such a hook writes is what the step takes, whenever it was registered."""
    net, opt = at.wrap(Net(), sgd)

    def clamp(*_: Any) -> None:
        for p in net.parameters():
            if p.grad is not None:
                p.grad = p.grad.clamp(-0.02, 0.02)

    opt.register_step_pre_hook(clamp)
    return at.ended(net, *trained(at, net, opt))


@habit
def by_the_old_name(at: At) -> Seen:
    old = Net()
    net, opt = at.wrap(old, sgd)
    norms: list[Any] = []
    for x, y in at.batches():
        cross_entropy(old(x), y).backward()
        norms.append(at.whole(nn.utils.clip_grad_norm_(old.parameters(), 0.3)))
        for p in old.parameters():
            if p.grad is not None:
                p.grad = p.grad.clamp(-0.02, 0.02)
        opt.step()
        old.zero_grad()
    return at.ended(net, *norms) | {f"old {n}": at.whole(p) for n, p in old.state_dict().items()}


@habit
def gradients_logged(at: At) -> Seen:
    net, opt = at.wrap(Net(), sgd)
    norms: list[Any] = []
    trained(at, net, opt, between=lambda: norms.append(at.whole(net.first.weight.grad.norm())))
    return at.ended(net, *norms)


@habit
def own_sums(at: At) -> Seen:
    """The program sums a statistic of the batch itself."""
    net, opt = at.wrap(Net(), sgd)
    rows: list[Any] = []
    for x, y in at.batches():
        rows.append(at.total((net(x).detach().argmax(1) == y).sum()))
        at.backward(net, x, y)
        opt.step()
        opt.zero_grad()
    return at.ended(net, *rows)


@cache
def one_card(name: str) -> Seen:
    """The reference."""
    return HABITS[name](ONE_CARD)


def check(name: str, level: str) -> str:
    """What is wrong with a cell of the table; "" if it is right, or refused with the words that it should be refused with."""
    expected = one_card(name)
    if (name, level) in OPEN or (name, level) in NO_SENSE:
        return ""
    words = REFUSED.get((name, level))
    try:
        with compared(never), warnings.catch_warnings():  # of three calls the third is a replay
            warnings.filterwarnings("ignore", message=".*is recorded anew")
            at = LEVELS[level]()
            found = at.joined(HABITS[name](at))
    except Exception as error:
        if words is not None and re.search(words, str(error)):
            return ""
        return f"{type(error).__name__}: {error}"
    if words is not None:
        return f"was to be refused ({words})"
    if {*found} != {*expected}:
        return f"other names: {sorted({*found} ^ {*expected})[:4]}"
    far = {k: _far(found[k], v) for k, v in expected.items()}
    worst = max(far, key=far.__getitem__)
    return "" if far[worst] <= 1e-5 else f"{worst} is off by {far[worst]:.1e}"


def _far(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    gap = (found.double() - expected.double()).abs().max().item() / max(expected.double().abs().max().item(), 1e-2)
    return gap if gap == gap else float("inf")


def in_steps() -> tuple[str, ...]:
    """The habits whose steps are functions, which can be recorded."""
    return tuple(
        n for n, f in HABITS.items() if any(w in inspect.getsource(f) for w in ("trained(", "_each_gradient("))
    )
