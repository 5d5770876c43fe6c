"""Random training programs in the habits of DDP's, FSDP's and DeepSpeed's users, under every stage of ZeRO, against one card.

PYTHONPATH=tests python -m fuzz.zero --count 500
PYTHONPATH=tests python -m fuzz.zero --seed 17 --count 1
"""

from __future__ import annotations

import copy
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard import fleet
from onecard.tensor import buckets
from onecard.testing import RankError, RankTimeout, run_ranks

R, S = oc.Replicate(), oc.Shard
STAGES: dict[str, Any] = {"1": oc.ShardingStage1, "2": oc.ShardingStage2, "3": oc.ShardingStage3}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, nesterov=True, foreach=False),
    "fused sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3),
    "fused adamw": lambda p: torch.optim.AdamW(p, 0.01, eps=1e-3, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, eps=1e-3, amsgrad=True, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05, eps=1e-3),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-2, momentum=0.5, centered=True),
}
# What a user does before a step, between backward and step, and after it.
BEFORE = ("evaluate", "evaluate with graph", "freeze", "unfreeze", "freeze by parameters", "eval mode", "asked")
BETWEEN = (
    "clip norm",
    "clip norm",
    "clip value",
    "clip inf",
    "clip some",
    "halve",
    "replace",
    "log",
    "decay",
    "drop one",
)
AFTER = (
    "schedule",
    "save optimizer",
    "save model",
    "scale weights",
    "average weights",
    "new group",
    "evaluate",
    "evaluate with graph",
    "scale weights",
    "new optimizer",
)
ZERO = ("none", "none", "zeros", "model", "by hand", "before", "keep")


@dataclass(frozen=True)
class Step:
    """One step of a program: microbatches, what is done around them, and which optimizers step."""

    micro: int
    backward: str
    before: tuple[str, ...]
    between: tuple[str, ...]
    stepping: tuple[bool, bool]
    zero: str
    after: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """A model, its optimizers and the steps of a training; ``how`` it is made parallel."""

    seed: int
    how: dict[str, Any]
    width: int
    depth: int
    kinds: tuple[str, ...]
    tied: bool
    optimizers: tuple[str, ...]
    groups: bool
    steps: tuple[Step, ...]


def some(r: random.Random, known: Sequence[str], likely: float) -> tuple[str, ...]:
    return tuple(r.choice(known) for _ in range(2) if r.random() < likely)


