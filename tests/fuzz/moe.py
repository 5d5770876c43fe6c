"""Random mixtures of experts against the same program on one card: styles, experts, tokens, favourites, layouts.

PYTHONPATH=tests python -m fuzz.moe 300
"""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from experts_programs import LAYERS
from torch import Tensor

import onecard as oc
from onecard.testing import run_ranks

R, S = oc.Replicate(), oc.Shard
MESHES = (((2,), ("ep",)), ((4,), ("ep",)), ((2, 2), ("dp", "ep")), ((2, 2), ("ep", "tp")), ((2, 2), ("ep", "dp")))


@dataclass(frozen=True)
class Mixture:
    """One program: its style and sizes, how many experts get most tokens, and how all lies on a mesh."""

    seed: int
    style: str
    experts: int
    top: int
    tokens: int
    width: int
    inner: int
    favourites: int
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    layouts: tuple[tuple[Any, ...], ...]  # of tokens, the router, and both stacks


def draw(seed: int) -> Mixture:
    """The program of a seed."""
    dice = random.Random(seed)
    shape, axes = dice.choice(MESHES)
    experts = dice.choice((2, 3, 4, 5, 8, 9))
    top = dice.randint(1, min(3, experts))
    tokens = dice.choice((1, 2, 3, 7, 16, 24, 33))
    tokens_lie = tuple(R if a == "tp" or dice.random() < 0.25 else S(0) for a in axes)
    cut = tuple(S(0) if a == "ep" and dice.random() < 0.9 else R for a in axes)
    tp = dice.random() < 0.7
    up = tuple(S(1) if a == "tp" and tp else p for a, p in zip(axes, cut, strict=True))
    down = tuple(S(2) if a == "tp" and tp else p for a, p in zip(axes, cut, strict=True))
    return Mixture(
        seed, dice.choice(sorted(LAYERS)), experts, top, tokens, dice.choice((4, 8, 12)), dice.choice((4, 8, 12)),
        dice.choice((0, 0, 1, 2)), shape, axes, (tokens_lie, (R,) * len(axes), up, down),
    )  # fmt: skip


def values(m: Mixture) -> list[Tensor]:
    """Tokens, router and weights. Choices are no ties: the router's numbers lie far apart."""
    source = torch.Generator().manual_seed(m.seed)
    shapes = (m.tokens, m.width), (m.experts, m.width), (m.experts, 2 * m.inner, m.width), (m.experts, m.width, m.inner)
    given = [
        torch.randn(shape, generator=source, dtype=torch.float32).to(torch.get_default_dtype()) / 2 for shape in shapes
    ]
    if m.favourites:
        given[0][:, 0] = 4.0
        given[1][: m.favourites, 0] += 3.0
    return given


def is_tied(m: Mixture, given: Sequence[Tensor]) -> bool:
    """Whether rounding could change which experts a token gets."""
    ranked = (given[0] @ given[1].T).sort(-1, descending=True).values
    return bool(((ranked[:, :-1] - ranked[:, 1:]).abs() < 1e-4).any())


def error(m: Mixture, fault: float = 1.0) -> float:
    """The largest relative error of the result and its gradients; ``fault`` is a planted one: it scales a gradient."""
    given = values(m)
    if is_tied(m, given):
        return 0.0
    mesh = oc.ProcessMesh(torch.arange(math.prod(m.shape)).view(m.shape), list(m.axes))
    plain = [x.clone().requires_grad_() for x in given]
    mine = [oc.shard_tensor(x, mesh, list(p)).requires_grad_() for x, p in zip(given, m.layouts, strict=True)]
    found = []
    for leaves in (plain, mine):
        made: Any = LAYERS[m.style](*leaves, m.top)
        balance = torch.nn.functional.linear(leaves[0], leaves[1]).softmax(-1).mean(0).square().sum() * m.experts
        (made.square().sum() + balance).backward()
        found.append([made, *(x.grad for x in leaves)])
    found[1][2] = found[1][2] * fault
    # On one scale: what is zero but for rounding is compared with the largest gradient.
    scale = max(float(x.detach().abs().max()) for x in found[0])
    pairs = zip(found[1], found[0], strict=True)
    return max(
        float((oc.unshard(a.detach()) - b.detach()).abs().max() / max(float(b.detach().abs().max()), 1e-3 * scale))
        for a, b in pairs
    )


def wrong(seeds: Sequence[int], fault: float = 1.0) -> list[tuple[Mixture, float]]:
    """On a rank: the programs that are wrong."""
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    found = []
    for m in map(draw, seeds):
        # The grouped product knows no float64, which tells rounding from faults; the other styles run in it.
        torch.set_default_dtype(torch.float32 if m.style.startswith("grouped") else torch.float64)
        how = error(m, fault)
        if not how <= (2e-5 if m.style.startswith("grouped") else 1e-10):
            found.append((m, how))
    torch.set_default_dtype(torch.float32)
    return found


def run(seeds: Sequence[int], fault: float = 1.0) -> list[tuple[Mixture, float]]:
    """The programs of these seeds that are wrong on some rank; those of as many ranks run together."""
    found = []
    for ranks in (2, 4):
        mine = [seed for seed in seeds if math.prod(draw(seed).shape) == ranks]
        if mine:
            found += [case for cases in run_ranks(wrong, ranks, mine, fault, timeout=580) for case in cases]
    return found


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    bad = run(range(first, first + count))
    for mixture, how in bad:
        print(f"{how:.3g}  {mixture}")
    print(f"{count} mixtures, {len({m.seed for m, _ in bad})} wrong")
    sys.exit(bool(bad))
