"""What a plan takes at least: seconds and bytes, without a simulation. Pure.

A plan whose bound is worse than a price that is known needs no price of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from onecard.machine.cost import Machine
from onecard.planning.job import PieceCost
from onecard.planning.plan import Plan
from onecard.planning.rank import stage_time
from onecard.planning.stages import StageCost, stages_of
from onecard.planning.state import TrainingState

_FOLDED = ("ZBV", "VHalf", "VMin", "DualPipeV")
_IN_ONE = ("1F1B", "VPP", "F-then-B", "BFS", "naive", "Eager1F1B")
"""Schedules in which a stage's backward is done in one: what comes before it waits for all of it."""


@dataclass(frozen=True, slots=True)
class _Rank:
    """What one place of a pipeline has to do with a microbatch, whatever dp divides."""

    stages: tuple[int, ...]
    before: float  # forward of the stages ahead of its first one
    busy: float
    behind: float  # their backward
    elements: int
    frozen: int
    kept: int  # of its stage that keeps most, and of the one that keeps least
    least: int
    experts: int


class Bounds:
    """Of the plans of one group, whose pieces are known; ``other``: where nothing is computed again."""

    def __init__(self, pieces: Sequence[PieceCost], other: Sequence[PieceCost], machine: Machine) -> None:
        self.pieces, self.other, self.machine = pieces, other, machine
        self._shapes: dict[object, tuple[list[StageCost], list[_Rank]]] = {}
        self._even: dict[int, tuple[int, ...]] = {}

    def quickly(self, plan: Plan) -> tuple[float, int]:
        """Seconds and bytes that the plan takes at least; nothing is counted of what dp sends.

        A rank begins when the stages before its first one have done a microbatch's forward, does all of its work, and is followed
        by the backward of those stages. It holds its training state, and one microbatch's activations or all gradients.
        """
        state = TrainingState(plan, self.machine)
        halves = plan.pp > 1 and plan.schedule not in _IN_ONE
        seconds, peak = 0.0, 0
        known: dict[tuple[int, int, int], tuple[int, int]] = {}  # most ranks have the same numbers of elements
        for place, rank in enumerate(self._shape(plan)[1]):
            done = rank.before + plan.microbatches * rank.busy + (0.0 if halves else rank.behind)
            seconds = max(seconds, done)
            sizes = rank.elements, rank.frozen, rank.experts
            if sizes not in known:
                known[sizes] = always_kept(state, *sizes)
            always, gradients = known[sizes]
            held = max(rank.kept, in_flight(plan, place) * rank.least)
            peak = max(peak, always + max(held, gradients))
        return seconds, peak

    def closely(self, plan: Plan) -> float:
        """Seconds with the gathers of ZeRO-3 and the optimizer."""
        state = TrainingState(plan, self.machine)
        stages, ranks = self._shape(plan)
        halves = plan.pp > 1 and plan.schedule not in _IN_ONE
        known: dict[object, float] = {}
        seconds = update = 0.0
        for rank in ranks:
            busy = 0.0
            for i in rank.stages:
                key = tuple((id(piece), count) for piece, count in stages[i].runs)
                if key not in known:
                    time = stage_time(stages[i], state)
                    known[key] = time.forward + time.backward_input + time.backward_weight
                busy += known[key]
            seconds = max(seconds, rank.before + plan.microbatches * busy + (0.0 if halves else rank.behind))
            update = max(update, sum(n * state.update(piece) for i in rank.stages for piece, n in stages[i].runs))
        return seconds + update

    def balanced(self, plan: Plan) -> tuple[int, ...]:
        """Blocks of each stage such that the slowest takes least, if that is better than equal numbers; else ().

        Blocks go one by one to the stage that would be the fastest with it: for blocks that are alike that is the best.
        """
        count = plan.pp * plan.virtual
        if count not in self._even:
            self._even[count] = _balanced(self.pieces, count) if len(self.pieces) >= 3 else ()
        return self._even[count]

    def _shape(self, plan: Plan) -> tuple[list[StageCost], list[_Rank]]:
        key = plan.pp, plan.virtual, plan.stages, plan.recompute_blocks, plan.schedule in _FOLDED
        if key not in self._shapes:
            stages = stages_of(self.pieces, self.other, plan)
            self._shapes[key] = stages, list(self._ranks(stages, plan))
        return self._shapes[key]

    def _ranks(self, stages: Sequence[StageCost], plan: Plan) -> list[_Rank]:
        forward = [sum(n * piece.forward for piece, n in stage.runs) for stage in stages]
        backward = [sum(n * piece.backward for piece, n in stage.runs) for stage in stages]
        kept = [sum(n * piece.kept for piece, n in stage.runs) for stage in stages]
        found, before, behind = [], 0.0, 0.0
        for place in range(plan.pp):
            mine = _of_rank(place, plan)
            found.append(
                _Rank(
                    mine, before, sum(forward[i] + backward[i] for i in mine), behind,
                    sum(stages[i].parameters for i in mine), sum(stages[i].frozen for i in mine), max(kept[i] for i in mine),
                    min(kept[i] for i in mine), sum(stages[i].experts for i in mine),
                )
            )  # fmt: skip
            before, behind = before + forward[place], behind + backward[place]
        return found


