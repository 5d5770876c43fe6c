"""Jobs that others ran, priced: ours beside theirs, with errors. Nothing is fitted here; the tables are data with their sources.

python benchmarks/published.py                       # all tables
python benchmarks/published.py --only megatron_2022  # one of published/*.json
python benchmarks/published.py --terms               # and where the time goes
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

import onecard as oc
from onecard.pipeline.schedule.modes import plan as schedule_named
from onecard.pipeline.schedule.timing import Times, simulate
from onecard.planning import activations
from onecard.planning.allocator import CachingAllocator
from onecard.planning.state import TrainingState

FOLDER = Path(__file__).parent / "published"
JOBS = ("megatron_2022", "megatron_2021", "torchtitan_2024")


@dataclass(frozen=True)
class Options:
    """What to print."""

    only: tuple[str, ...] = ()
    """tables by name: megatron_2022, megatron_2021, torchtitan_2024, activations, zero, zero_bubble"""
    terms: bool = False
    """where each job's time goes"""


@dataclass(frozen=True)
class Found:
    """One number of a row: ours beside the published one."""

    row: str
    what: str
    ours: float
    published: float
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def off(self) -> float:
        """Ours less theirs, as a share of theirs."""
        return self.ours / self.published - 1


def data(name: str) -> Any:
    """A table: title, source, rows."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def machine_of(table: Any) -> oc.Machine:
    """The machine that a table names, with what it says of it otherwise."""
    given = dict(table["machine"])
    known, memory = oc.Machine.preset(given.pop("like")), given.pop("memory_by_kernels", {})
    if memory and known.kernels is not None:
        given["kernels"] = replace(known.kernels, memory={**known.kernels.memory, **memory})
    return replace(known, **given) if given else known


def jobs(name: str) -> Iterator[Found]:
    """The rows of a table of jobs."""
    table = data(name)
    machine = machine_of(table)
    for row in table["rows"]:
        sizes = oc.Transformer(**{**table["transformer"], **row["transformer"]})
        plan = oc.Plan(**{**table["plan"], **row["plan"]})
        job = oc.price(sizes, plan, machine)
        ours = {
            "seconds": job.seconds,
            "teraflops": operations(sizes, plan) / job.seconds / plan.world / 1e12,
            "tokens_per_second": job.tokens_per_second / plan.world,
            "gib": (_of_loss(job, sizes) + _of_fsdp(job)) / 2**30,
        }
        for what in ours.keys() & row.keys():
            yield Found(row["name"], what, ours[what], row[what], {k: v / job.seconds for k, v in job.terms.items()})


def _of_fsdp(job: oc.JobCost) -> int:
    """Bytes that FSDP2 reserves beside onecard: parameters arrive in memory of their own, from which they are copied to where
    they are used, those of the next block while one computes."""
    if job.plan.zero < 3:
        return 0
    memory, element = CachingAllocator(), getattr(torch, job.plan.compute).itemsize
    chain = [(i, piece.parameters) for i, piece in enumerate(job.pieces) for _ in range(piece.alike)]
    for order in (chain, chain[::-1]):
        for at, (_, elements) in enumerate(order):
            memory.make(at % 2, elements * element)
            memory.drop((at + 1) % 2)
        memory.drop((len(order) - 1) % 2)
    return memory.reserved


def _of_loss(job: oc.JobCost, sizes: oc.Transformer) -> int:
    """What the fullest rank reserves, where those of the last stage compute DTensor's loss of logits that are divided.

    By its code (``torch.distributed.tensor.parallel.loss``) its backward holds four tensors as large as the logits in float32,
    once they themselves are given up: log-probabilities, the gradient that it begins with, that with probabilities added, and
    the product. onecard's holds two, and the logits.
    """
    if job.plan.tp == 1:
        return job.reserved
    logits = job.plan.microbatch * sizes.sequence * sizes.vocab // job.plan.tp
    more = 4 * 4 - (2 * 4 + torch.bfloat16.itemsize)
    return max(job.reserved, job.ranks[-1].reserved + more * logits)


def operations(sizes: oc.Transformer, plan: oc.Plan) -> float:
    """Floating-point operations of a step with full recompute, by equation 3 of Narayanan et al. (2021)."""
    s, h, v = sizes.sequence, sizes.hidden, sizes.vocab
    return 96 * plan.batch * s * sizes.layers * h**2 * (1 + s / (6 * h) + v / (16 * sizes.layers * h))


def activation_bytes() -> Iterator[Found]:
    """What a rank keeps of a layer, recorded, beside the formula of Korthikanti et al. (2022)."""
    for row in data("megatron_2022")["rows"][::2]:
        sizes = row["transformer"]
        given = activations.LayerSizes(sizes["heads"], 2048, sizes["hidden"], row["plan"]["microbatch"])
        for found in activations.measure(given):
            yield Found(f"{row['name'].partition(',')[0]}, {found.name}", "bytes", found.measured, found.formula)


def zero() -> Iterator[Found]:
    """Bytes of the training state by ZeRO's stages."""
    table = data("zero")
    for row in table["rows"]:
        plan = oc.Plan(dp=table["ranks"], zero=row["zero"], parameters="float16", gradients="float16")
        state, count = TrainingState(plan, oc.Machine.preset("A100")), int(table["parameters"])
        made = state.parameters(count) + state.gradients(count) + state.states(count)
        yield Found(row["name"], "gigabytes", made / 1e9, row["gigabytes"])


