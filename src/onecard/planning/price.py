"""price: what a step of a job takes on all its ranks, from recordings of the distinct pieces of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from onecard.errors import PlanError
from onecard.machine.cost import MACHINE, Machine
from onecard.pipeline.schedule.action import Schedule
from onecard.pipeline.schedule.modes import plan as schedule_named
from onecard.pipeline.schedule.timing import Span, Timeline, Times, makespan, simulate
from onecard.planning.job import JobCost, PieceCost, RankCost
from onecard.planning.lines import AxisLine
from onecard.planning.machine_file import machine_named
from onecard.planning.memory import RankMemory
from onecard.planning.plan import Plan
from onecard.planning.rank import RankTime, StageTime, stage_time
from onecard.planning.record import Loss, Model, recorded
from onecard.planning.reserved import reserved
from onecard.planning.stages import StageCost, stages_of
from onecard.planning.state import TrainingState
from onecard.planning.transformer import Transformer


def price(
    model: Model, plan: Plan, machine: Machine | str = MACHINE, *, batch: object = None, loss: Loss | None = None
) -> JobCost:
    """What a step of a job takes: seconds, bytes, memory of each kind of rank. Nothing runs, and no device is needed.

    Forward and backward of one microbatch are recorded, once for all plans that cut the model alike, with three blocks of each
    run of blocks that are alike. Pieces are put together by the schedule's simulation; along dp come sums of gradients,
    gathers of ZeRO and the optimizer (Adam).

    Args:
        model: an ``oc.Transformer``; or a module of plain torch, divided by ``plan.placements``; or a function that builds a
            module, also one of fleet's layers (``fleet.init`` has been called there, with the plan's tp and cp).
        plan: how it runs.
        machine: on what; the name of a data sheet ("H100") or a file will do.
        batch: of a module: an example of what it is called with: a tensor, several, or a dict of names with tensors; its rows are
            set to the plan's.
        loss: (model, *batch) -> the loss, where the model does not return it; a dict is one: (model, {"ids": ids}).

    Raises:
        PlanError: the plan does not fit the model.

    Source: the composition of layers, pipeline and data parallelism is that of Calculon (Isaev et al., 2023), on recordings
        instead of formulas.

    Example:
        >>> import onecard as oc
        >>> sizes = oc.Transformer(layers=12, hidden=256, heads=8, vocab=1024, sequence=128)
        >>> found = oc.price(sizes, oc.Plan(dp=2, tp=2, pp=3, microbatches=6), oc.Machine.preset("A100"))
        >>> len(found.ranks), [sum(n for _, n in rank.pieces) for rank in found.ranks]
        (3, [5, 4, 5])
        >>> abs(sum(found.terms.values()) - found.seconds) < 1e-9
        True
    """
    if plan.compute == "tfloat32":
        raise PlanError(
            "compute='tfloat32' is not priced; 'float32', 'bfloat16', 'float16' and 'float8_e4m3fn' are", "compute"
        )
    if isinstance(model, Transformer):  # what a program says itself is seen as it is recorded
        for wrong in (finding for finding in plan.check(model) if finding.kind == "mistake"):
            raise PlanError(str(wrong), wrong.about)
    machine = on_hosts(machine_named(machine, Machine.measure) if isinstance(machine, str) else machine, plan.per_host)
    model_costs = recorded(model, plan, batch, loss)
    pieces = model_costs.costs(machine)
    other = pieces
    if plan.recompute_blocks:
        other = recorded(model, replace(plan, recompute="none", recompute_blocks=0), batch, loss).costs(machine)
    return composed(plan, machine, pieces, other, model_costs.tokens)


def composed(
    plan: Plan, machine: Machine, pieces: Sequence[PieceCost], other: Sequence[PieceCost], tokens: int
) -> JobCost:
    """A job of pieces whose costs are known; ``other``: the same where nothing is computed again.

    Args:
        machine: of ``on_hosts``. tokens: of a row of the batch.
    """
    state = TrainingState(plan, machine)
    stages = stages_of(pieces, other, plan)
    times = [stage_time(stage, state) for stage in stages]
    times[0] = times[0].in_one()
    name = plan.schedule if plan.pp > 1 else "1F1B"
    schedule = schedule_named(name, plan.pp, plan.virtual, messages=False)(plan.microbatches)
    message = max((_to_the_next(stage.output, state) for stage in stages[:-1]), default=0.0)
    timeline = simulate(schedule, _durations(times, message, plan.overlap_pp))
    spans: dict[int, list[Span]] = {place: [] for place in range(plan.pp)}
    for span in timeline.computing:
        spans[span.rank].append(span)
    ranks = [_rank(place, schedule, stages, times, of_rank, state) for place, of_rank in spans.items()]
    without = makespan(schedule, _durations(times, 0.0, True)) if message else timeline.makespan
    return _job(plan, machine, ranks, timeline, timeline.makespan - without, pieces, tokens)


def _to_the_next(nbytes: int, state: TrainingState) -> float:
    """Seconds in which a stage's result is sent to the next one, and joined there if it was sent in parts."""
    plan, machine = state.plan, state.machine
    part = state.sent_on(nbytes)
    line = AxisLine("pp", machine, plan.pp, plan.tp * plan.cp * plan.dp, plan.per_host)
    joined = AxisLine("tp", machine, plan.tp, 1, plan.per_host).seconds("all_gather", part) if part < nbytes else 0.0
    return line.send(part) + joined


