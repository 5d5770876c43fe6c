"""Random steps of tensor statements, cut in microbatches: views, memory that is written to, sums, sorts. One card's numbers?

``python -m fuzz.micro --seed 17 --count 1 --show``: one again, with its text.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

import onecard as oc
from fuzz.counts import CLASSES, ROWS, alike, hot, trains
from fuzz.statements import IN_PLACE, OPERATORS, VIEWS
from onecard.errors import RecordingError
from onecard.static.passes.microbatches import Microbatches

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
DRAWN = ("dropout", "normal_(", "checkpoint", ".unique", "histc")
"""What each microbatch draws for itself, or reads on the host."""
FIRST = (
    "e = F.cross_entropy(o, y, reduction='none')", "w = (y != 4).float()", "m = torch.ones(len(y))", "m = torch.zeros({rows}, 3)",
    "t = normal({s}, 5) * 1", "a = torch.arange(len(y)) * 0.1", "q = hot(y)", "c = (x > 0).sum(1) * 0.1",
    "p = o.softmax(1)", "m = torch.zeros(())", "m = normal({s}, 2, 5) * 1", "u = o.new_zeros(len(o), 2)",
)  # fmt: skip
LATER = "late: "  # what stands between backward() and the optimizer's step
ORDERED = 100_000  # of the seeds from here on some sort their rows, or use their length behind backward()
ORDERS = (
    "n = y.argsort().argsort() * 0.1", "n = o[y.argsort()] * 1", "n = o[y.argsort()][y.argsort().argsort()]",
    "n = y.cumsum(0) * 0.01",
    "n = y.sort().values * 0.2", "n = e[o[:, 0].argsort()]", "n = torch.histc(y.float(), 5, 0, 4)",
    "n = x.sort(0).values[:, :5] * 1",
    "n = torch.zeros_like(e).index_add(0, y.argsort(), e[y.argsort()])", "n = o.sort(1).values", "n = o[:, 1].sort().values",
    "n = o.argsort(1).argsort(1) * 0.1 * o", "n = (y == 1).long().cumsum(0) * e", "n = F.one_hot(y, 5).cumsum(0).sum(1) * 0.1",
)  # fmt: skip
LATE = (
    "for g in gs: g.div_({n})", "for g in gs: g.mul_(1 / {n})", "torch._foreach_div_(gs, {n})",
    "for g in gs: g.add_(0.01 * {n})", "for g in gs: g.mul_({n} > 9)",
    "torch.nn.utils.clip_grad_norm_(ps, 0.1 * {n})", "torch.nn.utils.clip_grad_value_(ps, 0.02 * {n})",
    "for p, g in zip(ps, gs): p.grad = g / {n}", "for p in ps: p.data.mul_(1 - 0.001 * {n})",
    "for g in gs: g.div_(torch.tensor({n} * 1.0))",
    "for p, g in zip(ps, gs): p.data.add_(g, alpha=-0.01 / {n})",
    "for g in gs: g.sub_(g.mean() / {n})",
    "for g in gs: g.div_(torch.full((), {n} * 1.0))",
    "for g in gs: g.lerp_(torch.zeros_like(g), 1 / {n})",
    "if {n} > 9: torch._foreach_mul_(gs, 0.5)", "for g in gs: g.div_(torch.ones({rows}).sum())",
    "for g in gs: g.div_((y != 4).sum())",
)  # fmt: skip
LENGTHS = (
    "len(y)",
    "x.shape[0]",
    "y.numel()",
    "(len(x) + 1)",
    "len(x) ** 0.5",
    "max(len(y), 3)",
    "min(len(y), 7)",
    "7",
)
MADE = 200_000  # of the seeds from here on all divide by what is made of the batch's length, by way of tensors
OF_LENGTH = (
    "torch.tensor([float(len(y)), 2.0])", "torch.tensor(list(o.shape)).float()", "torch.full((3,), len(y) * 1.0)",
    "torch.arange(1.0, len(y) + 1)", "torch.ones(len(y), 2)", "torch.linspace(0, len(y), 3)", "torch.eye(len(y))",
    "torch.tensor(len(y)).float()[None]", "normal(5, 3) * 0 + len(y)", "torch.as_tensor([len(x), 3]).float()",
    "torch.zeros(2).index_fill(0, torch.tensor([1]), len(y))", "o.new_full((2,), len(o))", "o.new_tensor([len(o), 1.0])",
)  # fmt: skip
TURNS = (
    "z.unbind()[-1]", "z.sort().values", "z.max(0).values", "z.cumsum(0)", "torch.stack([z, z * 2])", "torch.cat([z, z])",
    "z.chunk(2)[0]", "z.flip(0)", "z[None]", "z.t()", "z.flatten()", "torch.where(z > 3, z, 3.0)", "z.clamp(min=2)",
    "z.roll(1, 0)", "z.expand(2, *z.shape)", "z.repeat(2)", "z.mean(0)", "z.sum(0)", "z.clone().mul_(2)", "z / z.sum()",
    "torch.cat([z, normal(7, 2)])", "z.sqrt()", "z.topk(1).values", "z.aminmax().max", "z.double().float()",
    "z.long().float()", "z.softmax(0)", "z.norm()", "z.clone().fill_(len(y))", "z.clone().index_fill_(0, torch.tensor([0]), 5.0)",
    "torch.nan_to_num(z)", "z.split(1)[0]", "z.tolist() and z", "torch.atleast_2d(z)", "z.median(0).values",
)  # fmt: skip
DIVIDED = (
    "e.sum() / z.sum()", "e.sum() / z.flatten()[0]", "e.sum() / z.max()", "(e * z.mean()).mean()", "(e / z.flatten()[-1]).sum()",
    "e.mean() + o.square().mean() * z.mean()", "o.square().sum() / z.abs().sum()", "e.sum() * (1 / z.sum())",
    "e.sum() / z.reshape(-1)[:1].squeeze()", "torch.stack([e.sum(), o.sum()])[0] / z.amax()",
)  # fmt: skip
RANDOM = 300_000  # of the seeds from here on all draw random numbers, as one card does
RANDOMS = (
    "F.dropout({x}, 0.3)", "{x} + torch.randn_like({x}) * 0.1", "{x} * (torch.rand_like({x}) > 0.3)", "{x} * torch.rand(())",
    "{x} * (torch.rand(len(y)) > 0.2).reshape(-1, *[1] * ({x}.dim() - 1))", "F.gumbel_softmax({x}, dim=-1)",
    "torch.bernoulli({x}.detach().sigmoid()) * {x}", "{x} + torch.empty_like({x}).uniform_(-0.1, 0.1)",
    "F.dropout({x}.reshape(-1), 0.3).reshape({x}.shape)", "F.dropout({x}.t(), 0.3).t()", "F.alpha_dropout({x}, 0.2)",
    "{x} * torch.randn({x}.shape[-1])", "{x} + torch.randn({x}.shape) * 0.1", "F.rrelu({x}, training=True)",
    "F.dropout({x}.repeat_interleave(2, 0), 0.3)[::2]", "F.dropout(torch.cat([{x}, {x}]), 0.3)[: len({x})]",
    "F.dropout(torch.cat([{x}, {x}], -1), 0.3)", "{x}.gather(-1, torch.rand({x}.shape).argsort(-1))",
    "{x} * torch.randint(0, 3, ({x}.shape[0],)).reshape(-1, *[1] * ({x}.dim() - 1))", "{x}[torch.randperm(len({x}))]",
    "F.dropout({x}[:, None].expand(-1, 3, *{x}.shape[1:]), 0.3).mean(1)",
    "F.dropout({x}.unflatten(0, (-1, 2)), 0.3).flatten(0, 1)",
    "torch.normal({x}.detach(), 0.1) + {x}", "F.dropout({x}[torch.arange(len(y))], 0.5)", "F.dropout({x}.sum(0), 0.3) + {x}",
    "F.feature_alpha_dropout({x}[..., None], 0.2)[..., 0]", "{x} * F.dropout(torch.ones(5), 0.2).mean()",
)  # fmt: skip
LAST = (
    "{v}.mean()", "{v}.sum()", "{v}.sum() / len(y)", "({v} * {u}).mean()", "({v} * {u}).sum()", "{v}.square().mean()", "e.mean()",
    "{v}.sum() / {u}.abs().sum().clamp(min=1)", "({v} * {u}).sum() / {u}.abs().sum().clamp(min=1)",
    "(e * {u}).mean()", "e.mean() * {u}.mean()", "e.sum() / {u}.abs().sum().clamp(min=1)",
)  # fmt: skip


class Longer(Exception):
    """A table of the program's that is as long as the batch: a microbatch has none."""


