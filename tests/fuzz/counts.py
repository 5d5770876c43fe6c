"""Random losses that are scaled by what a batch counts, cut in microbatches: one card's numbers, or told."""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError
from onecard.static.passes.microbatches import Microbatches

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
ROWS, CLASSES, CALLS = 16, 5, 4

# {o}: (rows, classes), what the model gives. {w}: (rows,), made of the batch alone.
EACH = (
    "F.cross_entropy(o, y, reduction='none')", "(o.logsumexp(1) - o.gather(1, y[:, None])[:, 0])", "o.square().mean(1)",
    "F.mse_loss(o, hot(y), reduction='none').mean(1)", "F.binary_cross_entropy_with_logits(o, hot(y), reduction='none').sum(1)",
)  # fmt: skip
WEIGHTS = (
    "(y != 4)", "(y != 4).float()", "(y < 2)", "table[y]", "(x[:, 0] > 0).float()", "x[:, 1].abs()",
    "torch.where(y == 1, 2.0, 0.5)", "((y != 4) * (y != 0))", "y.float()", "(x.abs().sum(1) / len(x))",
    "(x > 0).sum(1).clamp(max=3)", "x.cumsum(1)[:, 2].abs()", "F.pad(x, (0, 2))[:, 3:].abs().sum(1)", "x.roll(1, 1)[:, 0].abs()",
    "x.softmax(1).amax(1)", "hot(y).mean(0)[y]", "x.abs().cumsum(0)[:, 0]", "x.roll(1, 0)[:, 0].abs()", "x.softmax(0)[:, 1]",
    "F.pad(x.abs(), (0, 0, 0, 1))[1:, 0]",
)  # fmt: skip
SUMS = (
    "({e} * {w}).sum()", "({e} * {w}).mean()", "{e}.sum()", "{e}.masked_fill({w} == 0, 0.0).sum()",
    "torch.where({w} != 0, {e}, 0.0).sum()", "torch.dot({e}, {w}.float())", "({e} / len(o) * {w}).sum()",
    "(o / len(o)).square().sum()",
)  # fmt: skip
COUNTS = (
    "{w}.sum()", "{w}.sum().clamp(min=1)", "({w}.sum() + 1e-6)", "{w}.float().mean()", "torch.count_nonzero({w})",
    "{w}.sum().float().sqrt()", "{w}.sum(dim=0)", "torch.maximum({w}.sum(), torch.ones(()))", "{w}.cumsum(0)[-1]",
    "(torch.sum({w}) * 2)", "({w}.float().mean() * len(x))", "({w}.float().max() + 1)",
    "{w}[:4].sum().clamp(min=1)", "{w}[1:].sum().clamp(min=1)", "({w} * torch.arange(len(x))).sum().clamp(min=1)",
    "({w}.float().mean() * len(x) + 1)", "({w}.sum() / len(x) + 1)",
)  # fmt: skip
WHOLE = (
    "{sum} / {count}", "{sum} / {count}", "{sum} / {count}", "{sum} * (1 / {count})", "{sum} * (len(y) / {count})",
    "({e} * ({w} / {count})).sum()", "({w} / {count} * {e}).mean()", "F.cross_entropy(o, y, ignore_index={i})",
    "F.cross_entropy(o, y, weight=table, label_smoothing=0.1)", "F.nll_loss(o.log_softmax(1), y, ignore_index={i}, weight=table)",
    "F.cross_entropy(o * (1 / {count}), y)", "{sum}",
)  # fmt: skip

GROWING = (
    "(len(y) - {w}.sum() + 1)", "({w}.sum() + len(y))", "(len(y) + 1 + {w}.sum())", "(x.numel() - {w}.sum())",
    "(16 - {w}.sum())", "(4 + {w}.sum())", "(len(y) - {w}.sum()) + (4 + {w}.sum())", "({w}.sum() - 2 * len(y))",
    "(len(y) - {w}.float().mean())", "(len(y) - {w}.sum() / 2)", "(len(y) - {w}.sum(0) * 2)",
)  # fmt: skip
GUARDED = (
    "torch.where({count} > 3, {sum} / {count}, torch.zeros(()))", "torch.where({count} > 3, {sum} / {count}, 0.0)",
    "({sum} / {count} * ({count} > 9))", "torch.where({count} <= 4, 0.0, {sum})", "torch.where({count} > len(y), {sum}, 0.0)",
    "torch.where({count} > 3, {sum} / {count}, 1.0)", "torch.where({count} > 3, {sum} / {count}, {sum} * 0)",
)  # fmt: skip
"""Of seeds from 500,000 on."""