def always_kept(state: TrainingState, elements: int, frozen: int, experts: int) -> tuple[int, int]:
    """Bytes of parameters and states of so many elements on a rank, and of their gradients."""
    kept = state.parameters(elements + frozen, experts) + state.states(elements, experts)
    return kept, state.gradients(elements, experts)


def _balanced(pieces: Sequence[PieceCost], stages: int) -> tuple[int, ...]:
    blocks = sum(p.alike for p in pieces[1:-1])
    each = sum(p.alike * (p.forward + p.backward) for p in pieces[1:-1]) / blocks
    ends = [0.0] * stages
    ends[0] += pieces[0].forward + pieces[0].backward
    ends[-1] += pieces[-1].forward + pieces[-1].backward
    found, line = [0] * stages, [(ends[i] + each, i) for i in range(stages)]
    heapq.heapify(line)
    for _ in range(blocks):
        load, i = heapq.heappop(line)
        found[i] += 1
        heapq.heappush(line, (load + each, i))
    equal = [blocks // stages + (i < blocks % stages) for i in range(stages)]
    # A rank with several stages waits for the sum of them.
    slowest = [max(ends[i] + n * each for i, n in enumerate(numbers)) for numbers in (found, equal)]
    return tuple(found) if slowest[0] < (1 - 1e-9) * slowest[1] else ()


def _of_rank(place: int, plan: Plan) -> tuple[int, ...]:
    """The stages of a rank."""
    if plan.virtual == 1:
        return (place,)
    if plan.schedule in _FOLDED:
        return place, 2 * plan.pp - 1 - place
    return tuple(place + k * plan.pp for k in range(plan.virtual))


def in_flight(plan: Plan, place: int) -> int:
    """How many forwards of its stages a rank has done, at most at once, whose backward is still to come; at least that many.

    Source: what the orders of the papers' schedules hold; ``tests/test_search.py`` counts them.

    Example:
        >>> in_flight(Plan(pp=4, microbatches=8), 0), in_flight(Plan(pp=4, virtual=2, microbatches=8), 0)
        (4, 11)
    """
    count, pp = plan.microbatches, plan.pp
    if plan.schedule == "1F1B":
        return min(pp - place, count)
    if plan.schedule == "ZBH1" and plan.virtual == 1:
        return min(pp, count)
    if plan.schedule == "ZBV":
        return min(count + 1, 2 * pp)
    if plan.schedule == "VPP":
        return min(count * plan.virtual, 2 * (pp - place - 1) + (plan.virtual - 1) * pp + 1)
    return 1


SPARED = 0.95


def divided(pieces: Sequence[PieceCost], ways: int) -> list[PieceCost]:
    """What pieces take at least if tensors or sequences are divided over ``ways`` times as many ranks.

    Operators take that part of their time at best (``SPARED``: some layers do less when they are divided, such as a cross entropy
    that keeps no logits); messages take no less, as no rank has less to tell. Of activations nothing is said.
    """
    return [_part(piece, ways) for piece in pieces]


def _part(piece: PieceCost, ways: int) -> PieceCost:
    waits = sum(piece.messages.values())
    whole = piece.forward + piece.backward
    share = (waits + (whole - waits) * SPARED / ways) / whole if whole else 1.0
    none: Mapping[str, int] = {}
    return replace(
        piece, forward=piece.forward * share, backward_input=piece.backward_input * share,
        backward_weight=piece.backward_weight * share, kept=0,
        tensors=tuple(n // ways for n in piece.tensors), expert_tensors=tuple(n // ways for n in piece.expert_tensors),
        gradients=piece.gradients // ways, frozen=piece.frozen // ways,
        pending=none, transient=0, first=0, output=0,
    )  # fmt: skip
