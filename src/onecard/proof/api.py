"""prove: a program on all ranks against the same program on one card, in one process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from onecard.errors import ProofError
from onecard.planning.plan import Plan
from onecard.proof import bisection, plain
from onecard.proof.begun import Begun
from onecard.proof.cancelled import apart_from, cancelled
from onecard.proof.given import check, of_one
from onecard.proof.nudged import Excused, told_apart
from onecard.proof.partners import partners
from onecard.proof.processes import on_processes
from onecard.proof.replayed import Recorded
from onecard.proof.report import Proof, first_divergence
from onecard.proof.results import compare
from onecard.proof.running import Case, Program
from onecard.proof.seen import Watched
from onecard.proof.small import said_of, smaller
from onecard.static.step.step import RecordedStep

EXACT = 1e-7
"""How far values may be apart in float64, relatively to the largest number of a tensor."""
OWN = 2e-4
"""The same in float32, where a program cannot run in float64."""


def prove(
    program: Program | nn.Module | Sequence[RecordedStep],
    *given: Any,
    args: Any = (),
    world: int | None = None,
    against: Program | RecordedStep | None = None,
    plan: Plan | str | Path | None = None,
    steps: int = 0,
    rounding: bool = True,
    recorded: bool = False,
    bisect: bool = False,
    processes: bool = False,
    start: str | Path | None = None,
    wide: bool = False,
) -> Proof:
    """Run a program, or recordings of its step, on all ranks of a world, in this process; hold every value against one card's.

    Each rank runs ``program(*args)``, as its process would: ``onecard.get_rank()``, process groups of torch.distributed,
    marks, ``onecard.fleet``, pipelines, ``DTensor`` and functional collectives work. Messages carry values; nothing is sent.
    Both run in float64, where rounding cannot be taken for a fault, and once more in their own precision, to tell how much
    rounding there is.

    Args:
        program: makes its model and trains; may return numbers and tensors, such as its losses. A module is called with
            ``args`` and trained by SGD, for ``steps`` (2 if left out). Or a list of recordings, one of each rank in order,
            made in pretended worlds or on real ranks: their nodes are interpreted together.
        given, args: each rank gets a copy; ``args=(x,)`` is the same as ``x``. Of recordings: what one card's step was called
            with, or values by the names of its inputs (``against.inputs``); all else is what ``against`` is bound to.
        world: how many ranks; by default the plan's, else 2.
        against: what one card runs; by default the same program in a world of one, whose meshes have one rank. Of recordings:
            that of one card.
        plan: an ``oc.Plan`` or its file, by which the ranks run a program for one card, as ``onecard run --auto`` does.
        steps: of the first optimizer, after which each run ends; 0: it runs to its end. Of recordings: how many times; 0: once.
        rounding: whether to run in the program's own precision, too.
        recorded: steps of ``oc.to_static`` are recorded and replayed on the ranks, by their passes; one card runs them as
            they are. False: they run as they are on both, so that each operator is seen.
        bisect: the same, and if it is not equal, which pass is at fault.
        processes: each rank is a process of this host, for programs that cannot share one; so it is for recordings. The program
            is then a function of a module, or a script.
        start: a checkpoint of ``oc.checkpoint.save``, by whatever mesh, whose models and optimizers both begin with. Widths stay.
        wide: configs among ``args`` (a hidden size and heads, as attributes) stay as they are. False: their widths, batch and
            vocabulary become as small as leaves every remainder, heads as they are; where the program fails so, they stay.

    Returns:
        The proof: true if parameters, gradients, buffers and what is returned are one card's. Else it names the first value
        that is not: its operator, line, module, layout, ranks, the messages before it, and what would explain it.

    Raises:
        ProofError: the program fails on a rank, or on one card; recordings are not those of all ranks, or ``args`` do not fit.
        PlanError: the plan cannot be applied to a program for one card.

    Source: the sparse check and ``onecard.rules.verify``, for a whole program; TTrace (Megatron's bugs found by comparing
    values with a reference).

    Example:
        >>> import torch, onecard as oc
        >>> def program():
        ...     torch.manual_seed(0)
        ...     mesh = oc.ProcessMesh(range(oc.get_world_size()), ["tp"])
        ...     model = torch.nn.Linear(4, 8, bias=False)
        ...     model.weight = oc.shard_tensor(model.weight, mesh, [oc.Shard(0)])
        ...     loss = model(torch.randn(2, 4)).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> bool(prove(program, world=4))
        True
        >>> bool(prove(torch.nn.Linear(4, 2), torch.ones(4, 4), plan=oc.Plan(dp=4, zero=1)))
        True
    """
    given = (*given, *args) if not isinstance(args, Mapping) else given
    if isinstance(program, Sequence):
        return _of_recordings(program, against, given or args, world, steps, rounding, start)
    wanted = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    ranks = world if world is not None else wanted.world if wanted is not None else 2
    if not isinstance(ranks, int) or ranks < 1:
        raise ProofError(f"prove(..., world={world!r}): want the number of ranks: world=8")
    if isinstance(against, RecordedStep) or isinstance(args, Mapping):
        raise ProofError(
            "prove(program, ...): against= a recording, and args= by names, are for recordings: prove([...])"
        )
    if wanted is not None:
        plain.check(wanted, ranks)
    if isinstance(program, nn.Module):
        program, given, steps = plain.trained, (program, steps or 2, *given), 0
    begun = "" if start is None else str(Begun(start).folder.resolve())
    case = Case(program, given, ranks, against, steps, wanted, recorded or bisect, (), processes, begun)
    case, proof = _smallest(case, rounding, wide or bool(begun))
    if bisect and not proof:
        proof = replace(proof, passes=bisection.which(case, lambda other: bool(proved(other, rounding=False))))
    return proof


def _smallest(case: Case, rounding: bool, wide: bool) -> tuple[Case, Proof]:
    """The proof of a case with small widths; if it fails so, with its own."""
    made = [smaller(x, case.world) for x in case.args]
    found = {name: sizes for _, each in made for name, sizes in each.items()}
    if wide or not found:
        return case, proved(case, rounding)
    less = replace(case, args=tuple(x for x, _ in made))
    try:
        return less, replace(proved(less, rounding), widths=said_of(found))
    except ProofError as fault:
        why = f"widths as they are: with smaller ones {str(fault).splitlines()[0]}"
        return case, replace(proved(case, rounding), widths=why)


def _of_recordings(
    steps: Sequence[Any], against: Any, args: Any, world: int | None, count: int, rounding: bool, start: Any
) -> Proof:
    if world not in (None, len(steps)):
        raise ProofError(
            f"prove(recordings, world={world}): {len(steps)} recordings: one of each rank, or leave world= out"
        )
    check(steps, against)
    return proved(Recorded(tuple(steps), against, of_one(against, args, start), count or 1), rounding)


def proved(case: Case | Recorded, rounding: bool = True) -> Proof:
    """Run a case and compare it.

    Raises:
        ProofError: it fails on a rank, or on one card; or nothing of it is seen that could be compared.
    """
    began = time.perf_counter()
    exact, why = True, ""
    try:
        one, ranks = both(case, in_float64=True)
    except ProofError as fault:
        one, ranks = _in_its_own(case, fault)
        exact, why = False, f"not in float64: {str(fault.__cause__ or fault).splitlines()[0]}"
    bound = EXACT if exact else OWN
    results, unpaired = compare(ranks, one, bound)
    if not results:
        raise ProofError(
            "nothing was compared: the program trains nothing that is seen, and returns nothing. It has to call "
            "optimizer.step(), or to return its losses; a script's ranks have to reach their first step"
        )
    told = Excused(tuple(result for result in results if result.off > bound))
    if told.wrong and exact and isinstance(case, Case):
        told = told_apart(case, one, ranks, told.wrong, bound)
    wrong = told.wrong
    found = partners(ranks, one, bound)
    first = first_divergence(found, ranks, wrong, bound) if wrong else None
    own, zero = _rounding(case, one) if exact and rounding and not wrong else (None, "")
    return Proof(
        case.world, not wrong, exact, len(found.one) - len(found.numbered), found.share, tuple(results), wrong, first,
        own, tuple(unpaired), time.perf_counter() - began, why, rounded=told.rounded, begun=told.begun, alone=found.names_alone(),
        numbered=found.names_numbered(), zero=zero, undivided=_undivided(case, ranks),
    )  # fmt: skip


def _undivided(case: Case | Recorded, ranks: Sequence[Watched]) -> str:
    """Ranks that send nothing run one card's program as it is: what is proved is little."""
    if isinstance(case, Recorded) or case.recorded or case.plan is not None or case.world == 1:
        return ""
    if any(rank.messages for rank in ranks):
        return ""
    return "no rank sent anything: each ran the whole program. Divide it (marks, fleet), or give a plan: plan=oc.Plan(dp=2)"


