"""The losses of ``counts`` and the steps of ``micro`` under plans: beside dp and tp, in pipelines, on real ranks."""

from __future__ import annotations

import sys
from collections import Counter

import tyro

import onecard as oc
from fuzz import counts, micro
from onecard.errors import PlanError
from onecard.testing import run_ranks

Verdict = tuple[str, str, str]


def judged(kind: str, seeds: list[int], degrees: dict[str, int]) -> list[Verdict]:
    """Of each seed what came of it (see ``micro.judged``), words, and its text."""
    plan = oc.Plan(**degrees, parameters="float32", compute="float32", master=False)  # type: ignore[arg-type]
    counts.options.clear()
    counts.options.update(plan=plan)
    found = list[Verdict]()
    for seed in seeds:
        if kind == "micro":
            text = micro.drawn(seed)
            found.append((*micro.judged(text, plan.microbatches), text))
        else:
            try:
                found.append((counts.judged(seed, plan.microbatches), "", counts.drawn(seed)))
            except PlanError as error:
                found.append(("refused", str(error), ""))
    return found


def main(
    seed: int = 0, count: int = 100, kind: str = "micro", plan: str = "dp=2, microbatches=2", at_once: int = 10
) -> None:
    """Random steps under a plan; exit status 1 if any gives other numbers than one card's, and nobody was told.

    Args:
        seed: the first step's.
        count: how many.
        kind: micro, or counts.
        plan: its degrees.
        at_once: steps of one start of the ranks.
    """
    degrees = {name.strip(): int(n) for name, n in (part.split("=") for part in plan.split(","))}
    ranks = degrees.get("dp", 1) * degrees.get("tp", 1) * degrees.get("pp", 1)
    found = Counter[str]()
    for first in range(seed, seed + count, at_once):
        seeds = [*range(first, min(first + at_once, seed + count))]
        try:
            alike = run_ranks(judged, ranks, kind, seeds, degrees, timeout=600.0)[0]
        except Exception as error:
            found["broken"] += 1
            print(f"seeds from {first}: broken: {str(error)[:1500]}", flush=True)
            continue
        for number, (what, words, text) in zip(seeds, alike, strict=True):
            found[what] += 1
            if what in ("silent", "error"):
                print(f"seed {number}: {what}: {words[:600]}\n    " + text.replace("\n", "\n    "), flush=True)
    print(", ".join(f"{n} {what}" for what, n in found.most_common()))
    sys.exit(found["silent"] + found["broken"] > 0)


if __name__ == "__main__":
    tyro.cli(main)
