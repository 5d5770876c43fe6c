"""Habits of other libraries' users times levels: each cell is one card's numbers, refused or told?

Rows are the habits of `crossed_habits`, `crossed_later`, `crossed_between` and `habits_levels`; columns the levels here: steps
under a plan (microbatches, pipelines, other axes beside), `Engine` and `DistModel`, scripts of ``run --auto``, models laid out in
place, fleet, marks on two axes.

``python -m fuzz.crossed --seed 3 --count 100``: cells by chance; ``--habit NAME --level NAME``: those.
"""

from __future__ import annotations

import fnmatch
import json
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import crossed_between
import crossed_habits
import crossed_later
import habits_further  # noqa: F401 - its habits are among those of habits_levels
import habits_levels as old
import numpy as np
import torch
import torch.distributed as dist
import tyro
from habits_levels import At, Copies, Level, Maker, Marks, Planned, Seen
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.auto.rank import Job, begin
from onecard.errors import OnecardError, StageError
from onecard.place.boxes import slices
from onecard.tensor.staged import is_elsewhere
from onecard.testing import RankError, RankTimeout, run_ranks


class Step(At):
    """``oc.to_static(step, plan=...)``."""

    def __init__(self, **fields: Any) -> None:
        self.plan = oc.Plan(per_host=0, parameters="float32", compute="float32", **fields)

    def step(self, one: Callable[..., Any]) -> Callable[..., Any]:
        return oc.to_static(one, plan=self.plan)

    def whole(self, x: Tensor) -> Tensor:
        try:
            found = super().whole(x)
        except StageError:  # another stage's
            return None
        return None if is_elsewhere(found) else found

    def joined(self, seen: Seen) -> Seen:
        every: list[Any] = [None] * oc.get_world_size()
        dist.all_gather_object(every, {k: v for k, v in seen.items() if v is not None})
        for name in {name for each in every for name in each}:
            have = [each[name] for each in every if name in each]
            if any(
                not torch.allclose(have[0].double(), v.double(), rtol=1e-5, atol=1e-7, equal_nan=True) for v in have
            ):
                return {f"{name} differs between ranks": have[0]}
        found = {k: v for each in every for k, v in each.items()}
        if lost := {*seen} - {*found}:
            raise StageError(f"no rank has {sorted(lost)[0]}")
        return found


class Unfit(Exception):
    """A habit for which a level has no place."""


