"""Random training scripts for one card, put together of habits: the same printed numbers on each level?

Levels: as a rank of ``run --auto``; its model laid out in place by a line; its step recorded; both.
One again: ``python -m fuzz.scripts --seed 17 --count 1``; its text: ``--show``.
"""

from __future__ import annotations

import io
import linecache
import math
import random
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from textwrap import indent
from typing import Any, NamedTuple

import tyro

import onecard as oc
from fuzz import script_parts as parts
from onecard.auto.rank import Job, begin
from onecard.errors import OnecardError
from onecard.testing import run_ranks

CUTS = (("*weight*", "tp: Shard(0)"), ("*bias*", "tp: Shard(0)"))
PLANS: list[dict[str, Any]] = [
    {"dp": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}, {"tp": 2, "placements": CUTS},
    {"dp": 2, "tp": 2, "placements": CUTS}, {"dp": 4, "zero": 2}, {"pp": 2},
    {"pp": 2, "microbatches": 2, "schedule": "F-then-B"},
]  # fmt: skip
STEPS: list[dict[str, Any]] = [
    {"microbatches": 2}, {"pp": 2, "microbatches": 2}, {"dp": 2, "microbatches": 2}, {"dp": 2, "zero": 1},
    {"pp": 2, "microbatches": 4, "schedule": "ZBH1"}, {"dp": 2, "pp": 2, "microbatches": 2},
    {"pp": 2, "microbatches": 2, "virtual": 2, "schedule": "ZBV"},
]  # fmt: skip
LEVELS = ("auto", "in place", "recorded", "in place, recorded", "planned")
CLOSE = {"float32": 3e-4, "bfloat16": 3e-2}
"""Relative difference of printed numbers after some ten steps, the last ones with rounding that was multiplied by them."""
_NUMBER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?|nan|inf")


class Script(NamedTuple):
    """A program, and what it was made of."""

    text: str
    habits: tuple[str, ...]

    @property
    def close(self) -> float:
        return CLOSE["bfloat16" if "autocast" in self.habits else "float32"]


class _Draw:
    """Chooses, and notes what."""

    def __init__(self, seed: int, whole: bool) -> None:
        self.random, self.habits, self.whole = random.Random(seed), list[str](), whole

    def one(self, options: Any, note: bool = True) -> Any:
        chosen = self.random.choice([*options])
        if note and chosen:
            self.habits.append(str(chosen))
        return chosen

    def whether(self, habit: str, likely: float) -> bool:
        if self.random.random() >= likely:
            return False
        self.habits.append(habit)
        return True

    def some(self, table: dict[str, tuple[float, str]]) -> list[str]:
        return [text for habit, (likely, text) in table.items() if self.fits(text) and self.whether(habit, likely)]

    def fits(self, text: str) -> bool:
        """Whether the step may have this part."""
        return not (self.whole and parts.READS.search(text))


def drawn(seed: int, whole: bool = False) -> Script:
    """A script of two epochs. ``PLACE`` and ``STEP``, which it calls, are the level's; on one card they do nothing.

    ``whole``: its step is one function, from the batch to the update, that reads nothing on the host; nothing else looks at the
    parameters, of which a rank may have a stage's.
    """
    draw = _Draw(seed, whole)
    model, kind = parts.MODELS[draw.one(filter(lambda name: not (whole and name in parts.COUNTING), parts.MODELS))]
    average, schedule = "none" if whole else draw.one(parts.AVERAGES), draw.one(parts.SCHEDULES)
    optimizer = draw.one(parts.OPTIMIZERS).format(p=draw.one(parts.GROUPS, note=False))
    classes, every = 11 if kind == "text" else 3, 1 if whole else draw.random.choice((1, 1, 1, 2, 3))
    functions, loop = _loop(draw, kind, average, schedule, every, whole)
    rows = draw.one((24, 32) if whole else (24, 30, 32), note=False)
    lines = [
        parts.BEGIN.format(seed=seed), model, parts.DATA[kind].format(n=rows),
        f"C, W, ACC = {classes}, {[1.0, 2.0, 0.5] + [1.0] * (classes - 3)}, {every}",
        "hist, late, best, run, seen, hits, it, seen_losses = [], [], 1e9, 0.0, 0, 0, 0, []",
        "first = next(iter(net.state_dict()))",
        parts.AVERAGES[average][0], parts.OWN, f"opt = {optimizer}", *draw.some(parts.BEFORE), parts.SCHEDULES[schedule][0],
        "scaler = torch.amp.GradScaler('cpu', init_scale=256.0)", "PLACE(net, opt)", functions,
        "for epoch in range(2):", indent("\n".join(filter(None, _epoch(draw, loop, schedule))), "    "),
        parts.LOSSES_SEEN if whole else parts.END,
    ]  # fmt: skip
    lines.append({"none": "", "shadows": parts.OF_SHADOWS}.get(average, parts.OF_AVERAGE))
    return Script("\n".join(line for line in lines if line) + "\n", tuple(draw.habits))