def zero_bubble() -> Iterator[Found]:
    """The share of a step in which ranks wait."""
    for row in data("zero_bubble")["rows"]:
        schedule = schedule_named("1F1B", row["stages"])(row["microbatches"])
        times = Times(row["forward"], row["input"], row["weight"], row["message"])
        step = simulate(schedule, times).makespan
        busy = row["microbatches"] * (row["forward"] + row["input"] + row["weight"])
        yield Found(row["name"], "bubble", 1 - busy / step, row["bubble"])


TABLES = {
    **{name: lambda name=name: jobs(name) for name in JOBS},
    "activations": activation_bytes,
    "zero": zero,
    "zero_bubble": zero_bubble,
}


def shown(name: str, found: list[Found], terms: bool) -> Table:
    """A table with errors, their mean and the worst of them."""
    title = data(name)["title"] if name != "activations" else "Bytes that a rank keeps of a layer, beside the formula"
    table = Table(title=title, title_justify="left")
    for column in ("", "", "ours", "published", "off", *(["where the time goes"] if terms else [])):
        table.add_column(column, justify="left" if not column or column.startswith("where") else "right", no_wrap=True)
    for one in found:
        where = ", ".join(f"{k} {v:.1%}" for k, v in one.terms.items() if v >= 0.001)
        digits = f"{one.ours:,.4g}", f"{one.published:,.4g}"
        table.add_row(one.row, one.what, *digits, f"{one.off:+.1%}", *([where] if terms else []))
    for what in dict.fromkeys(one.what for one in found):
        for part, chosen in parts(found, what).items():
            mean, worst = statistics.fmean(map(abs, chosen)), max(chosen, key=abs)
            table.add_row(f"{part} ({len(chosen)})", what, "", "", f"mean {mean:.2%}, worst {worst:+.1%}")
    return table


def parts(found: list[Found], what: str) -> dict[str, list[float]]:
    """Errors of all rows; rows in float8 apart."""
    chosen: dict[str, list[float]] = {}
    for one in found:
        if one.what == what:
            chosen.setdefault("float8" if one.row.startswith("float8") else "rows", []).append(one.off)
    return chosen


def main(options: Options) -> None:
    """Print."""
    for name, make in TABLES.items():
        if not options.only or name in options.only:
            Console(width=None if options.terms else 130).print(shown(name, list(make()), options.terms))


if __name__ == "__main__":
    main(tyro.cli(Options))