_tables: dict[Any, Tensor] = {}


def _table(key: Any, make: Callable[[], Tensor]) -> Tensor:
    """Of the program's own: made as it is drawn, and not by its step."""
    if key not in _tables:
        if "closed" in _tables:
            raise Longer
        _tables[key] = make()
    return _tables[key]


def normal(seed: int, *shape: int) -> Tensor:
    return _table((seed, shape), lambda: torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def ints(seed: int, high: int, *shape: int) -> Tensor:
    return _table(
        (seed, high, shape), lambda: torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))
    )


NAMES = {"torch": torch, "F": F, "hot": hot, "normal": normal, "ints": ints}


class Drawing:
    """A step's statements, each tried on a batch as it is drawn."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.lines: list[str] = []
        x, y = normal(1, ROWS, 8), ints(2, CLASSES, ROWS)
        self.space: dict[str, Any] = {"x": x, "y": y, "o": (x[:, :CLASSES] * 1.5).requires_grad_() * 1.0}
        self.say(FIRST[0])
        for _ in range(self.r.randint(1, 3)):
            self.say(self.r.choice(FIRST[1:]).format(rows=self.r.choice(("len(y)", "len(o)", "4")), s=self.seed()))

    def seed(self) -> int:
        return self.r.randrange(1000)

    def say(self, line: str) -> bool:
        trial = {
            k: v.detach().clone().requires_grad_(v.requires_grad) * 1 if k in "x" else v for k, v in self.space.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(line, NAMES, trial)
                made = [v for v in trial.values() if isinstance(v, Tensor) and v.is_floating_point()]
                if any(not v.isfinite().all() or v.numel() > 4000 or v.abs().sum() > 1e5 for v in made):
                    return False
            except Exception:
                return False
        self.space = trial
        self.lines.append(line)
        return True

    def floats(self) -> list[str]:
        found = [k for k, v in self.space.items() if isinstance(v, Tensor) and v.is_floating_point() and k != "x"]
        return [*found, *found[2:]]  # later ones more often

    def fill(self, text: str, x: str) -> str | None:
        shape = self.space[x].shape
        if not shape and any(blank in text for blank in ("{d}", "{e}", "{n}", "{i}", "{k}")):
            return None
        dim = self.r.choice([*range(len(shape)), len(shape) - 1]) if shape else 0
        n = max(shape[dim], 1) if shape else 1
        y = self.r.choice(self.floats())
        i = self.r.randrange(max(1, min(n, shape[0] if shape else 1)))
        other = self.r.randrange(max(len(shape), 1))
        return text.format(
            x=x, y=y, d=dim, e=other, n=n, i=i, k=self.r.randint(1, n), c=self.r.choice((-1, 0, 1, 2)), s=self.seed()
        )

    def step(self) -> None:
        x = self.r.choice([*self.floats(), "x"])
        chance = self.r.random()
        table = OPERATORS if chance < 0.5 else VIEWS if chance < 0.7 else IN_PLACE
        text = self.fill(self.r.choice([t for t in table if not any(d in t for d in DRAWN)]), x)
        if text is None:
            return
        if table is IN_PLACE:
            self.say(f"with torch.no_grad(): {text}" if self.r.random() < 0.25 else text)
        else:
            self.say(f"v{len(self.lines)} = {text}")

    def term(self) -> str | None:
        graphs = [k for k, v in self.space.items() if isinstance(v, Tensor) and v.requires_grad and k != "x"]
        text = self.r.choice(LAST).format(v=self.r.choice([*graphs, *graphs[2:]]), u=self.r.choice(self.floats()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = eval(text, NAMES, self.space)
            except Exception:
                return None
        return text if found.dim() == 0 and found.requires_grad and found.isfinite() and found.abs() < 1e3 else None


def drawn(seed: int) -> str:
    """The text of a step's loss."""
    _tables.clear()
    d = Drawing(seed)
    if seed >= ORDERED and d.r.random() < 0.7:
        d.say(d.r.choice(ORDERS))
    if MADE <= seed < RANDOM:
        return _of_length(d)
    for _ in range(d.r.randint(1, 6)):
        d.step()
        if seed >= RANDOM:
            text = d.r.choice(RANDOMS).format(x=d.r.choice([*d.floats(), "x", "o", "o", "e"]))
            d.say(f"v{len(d.lines)} = {text}")
    late = ""
    if seed >= ORDERED and d.r.random() < 0.4:
        late = LATER + d.r.choice(LATE).format(n=d.r.choice(LENGTHS), rows="len(x)")
    terms = [t for t in (d.term() for _ in range(d.r.choice((1, 1, 2, 3)))) if t] or ["e.mean()"]
    return "\n".join([*d.lines, "loss = " + " + ".join(terms), *filter(None, [late])])