def _loop(draw: _Draw, kind: str, average: str, schedule: str, every: int, whole: bool) -> tuple[str, str]:
    """The functions that a loop over batches calls, and the loop."""
    zero = draw.one(("opt.zero_grad()", "net.zero_grad()", "for p in net.parameters(): p.grad = None"), note=False)
    zero = "opt.zero_grad(set_to_none=False)" if draw.whether("zeros kept", 0.15) else zero
    scaled, flat = draw.whether("scaler", 0.12), "o, y = o.flatten(0, 1), y.flatten()" if kind == "text" else ""
    after = [parts.SCHEDULES[schedule][1], parts.AVERAGES[average][1]]
    update = [
        "scaler.unscale_(opt)" if scaled else "", draw.one(filter(draw.fits, parts.CLIPS)),
        "scaler.step(opt); scaler.update()" if scaled else "opt.step()",
        zero, *([] if whole else after), *draw.some(parts.AFTER_STEP),
    ]  # fmt: skip
    forward = "o = net(x)"
    if draw.whether("autocast", 0.12):
        forward = "with torch.autocast('cpu', dtype=torch.bfloat16): o = net(x)\no = o.float()"
    noisy = kind in ("rows", "images") and not whole and draw.whether("noise", 0.15)
    compute = [
        "x = x + 0.1 * torch.randn_like(x)" if noisy else "",
        forward, flat, f"l = {draw.one(parts.LOSSES)}{draw.one(parts.BESIDE)}",
        "scaler.scale(l / ACC).backward()" if scaled else "(l / ACC).backward()",
    ]  # fmt: skip
    given = {
        "loop": draw.one(parts.LOOPS).format(b=draw.one((4, 8) if whole else (4, 5, 6, 7, 8), note=False)),
        "log": draw.one(parts.LOGS, note=False),
        "compute": "\n".join(filter(None, compute)), "update": "\n".join(filter(None, update)),
        "shape": flat and "y = y.flatten()", "after": "\n".join(filter(None, after)) if whole else "",
    }  # fmt: skip
    form = draw.one(
        ("one function",) if whole else ("flat", "functions", "one function" if every == 1 else "functions")
    )
    functions, loop = {
        "flat": ("", parts.FLAT), "functions": (parts.FUNCTIONS, parts.CALLED),
        "one function": (parts.ONE_FUNCTION, parts.ONE_CALLED),
    }[form]  # fmt: skip
    return _filled(functions, given), _filled(loop, given)


def _filled(text: str, given: dict[str, str]) -> str:
    """Each line that is a place for a part takes it, as far in as it stands."""
    lines = []
    for line in text.splitlines():
        name = line.strip()[1:-1]
        lines.append(indent(given[name], line[: line.index("{")]) if line.strip() == f"{{{name}}}" else line)
    return "\n".join(filter(None, lines))


def _epoch(draw: _Draw, loop: str, schedule: str) -> list[str]:
    between = parts.BETWEEN[draw.one(parts.OF_STEPS if draw.whole else parts.BETWEEN)]
    return [
        "net.train()", loop, "print('epoch', epoch, float(run) / max(seen, 1), hits)", parts.SCHEDULES[schedule][2],
        *_evaluation(draw), f"if epoch == 0:\n    pass\n{indent(between, '    ')}",
    ]  # fmt: skip


def _evaluation(draw: _Draw) -> list[str]:
    mode = "" if draw.whole else draw.one(("", "torch.no_grad()", "torch.inference_mode()"))
    if not mode:
        return []
    lines = [
        "preds, ls = [], []",
        "for a, b in zip(X.split(9), Y.split(9)):",
        "    q = net(a); preds.append(q.argmax(-1)); ls.append(F.cross_entropy(q.flatten(0, -2), b.flatten()))",
        f"P = torch.cat(preds)\n{draw.one(parts.EVALUATIONS, note=False)}",
    ]
    return ["net.eval()" if draw.random.random() < 0.7 else "", f"with {mode}:", indent("\n".join(lines), "    ")]


def said(
    seeds: Sequence[int], level: str = "", plan: dict[str, Any] | None = None, whole: bool = False
) -> dict[int, str]:
    """What each of some scripts prints on a level. The last line may be an error."""
    if level == "auto":
        begin(Job(oc.Plan(per_host=0, **plan or {})).to_json())
    names: dict[str, Any] = {"PLACE": lambda *_: None, "STEP": lambda step: step}
    if "in place" in level:
        names["PLACE"] = lambda net, opt: oc.parallelize(net, opt, plan=oc.Plan(**plan or {}))
    if "recorded" in level:
        names["STEP"] = lambda step: oc.to_static(step, ask=True)
    if level == "planned":
        names["STEP"] = lambda step: oc.to_static(step, plan=oc.Plan(**plan or {}))
    return {seed: _said(drawn(seed, whole).text, f"script {seed}", names) for seed in seeds}