def drawn(seed: int) -> str:
    """The text of a loss of ``o``, ``x`` and ``y``."""
    r = random.Random(seed)
    counts, wholes = (COUNTS + GROWING, WHOLE + GUARDED) if seed >= 500_000 else (COUNTS, WHOLE)

    written = partial(_written, random.Random(~seed))

    def term() -> str:
        w, e = r.choice(WEIGHTS), r.choice(EACH)
        parts = {"w": w, "e": e, "i": r.randrange(CLASSES)}
        parts |= {name: written(parts[name]) for name in ("w", "e")}
        total, count = (written(r.choice(table).format(**parts)) for table in (SUMS, counts))
        return r.choice(("", "0.1 * ", "2 * ")) + "(" + r.choice(wholes).format(sum=total, count=count, **parts) + ")"

    return " + ".join(term() for _ in range(r.choice((1, 1, 1, 2, 2, 3))))


def _written(r: random.Random, text: str) -> str:
    """The text, or the same by way of memory that it is written to."""
    return f"{r.choice([*WRITTEN])}({text})" if r.random() < 0.15 else text


def _added(x: Tensor) -> Tensor:
    return torch.zeros(x.shape).add_(x)


def _copied(x: Tensor) -> Tensor:
    return torch.zeros(x.shape).copy_(x)


def _entry(x: Tensor) -> Tensor:
    made = torch.zeros(2, *x.shape)
    made[1] = x
    return made[1]


def _twice(x: Tensor) -> Tensor:
    made = 0.5 * x
    made += made
    return made


def _cleared(x: Tensor) -> Tensor:
    made = x.float().clone()
    made[x.detach() < 0] = 0
    return made


WRITTEN = {f.__name__: f for f in (_added, _copied, _entry, _twice, _cleared)}


def hot(y: Tensor) -> Tensor:
    return F.one_hot(y, CLASSES).float()


def trained(text: str, k: int | None) -> tuple[Tensor, list[str]]:
    """(CALLS,) losses, and what was told of microbatches. ``k``: None runs the step as it is."""
    table = torch.linspace(0.5, 2, CLASSES)
    loss: Loss = eval(f"lambda o, x, y: {text}", {"torch": torch, "F": F, "table": table, "hot": hot, **WRITTEN})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses, _ = trains(loss, k)
    return losses, [str(w.message) for w in said]


options: dict[str, Any] = {}
"""What a step is recorded with, beside or in place of microbatches: see ``micro_ranks``."""


def trains(loss: Loss, k: int | None, late: Callable[..., None] | None = None) -> tuple[Tensor, nn.Module]:
    """(CALLS,) losses of a net, and the net. ``k``: microbatches; None: as it is; ``late`` runs behind ``backward()``."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, CLASSES))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        found = loss(net(x), x, y)
        found.backward()
        if late is not None:
            late([p.grad for p in net.parameters()], [*net.parameters()], x, y)
        optimizer.step()
        return found.detach()

    run = step if k is None else oc.to_static(step, **(options or {"k_steps": k}))  # type: ignore[call-overload]
    made = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(ROWS, 8, generator=made), torch.randint(0, CLASSES, (ROWS,), generator=made)) for _ in range(CALLS)
    ]
    return torch.stack([oc.unshard(run(x, y)) for x, y in batches]), net


def judged(seed: int, k: int) -> str:
    """right, right though told, told, refused, right though refused, silent, or void: no number on one card."""
    text = drawn(seed)
    one, _ = trained(text, None)
    if not torch.isfinite(one).all() or one.abs().max() > 1e4:
        return "void"
    try:
        found, said = trained(text, k)
    except RecordingError:
        with mock.patch.object(Microbatches, "_judge"):
            try:
                found, _ = trained(text, k)
            except RecordingError:
                return "refused"
        return "right though refused" if alike(one, found) else "refused"
    return ("right though told" if said else "right") if alike(one, found) else "told" if said else "silent"


def alike(one: Tensor, found: Tensor) -> bool:
    return bool(((one - found).abs() / one.abs().clamp(min=1e-2)).max() < 1e-4)


def main(seed: int = 0, count: int = 200, k: int = 4) -> None:
    """Random losses under microbatches; exit status 1 if any is another number than one card's, and nobody was told.

    Args:
        seed: the first loss'.
        count: how many.
        k: microbatches.
    """
    found = Counter[str]()
    for number in range(seed, seed + count):
        what = judged(number, k)
        found[what] += 1
        if what == "silent" or "though" in what:
            print(f"seed {number}: {what}: {drawn(number)}", flush=True)
    print(", ".join(f"{n} {what}" for what, n in found.most_common()))
    sys.exit(found["silent"] > 0)


if __name__ == "__main__":
    tyro.cli(main)
