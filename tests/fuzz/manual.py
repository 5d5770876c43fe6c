"""Random programs of the manual level (fleet's layers over dp, mp and sep) on real ranks against plain torch on one card.

    PYTHONPATH=tests python -m fuzz.manual --count 200          # some minutes
    PYTHONPATH=tests python -m fuzz.manual --seed 17 --count 1  # one again, with its program

A program is a stack of blocks around a residual (MLPs, gated MLPs, attention, norms, plain layers, some computed again in
backward), between an embedding and a head, trained for a few steps with microbatches, clipping, a schedule, a scaler.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from fleet_programs import begin, close, compare, seeded
from torch import Tensor, nn

import onecard as oc
from fuzz.wide import is_rounding, width
from onecard import fleet
from onecard.fleet.layers import context, sequence
from onecard.fleet.layers.mappings import copy_to
from onecard.testing import run_ranks

mp = fleet.meta_parallel
WIDTH, IGNORED = 8, -100
DEGREES = [
    {"mp": 2},
    {"dp": 2},
    {"sep": 2},
    {"mp": 3},
    {"dp": 2, "mp": 2},
    {"mp": 2, "sep": 2},
    {"dp": 2, "sep": 2},
    {"mp": 4},
]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "silu": F.silu,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3),
    "adam in a loop": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3, foreach=False, amsgrad=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2),
}


@dataclass(frozen=True)
class Program:
    """What is built and how it is trained; the same text on one card and on ranks."""

    seed: int
    degrees: dict[str, int]
    parallel: bool  # in the sequence, along mp
    causal: bool
    ring: bool
    blocks: list[dict[str, Any]]
    classes: int
    head: str
    smoothing: float
    frozen: int
    groups: bool
    optimizer: str
    micro: int
    clip: float
    schedule: bool
    scaler: bool
    recorded: str  # "backward": forward and backward are replayed, "both": what follows, too
    time: int = 16
    batch: int = 4
    steps: int = 5
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        n = 1
        for size in self.degrees.values():
            n *= size
        object.__setattr__(self, "ranks", n)


def draw(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    degrees = r.choice(DEGREES)
    m, parallel = degrees.get("mp", 1), degrees.get("mp") in (2, 4) and r.random() < 0.5
    return Program(
        seed=seed, degrees=degrees, parallel=parallel, causal=r.random() < 0.7, ring=r.random() < 0.5,
        blocks=[_block(r, m) for _ in range(r.randrange(1, 4))], classes=r.choice([11, 12, 16, 5]),
        head=r.choice(["tied", "column", "gathered", "plain"]), smoothing=r.choice([0.0, 0.1]), frozen=r.choice([-1, -1, 0, 3]),
        groups=r.random() < 0.3, optimizer=r.choice(list(OPTIMIZERS)), micro=r.choice([1, 1, 2]), clip=r.choice([0.0, 0.2, 5.0]),
        schedule=r.random() < 0.5, scaler=r.random() < 0.3, recorded=r.choice(["", "", "backward", "both"]),
    )  # fmt: skip


def _block(r: random.Random, m: int) -> dict[str, Any]:
    kind = r.choice(["mlp", "mlp", "gated", "attention", "attention", "norm", "linear"])
    block: dict[str, Any] = {"kind": kind, "again": r.random() < 0.3, "norm": r.choice(["layer", "rms", "none"])}
    if kind in ("mlp", "gated"):
        block |= {"units": r.choice([4, 6, 8, 13]), "act": r.choice(list(ACTIVATIONS)), "bias": r.random() < 0.7}
        block["gather"] = kind == "mlp" and r.random() < 0.2
    if kind == "attention":
        heads = r.choice([4, 8] if m == 4 else [2, 4, 8] if m < 3 else [4, 8])
        block |= {"heads": heads, "kv": r.choice([k for k in (1, 2, 4, 8) if k <= heads and heads % k == 0])}
    return block


class Block(nn.Module):
    """One block, on one card (``plain``) or with its parts on ranks; x is (time, batch, width)."""

    def __init__(self, what: dict[str, Any], program: Program, plain: bool) -> None:
        super().__init__()
        self.what, self.program, self.plain = what, program, plain
        kind, width, parallel = what["kind"], WIDTH, program.parallel and not plain
        self.norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "none": lambda _: nn.Identity()}[what["norm"]](width)
        column: Any = mp.ColumnParallelLinear if not parallel else sequence.ColumnSequenceParallelLinear
        merged: Any = mp.MergedColumnParallelLinear if not parallel else sequence.MergedColumnSequenceParallelLinear
        projections: Any = mp.QKVParallelLinear if not parallel else sequence.QKVSequenceParallelLinear
        row: Any = mp.RowParallelLinear if not parallel else sequence.RowSequenceParallelLinear
        if kind == "mlp":
            units, bias, gather = what["units"], what["bias"], what["gather"] and not parallel
            self.a = (
                nn.Linear(width, units, bias) if plain else column(width, units, has_bias=bias, gather_output=gather)
            )
            self.b = (
                nn.Linear(units, width) if plain else row(units, width, has_bias=True, input_is_parallel=not gather)
            )
        elif kind == "gated":
            units, bias = what["units"], what["bias"]
            self.a = (
                nn.Linear(width, 2 * units, bias)
                if plain
                else merged(width, [units] * 2, has_bias=bias, gather_output=False)
            )
            self.b = nn.Linear(units, width) if plain else row(units, width, has_bias=True, input_is_parallel=True)
        elif kind == "attention":
            heads, kv, each = what["heads"], what["kv"], 4
            self.a = (
                nn.Linear(width, each * (heads + 2 * kv))
                if plain
                else projections(width, each, heads, kv, has_bias=True)
            )
            out = heads * each
            self.b = (
                nn.Linear(out, width) if plain else row(out, width, has_bias=True, input_is_parallel=True, unit=each)
            )
        elif kind == "linear":
            self.a = nn.Linear(width, width)
        if parallel:  # what every rank holds sees a part of the sequence
            for p in (*self.norm.parameters(), *(self.a.parameters() if kind == "linear" else ())):
                fleet.mark_as_sequence_parallel_parameter(p)

    def forward(self, x: Tensor) -> Tensor:
        if not self.what["again"]:
            return x + self._body(x)
        if self.plain:
            return x + torch.utils.checkpoint.checkpoint(self._body, x, use_reentrant=False)
        return x + fleet.recompute(self._body, x)

    def _body(self, x: Tensor) -> Tensor:
        kind, x = self.what["kind"], self.norm(x)
        if kind == "norm":
            return x
        if kind == "linear":
            return torch.tanh(self.a(x))
        if kind == "attention":
            return self.b(self._attend(self.a(x)))
        act = ACTIVATIONS[self.what["act"]]
        if kind == "mlp":
            return self.b(act(self.a(x)))
        gate, up = self.a(x).chunk(2, -1) if self.plain else self.a.split(self.a(x))
        return self.b(act(gate) * up)

    def _attend(self, y: Tensor) -> Tensor:
        heads, kv = self.what["heads"], self.what["kv"]
        if self.plain:
            q, k, v = y.unflatten(-1, (heads + 2 * kv, 4)).split([heads, kv, kv], -2)
            k, v = (t.repeat_interleave(heads // kv, -2) for t in (k, v))
        else:
            q, k, v = self.a.split(y)
            k, v = (self.a.expand(t, -2) for t in (k, v))
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        causal = self.program.causal
        if self.plain or self.program.degrees.get("sep", 1) == 1:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        elif self.program.ring or q.shape[1] % 2:
            y = fleet.ring_attention(q, k, v, causal=causal)
        else:
            y = fleet.ulysses_attention(q, k, v, causal=causal)
        return y.permute(2, 0, 1, 3).flatten(2)


class Model(nn.Module):
    """Embedding, blocks, head: (batch, time) of ids -> losses of tokens (time, batch)."""

    def __init__(self, program: Program, plain: bool) -> None:
        super().__init__()
        self.program, self.plain = program, plain
        classes, parallel = program.classes, program.parallel and not plain
        self.table = nn.Embedding(classes, WIDTH) if plain else mp.VocabParallelEmbedding(classes, WIDTH)
        self.blocks = nn.ModuleList(Block(block, program, plain) for block in program.blocks)
        self.last = nn.LayerNorm(WIDTH)
        if parallel:
            for p in self.last.parameters():
                fleet.mark_as_sequence_parallel_parameter(p)
        if program.head != "tied":
            cut = program.head in ("column", "gathered") and not plain
            gather = program.head == "gathered"
            make: Any = mp.ColumnParallelLinear
            self.head = make(WIDTH, classes, has_bias=True, gather_output=gather) if cut else nn.Linear(WIDTH, classes)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        program, plain = self.program, self.plain
        x = self.table(ids.t())
        parallel = program.parallel and not plain
        if parallel:
            x = sequence.scatter(x)
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        tied = program.head == "tied"
        cut = not plain and program.head in ("tied", "column")
        if parallel:
            # before a product of which each rank has a part gradients are summed; where all do the same, each takes its own
            x = sequence.all_gather(x) if tied else sequence.gather(x)
        elif tied and not plain:
            x = copy_to(x, self.table.group)
        logits = F.linear(x, self.table.weight) if tied else self.head(x)
        labels = labels.t()
        if cut:
            loss = mp.ParallelCrossEntropy(
                ignore_index=IGNORED, num_classes=program.classes, label_smoothing=program.smoothing
            )
            return loss(logits, labels).view(labels.shape)
        flat = F.cross_entropy(
            logits.flatten(0, 1),
            labels.flatten(),
            ignore_index=IGNORED,
            label_smoothing=program.smoothing,
            reduction="none",
        )
        return flat.view(labels.shape)


def _batch(program: Program, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * program.seed + step)
    ids, labels = (torch.randint(program.classes, (program.batch, program.time), generator=g) for _ in range(2))
    labels[: program.batch // 2, : program.time // 2] = IGNORED
    return ids, labels


def _optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    params = [*model.parameters()]
    if 0 <= program.frozen < len(params):
        params[program.frozen].requires_grad_(False)
    params = [p for p in params if p.requires_grad]
    flat = [p for p in params if p.dim() < 2]
    groups: Any = params
    if program.groups and flat and len(flat) < len(params):
        groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": flat, "weight_decay": 0.0}]
    return OPTIMIZERS[program.optimizer](groups)


def train(program: Program, plain: bool) -> tuple[list[float], list[float], nn.Module]:
    """Losses, norms of the gradients, and the model after its steps."""
    model: Any = seeded(Model, program, plain)
    group = None
    if not plain:
        model = fleet.distributed_model(model)
        group = fleet.get_hybrid_communicate_group()
    optimizer: Any = _optimizer(program, model)
    optimizer = optimizer if plain else fleet.distributed_optimizer(optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5) if program.schedule else None
    make: Any = torch.amp.GradScaler if plain else fleet.GradScaler
    scaler = make("cpu", init_scale=64.0, enabled=program.scaler)

    def backward(ids: Tensor, labels: Tensor) -> Tensor:
        each = model(ids, labels)
        loss = each.sum() / (labels != IGNORED).sum() if plain else fleet.token_mean(each, labels.t() != IGNORED)
        scaler.scale(loss / program.micro).backward()
        return loss.detach()

    def update() -> Tensor:
        norm = torch.zeros(())
        if program.clip:
            scaler.unscale_(optimizer)
            clip: Any = torch.nn.utils.clip_grad_norm_ if plain else fleet.clip_grad_norm_
            norm = clip(model.parameters(), program.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return norm

    add_up: Any = backward
    end: Any = update
    if not (plain or program.scaler):
        add_up = oc.to_static(backward) if program.recorded else backward
        end = oc.to_static(update) if program.recorded == "both" else update
    losses, norms = [], []
    for step in range(program.steps):
        total = 0.0
        for micro in range(program.micro):
            ids, labels = _batch(program, 10 * step + micro)
            if group is not None:
                n, me = group.get_data_parallel_world_size(), group.get_data_parallel_rank()
                ids, labels = ids.chunk(n)[me], labels.chunk(n)[me]
                if group.get_sep_parallel_world_size() > 1:
                    ids, labels = (context.cut(t, 1, balanced=program.causal) for t in (ids, labels))
            total += add_up(ids, labels).item()
        losses.append(total / program.micro)
        norms.append(end().item())
        if schedule is not None:
            schedule.step()
    return losses, norms, model if plain else model.module


def check(program: Program, finer: float = 1.0) -> None:
    """On ranks: this program against its one-card twin; ``finer``: a part of the tolerance."""
    expected = train(program, plain=True)
    found = train(program, plain=False)
    for what, a, b in zip(("losses", "norms"), found, expected, strict=False):
        close(torch.tensor(a), torch.tensor(b), what, 2e-5 * finer)
    compare(found[2], expected[2], gradients=False, tolerance=1e-4 * finer)


def _unmarked() -> None:
    """Norms between sequence-parallel layers keep the gradients of their own part of the sequence."""
    fleet.mark_as_sequence_parallel_parameter = lambda p, group=None: p


def _no_sum_before_the_head() -> None:
    """Each rank's part of a tied head sends back its own gradient alone."""
    sequence.all_gather = sequence.gather