_changes: dict[tuple[int, int], tuple[Machine, Machine]] = {}
"""Machines with what a plan changes of them: the same object for the same machine, as prices are kept by it."""


def on_hosts(machine: Machine, per_host: int) -> Machine:
    """The machine with so many ranks on a host."""
    if machine.per_host == per_host:
        return machine
    key = (id(machine), per_host)
    if key not in _changes:
        if len(_changes) >= 64:
            _changes.pop(next(iter(_changes)))
        _changes[key] = machine, replace(machine, per_host=per_host)
    return _changes[key][1]


def _durations(times: Sequence[StageTime], message: float, overlap: bool) -> Times:
    """``overlap``: a stage goes on while what it has made travels; else it waits until that is there."""
    forward, back = ([0.0] * len(times) for _ in range(2))
    if not overlap:
        forward[:-1] = back[1:] = [message] * (len(times) - 1)
    return Times(
        [t.forward + more for t, more in zip(times, forward, strict=True)],
        [t.backward_input + more for t, more in zip(times, back, strict=True)],
        [t.backward_weight for t in times],
        message if overlap else 0.0,
    )


def _rank(
    place: int, schedule: Schedule, stages: Sequence[StageCost], times: Sequence[StageTime], spans: Sequence[Span],
    state: TrainingState,
) -> RankTime:  # fmt: skip
    mine = [number for number, rank in schedule.stage_to_rank.items() if rank == place]
    received = {number: stages[number - 1].output for number in mine if number > 0}
    return RankTime(place, {n: stages[n] for n in mine}, {n: times[n] for n in mine}, spans, state, received)


def _job(
    plan: Plan, machine: Machine, ranks: Sequence[RankTime], timeline: Timeline, messages: float,
    pieces: Sequence[PieceCost], tokens: int,
) -> JobCost:  # fmt: skip
    # Clipping and the check for finite gradients meet on all ranks: the optimizer begins when the last one has its sums.
    seconds = (
        max(r.end + r.sums + sum(r.late.values()) for r in ranks)
        + max(r.update for r in ranks)
        + max(r.gathers for r in ranks)
    )
    alike = plan.world // plan.pp
    found: list[RankCost] = []
    stages = {number: stage for rank in ranks for number, stage in rank.stages.items()}
    for rank in ranks:
        memory = RankMemory(rank.stages, rank.spans, rank.state, plan.pp * plan.virtual - 1)
        terms = rank.terms(seconds, 0.0, messages)
        made = rank.cost(f"pp {rank.place}", alike, terms, memory)
        if machine.to_host:  # memory of its own, which torch's caching allocator manages
            made = replace(made, reserving=partial(reserved, stages, sorted(rank.stages), rank.spans, rank.state))
        found.append(made)
    macs = sum(alike * rank.macs()[0] for rank in ranks)
    again = sum(alike * rank.macs()[1] for rank in ranks)
    longest = max(found, key=lambda rank: rank.terms["compute"])
    return JobCost(
        plan, machine, seconds, longest.terms, plan.batch * tokens, 2 * (macs - again), 2 * macs, tuple(found),
        tuple(pieces), timeline.spans,
    )  # fmt: skip
