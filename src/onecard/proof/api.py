"""prove: a program on all ranks against the same program on one card, in one process."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from onecard.errors import ProofError
from onecard.planning.plan import Plan
from onecard.proof import bisection, plain
from onecard.proof.partners import partners
from onecard.proof.processes import on_processes
from onecard.proof.report import Proof, first_divergence
from onecard.proof.results import compare
from onecard.proof.running import Case, Program
from onecard.proof.watch import Watched

EXACT = 1e-7
"""How far values may be apart in float64, relatively to the largest number of a tensor."""
OWN = 2e-4
"""The same in float32, where a program cannot run in float64."""


def prove(
    program: Program | nn.Module,
    *args: Any,
    world: int | None = None,
    against: Program | None = None,
    plan: Plan | str | Path | None = None,
    steps: int = 0,
    rounding: bool = True,
    recorded: bool = False,
    bisect: bool = False,
    processes: bool = False,
) -> Proof:
    """Run a program on all ranks of a world, in this process, and hold every value against one card's.

    Each rank runs ``program(*args)``, as its process would: ``onecard.get_rank()``, process groups of torch.distributed,
    marks, ``onecard.fleet``, pipelines, ``DTensor`` and functional collectives work. Messages carry values; nothing is sent.
    Both run in float64, where rounding cannot be taken for a fault, and once more in their own precision, to tell how much
    rounding there is.

    Args:
        program: makes its model and trains; may return numbers and tensors, such as its losses. A module is called with
            ``args`` and trained by SGD, for ``steps`` (2 if left out).
        args: each rank gets a copy.
        world: how many ranks; by default the plan's, else 2.
        against: what one card runs; by default the same program in a world of one, whose meshes have one rank.
        plan: an ``oc.Plan`` or its file, by which the ranks run a program for one card, as ``onecard run --auto`` does.
        steps: of the first optimizer, after which each run ends; 0: it runs to its end.
        rounding: whether to run in the program's own precision, too.
        recorded: steps of ``oc.to_static`` are recorded and replayed on the ranks, by their passes; one card runs them as
            they are. False: they run as they are on both, so that each operator is seen.
        bisect: the same, and if it is not equal, which pass is at fault.
        processes: each rank is a process of this host, for programs that cannot share one; so it is for recordings. The program
            is then a function of a module, or a script.

    Returns:
        The proof: true if parameters, gradients, buffers and what is returned are one card's. Else it names the first value
        that is not: its operator, line, module, layout, ranks, the messages before it, and what would explain it.

    Raises:
        ProofError: the program fails on a rank, or on one card.
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
    given = plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)
    ranks = world if world is not None else given.world if given is not None else 2
    if not isinstance(ranks, int) or ranks < 1:
        raise ProofError(f"prove(..., world={world!r}): want the number of ranks: world=8")
    if given is not None:
        plain.check(given, ranks)
    if isinstance(program, nn.Module):
        program, args, steps = plain.trained, (program, steps or 2, *args), 0
    case = Case(program, args, ranks, against, steps, given, recorded or bisect, (), processes)
    proof = proved(case, rounding)
    if bisect and not proof:
        proof = replace(proof, passes=bisection.which(case, lambda other: bool(proved(other, rounding=False))))
    return proof


def proved(case: Case, rounding: bool = True) -> Proof:
    """Run a case and compare it.

    Raises:
        ProofError: it fails on a rank, or on one card.
    """
    began = time.perf_counter()
    exact, why = True, ""
    try:
        one, ranks = both(case, in_float64=True)
    except ProofError as fault:
        one, ranks = both(case, in_float64=False)  # its own faults are raised here
        exact, why = False, f"not in float64: {str(fault.__cause__ or fault).splitlines()[0]}"
    bound = EXACT if exact else OWN
    results, unpaired = compare(ranks, one, bound)
    wrong = tuple(result for result in results if result.off > bound)
    found = partners(ranks, one, bound)
    first = first_divergence(found, ranks, wrong, bound) if wrong else None
    apart = _rounding(case) if exact and rounding and not wrong else None
    return Proof(
        case.world, not wrong, exact, len(found.nodes), found.share, tuple(results), wrong, first, apart, tuple(unpaired),
        time.perf_counter() - began, why,
    )  # fmt: skip


def both(case: Case, in_float64: bool, keep: bool = True) -> tuple[Watched, list[Watched]]:
    """One card's values, and each rank's. Of recordings results alone: a replay has neither modules nor layouts."""
    apart, keep = case.recorded or case.processes, keep and not case.recorded
    return case.one(in_float64, keep), on_processes(case, in_float64, keep) if apart else case.ranks(in_float64, keep)


def _rounding(case: Case) -> tuple[float, str] | None:
    try:
        one, ranks = both(case, in_float64=False, keep=False)
    except ProofError:
        return None
    results, _ = compare(ranks, one, OWN)
    most = max(results, key=lambda result: result.off, default=None)
    return None if most is None else (most.off, most.what)


__all__ = ["EXACT", "OWN", "Case", "Program", "Watched", "prove", "proved"]
