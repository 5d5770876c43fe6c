"""Stages of a job: which pieces lie in which stage of the pipeline, and what a stage takes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onecard.errors import PlanError
from onecard.pipeline.schedule.action import Action
from onecard.planning.job import PieceCost
from onecard.planning.plan import Plan

Run = tuple[PieceCost, int]
"""A piece, and how often it comes, one after the other."""


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage of a pipeline: its pieces in order, of which neighbours alike are counted.

    Attributes:
        runs: the pieces.
        output: bytes that it sends to the next stage for one microbatch.
        at_cuts: (bytes sent, seconds) beyond its pieces', by axis, of one microbatch: what the next stage would sum it scatters
            among the ranks of the axis, each of which hands on its part; what it is given itself is summed. So are gradients
            that it would sum for the stage before.
    """

    runs: tuple[Run, ...]
    output: int
    at_cuts: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    def pieces(self) -> Iterator[PieceCost]:
        """Each piece, one by one, in the order of forward."""
        for piece, count in self.runs:
            for _ in range(count):
                yield piece

    @property
    def parameters(self) -> int:
        """Elements on this rank that are trained."""
        return sum(count * piece.parameters for piece, count in self.runs)

    @property
    def experts(self) -> int:
        """Of them, those of experts."""
        return sum(count * piece.experts for piece, count in self.runs)

    @property
    def frozen(self) -> int:
        """Elements on this rank that are not."""
        return sum(count * piece.frozen for piece, count in self.runs)


def makes_gradients(action: Action) -> bool:
    """Whether the gradients of its stage's weights are there once it has run, and what forward kept is free.

    Example:
        >>> [makes_gradients(Action.parse(text)) for text in ("0I0", "0W0", "1I0", "1W0", "1B0")]
        [True, False, False, True, True]
    """
    return action.kind == "B" or action.kind == ("W" if action.stage else "I")


def stages_of(pieces: Sequence[PieceCost], other: Sequence[PieceCost], plan: Plan) -> list[StageCost]:
    """The stages of a plan.

    Args:
        pieces: of the model; ``other``: the same where nothing is computed again, of which a stage has those that are beyond
            ``plan.recompute_blocks``.

    Raises:
        PlanError: fewer blocks than stages, or ``plan.stages`` counts another number of blocks.
    """
    count = plan.pp * plan.virtual
    if count == 1 and not plan.recompute_blocks:
        return [StageCost(tuple((piece, piece.alike) for piece in pieces), 0)]
    if len(pieces) < 3:
        raise PlanError(
            f"pp={plan.pp}, virtual={plan.virtual}: a pipeline is cut between blocks, and the model has no list of blocks"
        )
    blocks = [i for i, piece in enumerate(pieces) for _ in range(piece.alike) if 0 < i < len(pieces) - 1]
    found, at = [], 0
    for stage, size in enumerate(_sizes(len(blocks), count, plan)):
        mine = blocks[at : at + size]
        at += size
        chosen = [
            pieces[i] if not plan.recompute_blocks or k < plan.recompute_blocks else other[i]
            for k, i in enumerate(mine)
        ]
        chosen = [*([pieces[0]] if stage == 0 else []), *chosen, *([pieces[-1]] if stage == count - 1 else [])]
        found.append(StageCost(tuple(_runs(chosen)), chosen[-1].output if stage < count - 1 else 0))
    return [replace(stage, at_cuts=_at_cuts(i, found)) for i, stage in enumerate(found)]


def _at_cuts(i: int, stages: Sequence[StageCost]) -> dict[str, tuple[int, float]]:
    """Of an all-reduce half is a reduce-scatter. The transfer does the other half: each rank sends its part to all."""
    found: dict[str, tuple[int, float]] = {}
    mine, following = (next(s.pieces(), None) for s in (stages[i], stages[(i + 1) % len(stages)]))
    halves = [(following.joined, 1)] if following and i + 1 < len(stages) else []
    halves += [(mine.joined, -2), (mine.handed, -1)] if mine and i else []
    for messages, count in halves:
        for axis, (nbytes, took) in messages.items():
            before = found.get(axis, (0, 0.0))
            found[axis] = before[0] + count * nbytes // 2, before[1] + count * took / 2
    return found


def _sizes(blocks: int, count: int, plan: Plan) -> Sequence[int]:
    if plan.stages:
        if len(plan.stages) != count or sum(plan.stages) != blocks:
            raise PlanError(
                f"stages={plan.stages}: want {count} numbers (pp={plan.pp} x virtual={plan.virtual}) that add up to the model's "
                f"{blocks} blocks"
            )
        return plan.stages
    if blocks < count:
        raise PlanError(
            f"pp={plan.pp} x virtual={plan.virtual} makes {count} stages, and the model has {blocks} blocks: want at most as many"
        )
    return [blocks // count + (stage < blocks % count) for stage in range(count)]


def _runs(pieces: Sequence[PieceCost]) -> Iterator[Run]:
    last, count = None, 0
    for piece in pieces:
        if piece is last:
            count += 1
            continue
        if last is not None:
            yield last, count
        last, count = piece, 1
    if last is not None:
        yield last, count
