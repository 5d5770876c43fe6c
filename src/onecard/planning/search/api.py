"""plan: the best way to run a job on so many ranks, found without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from onecard._garbage import seldom_collected
from onecard.errors import NothingFits, OnecardError, PlanError
from onecard.machine.cost import MACHINE, Machine
from onecard.planning.job import JobCost, bytes_in_words
from onecard.planning.known_models import known_model
from onecard.planning.machine_file import machine_named
from onecard.planning.plan import Plan
from onecard.planning.record import Loss, Model, parts_of
from onecard.planning.search.find import ALIKE, Search
from onecard.planning.search.plans import Choice, Plans, beside, chosen
from onecard.planning.search.space import Space
from onecard.planning.search.subject import PlanSubject, subject_of
from onecard.planning.search.words import in_words, largest
from onecard.planning.step_parts import is_step, parts_of_step
from onecard.static.call import name_of

OBJECTIVES = ("time", "memory")
SHOWN = 5
"""Runners-up that are shown."""


def plan(
    model: Model | str | tuple[Any, ...] | Callable[..., Any],
    *,
    world: int,
    machine: Machine | str = MACHINE,
    batch: Any = None,
    loss: Loss | None = None,
    memory: int | None = None,
    fixed: Mapping[str, Any] | None = None,
    objective: str = "time",
) -> Plans:
    """The best plan of a job on so many ranks, and why. Nothing of the model runs.

    Looked at is every way to divide the ranks (dp, tp with sequence parallelism, cp, pp), the rows (microbatches), the training
    state (ZeRO, copies), what is computed again, the pipeline's schedule and where it is cut. Recorded is one microbatch for each
    way to divide layers; a plan is priced (``oc.price``) only if what it takes at least is less than the best price so far: the
    first one is the best of all, or ``ALIKE`` (0.5 %) from it where that divides less.

    Args:
        model: an ``oc.Transformer``; a module of plain torch, whose tensors lie as is found here for each degree of tp; a
            function without arguments that builds one; (model, loss, optimizer, batch); the name of a known decoder
            ("llama3-8b"); or a step as ``to_static`` takes it, a function of its batch: forward, one ``backward()``, the
            optimizer, which runs once without data. Marks of a module's parameters are pins.
        world: ranks.
        machine: on what; a name ("H100"), a file.
        batch: what a step is given on all ranks together: of a Transformer the number of its rows (sequences); of a module an
            example, as a loader gives it; of a step what it is called with.
        loss: (model, *batch) -> the loss, where the model does not return it; or a criterion, such as ``nn.CrossEntropyLoss()``,
            of the model's output and the batch's last tensor.
        memory: bytes of each rank; None: what the machine has; 0: any.
        fixed: fields of ``oc.Plan`` that are given; also precision and ``per_host``. The optimizer is Adam, as for ``oc.price``.
        objective: "time" of a step, or "memory" of the fullest rank.

    Raises:
        NothingFits: says which plan takes least, and what is missing.
        PlanError: a field that cannot be; a step of several models, or of several ``backward()``.
        RecordingError: a step reads values; names the line.

    Source: bounds and pruning as in Calculon (Isaev et al., 2023) and Galvatron (Miao et al., 2022); prices by recordings.

    Example:
        >>> import onecard as oc
        >>> sizes = oc.Transformer(layers=4, hidden=512, heads=8, vocab=4096, sequence=512)
        >>> found = oc.plan(sizes, world=2, machine=oc.Machine.preset("A100"), batch=8)
        >>> found.best.dp, found.what_if(tp=2).plan.tp
        (2, 2)
        >>> import torch
        >>> net = torch.nn.Linear(8, 8)
        >>> def step(x):
        ...     net(x).square().mean().backward()
        >>> oc.plan(step, world=2, batch=torch.zeros(4, 8)).best.world
        2
    """
    if isinstance(model, tuple):
        if len(model) != 4:
            raise PlanError(f"plan: want (model, loss, optimizer, batch), not {len(model)} values")
        model, loss, _, batch = model
    if objective not in OBJECTIVES:
        raise PlanError(f"plan: objective={objective!r}; want one of {', '.join(OBJECTIVES)}", "objective")
    if memory is not None and (type(memory) is not int or memory < 0):
        raise PlanError(
            f"plan: memory={memory!r}: want a whole number of bytes, such as 24 * 2**30; 0 is any", "memory"
        )
    if isinstance(machine, str):
        machine = machine_named(machine, Machine.measure)
    if isinstance(model, str):
        model = known_model(model)
    given = dict(fixed or {})
    if machine.curves:  # a CPU, as it was measured: there messages have no engine of their own
        given.setdefault("overlap", False)
    limit = int(machine.capacity or 0) if memory is None else memory

    def of(model: Any, batch: Any, loss: Any) -> Plans:
        return _planned(subject_of(model, batch, loss, given), world, machine, limit, given, objective, obvious=True)

    with seldom_collected():
        return _of_step(model, batch, loss, of) if is_step(model) else of(model, batch, loss)


def _of_step(step: Any, batch: Any, loss: Any, planned: Callable[..., Plans]) -> Plans:
    """The plans of a step: those of its model, batch and loss."""
    if batch is None or loss is not None:
        raise PlanError(
            f"plan: {name_of(step)} is taken for a step, as it takes arguments: give what it is called with, batch=(x, y), and "
            "no loss, which it makes itself. A function that builds a module takes no arguments: oc.plan(lambda: Net(8), ...)",
            "batch",
        )
    parts = parts_of_step(step, parts_of(batch))
    try:
        return planned(parts.model, parts.batch, parts.loss)
    except RuntimeError as why:
        if isinstance(why, OnecardError):
            raise
        raise PlanError(
            f"plan: {name_of(step)}: what it computes does not work with the rows of one rank or microbatch ({why}): in place of "
            "numbers of rows write -1 or x.shape[0] inside the model; or give (model, loss, optimizer, batch), the loss as a "
            "function of (model, *batch)"
        ) from why


def _planned(
    subject: PlanSubject, world: int, machine: Machine, limit: int, fixed: Mapping[str, Any], objective: str,
    obvious: bool = False,
) -> Plans:  # fmt: skip
    search = Search(Space(subject, world, machine, dict(fixed)), machine, limit, objective)
    found = search.run()
    if not found.priced:
        raise _nothing(subject, world, machine, limit, fixed, search)
    ordered = in_order(found.priced, objective)
    best = ordered[0]

    def again(more: Mapping[str, Any]) -> Plans:
        new = dict(more)
        bytes_ = int(new.pop("limit", limit))
        with seldom_collected():
            return _planned(subject.with_precision(new), world, machine, bytes_, {**fixed, **new}, objective)

    runners = _runners(ordered)
    first = chosen(best, limit, found.looked, runners[0] if runners else None, objective)
    choices = (first, *(beside(cost, best, limit) for cost in runners[:SHOWN]))
    plain = tuple(_obvious(subject, world, machine, limit, fixed, best)) if obvious else ()
    return Plans(choices, plain, found.looked, len(found.priced), found.recorded, limit, again)


def in_order(priced: Sequence[JobCost], objective: str = "time") -> list[JobCost]:
    """The best first: of those that are alike, what divides least."""

    def of(cost: JobCost) -> float:
        return cost.seconds if objective == "time" else float(cost.needs)

    least = min(map(of, priced))
    near = sorted((c for c in priced if of(c) <= least * (1 + ALIKE)), key=lambda c: (_divides(c.plan), of(c)))
    return [*near, *sorted((c for c in priced if of(c) > least * (1 + ALIKE)), key=lambda c: (of(c), _divides(c.plan)))]


def _divides(plan: Plan) -> tuple[Any, ...]:
    """How much a plan divides and does again: of two that are alike, the smaller is taken."""
    return (
        plan.pp, plan.cp, plan.tp, plan.virtual, plan.recompute != "none", plan.zero, plan.replicas, plan.microbatches,
        plan.recompute_blocks, plan.stages, plan.schedule, plan.recompute, plan.placements, plan.outputs,
    )  # fmt: skip


def _runners(ordered: Sequence[JobCost]) -> list[JobCost]:
    """The best of each other way to divide the ranks."""
    best = ordered[0].plan
    seen, found = {(best.dp, best.cp, best.tp, best.pp)}, []
    for cost in ordered[1:]:
        way = cost.plan.dp, cost.plan.cp, cost.plan.tp, cost.plan.pp
        if way not in seen:
            seen.add(way)
            found.append(cost)
    return found


def _obvious(
    subject: PlanSubject, world: int, machine: Machine, limit: int, fixed: Mapping[str, Any], best: JobCost
) -> list[Choice]:
    """What many would try first, and why not."""
    found: list[Choice] = []
    for name, ways in _ways(subject, world).items():
        if any(fixed.get(field, value) != value for field, value in ways.items()):
            continue
        near = None
        one = _best(subject, world, machine, limit, {**fixed, **ways})
        if one is None:
            one = _best(subject, world, machine, 0, {**fixed, **ways}, "memory")
            if one is None:  # nor with any memory
                continue
            free = {name: value for name, value in ways.items() if name != "recompute"}
            near = _best(subject, world, machine, limit, {**fixed, **free})
        if one.plan != best.plan and all(one.plan != other.plan for other in found):
            found.append(beside(one, best, limit, near, name))
    return found


def _best(
    subject: PlanSubject, world: int, machine: Machine, limit: int, fixed: Mapping[str, Any], objective: str = "time"
) -> JobCost | None:
    """The best plan with these fields, if any fits; for the smallest one only small microbatches are looked at."""
    with suppress(PlanError):
        space = Space(subject, world, machine, dict(fixed), objective == "memory")
        found = Search(space, machine, limit, objective).run().priced
        if found:
            return found[0] if objective == "memory" else in_order(found)[0]
    return None


def _ways(subject: PlanSubject, world: int) -> dict[str, dict[str, Any]]:
    if world == 1:
        return {}
    whole = {"dp": world, "tp": 1, "cp": 1, "pp": 1, "recompute": "none"}
    ways = {"pure dp": {**whole, "zero": 0}, "ZeRO-3": {**whole, "zero": 3, "replicas": 1}}
    host = subject.base.per_host or world
    degrees = [n for n in subject.tensor_degrees(min(host, world)) if world % n == 0 and n > 1]
    if degrees and subject.sequence():
        tp = max(degrees)
        ways["Megatron's recipe"] = {"tp": tp, "cp": 1, "recompute": "none", "zero": 1 if world > tp else 0}
    return ways


def _nothing(
    subject: PlanSubject, world: int, machine: Machine, limit: int, fixed: Mapping[str, Any], search: Search
) -> PlanError:
    """Nothing fits: which plan takes least, and what is missing."""
    cost = _best(subject, world, machine, 0, fixed, "memory")
    if cost is None:
        why = max(search.space.why, key=lambda w: search.space.why[w], default="no plan has these fields")
        return PlanError(f"plan: nothing can run on {world} ranks with {dict(fixed) or 'these rows'}: {why}")
    return NothingFits(
        f"nothing fits into {bytes_in_words(limit)} on {world} rank(s): {in_words(cost.plan)} takes least, "
        f"{bytes_in_words(cost.needs)} ({largest(cost)}). More ranks, fewer rows, or fixed={{'offload': True}}"
    )
