"""Random pipelines: what layers hand on, tie, drop and compute again, under any schedule, against one card.

    PYTHONPATH=tests python -m fuzz.stages --count 200 --ranks 2

The reference is the one-card program, microbatch by microbatch; for dropout it draws from a random state for
each rank, in the order of that rank's forwards, which is what each rank does.
"""

from __future__ import annotations

import random
import sys
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from fleet_programs import close, part_of
from pipeline_programs import OneCard, begin
from torch import Tensor, nn

import onecard as oc
from fuzz.wide import is_rounding, width
from onecard import fleet, pipeline
from onecard.pipeline.schedule.modes import MODES
from onecard.testing import run_ranks

WIDTH, CLASSES = 5, 4
KINDS = [
    "norm", "custom", "drop", "in place", "double", "merge", "same", "view", "expand", "mask", "masked", "none", "number",
    "batch norm",
]  # fmt: skip
State = dict[str, Any]


class Scaled(torch.autograd.Function):
    """A backward that makes the gradients of its input and of its weight in one piece."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


def pack(kind: str, state: State) -> Any:
    names = sorted(state)
    if kind == "dict":
        return dict(state)
    if kind == "tuple":
        return tuple(state[n] for n in names)
    if kind == "deep":
        half = len(names) // 2
        return {"a": [state[n] for n in names[:half]], "b": (tuple(state[n] for n in names[half:]), "end")}
    return [(n, state[n]) for n in names]


def unpack(kind: str, value: Any, names: list[str]) -> State:
    if kind == "dict":
        return dict(value)
    if kind == "tuple":
        return dict(zip(names, value, strict=True))
    if kind == "deep":
        assert value["b"][1] == "end"
        return dict(zip(names, [*value["a"], *value["b"][0]], strict=True))
    return dict(value)


class Layer(nn.Module):
    """Some operators on named values; what comes in and goes out is a nest of its own."""

    def __init__(self, plan: State) -> None:
        super().__init__()
        self.plan = plan
        self.linear = nn.Linear(WIDTH, WIDTH)
        kinds = {op[0] for op in plan["ops"]}
        self.norm = nn.LayerNorm(WIDTH) if "norm" in kinds else None
        self.batch_norm = nn.BatchNorm1d(WIDTH) if "batch norm" in kinds else None
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5) if "custom" in kinds else None
        if plan["frozen"]:
            self.requires_grad_(False)

    def forward(self, value: Any) -> Any:
        plan = self.plan
        state = unpack(plan["unpack"], value, plan["names"]) if plan["unpack"] else first(value)
        for op in plan["ops"]:
            self.run(state, *op)
        h = state["h"].to(torch.get_default_dtype())
        state["h"] = torch.tanh(self.linear(h)) + (h if plan["residual"] else 0)
        for name in plan["forget"]:
            state.pop(name)
        return pack(plan["pack"], state) if plan["pack"] else last(state)

    def run(self, state: State, kind: str, a: str, b: str) -> None:
        x = state[a]
        if kind == "norm":
            state[a] = self.norm(x.to(torch.get_default_dtype()))  # type: ignore[misc]
        elif kind == "batch norm":
            state[a] = self.batch_norm(x.to(torch.get_default_dtype()))  # type: ignore[misc]
        elif kind == "custom":
            state[a] = Scaled.apply(x.to(torch.get_default_dtype()), self.scale)
        elif kind == "drop":
            # A mask is drawn in the order of memory, and strides are not handed on.
            state[a] = F.dropout(x.to(torch.get_default_dtype()).contiguous(), 0.3, self.training)
        elif kind == "in place":
            x.mul_(0.9).add_(0.1)
        elif kind == "double":
            state[a] = x.double()
        elif kind == "merge":
            state[a] = x.to(torch.get_default_dtype()) + 0.5 * state[b].to(torch.get_default_dtype())
        elif kind == "same":
            state[b] = x
        elif kind == "view":
            state[b] = x.t().contiguous().t()
        elif kind == "expand":
            state[b] = x[:, :1].expand(-1, WIDTH)
        elif kind == "mask":
            state[b] = (x > 0).long()
        elif kind == "masked":
            state[a] = torch.where(state[b] > 0, x, 0.5 * x)
        elif kind == "none":
            state[b] = None
        else:
            state[b] = 3


def first(value: Any) -> State:
    return {"h": value} if isinstance(value, Tensor) else {"h": value["x"], "k": value["mask"]}


def last(state: State) -> Tensor:
    found = [x for _, x in sorted(state.items()) if isinstance(x, Tensor) and x.is_floating_point()]
    return sum(x.to(torch.get_default_dtype()) for x in found)[:, :CLASSES]  # type: ignore[index,return-value]


@dataclass
class Program:
    """One program, drawn by a seed: the same on all ranks."""

    seed: int
    ranks: int
    mode: str = ""
    microbatches: int = 1
    size: int = 1
    batch: int = 1
    recompute: int = 0
    chunks: int | None = None
    clip: bool = False
    steps: int = 2
    accumulate: int = 1
    masked: bool = False
    plans: list[State] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


def draw(seed: int, ranks: int) -> Program:
    """A program for so many ranks."""
    rng = random.Random(seed)
    made = Program(seed, ranks, rng.choice(MODES), rng.randint(1, 6), rng.randint(2, 3))
    if made.mode in ("VPP", "BFS"):
        made.chunks = rng.randint(2, 3)
        made.microbatches = ranks * rng.randint(1, 2) if made.mode == "VPP" else made.microbatches
    made.batch = made.microbatches * made.size - rng.choice([0, 0, made.size - 2])  # none of one sample: batch norm
    made.recompute = rng.choice([0, 0, 0, 1, 2])
    made.clip, made.accumulate = rng.random() < 0.5, rng.choice([1, 1, 2])
    stages = pipeline.modes.plan(made.mode, ranks, made.chunks)(made.microbatches).num_stages
    count = stages + rng.randint(0, 3)
    made.masked = rng.random() < 0.3
    names, packed = ["h", "k"] if made.masked else ["h"], ""
    for at in range(count):
        plan, names, packed = draw_layer(rng, names, packed, at == count - 1, made)
        made.plans.append(plan)
        made.keys.append(None)
    if rng.random() < 0.6:
        share(rng, made)
    if rng.random() < 0.2:
        for plan in made.plans[: rng.randint(1, count - 1)]:
            plan["frozen"] = True
    return made


def draw_layer(
    rng: random.Random, names: list[str], packed: str, end: bool, made: Program
) -> tuple[State, list[str], str]:
    """One layer's plan; the names that it hands on, and in which nest."""
    known, ops = list(names), []
    floats = [n for n in known if n in "habcd"]
    for _ in range(rng.randint(0, 4)):
        kind = rng.choice(KINDS)
        a = rng.choice(floats)
        fresh = next((n for n in "abcd" if n not in known), None)
        masks = [n for n in known if n in "km"]
        if kind in ("norm", "custom", "batch norm") and any(op[0] == kind for op in ops):
            continue
        if kind == "batch norm" and made.recompute:
            continue  # its buffers see each microbatch twice then, which is documented
        if kind == "in place":  # of what nothing else saved or has: one memory on one card, two on two ranks
            if names == ["h"] and packed and made.plans[-1]["residual"] and not made.recompute:
                ops.insert(0, (kind, "h", "h"))
            continue
        if kind in ("same", "view", "expand") and fresh:
            known.append(fresh)
            floats.append(fresh)
            ops.append((kind, a, fresh))
        elif kind == "mask" and "m" not in known:
            known.append("m")
            ops.append((kind, a, "m"))
        elif kind == "masked" and masks:
            ops.append((kind, a, rng.choice(masks)))
        elif kind in ("none", "number") and "z" not in known:
            known.append("z")
            ops.append((kind, a, "z"))
        elif kind in ("norm", "custom", "drop", "double", "merge", "batch norm"):
            ops.append((kind, a, rng.choice(floats)))
    forget = [n for n in known if n != "h" and rng.random() < 0.2]
    kept = sorted(n for n in known if n not in forget)
    pack_kind = "" if end else rng.choice(["dict", "tuple", "deep", "pairs"])
    plan = {
        "unpack": packed, "names": sorted(names), "ops": ops, "forget": forget, "pack": pack_kind, "frozen": False,
        "residual": rng.random() < 0.5,
    }  # fmt: skip
    return plan, kept, pack_kind


