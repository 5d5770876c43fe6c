"""The plans that are looked at: every way to divide a job over its ranks, in groups that share one recording. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from onecard.errors import PlanError, ScheduleError
from onecard.machine.cost import Machine
from onecard.pipeline.schedule.modes import plan as schedule_named
from onecard.planning.plan import Plan
from onecard.planning.search.subject import PlanSubject

SCHEDULES = (("1F1B", 1), ("ZBH1", 1), ("ZBV", 2), ("1F1B", 2), ("1F1B", 3), ("1F1B", 4), ("1F1B", 6), ("1F1B", 8))
"""Schedules, and stages of each rank."""
LONG = 16384
"""Tokens from which on parts of a sequence are worth dividing in attention, however many rows there are."""
ENOUGH = 8
"""Microbatches for each rank of a pipeline: with more the bubble is a few percent."""
PARTS = 4
"""Of a stage's blocks, so many numbers of blocks are tried that are computed again."""
FIELDS = tuple(f.name for f in fields(Plan))


class Space:
    """All plans of a subject on so many ranks.

    Args:
        subject: what is planned; world: ranks; fixed: fields of ``Plan`` that are given; smallest: only the least memory is asked
            for, so that of microbatches only the smallest are looked at.

    Raises:
        PlanError: a fixed field that is none, or that cannot be on so many ranks.
    """

    def __init__(
        self, subject: PlanSubject, world: int, machine: Machine, fixed: dict[str, Any], smallest: bool = False
    ) -> None:
        for name in fixed:
            if name not in FIELDS:
                raise PlanError(f"plan: fixed names {name!r}; the fields of a Plan are {', '.join(FIELDS)}", name)
        if type(world) is not int or world < 1:
            raise PlanError(f"plan: world={world!r}: want a whole number of ranks, 1 or more", "world")
        self.subject, self.world, self.machine, self.fixed = subject, world, machine, dict(fixed)
        self._smallest = smallest
        if "schedule" in fixed:
            self.fixed["schedule"] = Plan(schedule=fixed["schedule"]).schedule
        for axis in ("dp", "tp", "cp", "pp", "ep", "microbatch", "microbatches", "virtual"):
            also = {"pp": 2} if axis == "virtual" else {"dp": fixed.get(axis, 1)} if axis == "ep" else {}
            Plan(**{axis: fixed.get(axis, 1)} | also)  # says what is no number
            if axis in ("dp", "tp", "cp", "pp") and world % fixed.get(axis, 1):
                raise PlanError(f"plan: fixed {axis}={fixed[axis]} does not divide {world} ranks", axis)
        if _is_said("recompute_blocks", self.fixed):
            self.fixed.setdefault("recompute", "full")
        self._pipelined = next((name for name in ("schedule", "virtual", "stages") if _is_said(name, self.fixed)), "")
        self.why: dict[str, int] = {}
        """Why plans were left out without a look, and how many."""

    def groups(self) -> Iterator[Plan]:
        """A plan for each recording: what divides layers and rows; nothing is computed again yet."""
        subject = self.subject
        host = subject.base.per_host or self.world
        for tp in self._pick("tp", subject.tensor_degrees(min(self.world, host)), self.world):
            for cp in self._pick("cp", self._context(tp), self.world // tp):
                for dp in self._divisors(self.world // (tp * cp), "dp"):
                    pp = self.world // (dp * tp * cp)
                    for ep in self._experts(dp, tp * cp):
                        for rows in self._pick("microbatch", self._microbatches(dp, pp)):
                            yield from self._group(dp, tp, cp, rows, ep)

    def _experts(self, dp: int, inside: int) -> Iterator[int]:
        """Of models that have experts: all on each rank, over the ranks of a host, over as many as can be. Each is a recording
        of its own, so that those between are looked at only if they are fixed."""
        experts = self.subject.experts()
        works = [n for n in range(1, experts + 1) if experts % n == 0 and dp % n == 0] or [1]
        near = [n for n in works if n * inside <= (self.subject.base.per_host or self.world)] or [1]
        yield from self._pick("ep", sorted({1, near[-1], works[-1]}), dp)

    def _microbatches(self, dp: int, pp: int) -> list[int]:
        """Rows of a microbatch: without a pipeline as many as can be, with one such that each rank has enough to do."""
        sizes = self.subject.microbatches(dp, pp)
        if not sizes:
            self.leave_out(f"dp={dp} does not divide {self.subject.rows} rows")
        if "microbatches" in self.fixed:
            rows, count = -(-self.subject.rows // dp), self.fixed["microbatches"]
            return [rows // count] if sizes and rows % count == 0 else []
        if self._smallest:
            return sizes[-1:]
        if pp == 1:
            return sizes[:1]
        filled = [n for n in sizes if pp <= self.subject.rows // dp // n <= ENOUGH * pp]
        return filled or sizes[-1:]

    def _group(self, dp: int, tp: int, cp: int, rows: int, ep: int) -> Iterator[Plan]:
        per_rank = -(-self.subject.rows // dp)
        pp = self.world // (dp * tp * cp)
        if per_rank % rows or ("pp" in self.fixed and self.fixed["pp"] != pp):
            return
        for name, axis, there in ((self._pipelined, "pp", pp > 1), ("sequence_parallel", "tp", tp > 1)):
            if not there and _is_said(name, self.fixed):
                self.leave_out(f"{name}={self.fixed[name]!r} says nothing where {axis}=1")
                return
        count = per_rank // rows
        if "microbatches" in self.fixed and self.fixed["microbatches"] != count:
            return
        sequence = self.subject.sequence()
        parallel = tp > 1 and sequence > 0 and sequence % (tp * cp) == 0
        one = replace(
            self.subject.base, dp=dp, tp=tp, cp=cp, pp=pp, ep=ep, microbatch=rows, microbatches=count,
            recompute=self.fixed.get("recompute", "none"), placements=self.subject.pinned,
            sequence_parallel=bool(self.fixed.get("sequence_parallel", parallel)),
        )  # fmt: skip
        why = self.subject.can(one)
        if why:
            self.leave_out(why)
            return
        placed = self.subject.placed(one, self.machine)
        if not placed:
            self.leave_out(
                f"every cut of parameters over tp={tp} ranks sends more than it saves on {self.machine.name or 'this machine'}. "
                'To have one all the same: Plan(tp=..., placements=(("*.up.weight", "tp: Shard(0)"), ...))'
            )
        yield from placed

    def again(self, group: Plan) -> Iterator[Plan]:
        """Groups like this one that take less memory and no less time: with what backward may compute again, or with smaller
        microbatches where there is no pipeline that has to be filled."""
        if group.pp == 1 and not {"microbatch", "microbatches"} & self.fixed.keys() and group.microbatch % 2 == 0:
            fewer = replace(group, microbatch=group.microbatch // 2, microbatches=group.microbatches * 2)
            yield self.subject.with_rows(fewer, self.machine)
        if "recompute" not in self.fixed and group.recompute == "none":
            for again in self.subject.recompute:
                if again != "none":
                    yield replace(group, recompute=again)

    def members(self, group: Plan) -> Iterator[Plan]:
        """The plans of a group: pipeline, schedule, ZeRO, copies, how many blocks are computed again."""
        for pipelined in self._pipelines(group):
            for zeroed in self._states(pipelined):
                yield from self._again(zeroed)

    # -- the dimensions --------------------------------------------------------------------------------------------------

    def _pipelines(self, group: Plan) -> Iterator[Plan]:
        if group.pp == 1:
            yield group
            return
        for schedule, virtual in self._schedules():
            stages = group.pp * virtual
            if stages > self.subject.layers or (virtual > 1 and schedule == "1F1B" and group.microbatches % group.pp):
                continue
            if virtual > 1 and self.subject.layers < 2 * group.pp:
                continue
            try:
                one = replace(group, schedule=schedule, virtual=virtual, stages=tuple(self.fixed.get("stages", ())))
                if not one.stages:
                    schedule_named(one.schedule, one.pp, one.virtual, messages=False)(min(one.microbatches, one.pp))
            except (PlanError, ScheduleError) as why:
                self.leave_out(str(why))
                continue
            yield one

    def _schedules(self) -> Iterator[tuple[str, int]]:
        wanted, stages = self.fixed.get("schedule"), self.fixed.get("virtual")
        if wanted is not None and stages is not None:
            yield wanted, stages
            return
        for schedule, virtual in SCHEDULES:
            name = {"1F1B": "VPP"}.get(schedule, schedule) if virtual > 1 else schedule
            if wanted in (None, schedule, name) and stages in (None, virtual):
                yield schedule, virtual
        if wanted is not None and wanted not in {"1F1B", "VPP", *(name for name, _ in SCHEDULES)}:
            yield wanted, 2 if wanted in ("BFS", "VHalf", "VMin", "DualPipeV") else 1

    def _states(self, plan: Plan) -> Iterator[Plan]:
        shards = plan.dp * plan.cp
        stages: Sequence[int] = (0, 1, 2, 3) if plan.dp > 1 or shards > 1 else (0,)
        for zero in self._pick("zero", stages):
            if zero and shards == 1:
                self.leave_out(f"zero={zero} divides nothing where dp=1")
                continue
            # Gradients that are divided as they come are sent for each microbatch: that is stage 3's price.
            if zero == 2 and plan.microbatches > 1 and "zero" not in self.fixed:
                continue
            for replicas in self._pick("replicas", self._copies(plan, zero)):
                try:
                    yield replace(plan, zero=zero, replicas=replicas)
                except PlanError as why:
                    self.leave_out(str(why))

    def _copies(self, plan: Plan, zero: int) -> Sequence[int]:
        """One, and one for each host, if stage 3 then stays on a host."""
        near = max(1, (plan.per_host or self.world) // (plan.tp * plan.cp))
        copies = plan.dp // near
        return (1, copies) if zero == 3 and copies > 1 and plan.dp % near == 0 and near > 1 else (1,)

    def _again(self, plan: Plan) -> Iterator[Plan]:
        if plan.recompute == "none" or "recompute_blocks" in self.fixed:
            blocks = self.fixed.get("recompute_blocks", 0)
            if blocks and plan.recompute == "none":
                self.leave_out(f"recompute_blocks={blocks} says nothing where recompute='none'")
                return
            yield replace(plan, recompute_blocks=blocks) if blocks else plan
            return
        yield plan
        largest = -(-self.subject.layers // (plan.pp * plan.virtual))
        for blocks in sorted({largest * part // PARTS for part in range(1, PARTS)} - {0, largest}):
            yield replace(plan, recompute_blocks=blocks)

    # -- what a field may be ---------------------------------------------------------------------------------------------

    def _pick(self, name: str, values: Sequence[Any], divides: int = 0) -> Iterator[Any]:
        given = self.fixed.get(name)
        for value in values if given is None else [given]:
            if not divides or divides % value == 0:
                yield value

    def _divisors(self, number: int, name: str) -> Iterator[int]:
        yield from self._pick(name, [n for n in range(number, 0, -1) if number % n == 0], number)

    def _context(self, tp: int) -> list[int]:
        sequence = self.subject.sequence()
        if not sequence or (sequence < LONG and self.subject.rows * tp >= self.world):
            return [1]
        return [1, *(2**i for i in range(1, 11) if sequence // 2**i >= 2048)]

    def leave_out(self, why: str) -> None:
        """Plans that there are not, and why."""
        self.why[why] = self.why.get(why, 0) + 1


def _is_said(name: str, fixed: dict[str, Any]) -> bool:
    """Whether a field is given, and asks for more than a plan has that leaves it out."""
    return name in fixed and fixed[name] != getattr(Plan(), name)
