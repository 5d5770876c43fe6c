"""No false alarm: right programs of all generators, each under ``oc.prove`` in a world in this process.

    PYTHONPATH=tests python -m fuzz.prove --count 500
    PYTHONPATH=tests python -m fuzz.prove --kind zero --seed 17 --count 1

Seed n is a program of kind n modulo the number of kinds. What a generator's own tests refuse is refused here, too, and
counted apart. Steps that are recorded, and cut into stages, are in ``fuzz.prove_recorded``: there recordings are proved.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import moe_programs
import torch
import tyro
from fleet_programs import begin
from torch import nn

import onecard as oc
from fuzz import manual, moe_manual, plans, prove_recorded, rows, stages, twin, zero
from fuzz.draw import draw
from fuzz.program import axes_of, helpers, size_of
from onecard import fleet
from onecard.errors import OnecardError, PlanError, ProofError, RecordingError
from onecard.tensor import buckets

Made = tuple[Callable[[], Any], Callable[[], Any] | None, int] | prove_recorded.Recorded


@dataclass(frozen=True)
class Verdict:
    """ "right", "wrong", "refused", or "void" (none that runs on one card); why; share of values with a partner."""

    kind: str
    why: str = ""
    values: int = 0
    share: float = 1.0


# -- each generator's program, as one function of all ranks ------------------------------------------------------------------


def marks(seed: int) -> Made | None:
    """Statements on marked tensors against the same statements on plain ones."""
    program = draw(seed)

    def run(mesh: Any) -> dict[str, Any]:
        space = helpers(mesh)
        for at, step in program.run():
            twin.execute(program, at, step, space)
        found = {name: x for name, x in space.items() if isinstance(x, torch.Tensor)}
        return found | {name: p for name, p in twin.leaves(space)}

    if twin.one_card(program)[0].kind != "right":
        return None
    axes = ["x", "y"][: axes_of(program.ranks)]
    return lambda: run(oc.ProcessMesh(program.ranks, axes)), lambda: run(None), size_of(program.ranks)


def levels(seed: int) -> Made:
    """All stages of ZeRO in the habits of other libraries' users."""
    program = zero.draw(seed)

    def run(parallel: bool) -> dict[str, Any]:
        if parallel:
            fleet.init(is_collective=True)
        made = zero.Run(program, parallel)
        torch.manual_seed(1)
        made.go()
        return made.result()

    return lambda: run(True), lambda: run(False), program.how["ranks"]


def by_hand(seed: int) -> Made:
    """fleet's layers against plain ones."""
    program = manual.draw(seed)

    def run(plain: bool) -> Any:
        if not plain:
            begin(**program.degrees)
        losses, norms, _ = manual.train(program, plain)
        return losses, norms

    return lambda: run(False), lambda: run(True), program.ranks


def pipelines(seed: int) -> Made | None:
    """Layers in stages under any schedule against the same layers in a world of one; each rank draws its own dropout."""
    ranks = 2 + 2 * (seed % 5 == 0)
    made = stages.draw(seed, ranks)
    if any(op[0] == "drop" for plan in made.plans for op in plan["ops"]):
        return None

    def run() -> list[Any]:
        stages.begin(made.mode, made.microbatches, made.size, pp=made.ranks)
        torch.manual_seed(seed)
        layers = fleet.PipelineLayer(
            stages.listed(made), loss_fn=nn.CrossEntropyLoss(), recompute_interval=made.recompute,
            num_virtual_pipeline_stages=made.chunks,
        )  # fmt: skip
        model = fleet.distributed_model(layers)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        found = []
        for step in range(made.steps):
            for part in range(made.accumulate):
                found.append(model.forward_backward_pipeline([*stages.data(made, 10 * step + part)]))
            if made.clip:
                found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        return found

    return run, None, ranks


def planned(seed: int) -> Made:
    """Plain programs under random plans; one with stages or microbatches by recordings."""
    ranks = (2, 4)[seed % 2]
    name, plan = plans.drawn(seed, ranks)
    if plan.pp > 1 or plan.microbatches > 1:
        return prove_recorded.by_plans(seed)
    program = plans.program_of(name)
    return lambda: plans.trained(program, plan, 2), lambda: plans.trained(program, None, 2), ranks


def mixtures(seed: int) -> Made:
    """fleet's mixtures of experts against the same in a world of one."""
    what = moe_manual.draw(seed)
    alone = replace(what, degrees={}, overlap=False, zero="" if what.zero == "sharding" else what.zero)
    return lambda: moe_programs.train(what)["losses"], lambda: moe_programs.train(alone)["losses"], what.ranks