class _WithLoss(nn.Module):
    """A net whose forward is the habit's loss."""

    def __init__(self, net: nn.Module, loss_of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.net, self.given = net, [loss_of]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.given[0](x, y)


class Fitted(Step):
    """``Engine.fit``, one batch at a time; or a ``DistModel``. What is between backward and the step are hooks of optimizers."""

    def __init__(self, dist_model: bool = False, **fields: Any) -> None:
        self.strategy, self.dist_model = oc.Strategy(fields), dist_model

    def step(self, one: Callable[..., Any]) -> Callable[..., Any]:
        raise Unfit("the step is the program's own")

    def fitted(self, net: Any, opts: Sequence[Any], loss_of: Any, between: Any, after: Any) -> Any:
        if not isinstance(net, nn.Module) or not opts:
            raise Unfit("no model, or no optimizer")
        opts[0].register_step_pre_hook(lambda *_: between() and None)
        if after is not None:
            opts[-1].register_step_post_hook(lambda *_: after() and None)
        given: Any = [*opts] if len(opts) > 1 else opts[0]
        if self.dist_model:
            made = oc.to_static(_WithLoss(net, loss_of), None, lambda loss, *_: loss, given, self.strategy)
            made.train()
            return lambda x, y: torch.as_tensor(made((x, y), y))
        engine = oc.Engine(_WithLoss(net, loss_of), None, given, strategy=self.strategy)

        def fit(x: Any, y: Any) -> Tensor:
            return torch.as_tensor(engine.fit(iter([(x, y)]), verbose=0).losses[-1])  # a dataset's loader draws

        return fit


class Auto(At):
    """A rank of ``run --auto``: the program is one card's."""

    def __init__(self, **fields: Any) -> None:
        begin(Job(oc.Plan(per_host=0, parameters="float32", compute="float32", **fields)).to_json())


class Grid(Marks):
    """Marks on two axes: parameters cut along the second by name, a stage of ZeRO along ``dp``, rows along ``rows``."""

    axis, cut, rows = "tp", old.CUT, 1

    def __init__(self, stage: Any, dp: int = 2) -> None:
        self.stage = stage
        self.mesh = oc.ProcessMesh([[0, 1], [2, 3]][:dp], ["dp", self.axis])

    def wrap(self, net: nn.Module, *makers: Maker, given: int | None = None) -> list[Any]:
        def place(name: str, layer: nn.Module, mesh: Any) -> None:
            for kept, as_ in ((layer._parameters, nn.Parameter), (layer._buffers, lambda t, **_: t)):
                for short, p in list(kept.items()):
                    if p is not None and not isinstance(p, oc.DistTensor):
                        full = f"{name}.{short}".lstrip(".")
                        dim = next((d for mark, d in self.cut if fnmatch.fnmatch(full, mark)), None)
                        where = oc.Replicate() if dim is None or not p.dim() else oc.Shard(int(dim[-2]))
                        kept[short] = as_(
                            oc.shard_tensor(p.detach(), mesh, [oc.Replicate(), where]), requires_grad=p.requires_grad
                        )

        oc.shard_layer(net, self.mesh, place)
        made = [make(net) for make in makers]
        for each in made[:given]:
            oc.shard_optimizer(each, self.stage("dp", self.mesh)) if self.stage else oc.shard_optimizer(each)
        return [net, *made]

    def data(self, x: Tensor) -> Tensor:
        return oc.shard_tensor(x, self.mesh, [oc.Shard(0)] * self.rows + [oc.Replicate()] * (2 - self.rows))


class Experts(Grid):
    """The stacked weights of a mixture cut along ``ep``, rows along both axes."""

    axis, cut, rows = "ep", (("*.up", "ep: Shard(0)"), ("*.down", "ep: Shard(0)")), 2


class Hybrid(Copies):
    """A grid of ``fleet``: rows over dp and sharding; with ``mp`` the blocks' layers are its parallel ones."""

    def __init__(self, **degrees: int) -> None:
        super().__init__()
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in degrees.items()}
        fleet.init(is_collective=True, strategy=strategy)
        self.mp, self.rows = degrees.get("mp", 1), fleet.get_hybrid_communicate_group().data()

    def wrap(self, net: Any, *makers: Maker, given: int | None = None) -> list[Any]:
        for block in getattr(net, "blocks", ()) if self.mp > 1 else ():
            if type(block) is nn.Sequential and type(block[0]) is type(block[2]) is nn.Linear:
                block[0], block[2] = _column(block[0]), _row(block[2])
        return super().wrap(net, *makers, given=given)

    def data(self, x: Tensor) -> Tensor:
        return x.chunk(self.rows.size)[self.rows.index]

    def whole(self, x: Tensor) -> Tensor:
        shard = fleet.held(x)
        if not shard.is_cut():
            return super().whole(x)
        mine = [(box, x.detach()[where].clone()) for box, where in shard.boxes()]
        every: list[Any] = [None] * oc.get_world_size()
        dist.all_gather_object(every, mine)
        made = torch.full(shard.shape, float("nan"))
        for box, part in (each for one in every for each in one):
            made[slices(box)] = part
        return made


def _column(layer: nn.Linear) -> nn.Module:
    return _filled(fleet.meta_parallel.ColumnParallelLinear(*_sizes(layer), has_bias=True, gather_output=False), layer)


def _row(layer: nn.Linear) -> nn.Module:
    return _filled(fleet.meta_parallel.RowParallelLinear(*_sizes(layer), has_bias=True, input_is_parallel=True), layer)


def _sizes(layer: nn.Linear) -> tuple[int, int]:
    return layer.in_features, layer.out_features


def _filled(made: Any, layer: nn.Linear) -> nn.Module:
    """A parallel layer with this rank's parts of a plain one's parameters."""
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.copy_(fleet.held(p).take(getattr(layer, name)))
    return made