PLANTS = {"unmarked norms": _unmarked, "no sum before the head": _no_sum_before_the_head}


def together(programs: list[Program], plant: str = "", wide: bool = False) -> dict[int, str]:
    """On ranks: what is wrong with each of these programs (of the same degrees); the first ends the run."""
    begin(**programs[0].degrees)
    if plant:
        PLANTS[plant]()
    warnings.filterwarnings("ignore", ".*is recorded anew")  # once for each state in which a call finds the gradients
    for program in programs:
        try:
            with width(wide) as finer:
                check(program, finer)
        except Exception as e:
            return {program.seed: f"{type(e).__name__}: {e}"}
    return {}


@dataclass(frozen=True)
class Options:
    """Random programs of the manual level against one card; exit status 1 if any is wrong."""

    seed: int = 0
    """the first program's seed"""
    count: int = 100
    """how many"""
    plant: str = ""
    """a deliberate fault, by its name in PLANTS"""


def run(seeds: Iterable[int], plant: str = "") -> dict[int, str]:
    """What is wrong, by seed, and not by rounding alone."""
    wrong: dict[int, str] = {}
    programs = [*map(draw, seeds)]
    for degrees in DEGREES:
        left = [p for p in programs if p.degrees == degrees]
        while left:
            try:
                found = run_ranks(together, left[0].ranks, left[:25], plant, timeout=180)
            except Exception as e:
                found = [{left[0].seed: f"the run of {[p.seed for p in left[:25]]} failed: {e}"}]
            bad = {seed: why for each in found for seed, why in each.items()}
            wrong |= {
                seed: why
                for seed, why in bad.items()
                if not is_rounding(together, left[0].ranks, [p for p in left if p.seed == seed], plant, True)
            }
            stopped = [i for i, p in enumerate(left[:25]) if p.seed in bad]
            left = left[stopped[0] + 1 :] if stopped else left[25:]
    return wrong


def main(options: Options) -> int:
    """Run them and print what failed."""
    if options.count == 1:
        print(draw(options.seed))
    wrong = run(range(options.seed, options.seed + options.count), options.plant)
    for seed, why in sorted(wrong.items()):
        print(f"seed {seed}: {draw(seed).degrees}: {why}")
    print(
        f"{options.count} programs from seed {options.seed} on: {options.count - len(wrong)} right, {len(wrong)} wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