def both(case: Case | Recorded, in_float64: bool, keep: bool = True) -> tuple[Watched, list[Watched]]:
    """One card's values, and each rank's. Of replays results alone: they have neither modules nor layouts."""
    if isinstance(case, Recorded):
        return case.both(in_float64, keep)
    apart, keep = case.recorded or case.processes, keep and not case.recorded
    return case.one(in_float64, keep), on_processes(case, in_float64, keep) if apart else case.ranks(in_float64, keep)


def _in_its_own(case: Case | Recorded, fault: ProofError) -> tuple[Watched, list[Watched]]:
    """A program that fails in float64, in its own precision. One that needs float64 fails there, too, in another way."""
    try:
        return both(case, in_float64=False)
    except ProofError as own:
        if str(own) == str(fault):
            raise
        raise ProofError(f"{own}\nIn float64 {fault}") from own.__cause__


def _rounding(case: Case | Recorded, exact: Watched) -> tuple[tuple[float, str] | None, str]:
    """How far results are apart in their own precision, and in words those that are nothing but rounding."""
    try:
        one, ranks = both(case, in_float64=False, keep=False)
    except ProofError:
        return None, ""
    results, zero = apart_from(compare(ranks, one, OWN)[0], cancelled(exact))
    most = max(results, key=lambda result: result.off, default=None)
    return None if most is None else (most.off, most.what), zero


__all__ = ["EXACT", "OWN", "Case", "Program", "Watched", "prove", "proved"]