COLUMN, ROW = "tp: Shard(0)", "tp: Shard(1)"
PIPELINE = {"enable": True, "accumulate_steps": 2, "micro_batch_size": 4}
TP = {"tp": 2, "placements": old.CUT}
SP: dict[str, Any] = {**TP, "outputs": (("blocks.*.2", "tp: Shard(0)"), ("norm", "tp: Replicate()"))}
LEVELS: dict[str, tuple[int, Callable[[], At]]] = {
    "micro": (1, lambda: Step(microbatches=2)),
    "recorded dp": (2, lambda: Step(dp=2)),
    "recorded ZeRO 3": (2, lambda: Step(dp=2, zero=3)),
    "recorded tp": (2, lambda: Step(**TP)),
    "recorded sp": (2, lambda: Step(**SP)),
    "dp micro": (2, lambda: Step(dp=2, microbatches=2)),
    "1F1B": (2, lambda: Step(pp=2, microbatches=2)),
    "VPP": (2, lambda: Step(pp=2, microbatches=4, virtual=2, schedule="VPP")),
    "ZBV": (2, lambda: Step(pp=2, microbatches=2, virtual=2, schedule="ZBV")),
    "ZBH1": (2, lambda: Step(pp=2, microbatches=4, schedule="ZBH1")),
    "dp x pp": (4, lambda: Step(pp=2, dp=2, microbatches=2)),
    "ZeRO 1 x pp": (4, lambda: Step(pp=2, dp=2, zero=1, microbatches=2)),
    "ZeRO 3 x pp": (4, lambda: Step(pp=2, dp=2, zero=3, microbatches=2, schedule="ZBH1")),
    "tp x pp": (4, lambda: Step(pp=2, microbatches=2, **TP)),
    "Engine dp": (2, Fitted),
    "Engine 1F1B": (2, lambda: Fitted(pipeline=PIPELINE)),
    "Engine merge": (2, lambda: Fitted(gradient_merge={"enable": True, "k_steps": 2})),
    "Engine ZeRO 2": (2, lambda: Fitted(sharding={"enable": True, "stage": 2})),
    "DistModel dp": (2, lambda: Fitted(True)),
    "DistModel 1F1B": (2, lambda: Fitted(True, pipeline=PIPELINE)),
    "auto dp": (2, lambda: Auto(dp=2)),
    "auto ZeRO 1": (2, lambda: Auto(dp=2, zero=1)),
    "auto ZeRO 3": (2, lambda: Auto(dp=2, zero=3)),
    "auto tp": (2, lambda: Auto(**TP)),
    "auto sp": (2, lambda: Auto(**SP)),
    "auto dp x tp": (4, lambda: Auto(dp=2, zero=2, **TP)),
    "auto pp": (2, lambda: Auto(pp=2)),
    "auto pp x dp": (4, lambda: Auto(pp=2, dp=2, zero=1)),
    "plan dp": (2, lambda: Planned(dp=2)),
    "plan ZeRO 1": (2, lambda: Planned(dp=2, zero=1)),
    "plan ZeRO 2": (2, lambda: Planned(dp=2, zero=2)),
    "plan ZeRO 3": (2, lambda: Planned(dp=2, zero=3)),
    "plan tp": (2, lambda: Planned(**TP)),
    "plan dp x tp": (4, lambda: Planned(dp=2, zero=1, **TP)),
    "plan pp": (2, lambda: Planned(pp=2)),
    "plan pp micro": (2, lambda: Planned(pp=2, microbatches=2, schedule="F-then-B")),
    "plan pp ZeRO 3": (4, lambda: Planned(pp=2, dp=2, zero=3)),
    "fleet dp": (2, Copies),
    "fleet sharding x dp": (4, lambda: Hybrid(dp=2, sharding=2)),
    "fleet mp x dp": (4, lambda: Hybrid(dp=2, mp=2)),
    "os": (2, lambda: Level("os")),
    "os_g": (2, lambda: Level("os_g")),
    "p_g_os": (2, lambda: Level("p_g_os")),
    "marks ZeRO 1": (2, lambda: Marks(oc.ShardingStage1)),
    "marks ZeRO 2": (2, lambda: Marks(oc.ShardingStage2)),
    "marks ZeRO 3": (2, lambda: Marks(oc.ShardingStage3)),
    "grid ep": (2, lambda: Experts(None, 1)),
    "grid ep ZeRO 2": (4, lambda: Experts(oc.ShardingStage2)),
    "grid ep ZeRO 3": (4, lambda: Experts(oc.ShardingStage3)),
    "grid": (4, lambda: Grid(None)),
    "grid ZeRO 2": (4, lambda: Grid(oc.ShardingStage2)),
    "grid ZeRO 3": (4, lambda: Grid(oc.ShardingStage3)),
}  # fmt: skip
FITTED = tuple(n for n in LEVELS if n.startswith(("Engine", "DistModel")))
PLAIN = tuple(n for n in LEVELS if n.startswith(("auto", "plan", "recorded", *FITTED)))
CUT = ("micro", "dp micro", "1F1B", "VPP", "ZBV", "ZBH1", "dp x pp", "ZeRO 1 x pp", "ZeRO 3 x pp", "tp x pp")
CLOSE = crossed_habits.CLOSE
LATER = crossed_between, crossed_later  # their habits are among them
HABITS = crossed_habits.HABITS | {f"old {k}": v for k, v in old.HABITS.items()}
OF_PARTS = ("sam", "norm_by_hand", "clipped_each", "centralised", "centralised_by_a_hook")
"""Habits that join elements of one gradient themselves: by hand a rank has a part of it."""
DRAWS = ("r_drop",)
"""Habits that draw for rows: microbatches draw each for itself."""
PATIENCE, REFUSED = 40.0, 5.0
"""Seconds that a rank waits for the others at the end of a cell."""
Outcome = tuple[str, str]


