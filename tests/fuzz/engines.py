"""Random programs around an ``oc.Engine``: between its steps they do what other libraries' users do. One card's numbers?

Levels: an Engine on one rank, with data parallelism, stages of ZeRO, recomputation, microbatches, a pipeline.
One again: ``python -m fuzz.engines --seed 17 --count 1``; its text: ``--show``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

import torch
import tyro
from torch import nn

import onecard as oc
from fuzz import engine_parts, script_parts
from fuzz.scripts import Found, Script, _filled, _said, compare
from onecard.testing import run_ranks

Level = tuple[int, dict[str, Any]]


def _zero(stage: int, **more: Any) -> Level:
    return 2, {"sharding": {"enable": True, "stage": stage, **more}}


LEVELS: dict[str, Level] = {
    "one rank": (1, {}), "dp": (2, {}), "ZeRO 1": _zero(1), "ZeRO 2": _zero(2), "ZeRO 3": _zero(3),
    "ZeRO 1 offload": _zero(1, offload=True), "recompute": (2, {"recompute": {"enable": True}}),
    "microbatches": (2, {"gradient_merge": {"enable": True, "k_steps": 2}}),
    "pipeline": (2, {"pipeline": {"enable": True, "schedule_mode": "1F1B", "accumulate_steps": 2}}),
}  # fmt: skip
CUT = ("microbatches", "pipeline")
"""Levels that cut a batch: the loss is a mean, and no layer looks at statistics of the batch."""


class Plain:
    """What an Engine is on one card."""

    def __init__(self, net: nn.Module, loss: Any, optimizer: Any, clip: float | None) -> None:
        self.net, self.loss, self.optimizer, self.clip_grad_norm = net, loss, optimizer, clip

    def run(self, batch: Any, mode: str) -> dict[str, Any]:
        if mode != "train":
            before = [(m, m.training) for m in self.net.modules()]
            self.net.eval()
            with torch.no_grad():
                outputs = self.net(batch[0])
                found = {"outputs": outputs} if mode == "predict" else {"loss": self.loss(outputs, batch[1])}
            for module, training in before:
                module.training = training
            return found
        loss = self.loss(self.net(batch[0]), batch[1])
        loss.backward()
        if self.clip_grad_norm is not None:
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(params, self.clip_grad_norm)
        self.optimizer.step()
        self.net.zero_grad()
        self.optimizer.zero_grad()
        return {"loss": loss.detach()}


def drawn(seed: int, level: str) -> Script:
    """A program of a dozen steps, and what it was made of. ``ENGINE``, which it calls, is the level's."""
    draw, cut = random.Random(seed), level in CUT
    left_out = script_parts.COUNTING if cut else ()
    models = [name for name in script_parts.MODELS if name not in left_out]
    name = draw.choice(models)
    model, kind = script_parts.MODELS[name]
    optimizer = draw.choice(script_parts.OPTIMIZERS[:7]).format(p=draw.choice(script_parts.GROUPS))
    loss = script_parts.LOSSES[0] if cut else draw.choice(script_parts.LOSSES)
    edits = [e for e, (_, values) in engine_parts.EDITS.items() if not (cut and values)]
    schedule = draw.choice([*script_parts.SCHEDULES])
    made, after, _ = script_parts.SCHEDULES[schedule]
    edits = (
        edits if schedule in ("none", "by hand") else [e for e in edits if e != "a group more"]
    )  # torch's own refuse it
    given = {"flat": "o, y = o.flatten(0, 1), y.flatten()" if kind == "text" else "", "after": f"it += 1\n{after}"}
    begin = engine_parts.BEGIN.replace("{loss}", loss).replace("{clip}", draw.choice(("None", "0.3")))
    lines = [script_parts.BEGIN.format(seed=seed), model, script_parts.DATA[kind].format(n=32), "C, W = "
             f"{11 if kind == 'text' else 3}, {[1.0, 2.0, 0.5] + [1.0] * (8 if kind == 'text' else 0)}",
             script_parts.OWN, f"opt = {optimizer}", made, _filled(begin, given)]  # fmt: skip
    habits = [name, schedule, loss]
    for _ in range(12):
        start, rows = draw.randrange(0, 24, 4), draw.choice((8, 8, 8, 4)) if cut else draw.choice((8, 8, 8, 8, 5))
        chosen = draw.sample(edits, draw.choice((0, 1, 1, 2)))
        habits += chosen
        text = engine_parts.STEP.replace("{start}", str(start)).replace("{end}", str(start + rows))
        lines.append(_filled(text, given | {"edit": "\n".join(engine_parts.EDITS[e][0] for e in chosen)}))
    if level != "pipeline":
        lines.append(engine_parts.END)
    return Script("\n".join(line for line in lines if line) + "\n", tuple(habits))


def said(seeds: Sequence[int], level: str, plain: bool = False) -> dict[int, str]:
    """What each of some programs prints on a level, or on one card. The last line may be an error."""

    def engine(net: Any, loss: Any, optimizer: Any, clip: float | None) -> Any:
        if plain:
            return Plain(net, loss, optimizer, clip)
        made = oc.Engine(net, loss, optimizer, strategy=LEVELS[level][1], clip_grad_norm=clip)
        made.prepare(mode="train")
        return made

    return {seed: _said(drawn(seed, level).text, f"program {seed}", {"ENGINE": engine}) for seed in seeds}


def tried(seeds: Sequence[int], level: str) -> Found:
    """Which print something else than on one card, which are refused or told in words, which fail on one card."""
    one = run_ranks(said, 1, seeds, level, True, timeout=200.0)[0]
    found = Found({}, {}, [seed for seed in seeds if "ERROR" in one[seed]])
    runnable = [seed for seed in seeds if seed not in found.void]
    # A program that is refused on one rank leaves the others' messages under way.
    for block in [[seed] for seed in runnable] if level in CUT else [runnable]:
        ranks = run_ranks(said, LEVELS[level][0], block, level, timeout=400.0)
        for seed in block:
            compare(found, seed, one[seed], [rank[seed] for rank in ranks], drawn(seed, level).close)
    return found


@dataclass(frozen=True)
class Options:
    """Random programs around an Engine; exit status 1 if any prints something else than on one card."""

    seed: int = 0
    """the first program's seed"""
    count: int = 90
    """how many"""
    level: str = ""
    """one of LEVELS; "": each block of programs takes the next"""
    show: bool = False
    """print the first program, and run nothing"""


def main(options: Options) -> int:
    """Runs the programs and prints what differs; returns the exit status."""
    levels, block = [options.level] if options.level else [*LEVELS], 10
    if options.show:
        print(drawn(options.seed, levels[0]).text)
        return 0
    wrong = void = refused = 0
    end = options.seed + options.count
    for number, first in enumerate(range(options.seed, end, block)):
        level = levels[number % len(levels)]
        found = tried(range(first, min(first + block, end)), level)
        for seed, why in found.wrong.items():
            habits = indent("; ".join(drawn(seed, level).habits), "    ")
            print(f"seed {seed} at {level}: {why[:900]}\n{habits}", flush=True)
        for seed, why in found.refused.items():
            print(f"seed {seed} at {level}: {why[:300]}", flush=True)
        wrong, void, refused = wrong + len(found.wrong), void + len(found.void), refused + len(found.refused)
    print(
        f"{options.count} programs from seed {options.seed} on: {wrong} wrong, {refused} refused, {void} fail on one card"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