def _said(text: str, file: str, names: dict[str, Any]) -> str:
    linecache.cache[file] = (
        len(text),
        None,
        text.splitlines(keepends=True),
        file,
    )  # as of a file: errors show its lines
    with redirect_stdout(io.StringIO()) as out, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            exec(compile(text, file, "exec"), {"__name__": "__main__", **names})
        except Exception as fault:
            lines = [f.lineno for f in traceback.extract_tb(fault.__traceback__) if f.filename == file]
            refused = isinstance(fault, OnecardError)
            where = text.splitlines()[(lines or [1])[-1] - 1].strip()
            print(f"{'REFUSED' if refused else 'ERROR'} {type(fault).__name__}: {fault} at: {where}")
    words = [str(w.message).splitlines()[0] for w in told if parts.TOLD.search(str(w.message))]
    return out.getvalue() + "".join(f"TOLD {word}\n" for word in words)


def difference(wanted: str, found: str, close: float) -> str:
    """The first line that is not the same; nothing if all are."""
    ours, theirs = wanted.splitlines(), found.splitlines()
    for one, other in zip(ours, theirs, strict=False):
        numbers = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=False)
        if _NUMBER.sub("#", one) != _NUMBER.sub("#", other) or not all(
            _same(float(a), float(b), close) for a, b in numbers
        ):
            return f"{one} | {other}"
    return "" if len(ours) == len(theirs) else f"{len(ours)} lines | {len(theirs)}: {theirs[-1:]}"


def _same(a: float, b: float, close: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= close * abs(a) + close / 3


class Found(NamedTuple):
    """Of some scripts on a level, by seed."""

    wrong: dict[int, str]
    refused: dict[int, str]
    void: list[int]


def compare(found: Found, seed: int, one: str, ranks: Sequence[str], close: float) -> None:
    """Note how a program ended on ranks, beside what it printed on one card."""
    last = [rank.splitlines()[-1] if rank else "" for rank in ranks]
    if all(line.startswith(("REFUSED", "TOLD")) for line in last):
        found.refused[seed] = last[0]
    elif differ := [*filter(None, (difference(one, rank, close) for rank in ranks))]:
        found.wrong[seed] = differ[0]


def tried(seeds: Sequence[int], level: str, plan: dict[str, Any]) -> Found:
    """Which print something else than on one card, which are refused in words, which fail on one card."""
    whole = level == "planned"
    one = run_ranks(said, 1, seeds, "", None, whole, timeout=200.0)[0]
    runnable = [seed for seed in seeds if "ERROR" not in one[seed]]
    world = 1 if level == "recorded" else oc.Plan(**plan).world
    ranks = run_ranks(said, world, runnable, level, plan, whole, timeout=400.0)
    found = Found({}, {}, [seed for seed in seeds if seed not in runnable])
    for seed in runnable:
        compare(found, seed, one[seed], [rank[seed] for rank in ranks], drawn(seed, whole).close)
    return found


@dataclass(frozen=True)
class Options:
    """Random scripts on a level; exit status 1 if any prints something else than on one card."""

    seed: int = 0
    """the first script's seed"""
    count: int = 100
    """how many"""
    level: str = "auto"
    """one of LEVELS"""
    plan: int = -1
    """its number in PLANS; -1: each block of scripts takes the next"""
    show: bool = False
    """print the first script, and run nothing"""


def main(options: Options) -> int:
    """Runs the scripts and prints what differs; returns the exit status."""
    if options.show:
        print(drawn(options.seed, options.level == "planned").text)
        return 0
    plans, whole = (STEPS, True) if options.level == "planned" else (PLANS, False)
    wrong = void = refused = 0
    end = options.seed + options.count
    block = 1 if whole else 10  # a step that is refused on one stage leaves the others' messages under way
    for number, first in enumerate(range(options.seed, end, block)):
        plan = plans[options.plan if options.plan >= 0 else number % len(plans)]
        found = tried(range(first, min(first + block, end)), options.level, plan)
        for seed, why in found.wrong.items():
            print(f"seed {seed} {plan}: {why[:900]}\n    {'; '.join(drawn(seed, whole).habits)}", flush=True)
        for seed, why in found.refused.items():
            print(f"seed {seed}: {why[:300]}", flush=True)
        wrong, void, refused = wrong + len(found.wrong), void + len(found.void), refused + len(found.refused)
    print(
        f"{options.count} scripts from seed {options.seed} on: {wrong} wrong, {refused} refused, {void} fail on one card"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