def fits(habit: str, level: str) -> bool:
    """Whether there is such a cell: what compares rows is another program where a rank has its own rows."""
    if habit in DRAWS and (level in CUT or level.endswith(("1F1B", "pp micro"))):
        return False
    if habit.startswith("old "):
        return level in PLAIN or level in CUT or level.startswith("grid")
    by_hand = level in ("os", "os_g", "p_g_os") or level.startswith("fleet")
    if level == "fleet mp x dp" and habit in OF_PARTS:
        return False
    return not (by_hand and habit in crossed_habits.WHOLE) and not (
        habit in crossed_habits.CALLS and not (level in PLAIN or level in CUT)
    )


def _far(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    a, b = found.to(torch.complex128), expected.to(torch.complex128)
    both = torch.isnan(a.abs()) & torch.isnan(b.abs())
    if not a.numel():
        return 0.0
    gap = torch.where(both, 0.0, (a - b).abs()).max().item() / max(b.abs().nan_to_num().max().item(), 1e-2)
    return gap if gap == gap else float("inf")


def _seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def one_card(habit: str) -> Seen:
    """The reference."""
    _seeded()
    with warnings.catch_warnings(), oc.one_card_random():
        warnings.simplefilter("ignore")
        return HABITS[habit](old.ONE_CARD)


def cell(habit: str, level: str) -> Outcome:
    """How one cell ends on this rank: right, refused, told, void (one card's fails); in capitals what is a fault."""
    old.Net.mixed = level.startswith("grid ep")
    try:
        expected = one_card(habit)
    except Exception as error:
        return "void", f"{type(error).__name__}: {error}"
    _seeded()
    with warnings.catch_warnings(record=True) as caught, oc.one_card_random():
        warnings.simplefilter("always")
        try:
            at = LEVELS[level][1]()
            found = at.joined(HABITS[habit](at))
        except Unfit as error:
            return "void", str(error)
        except Exception as error:
            where = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:700]} @ {' '.join(where[-5:])}"
            # torch puts the words of what fails within load_state_dict into an error of its own.
            return ("refused" if isinstance(error, OnecardError) or "which stage" in words else "ERROR"), words
    words = [" ".join(str(w.message).split())[:240] for w in caught]
    told = " || ".join([w for w in words if not re.search(IGNORED, w)][:3])
    wrong = _difference(found, expected, CLOSE.get(habit, 1e-4))
    return (("told" if told else "SILENT") if wrong else "right"), f"{wrong} {told}".strip()


def _difference(found: Seen, expected: Seen, close: float) -> str:
    if {*found} != {*expected}:
        return f"other names: {sorted({*found} ^ {*expected})[:4]}"
    far = {k: _far(found[k], v) for k, v in expected.items()}
    bad = [k for k in far if not far[k] <= close]
    most = max(far, key=far.__getitem__)
    return f"{len(bad)} of {len(far)} off: {bad[0]}, most {most} by {far[most]:.1e}" if bad else ""


