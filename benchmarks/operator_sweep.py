"""Every operator of PyTorch's database on 2 ranks, by onecard and by torch DTensor: right, refused, wrong?

    python benchmarks/operator_sweep.py --only softmax --libraries onecard
    python benchmarks/operator_sweep.py --markdown docs/operators.md

Each tensor argument is replicated, cut along each dim (sizes do not divide), and mixed; results and gradients are
compared with plain torch.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.console import Console

from onecard.testing import RankError, RankTimeout, run_ranks
from sweep import report
from sweep.engine import Options, Outcome, run
from sweep.samples import operators, title


@dataclass(frozen=True)
class SweepArgs:
    """Sweep PyTorch's operator database."""

    only: tuple[str, ...] = ()
    """operators by name; a name that ends in * stands for all that begin so"""
    limit: int = 0
    """stop after this many operators"""
    dtype: tuple[str, ...] = ("float32", "int64", "bool")
    libraries: tuple[str, ...] = ("onecard", "DTensor")
    """or "onecard merged": what is cut lies in the inner part of a merged dim; "onecard replayed": recorded steps"""
    samples: int = 3
    placings: int = 8
    partial: bool = False
    """also pass the first tensor as a pending sum"""
    markdown: Path | None = None
    """write the page of the documentation"""
    results: Path | None = None
    """keep the outcomes in this file; those of libraries that are not run now are taken from it"""
    faults: int = 3
    """faults to print for each operator that is not right"""


def main(args: SweepArgs) -> None:
    console = Console(width=180)
    found, seconds = load(args.results)
    for library in args.libraries:
        start = time.monotonic()
        found[library] = []
        for dtype in args.dtype:
            options = Options(library, dtype, args.samples, args.placings, args.partial)
            found[library] += sweep(_names(args, dtype), options)
        seconds[library] = time.monotonic() - start
    if args.results is not None:
        kept = {name: [seconds[name], [asdict(o) for o in outcomes]] for name, outcomes in found.items()}
        args.results.write_text(json.dumps(kept))
    console.print(report.summary(found, seconds))
    for library, outcomes in found.items():
        console.print(report.faults(library, outcomes, args.faults), markup=False, highlight=False, soft_wrap=True)
    if args.markdown is not None:
        args.markdown.write_text(report.page(found, seconds))


def load(path: Path | None) -> tuple[dict[str, list[Outcome]], dict[str, float]]:
    """The outcomes and the seconds of each library that were kept."""
    kept = json.loads(path.read_text()) if path is not None and path.exists() else {}
    return {name: [Outcome(**o) for o in kept[name][1]] for name in kept}, {name: kept[name][0] for name in kept}


def _names(args: SweepArgs, dtype: str) -> list[str]:
    import torch

    names = [title(op) for op in operators(getattr(torch, dtype))]
    if args.only:
        names = [n for n in names if any(n == o or (o.endswith("*") and n.startswith(o[:-1])) for o in args.only)]
    return names[: args.limit or None]


def sweep(names: Sequence[str], options: Options, entry: Callable[..., None] = run) -> list[Outcome]:
    """Run the operators on 2 ranks, in fresh ones after each that hangs or kills them.

    ``entry`` is what each rank runs, ``engine.run`` or a function that prepares something and calls it.
    """
    done: dict[str, Outcome] = {}
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "outcomes")
            why = ""
            try:
                run_ranks(entry, 2, left, options, path, timeout=3600, backend="gloo")
            except (RankError, RankTimeout) as error:
                why = " ".join(str(error).split())[:600]
            begun = read(path, done)
        if why and begun is not None and begun[0] not in done:
            outcome = Outcome(begun[0], options.dtype)
            outcome.note("hung", f"{begun[1]}: {why}")
            done[begun[0]] = outcome
        elif why:
            raise SystemExit(f"the sweep itself failed: {why}")
        left = [name for name in left if name not in done]
    return [done[name] for name in names]


def read(path: str, done: dict[str, Outcome]) -> tuple[str, str] | None:
    """Add what rank 0 finished to ``done``; the operator and case that were begun last on either rank."""
    last = None
    for rank in (1, 0):
        if not os.path.exists(f"{path}.{rank}"):
            continue
        for line in Path(f"{path}.{rank}").read_text().splitlines():
            entry = json.loads(line)
            if "begin" in entry:
                last = (entry["begin"], "")
            elif "case" in entry:
                last = (last[0], entry["case"]) if last else None
            elif rank == 0:
                done[entry["name"]] = Outcome(**entry)
    return last


if __name__ == "__main__":
    main(tyro.cli(SweepArgs))
