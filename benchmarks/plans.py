"""Plans that are found: how long the search takes, beside published configurations, and beside all plans, measured.

python benchmarks/plans.py            # on paper: LLaMA and DeepSeek-V3 on H100, minutes; --only DeepSeek
python benchmarks/plans.py --truth    # eight programs on ranks of this machine: every plan of a reduced space, measured in turns
python benchmarks/plans.py --half     # the same programs: the plan for half the memory of pure data parallelism, measured
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import onecard as oc
from onecard.machine.cost import Machine
from onecard.planning.known_models import known_model
from onecard.planning.search import subject as subjects
from onecard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

PRECISION = ("parameters", "gradients", "states", "compute", "master", "compiled", "overlap_tp", "overlap_pp")
TITAN: dict[str, Any] = {"zero": 3, "parameters": "float32", "gradients": "float32", "states": "float32"}
FLOAT8: dict[str, Any] = {**TITAN, "compiled": True, "compute": "float8_e4m3fn"}
PUBLISHED = {
    # torchtitan (Liang et al., 2024), tables 2 to 5; and the Llama team, 2024, table 4 with section 3.3.2.
    "LLaMA-8B on 128 (torchtitan)": ("llama3-8b", oc.Plan(**TITAN, dp=128, microbatch=2, recompute="operators")),
    "LLaMA-70B on 256 (torchtitan)": (
        "llama3-70b", oc.Plan(**FLOAT8, dp=32, tp=8, microbatch=16, recompute="full", sequence_parallel=True),
    ),
    "LLaMA-405B on 512 (torchtitan)": (
        "llama3-405b", oc.Plan(compiled=True, compute="float8_e4m3fn", zero=1, dp=8, tp=8, pp=8, microbatch=4, microbatches=8,
                               recompute="full", sequence_parallel=True, overlap_tp=True, overlap_pp=False, virtual=2),
    ),
    "LLaMA-405B on 16,384 (Llama 3)": (
        "llama3-405b", oc.Plan(dp=128, tp=8, pp=16, microbatches=16, zero=2, sequence_parallel=True, virtual=4),
    ),
    # DeepSeek-AI, 2024 (arXiv 2412.19437), sections 3.2 and 4.2: DualPipe, whose V has half as many ranks for the same stages.
    "DeepSeek-V3 on 2,048 (DeepSeek)": (
        "deepseek-v3", oc.Plan(dp=128, pp=16, ep=64, microbatch=1, microbatches=120, zero=1, schedule="DualPipeV", virtual=2,
                               compute="float8_e4m3fn", recompute="operators"),
    ),
}  # fmt: skip


def on_paper(only: str = "") -> None:
    """The plans that are found for published jobs, and what both take under the price. Seconds are those of the processor."""
    machine = replace(Machine.preset("H100"), capacity=95 * 10**9)  # torchtitan's H100 have 96 GB
    spent, count = [0.0], [0]
    whole = subjects.record_decoder

    def timed(*given: Any) -> Any:
        began = time.process_time()
        made = whole(*given)
        spent[0] += time.process_time() - began
        count[0] += 1
        return made

    subjects.record_decoder = timed  # type: ignore[attr-defined]
    for name, (model, plan) in ((name, job) for name, job in PUBLISHED.items() if only in name):
        sizes = known_model(model)
        published = oc.price(sizes, plan, machine)
        spent[0], count[0], began = 0.0, 0, time.process_time()
        fixed = {field: getattr(plan, field) for field in PRECISION}
        limit = max(machine.capacity, published.peak)  # what was published ran, whatever the price says
        found = oc.plan(sizes, world=plan.world, machine=machine, batch=plan.batch, fixed=fixed, memory=limit)
        took = time.process_time() - began
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"\n{name}: found in {took - spent[0]:.1f} s + {spent[0]:.1f} s of {count[0]} recordings, {most:.2f} GiB resident"
        )
        print(f"  published: {published.seconds:.3f} s, {published.peak / 2**30:.1f} GiB: {_short(plan)}")
        memory = ", ".join(f"{kind} {size / 2**30:.1f}" for kind, size in found.cost.ranks[0].memory.items())
        print(f"  the first rank's GiB: {memory}")
        print(f"  found: {found.cost.seconds / published.seconds:.3f} of that, {found}")


def _short(plan: oc.Plan) -> str:
    from onecard.planning.search.words import in_words

    return in_words(plan)


# -- in truth --------------------------------------------------------------------------------------------------------------


def reduced(name: str, ranks: int, machine: Machine) -> Iterator[oc.Plan]:
    """All plans that can be applied to a program: dp x tp, ZeRO, recomputation."""
    from onecard.planning.search.find import Search
    from onecard.planning.search.space import Space

    program = _programs()[name]
    subject = subjects.subject_of(program.build(), program.batch(), program.loss, REDUCED)
    search = Search(Space(subject, ranks, machine, REDUCED), machine, 0)
    for group in search.space.groups():
        for one in (group, *search.space.again(group)):
            yield from search.space.members(one)


def _programs() -> dict[str, Any]:
    import plan_programs as p

    images = lambda: (torch.randn(32, 3, 32, 32), torch.randint(10, (32,)))  # noqa: E731
    import cut_programs as c

    small = p.small()
    return {
        "GPT wide": p.Program(lambda: p.GPT(512, 2, 2048, 64, 8), p._text(8, 64, 2048), p._tokens),
        "GPT deep": p.Program(lambda: p.GPT(128, 8, 2048, 64), p._text(16, 64, 2048), p._tokens),
        "seed 003": p.Program(lambda: p.MLP(784, 2048), lambda: p._pair(64, 784), small["mlp"].loss),
        "GRU": p.Program(lambda: p.GRU(2000, 256), p._text(16, 32, 2000), p._tokens),
        "ResNet": p.Program(c.ResNet, images, c._class_loss, True),
        "U-Net": p.Program(c.UNet, lambda: (torch.randn(16, 3, 64, 64), torch.randn(16, 1, 64, 64)), small["unet"].loss, True),
        "ViT": small["vit"], "T5": small["t5"],
    }  # fmt: skip


REDUCED = {"pp": 1, "cp": 1, "microbatches": 1, "replicas": 1, "recompute_blocks": 0, "overlap": False}
"""What ``oc.parallelize`` lays out in place; on CPUs messages along dp are not beside computation."""


def _step(name: str, plan: oc.Plan) -> tuple[Any, Any, Any]:
    """A program's model, its optimizer and its step, under a plan. On a rank."""
    import plan_programs as p

    model, optimizer, step = p.step_of(_programs()[name])
    if plan.pp > 1 or plan.microbatches > 1:
        return model, optimizer, oc.to_static(step, plan=plan)
    oc.parallelize(model, optimizer, plan=plan)
    return model, optimizer, step