IGNORED = "lr_scheduler.step|is recorded anew|no rule|operator .* gathered"


def work(cells: Sequence[tuple[str, str]], folder: str) -> None:
    """One rank's cells, to the first one that is not right."""
    fleet.init(is_collective=True)
    store, rank = dist.distributed_c10d._get_default_store(), oc.get_rank()
    with open(Path(folder, str(rank)), "w", buffering=1) as file:
        for number, (habit, level) in enumerate(cells):
            kind, words = cell(habit, level)
            file.write(json.dumps([kind, words]) + "\n")
            store.set(f"crossed/{number}/{rank}", kind)
            names = [f"crossed/{number}/{r}" for r in range(oc.get_world_size())]
            try:  # one that is refused ends soon, as its program would: the others hear of it
                store.wait(names, timedelta(seconds=REFUSED if kind == "refused" else PATIENCE))
            except RuntimeError:
                if kind == "refused":
                    raise
                return
            if any(store.get(n) not in (b"right", b"void") for n in names):
                return


def run(cells: list[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], Outcome]]:
    """Cells of one number of ranks."""
    waiting = [*cells]
    while waiting:
        portion = waiting[:12]
        if portion[0][1].startswith("auto"):  # begins once in a process
            portion = portion[:1]
        nproc = LEVELS[portion[0][1]][0]
        fault, ended = "", Exception()
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_ranks(work, nproc, portion, folder, timeout=60 + 15.0 * len(portion))
            except (RankError, RankTimeout) as error:
                fault, ended = str(error), error
            said = [
                [json.loads(line) for line in Path(folder, str(r)).read_text().splitlines()]
                if Path(folder, str(r)).exists()
                else []
                for r in range(nproc)
            ]
        most = max(map(len, said), default=0)
        done = 0
        for number in range(min(most, len(portion))):
            have = [s[number] if number < len(s) else ["HANG", fault[-1500:]] for s in said]
            kinds = {h[0] for h in have}
            done += 1
            if kinds == {"refused", "HANG"} and isinstance(ended, RankError):
                said_by = next(h[1] for h in have if h[0] == "refused")
                yield portion[number], ("refused", f"on one rank, whose end is that of all: {said_by}")
            elif len(kinds) == 1:
                yield portion[number], (have[0][0], have[0][1])
            elif kinds <= {"refused", "right", "told"} and "refused" in kinds:
                yield portion[number], ("UNEQUAL", " | ".join(f"{h[0]}: {h[1][:300]}" for h in have))
            else:
                worst = next(k for k in ("HANG", "SILENT", "ERROR", "void", "told", "refused", "right") if k in kinds)
                yield portion[number], (worst, " | ".join(f"{h[0]}: {h[1][:400]}" for h in have))
        if done == 0:
            yield portion[0], ("HANG", fault[-1500:])
            done = 1
        waiting = waiting[done:]


@dataclass(frozen=True)
class Options:
    """Habits times levels; exit status 1 if any cell is silently wrong, an error of another library's, or hangs."""

    seed: int = 0
    """draws the cells"""
    count: int = 100
    """how many; 0: all"""
    habit: str = "*"
    """a pattern of names"""
    level: str = "*"
    """a pattern of names"""
    right: bool = False
    """print cells that are right, too"""


def main(options: Options) -> int:
    """Runs the cells and prints those that are not right; returns the exit status."""
    every = [(h, at) for at in LEVELS for h in HABITS if fits(h, at)]
    chosen = [c for c in every if fnmatch.fnmatch(c[0], options.habit) and fnmatch.fnmatch(c[1], options.level)]
    if options.count and options.count < len(chosen):
        chosen = sorted(random.Random(options.seed).sample(chosen, options.count), key=every.index)
    count: Counter[str] = Counter()
    for level in LEVELS:
        for (habit, at), (kind, words) in run([c for c in chosen if c[1] == level]):
            count[kind] += 1
            if kind != "right" or options.right:
                print(f"{kind}: {habit} at {at}: {words}", flush=True)
    print(f"{len(chosen)} cells: " + ", ".join(f"{n} {k}" for k, n in count.items()))
    return 1 if any(k.isupper() for k in count) else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
