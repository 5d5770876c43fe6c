"""Random mixtures of experts of the manual level on real ranks against the same program in a world of one.

    PYTHONPATH=tests python -m fuzz.moe_manual --count 150           # some minutes
    PYTHONPATH=tests python -m fuzz.moe_manual --seed 17 --count 1   # one again, with its program

In float64, so that no choice of a router hangs on the last digit.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import tyro
from moe_programs import Mixture, differences, missing, train

from onecard.testing import run_ranks

DEGREES = [
    {"dp": 2, "ep": 2},
    {"dp": 2, "ep": 1},
    {"mp": 2},
    {"dp": 3, "ep": 3},
    {"sharding": 2, "ep": 2},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 4},
    {"dp": 2, "mp": 2, "ep": 2},
    {"dp": 2, "sharding": 2, "ep": 2},
    {"sep": 2, "ep": 2},
]
TOLERANCE = 1e-9


def draw(seed: int) -> Mixture:
    """The mixture of a seed."""
    r = random.Random(seed)
    degrees = r.choice(DEGREES)
    mp, data = degrees.get("mp", 1), r.choice([2, 3])
    kinds = ["modules", "stacked"] + (["parallel", "stacked parallel"] if mp > 1 else [])
    sequence = mp > 1 and degrees.get("dp", 1) == 1 and r.random() < 0.5
    alone = "sep" in degrees
    return Mixture(
        degrees,
        _gate(r, alone),
        r.choice(kinds),
        experts=r.choice([4, 6, 7, 16]),  # of many, some have tokens of one rank and none of another
        sequence=sequence,
        padded=r.random() < 0.4,
        shared=r.random() < 0.4,
        overlap=r.random() < 0.4,
        recompute=r.choice(["", "", "experts", "layer"]),
        zero=_zero(r, degrees),
        micro=r.choice([1, 1, 2]),
        clip=r.choice([0.0, 0.1, 5.0]),
        optimizer=r.choice(["adamw", "momentum"]),
        batch=12 if degrees.get("dp") == 3 else 4 * data,
        time=r.choice([4, 6]),
        steps=2,
        dtype="float64",
    )


def _gate(r: random.Random, alone: bool) -> dict[str, Any]:
    kind = r.choice(["naive", "switch", "gshard", "topk", "topk", "topk"])
    if kind != "topk":
        return {"type": kind, "loss_weight": r.choice([1.0, 0.1])}
    gate: dict[str, Any] = {
        "type": "topk", "top_k": r.choice([1, 2, 3]), "score": r.choice(["softmax", "sigmoid", "softmax_of_chosen"]),
        "normalize": r.random() < 0.7, "scale": r.choice([1.0, 2.5]), "linear_bias": r.random() < 0.3,
        "bias_rate": r.choice([0.0, 0.05]), "balance_loss": r.choice([0.0, 0.1]), "z_loss": r.choice([0.0, 0.02]),
        "jitter": r.choice([0.0, 0.1]), "drop_policy": r.choice(["position", "probability"]),
        "capacity": r.choice([None, 0.7, 1.3]),
    }  # fmt: skip
    return gate


def _zero(r: random.Random, degrees: dict[str, int]) -> str:
    if "sharding" in degrees:
        return "sharding"
    return r.choice(["", "", "", "os", "os_g", "p_g_os"]) if degrees.get("dp", 1) > 1 else ""


def wrong(what: Mixture) -> list[str]:
    """How the ranks' results differ from those of one card."""
    single = run_ranks(train, 1, replace(what, degrees={}, zero="", overlap=False))[0]
    ranks = run_ranks(train, what.ranks, what)
    return [d for each in ranks for d in differences(each, single, TOLERANCE)] + missing(ranks, single)


def run(seeds: Iterable[int]) -> list[int]:
    """The seeds of those that are wrong, each printed."""
    failed = []
    for seed in seeds:
        what = draw(seed)
        try:
            found = wrong(what)
        except Exception as fault:  # one that ends is as wrong as one that differs
            found = [f"{type(fault).__name__}: {fault}"]
        if found:
            failed.append(seed)
            print(f"seed {seed}: {what}\n  " + "\n  ".join(found[:6]), flush=True)
    return failed


@dataclass(frozen=True)
class Options:
    """Random mixtures against one card; exit status 1 if any is wrong."""

    seed: int = 0
    """the first program's seed"""
    count: int = 150
    """how many, of the seeds from there on"""


def main(options: Options) -> int:
    """Runs them; the exit status."""
    failed = run(range(options.seed, options.seed + options.count))
    print(
        f"{options.count} mixtures from seed {options.seed} on: {options.count - len(failed)} right, {len(failed)} wrong"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