def in_turns(name: str, plans: list[oc.Plan], rounds: int) -> list[list[float]]:
    """Seconds of a step under each plan, in each round: one after the other, so that all see the machine as it is then."""
    batch = _programs()[name].batch()
    steps = [_step(name, plan)[2] for plan in plans]
    took = []
    for _ in range(rounds + 3):
        took.append([])
        for step in steps:
            began = time.perf_counter()
            step(*batch)
            took[-1].append(time.perf_counter() - began)
    return took[3:]


def most_alive(name: str, plan: oc.Plan) -> int:
    """The most bytes of tensors alive at once in a later step, on this rank."""
    from live_memory import Counted

    batch = _programs()[name].batch()
    model, optimizer, step = _step(name, plan)
    for _ in range(4):  # the next call is none of those at which a recording is compared
        step(*batch)
    counted = Counted([[*model.parameters()], [*model.buffers()], [*optimizer.state.values()], batch])
    with counted:
        step(*batch)
    return counted.peak


def _found(name: str, ranks: int, machine: Machine, memory: int, fixed: dict[str, Any]) -> oc.Plan:
    program = _programs()[name]
    return oc.plan(
        program.build(),
        world=ranks,
        machine=machine,
        batch=program.batch(),
        loss=program.loss,
        memory=memory,
        fixed=fixed,
    ).best


def in_truth(rank_counts: list[int], rounds: int, only: str) -> None:
    """For each program every plan measured: where the one that is found comes, and what it takes of half the memory."""
    for ranks in rank_counts:
        machine = run_ranks(Machine.measure, ranks, timeout=300.0)[0]  # with as many at work as there will be
        for name in (name for name in _programs() if only in name):
            found = _found(name, ranks, machine, 0, REDUCED)
            plans = list(dict.fromkeys(reduced(name, ranks, machine)))
            pure = next(plan for plan in plans if plan.dp == ranks and not plan.zero and plan.recompute == "none")
            took = run_ranks(in_turns, ranks, name, plans, rounds, timeout=900.0)[0]
            middle = [statistics.median(of_plan) for of_plan in zip(*took, strict=True)]
            best = plans[middle.index(min(middle))]
            where = [plans.index(plan) for plan in (found, best, pure)]
            beside = [statistics.median(row[where[0]] / row[other] for row in took) for other in where[1:]]
            print(
                f"{name}, {ranks} ranks, {len(plans)} plans: found {_short(found)} {middle[where[0]] * 1e3:.1f} ms; best "
                f"{_short(best)} {middle[where[1]] * 1e3:.1f} ms: {beside[0]:.2f}; pure dp {beside[1]:.2f}",
                flush=True,
            )


def in_half(rank_counts: list[int], only: str) -> None:
    """For each program the plan for half the memory that pure data parallelism takes, and what it takes, on the fullest rank."""
    machine = Machine.measure()
    for ranks in rank_counts:
        for name in (name for name in _programs() if only in name):
            pure = next(
                plan for plan in reduced(name, ranks, machine)
                if plan.dp == ranks and not plan.zero and plan.recompute == "none"
            )  # fmt: skip
            whole = max(run_ranks(most_alive, ranks, name, pure, timeout=300.0))
            said = f"{name}, {ranks} ranks: pure dp {whole / 1e6:.1f} MB"
            wider = (
                [] if _programs()[name].statistics else [{"cp": 1, "replicas": 1}]
            )  # of a batch, not of a microbatch
            for fixed in (REDUCED, *wider):  # without, then with pipelines and microbatches
                try:
                    plan = _found(name, ranks, machine, whole // 2, fixed)
                except oc.errors.PlanError as why:
                    said += f"; {str(why).splitlines()[0]}"
                    continue
                took = max(run_ranks(most_alive, ranks, name, plan, timeout=300.0))
                said += f"; {_short(plan)} {took / 1e6:.1f} MB: {took / whole:.3f}"
                break
            print(said, flush=True)


def main() -> None:
    """Both parts, as asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", action="store_true")
    parser.add_argument("--half", action="store_true", help="plans for half the memory, measured")
    parser.add_argument("--only", default="", help="part of a job's or a program's name")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if given.truth:
        in_truth(given.ranks, given.rounds, given.only)
    elif given.half:
        in_half(given.ranks, given.only)
    else:
        on_paper(given.only)


if __name__ == "__main__":
    main()