def draw(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    how: dict[str, Any] = {"kind": r.choice(("marks", "marks", "level"))}
    how["overlap"] = r.choice((False, True))
    if how["kind"] == "marks":
        how |= {"stage": r.choice(("0", "1", "2", "3", "3")), "mesh": r.choice(("dp", "dp", "dp tp", "hybrid"))}
        how["blocks"] = how["stage"] == "3" and r.random() < 0.6
    else:
        how |= {"stage": r.choice(("os", "os_g", "p_g_os")), "mesh": "dp"}
    how["ranks"] = 4 if how["mesh"] == "hybrid" else r.choice((2, 2, 4))
    how["policy"] = r.choice((True, False))
    marks = how["kind"] == "marks"
    layers = ("norm", "tanh", "checkpoint", *(("batch norm", "dropout") if marks else ()))
    steps = []
    for number in range(r.randint(3, 5)):
        before = some(r, BEFORE if marks else BEFORE[:-1], 0.2)
        steps.append(
            Step(
                r.choice((1, 1, 2, 3)),
                r.choice(("sum", "sum", "two", "graph kept", "apart")),
                before,
                some(r, BETWEEN, 0.4),
                (number != 1 or r.random() < 0.8, r.random() < 0.7),
                r.choice(ZERO),
                some(r, AFTER, 0.25),
            )
        )
    optimizers = tuple(r.choice([*OPTIMIZERS]) for _ in range(r.choice((1, 1, 2)) if marks else 1))
    return Program(
        seed, how, r.randint(4, 9), depth := r.randint(1, 3), tuple(r.choice(layers) for _ in range(depth)),
        r.random() < 0.4, optimizers, r.random() < 0.4, tuple(steps),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False), kind
        made = {"norm": nn.LayerNorm(width), "batch norm": nn.BatchNorm1d(width), "dropout": nn.Dropout(0.3)}
        self.more = made.get(kind, nn.Tanh())

    def inner(self, x: Tensor) -> Tensor:
        return self.more(self.down(torch.tanh(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpoint":
            return x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return x + self.inner(x)


class Net(nn.Module):
    """Uneven sizes, tied weights, a scalar, a layer for every other step, one never used, one that is frozen at first."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(program.seed)
        w = program.width
        self.embedding, self.head = nn.Embedding(7, w), nn.Linear(w, 7, bias=not program.tied)
        if program.tied:
            self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList([Block(w, kind) for kind in program.kinds])
        self.sometimes, self.never, self.frozen = nn.Linear(w, w), nn.Linear(w, 3), nn.Linear(w, w)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor, often: bool = True) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        h = h + self.frozen(h)
        h = h + self.sometimes(h) if often else h
        return self.head(h * self.scale)


class Run:
    """One program on one card (``how`` None), by marks or by a level."""

    def __init__(self, program: Program, parallel: bool) -> None:
        self.program, self.how = program, program.how if parallel else None
        self.net: Any = Net(program)
        self.mesh: Any = None
        self.seen: list[Any] = []
        if self.how and self.how["kind"] == "marks":
            self._marks()
        self._optimizers(program.optimizers)
        self.average = [p.detach().clone() for p in self.net.parameters()]

    def _marks(self) -> None:
        n, how = oc.get_world_size(), self.how
        assert how is not None
        names = {"dp": ["dp"], "dp tp": ["dp", "tp"], "hybrid": ["replica", "dp"]}[how["mesh"]]
        grid = torch.arange(n).tolist() if len(names) == 1 else torch.arange(n).view(-1, 2).tolist()
        self.mesh = oc.ProcessMesh(grid, names)
        oc.shard_layer(self.net, self.mesh)
        for block in self.net.blocks if how["mesh"] == "dp tp" else ():
            block.up.weight = oc.shard_tensor(block.up.weight, self.mesh, [R, S(0)])
            block.down.weight = oc.shard_tensor(block.down.weight, self.mesh, [R, S(1)])

    def _optimizers(self, kinds: Sequence[str]) -> None:
        named = dict(self.net.named_parameters())
        outer = {n: p for n, p in named.items() if n.startswith(("embedding", "head"))}
        inner = {n: p for n, p in named.items() if n not in outer and not n.startswith("never")}
        never = [p for n, p in named.items() if n.startswith("never")]
        parts = (
            [[*inner.values(), *outer.values(), *never]] if len(kinds) == 1 else [[*inner.values()], [*outer.values()]]
        )
        self.later = never if len(kinds) > 1 else []
        made = []
        for kind, params in zip(kinds, parts, strict=True):
            given: Any = params
            if self.program.groups and len(params) > 2:
                given = [{"params": params[:2], "lr": 0.02}, {"params": params[2:]}]
            made.append(OPTIMIZERS[kind](given))
        self.optimizers = [self._parallel(o) for o in made]
        self.schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.7) for o in self.optimizers]

    def _parallel(self, optimizer: Any) -> Any:
        how = self.how
        if how is None:
            return optimizer
        if how["kind"] == "level":
            self.net, optimizer, _ = fleet.group_sharded_parallel(
                self.net, optimizer, how["stage"], overlap=how["overlap"], reshard_after_forward=how["policy"]
            )
            return optimizer
        if how["stage"] == "0":
            return oc.shard_optimizer(optimizer, overlap=how["overlap"])
        more = {"model": self.net, "reshard_after_forward": how["policy"]} if how["blocks"] else {}
        return oc.shard_optimizer(optimizer, STAGES[how["stage"]]("dp", self.mesh, overlap=how["overlap"], **more))

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(seed)
        x, y = torch.randint(7, (8,), generator=made), torch.randint(7, (8,), generator=made)
        if self.how and self.how["kind"] == "level":
            n, rank = oc.get_world_size(), oc.get_rank()
            return x.chunk(n)[rank], y.chunk(n)[rank]
        if self.mesh is None:
            return x, y
        where = [S(0), S(0) if self.how and self.how["mesh"] == "hybrid" else R][: self.mesh.ndim]
        return oc.shard_tensor(x, self.mesh, where), oc.shard_tensor(y, self.mesh, where)

    def call(self, x: Tensor, often: bool = True) -> Tensor:
        """The model: dropout on one card draws what it draws on a mesh."""
        with nullcontext() if self.how else oc.one_card_random():
            return self.net(x, often)

    def note(self, value: Tensor) -> None:
        """Look at a number: that of a level is a mean over its ranks."""
        found = oc.unshard(value.detach()).clone().double()
        if self.how and self.how["kind"] == "level":
            oc.all_reduce(found, oc.ReduceOp.AVG)
        self.seen.append(found.item())

    # -- the loop --------------------------------------------------------------------------------------------------

    def go(self) -> None:
        for number, step in enumerate(self.program.steps):
            self.number = number
            for what in step.before:
                self.do(what)
            if step.zero == "before":
                self.zero("none")
            for micro in range(step.micro):
                self.backward(step, 10 * number + micro)
            self.net.train()
            for what in step.between:
                self.do(what)
            for optimizer, now in zip(self.optimizers, step.stepping, strict=False):
                optimizer.step() if now else None
            self.zero(step.zero)
            for what in step.after:
                self.do(what)

    def backward(self, step: Step, seed: int) -> None:
        (x, y), often = self.batch(1000 * self.program.seed + seed), self.number % 2 == 0
        made = self.call(x, often)
        first, second = cross_entropy(made, y) / step.micro, 0.1 * made.square().mean()
        if step.backward == "sum":
            (first + second).backward()
        elif step.backward == "two":
            first.backward(retain_graph=True)
            second.backward()
        elif step.backward == "graph kept":
            first.backward(retain_graph=True)
            first.backward()
        else:
            first.backward()
            (0.1 * self.call(y, not often).square().mean()).backward()
        self.note(first)

    def zero(self, how: str) -> None:
        if how == "model":
            self.net.zero_grad()
        elif how == "by hand":
            for p in self.net.parameters():
                p.grad = None
        elif how != "keep":
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=how != "zeros")

    def do(self, what: str) -> None:
        getattr(self, what.replace(" ", "_"))()

    # -- what users do -----------------------------------------------------------------------------------------------

    def _with_gradient(self) -> list[Any]:
        return [p for p in self.net.parameters() if p.grad is not None]

    def evaluate(self) -> None:
        self.net.eval()
        with torch.no_grad():
            self.note(cross_entropy(self.call(self.batch(5)[0]), self.batch(5)[1]))
        self.net.train()

    def evaluate_with_graph(self) -> None:
        """Who forgets no_grad."""
        self.net.eval()
        self.note(self.call(self.batch(6)[0]).square().mean())
        self.net.train()

    def eval_mode(self) -> None:
        """Fine tuning with batch norm and dropout off."""
        self.net.eval()

    def freeze(self) -> None:
        self.net.blocks.requires_grad_(False)

    def unfreeze(self) -> None:
        self.net.blocks.requires_grad_(True)
        self.net.frozen.requires_grad_(True)

    def freeze_by_parameters(self) -> None:
        for name, p in self.net.named_parameters():
            if name.startswith("sometimes"):
                p.requires_grad_(not p.requires_grad)

    def asked(self) -> None:
        x, y = self.batch(77)
        names = ("sometimes.bias", "blocks.0.up.weight")
        chosen = [p for n, p in self.net.named_parameters() if n in names and p.requires_grad]
        if chosen:
            for grad in torch.autograd.grad(cross_entropy(self.call(x), y), chosen):
                self.note(grad.square().sum())

    def clip_norm(self) -> None:
        self.seen.append(oc.unshard(nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)).item())

    def clip_value(self) -> None:
        nn.utils.clip_grad_value_(self.net.parameters(), 0.05)

    def clip_inf(self) -> None:
        self.seen.append(oc.unshard(nn.utils.clip_grad_norm_(self.net.parameters(), 0.05, float("inf"))).item())

    def clip_some(self) -> None:
        for name, p in self.net.named_parameters():
            if name.endswith("weight") and p.grad is not None:
                nn.utils.clip_grad_norm_([p], 0.1)

    def halve(self) -> None:
        for p in self._with_gradient():
            p.grad.mul_(0.5)

    def replace(self) -> None:
        for p in self._with_gradient():
            p.grad = p.grad * 0.5 + 0.01

    def log(self) -> None:
        for p in self._with_gradient():
            self.seen.append(oc.unshard(p.grad.norm()).item())

    def decay(self) -> None:
        with torch.no_grad():
            for p in self._with_gradient():
                p.grad.add_(p, alpha=0.01)

    def drop_one(self) -> None:
        self._with_gradient()[0].grad = None

    def schedule(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # before the first step
            for schedule in self.schedules:
                schedule.step()

    def save_optimizer(self) -> None:
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def save_model(self) -> None:
        saved = copy.deepcopy(self.net.state_dict())
        with torch.no_grad():
            for p in self.net.parameters():
                p.fill_(0.5)
        self.net.load_state_dict(saved)

    def scale_weights(self) -> None:
        with torch.no_grad():
            for p in self.net.parameters():
                p.mul_(0.95)

    def look_and_scale(self) -> None:
        """Weights that are written to between a forward without a backward and the next one."""
        self.evaluate_with_graph()
        self.scale_weights()

    def average_weights(self) -> None:
        with torch.no_grad():
            for mean, p in zip(self.average, self.net.parameters(), strict=True):
                mean.lerp_(p, 0.1)
            self.seen.append(sum(oc.unshard(mean.square().sum()).item() for mean in self.average))

    def new_group(self) -> None:
        if self.later:
            self.optimizers[0].add_param_group({"params": self.later, "lr": 0.01})
            self.later = []

    def new_optimizer(self) -> None:
        """A second phase of the training, by marks: another optimizer over the same parameters."""
        if self.program.how["kind"] == "marks":
            self._optimizers(self.program.optimizers)

    def result(self) -> dict[str, Any]:
        """Everything that is to be equal."""
        made: dict[str, Any] = {f"seen {i}": torch.tensor(v) for i, v in enumerate(self.seen)}
        names = {id(p): n for n, p in self.net.named_parameters()}
        for name, p in self.net.named_parameters():
            made[name] = oc.unshard(p.detach())
        for name, b in self.net.named_buffers():
            made[name] = oc.unshard(b)
        for number, optimizer in enumerate(self.optimizers):
            for p, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        made[f"optimizer {number} {names[id(p)]} {key}"] = oc.unshard(value)
        return made


@contextmanager
def quiet() -> Iterator[None]:
    """Numbers of 64 bits, so that what differs is no rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def difference(program: Program, of: type[Run] = Run) -> str:
    """How a program's numbers differ from one card's; "" if they do not. ``of``: how it runs."""
    with quiet():
        results = []
        for parallel in (False, True):
            run = of(program, parallel)
            torch.manual_seed(1)
            try:
                run.go()
            except TypeError:  # torch's fused SGD, of a parameter that gets its first gradient later than others
                if not parallel:
                    return ""
                raise
            results.append(run.result())
    alone, found = results
    if alone.keys() != found.keys():
        return f"only one has {sorted(alone.keys() ^ found.keys())}"
    for name, value in alone.items():
        if not torch.allclose(found[name].double(), value.double(), rtol=1e-7, atol=1e-9):
            return f"{name}: {found[name].flatten()[:4].tolist()} instead of {value.flatten()[:4].tolist()}"
    return ""


def work(seeds: Sequence[int], plant: Callable[[], None] | None = None, of: type[Run] = Run) -> list[tuple[int, str]]:
    """Run programs of this many ranks; seeds and what is wrong. Ends with the first that raises."""
    buckets.BUCKET_BYTES = 512
    fleet.init(is_collective=True)
    if plant is not None:
        plant()
    failed = []
    for seed in seeds:
        try:
            why = difference(draw(seed), of)
        except Exception as fault:
            failed.append((seed, f"{type(fault).__name__}: {fault}\n" + traceback.format_exc()[-1500:]))
            break
        if why:
            failed.append((seed, why))
    return failed


def search(seeds: Sequence[int], portion: int = 50, of: type[Run] = Run) -> dict[int, str]:
    """Run the programs of these seeds; what is wrong, by seed."""
    wrong: dict[int, str] = {}
    for ranks in (2, 4):
        waiting = [seed for seed in seeds if draw(seed).how["ranks"] == ranks]
        while waiting:
            now, waiting = waiting[:portion], waiting[portion:]
            try:
                for failed in run_ranks(work, ranks, now, None, of, timeout=60 + 5 * len(now)):
                    wrong |= dict(failed)
                    for seed, why in failed:
                        if "\n" in why:  # it raised, and what comes after did not run
                            left = now[now.index(seed) + 1 :]
                            waiting = [s for s in left if s not in waiting] + waiting
            except (RankError, RankTimeout) as fault:
                wrong[now[0]] = f"one of {now}: {fault}"
    return wrong


@dataclass(frozen=True)
class Options:
    """Random programs under the stages of ZeRO against one card; exit status 1 if any is wrong."""

    seed: int = 0
    """the first program's seed"""
    count: int = 100
    """how many"""


def main(options: Options) -> int:
    """Run them and print what failed."""
    wrong = search(range(options.seed, options.seed + options.count))
    for seed, why in wrong.items():
        print(f"seed {seed}: {why}\n{draw(seed)}\n")
    print(f"{options.count} programs from seed {options.seed} on: {len(wrong)} wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