def chosen_rows(seed: int) -> Made:
    """Chosen rows, and experts in loops, on marked tensors."""
    count, source = rows.program(seed)
    grid = seed % 3 == 0

    def run(parallel: bool) -> Any:
        given, world = rows.values(seed, count), torch.arange(oc.get_world_size())
        if not parallel:
            return rows.ran(source, [nn.Parameter(x) for x in given])
        mesh = oc.ProcessMesh(world.view(2, -1) if grid else world, ["dp", "ep"][: 1 + grid])
        lie = zip(given, rows.layouts(seed, grid), strict=True)
        return rows.ran(source, [nn.Parameter(oc.shard_tensor(x, mesh, each)) for x, each in lie])

    return lambda: run(True), lambda: run(False), 4 if grid else 2


KINDS: dict[str, Callable[[int], Made | None]] = {
    "marks": marks, "zero": levels, "manual": by_hand, "stages": pipelines, "plans": planned,
    "recorded": prove_recorded.by_marks, "cuts": prove_recorded.by_plans, "mixtures": mixtures, "rows": chosen_rows,
}  # fmt: skip


@contextmanager
def small_buckets() -> Iterator[None]:
    """Several buckets also in small programs."""
    before = buckets.BUCKET_BYTES
    buckets.BUCKET_BYTES = 512
    try:
        yield
    finally:
        buckets.BUCKET_BYTES = before


REFUSED = re.compile("|".join(f"(?:{limit})" for limit in twin.LIMITS.values()))


def judge(kind: str, seed: int) -> Verdict:
    """Prove the program of a seed: it is right, whatever the ranks."""
    with warnings.catch_warnings(), small_buckets():
        warnings.simplefilter("ignore")
        try:
            made = KINDS[kind](seed)
            if made is None:
                return Verdict("void")
            if isinstance(made, prove_recorded.Recorded):
                proof = made.prove()
            else:
                program, against, world = made
                proof = oc.prove(program, world=world, against=against, rounding=False)
        except (RecordingError, PlanError) as fault:
            return Verdict("refused", str(fault))
        except ProofError as fault:
            if kind == "zero" and isinstance(fault.__cause__, TypeError) and "fails on one card" in str(fault):
                return Verdict(
                    "void"
                )  # torch's fused SGD, of a parameter that gets its first gradient later than others
            refused = isinstance(fault.__cause__, OnecardError) and kind in ("plans", "rows", "mixtures")
            refused = refused or "nothing says which part" in str(fault)  # two inputs of recordings have one name
            return Verdict("refused" if refused or REFUSED.search(str(fault)) else "wrong", str(fault))
        except RuntimeError as fault:  # a pretended rank is handed another stage's random state, which nobody has sent
            if "mt19937" not in str(fault):
                raise
            return Verdict("refused", str(fault))
    return Verdict(_named(proof), "" if proof else str(proof), proof.values, proof.share)


def cases(seed: int, count: int, kind: str = "") -> Iterator[tuple[str, int]]:
    """Kinds in turn, with the seeds of their generators."""
    names = [kind] if kind else [*KINDS]
    yield from ((names[n % len(names)], n // len(names)) for n in range(seed, seed + count))


@dataclass(frozen=True)
class Options:
    """Random right programs under ``oc.prove``; exit status 1 if any is called wrong."""

    seed: int = 0
    """the first one"""
    count: int = 100
    """how many"""
    kind: str = ""
    """of one generator only"""


def _named(proof: oc.Proof) -> str:
    """What was said; a program that cannot run in float64 (a gradient scaler's kernel) is held in its own precision."""
    if not proof:
        return "wrong"
    return "right" if proof.exact else "right, in its own precision"


def main(options: Options) -> int:
    """Runs them and prints what was called wrong."""
    found = Counter[str]()
    values, paired, begun = 0, 0.0, time.monotonic()
    for kind, seed in cases(options.seed, options.count, options.kind):
        verdict = judge(kind, seed)
        found[f"{kind}: {verdict.kind}"] += 1
        values, paired = values + verdict.values, paired + verdict.values * verdict.share
        if verdict.kind == "wrong":
            print(f"--kind {kind} --seed {seed} --count 1: {verdict.why}\n", flush=True)
    wrong = sum(n for name, n in found.items() if name.endswith("wrong"))
    for name, n in sorted(found.items()):
        print(f"  {name} {n}")
    print(
        f"{options.count} programs, {wrong} false alarms; {values} values, {paired / max(values, 1):.1%} with a partner; "
        f"{time.monotonic() - begun:.0f} s"
    )
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