def share(rng: random.Random, made: Program) -> None:
    """Ties weights: a layer of plain kind stands in two or three places."""
    plain = {"unpack": None, "ops": [], "forget": [], "frozen": False, "residual": True}
    places = sorted(rng.sample(range(len(made.plans) + 1), min(len(made.plans) + 1, rng.randint(2, 3))), reverse=True)
    for place in places:
        made.plans.insert(place, plain)
        made.keys.insert(place, "tied")


class Tied(nn.Module):
    """A layer that hands everything on as it came, but for one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


def through(layer: Tied, value: Any) -> Any:
    """The first floating tensor of a nest, through the layer."""
    done = [False]

    def each(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and not done[0]:
            done[0] = True
            return (
                torch.tanh(layer.linear(x[:, :WIDTH].to(torch.get_default_dtype())))
                + x[:, :WIDTH].to(torch.get_default_dtype())
                if x.shape[1] == WIDTH
                else x
            )
        return x

    return torch.utils._pytree.tree_map(each, value)


def listed(made: Program) -> list[Any]:
    """The layers as a user writes them."""
    return [
        fleet.LayerDesc(Layer, plan) if key is None else fleet.SharedLayerDesc(key, Tied, through, "linear.weight")
        for plan, key in zip(made.plans, made.keys, strict=True)
    ]


def data(made: Program, step: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(1000 * made.seed + step)
    x = torch.randn(made.batch, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (made.batch,), generator=generator)
    y[torch.rand(made.batch, generator=generator) < 0.2] = -100
    y[0] = 1
    mask = torch.randint(2, (made.batch, WIDTH), generator=generator)
    return {"x": x, "mask": mask} if made.masked else x, y


def split(value: Any, sizes: list[int]) -> list[Any]:
    if isinstance(value, Tensor):
        return [part.clone() for part in value.split(sizes)]
    parts = {k: v.split(sizes) for k, v in value.items()}
    return [{k: v[i].clone() for k, v in parts.items()} for i in range(len(sizes))]


def reference(single: OneCard, layers: Any, schedule: pipeline.Schedule, x: Any, y: Tensor, sizes: list[int]) -> Tensor:
    """One card, microbatch by microbatch, each stage in its rank's order and with its rank's random state."""
    xs, ys = split(x, sizes), y.split(sizes)
    now: dict[int, Any] = dict(enumerate(xs))
    states = {r: torch.Generator().manual_seed(50 + r).get_state() for r in range(len(schedule.ranks))}
    spans = sorted(pipeline.simulate(schedule.compute()).spans, key=lambda s: s.start)
    for rank, action in [(s.rank, s.action) for s in spans if s.action.kind == "F"]:
        torch.set_rng_state(states[rank])
        value = now[action.microbatch]
        for i in layers.layers_of(action.stage):
            function = single.functions[i]
            value = single[i](value) if function is None else function(single[i], value)
        now[action.microbatch] = value
        states[rank] = torch.get_rng_state()
    counts = [int((part != -100).sum()) for part in ys]
    losses = [
        F.cross_entropy(now[i], part) * n / sum(counts) for i, (part, n) in enumerate(zip(ys, counts, strict=True)) if n
    ]
    return torch.stack(losses).sum()


def check(seed: int, finer: float = 1.0) -> None:
    """A program on the ranks of this world against one card, to 1e-5, or a part of it."""
    near = partial(close, tolerance=1e-5 * finer)
    made = draw(seed, oc.get_world_size())
    begin(made.mode, made.microbatches, made.size, pp=made.ranks)
    torch.manual_seed(seed)
    single = OneCard(listed(made))
    torch.manual_seed(seed)
    layers = fleet.PipelineLayer(
        listed(made), loss_fn=nn.CrossEntropyLoss(), recompute_interval=made.recompute,
        num_virtual_pipeline_stages=made.chunks,
    )  # fmt: skip
    model = fleet.distributed_model(layers)
    mine = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    theirs = torch.optim.SGD(single.parameters(), lr=0.1, momentum=0.9)
    sizes = [made.size] * (made.microbatches - 1) + [made.batch - made.size * (made.microbatches - 1)]
    for step in range(made.steps):
        for part in range(made.accumulate):
            x, y = data(made, 10 * step + part)
            expected = reference(single, layers, model.schedule(), x, y, sizes)
            if expected.requires_grad:
                expected.backward()
            torch.manual_seed(50 + oc.get_rank())
            loss = model.forward_backward_pipeline([x, y])
            near(loss, expected.detach(), f"loss of step {step}")
        fleet.sync(model.parameters())
        same_gradients(layers, single, 1e-5 * finer)
        if made.clip:
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (model, single)]
            near(norms[0], norms[1], "norm")
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    kept = dict(single.named_buffers())
    for name, buffer in layers.named_buffers():
        near(buffer.double(), kept[name].double(), name)
    single.eval()
    x, y = data(made, 99)
    expected = single({k: v.clone() for k, v in x.items()} if isinstance(x, dict) else x.clone()).detach()
    near(model.eval_batch([x, y]), F.cross_entropy(expected, y), "in evaluation")


def same_gradients(layers: Any, single: nn.Module, tolerance: float) -> None:
    theirs = dict(single.named_parameters(remove_duplicate=False))
    largest = max([p.grad.abs().max().item() for p in theirs.values() if p.grad is not None], default=0.0)
    for name, p in layers.named_parameters():
        other = theirs[name].grad
        if other is None:
            assert p.grad is None, f"{name} has a gradient, on one card it has none"
        else:
            assert p.grad is not None, f"{name} has no gradient"
            far = (p.grad - part_of(p, other)).abs().max().item()  # before a batch norm there is little but rounding
            assert far <= tolerance * largest, f"gradient of {name}: {far} of {largest}"


def several(seeds: list[int], wide: bool = False) -> list[str]:
    """What went wrong, by seed; at the first fault this world is done: messages may be under way."""
    with width(wide) as finer:
        for seed in seeds:
            try:
                check(seed, finer)
            except Exception:
                raise AssertionError(
                    f"seed {seed}: {draw(seed, oc.get_world_size())}\n{traceback.format_exc()[-1800:]}"
                ) from None
    return []


@dataclass(frozen=True)
class Options:
    """Random pipelines against one card; exit status 1 if any is wrong."""

    seed: int = 0
    """the first program's seed"""
    count: int = 100
    """how many"""
    ranks: int = 2
    """2 or 4"""
    wide: bool = False
    """in float64 from the start"""


def main(options: Options) -> int:
    """Run them and print what failed; what is right in float64 is rounding, and counted apart."""
    failed, rounded, end = 0, list[int](), options.seed + options.count
    for at in range(options.seed, end, 20):
        seeds = list(range(at, min(at + 20, end)))
        while seeds:
            try:
                run_ranks(several, options.ranks, seeds, options.wide, timeout=120)
                break
            except Exception as fault:
                words = str(fault)
                seed = int(words.split("seed ")[1].split(":")[0]) if "seed " in words else seeds[0]
                if not options.wide and is_rounding(several, options.ranks, [seed], True):
                    rounded.append(seed)
                else:
                    print(f"seed {seed} FAILED\n{words[:2500]}\n", flush=True)
                    failed += 1
                seeds = [s for s in seeds if s > seed]
    print(f"{failed} of {options.count} failed; {len(rounded)} differ by rounding alone, and not in float64: {rounded}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