def _of_length(d: Drawing) -> str:
    """A loss that is divided by what a chain of calls makes of the batch's length."""
    d.say(f"z = {d.r.choice(OF_LENGTH)}")
    for _ in range(d.r.randint(1, 4)):
        d.say(f"z = {d.r.choice(TURNS)}")
    return "\n".join([*d.lines, f"loss = {d.r.choice(DIVIDED)}"])


def trained(text: str, k: int | None) -> Tensor:
    """Losses of a net that trains, and its parameters at the end. ``k``: None runs the step as it is."""
    text, _, late = text.partition("\n" + LATER)
    body = "\n    ".join(text.splitlines())
    source = f"def loss_of(o, x, y):\n    {body}\n    return loss\n\n\ndef late(gs, ps, x, y):\n    {late or 'pass'}"
    exec(compile(source, "step", "exec"), names := dict(NAMES))
    with oc.one_card_random():
        losses, net = trains(names["loss_of"], k, names["late"])
    return torch.cat([losses, *[oc.unshard(p.detach()).flatten() for p in net.parameters()]])


def _needless(text: str, k: int, one: Tensor) -> bool:
    """Whether microbatches that are refused give one card's numbers, were they not."""
    with mock.patch.object(Microbatches, "_judge"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return alike(one, trained(text, k))
        except Exception:
            return False


def judged(text: str, k: int, needless: bool = False) -> tuple[str, str]:
    """right, refused (right though refused: ``needless`` asks), told, silent, error; void: no number on one card; and words."""
    try:
        one = trained(text, None)
    except Exception as error:
        return "void", str(error)
    if not torch.isfinite(one).all() or one.abs().max() > 1e3:
        return "void", ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            _tables["closed"] = torch.ones(())
            found = trained(text, k)
        except Longer:
            return "void", "a table as long as the batch"
        except RecordingError as error:
            return "right though refused" if needless and _needless(text, k, one) else "refused", str(error)
        except Exception as error:
            return "error", f"{type(error).__name__}: {error}"
        finally:
            _tables.pop("closed")
    words = [str(w.message) for w in said if "recorded anew" not in str(w.message)]
    return "right" if alike(one, found) else "told" if words else "silent", " | ".join(words)


def main(seed: int = 0, count: int = 200, k: int = 4, show: bool = False, needless: bool = False) -> None:
    """Random steps under microbatches; exit status 1 if any gives other numbers than one card's, and nobody was told.

    Args:
        seed: the first step's.
        count: how many.
        k: microbatches.
        show: print each text.
        needless: print those that are refused and would be right.
    """
    found = Counter[str]()
    for number in range(seed, seed + count):
        what, words = judged(text := drawn(number), k, needless)
        found[what] += 1
        if show or what in ("silent", "error", "right though refused"):
            print(f"seed {number}: {what}: {words[:600]}\n    " + text.replace("\n", "\n    "), flush=True)
    print(", ".join(f"{n} {what}" for what, n in found.most_common()))
    sys.exit(found["silent"] > 0)


if __name__ == "__main__":
    tyro.cli(main)
