"""What torch's caching allocator reserves on one rank: the tensors of a step, made and dropped in their order. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from onecard.pipeline.schedule.timing import Span
from onecard.planning.allocator import CachingAllocator
from onecard.planning.job import PieceCost
from onecard.planning.lives import Life
from onecard.planning.stages import StageCost, makes_gradients
from onecard.planning.state import TrainingState, size

_Key = tuple[Hashable, ...]


def reserved(stages: Mapping[int, StageCost], own: Sequence[int], spans: Sequence[Span], state: TrainingState) -> int:
    """Bytes that torch's allocator has reserved on a rank: see ``pools``."""
    return sum(pool.reserved for pool in pools(stages, own, spans, state))


def pools(
    stages: Mapping[int, StageCost], own: Sequence[int], spans: Sequence[Span], state: TrainingState
) -> tuple[CachingAllocator, ...]:
    """A rank's memory after two steps, of which the first makes the optimizer's states.

    Tensors of three streams lie apart: what is computed; what arrives of parameters (ZeRO-3); divided gradients (ZeRO-2 and 3).
    Of the schedule as many microbatches run as it takes until the most are in flight, and one more.

    Args:
        stages: all of the job; own: the numbers of those that the rank has; spans: its computations.
    """
    rank = _Pools(stages, own, state)
    needed = _needed(spans)
    chosen = [span.action for span in sorted(spans, key=lambda s: s.start) if span.action.microbatch in needed]
    for step in range(2):
        for action in chosen:
            stage = rank.stages[action.stage]
            if action.kind == "F":
                stage.forward(action.microbatch)
            elif action.kind in ("B", "I"):
                stage.backward(action.microbatch, wait=not makes_gradients(action))
            else:
                stage.weights(action.microbatch)
        rank.step_ends(first=step == 0)
    return rank.computed, rank.gathered, rank.summed


def _needed(spans: Sequence[Span]) -> set[int]:
    """The microbatches that have begun when most are in flight, and the next one."""
    begun: set[int] = set()
    found: set[int] = set()
    now = most = 0
    for action in (span.action for span in sorted(spans, key=lambda s: s.start)):
        if action.kind == "F":
            begun.add(action.microbatch)
            now += 1
            if now > most:
                most, found = now, set(begun)
        elif makes_gradients(action):
            now -= 1
    return found | {max(found, default=-1) + 1}


class _Pools:
    """The pools of a rank, and its stages."""

    def __init__(self, stages: Mapping[int, StageCost], own: Sequence[int], state: TrainingState) -> None:
        self.computed, self.gathered, self.summed = (CachingAllocator() for _ in range(3))
        self.state = state
        self.at_end: list[_Key] = []
        """What is dropped when the step ends."""
        everyone = {number: [*stage.pieces()] for number, stage in stages.items()}
        self.stages = {number: _Stage(self, number, everyone) for number in own}
        for stage in self.stages.values():
            stage.begin()

    def step_ends(self, first: bool) -> None:
        if first:
            for stage in self.stages.values():
                stage.moments()
        for key in self.at_end:
            self.computed.drop(key)
            self.summed.drop(key)
        self.at_end.clear()
        for stage in self.stages.values():
            stage.step_ends()


class _Stage:
    """A stage's tensors: made and dropped as its pieces run."""

    def __init__(self, rank: _Pools, number: int, everyone: Mapping[int, Sequence[PieceCost]]) -> None:
        self._rank, self._number = rank, number
        self._pieces = everyone[number]
        self._before = everyone[number - 1][-1].lives.lives if number - 1 in everyone else ()
        self._after = everyone[number + 1][0].lives.lives if number + 1 in everyone else ()
        self._made = {id(piece): _by_node(piece) for piece in self._pieces}
        self._ends: dict[tuple[int, int, bool, int], list[_Key]] = defaultdict(list)
        self._waiting: dict[int, list[_Key]] = defaultdict(list)
        state = rank.state
        self._gathers = state.plan.zero >= 3 and state.shards > 1
        self._divides = state.plan.zero >= 2 and state.shards > 1
        self._there = set[int]()
        """Pieces whose parameters are gathered, or on their way."""
        self.seen = False

    # -- what stays ------------------------------------------------------------------------------------------------------

    def _tensors(self, k: int) -> list[tuple[int, int]]:
        """Of a piece's parameters: (elements, those of experts among them)."""
        piece = self._pieces[k]
        experts = list(piece.expert_tensors)
        return [(n, n if n in experts else 0) for n in piece.tensors]

    def begin(self) -> None:
        state, pool = self._rank.state, self._rank.computed
        for k, piece in enumerate(self._pieces):
            for j, (n, e) in enumerate(self._tensors(k)):
                pool.make((self._number, k, j, "parameter"), state.parameters(n, e))
                if state.plan.master and not state.plan.offload:
                    pool.make((self._number, k, j, "master"), 4 * state.updated(n, e))
            pool.make((self._number, k, "frozen"), state.parameters(piece.frozen))

    def moments(self) -> None:
        state = self._rank.state
        if state.plan.offload:
            return
        for k in range(len(self._pieces)):
            for j, (n, e) in enumerate(self._tensors(k)):
                for name in ("first", "second"):
                    nbytes = state.updated(n, e) * size(state.plan.states)
                    self._rank.computed.make((self._number, k, j, name), nbytes)

    # -- what comes and goes ---------------------------------------------------------------------------------------------

    def forward(self, microbatch: int) -> None:
        for m, life in enumerate(self._before):
            if life.forward and life.until is not None and life.until[0] > 0:
                self._make((microbatch, "given", m), life, -1, microbatch)
        self._pass(microbatch, range(len(self._pieces)), True)

    def backward(self, microbatch: int, wait: bool) -> None:
        """``wait``: what forward has kept stays until ``weights``, which makes the gradients of parameters."""
        for m, life in enumerate(self._after):
            if not life.forward and life.until is not None and life.until[0] < 0:
                self._make((microbatch, "back", m), life, len(self._pieces), microbatch)
        self._pass(microbatch, range(len(self._pieces) - 1, -1, -1), False, wait)
        self.seen = self.seen or not wait

    def weights(self, microbatch: int) -> None:
        for k in range(len(self._pieces) - 1, -1, -1):
            for m, life in enumerate(self._pieces[k].lives.lives):
                if life.gradient:
                    self._make((microbatch, k, m), life, k, microbatch)
            self._sum(k)
            self._drop(self._ends.pop((microbatch, k, False, self._pieces[k].lives.backward - 1), []))
        self._drop(self._waiting.pop(microbatch, []))
        self.seen = True

    def step_ends(self) -> None:
        for keys in self._ends.values():
            self._drop(keys)
        self._ends.clear()
        self.seen = False

    def _pass(self, microbatch: int, order: range, forward: bool, wait: bool = False) -> None:
        for k in order:
            piece = self._pieces[k]
            self._gather(k, k + order.step if k + order.step in order else None)
            for at in range(piece.lives.forward if forward else piece.lives.backward):
                for m, life in self._made[id(piece)].get((forward, at), ()):
                    if not (wait and life.gradient):
                        self._make((microbatch, k, m), life, k, microbatch)
                ended = self._ends.pop((microbatch, k, forward, at), [])
                if wait:
                    self._waiting[microbatch] += [key for key in ended if key[-1]]
                    ended = [key for key in ended if not key[-1]]
                self._drop(ended)
            if not (forward or wait):
                self._sum(k)
            self._release(k)
        # What goes to another stage is gone once it is sent.
        for key in [key for key in self._ends if key[0] == microbatch and key[1] not in range(len(self._pieces))]:
            self._drop(self._ends.pop(key))

    def _make(self, name: _Key, life: Life, k: int, microbatch: int) -> None:
        key = (self._number, *name, life.forward)
        self._rank.computed.make(key, life.nbytes)
        if life.gradient:
            stays = not self._divides and not self.seen and self._as_made(k)
            if stays:
                self._rank.at_end.append(key)
            else:
                self._ends[microbatch, k, False, self._pieces[k].lives.backward - 1].append(key)
        elif life.until is None:
            self._rank.at_end.append(key)
        else:
            away, forward, at = life.until
            there = k + away
            if 0 <= there < len(self._pieces):
                lives = self._pieces[there].lives
                at = min(at, (lives.forward if forward else lives.backward) - 1)
            self._ends[microbatch, there, forward, at].append(key)

    def _drop(self, keys: Sequence[_Key]) -> None:
        for key in keys:
            self._rank.computed.drop(key)

    # -- parameters that are gathered, gradients that are summed -----------------------------------------------------------

    def _gather(self, k: int, following: int | None) -> None:
        if not self._gathers:
            return
        state, element = self._rank.state, size(self._rank.state.plan.compute)
        for each in (k, following) if state.plan.overlap else (k,):
            if each is None or each in self._there:
                continue
            self._there.add(each)
            self._rank.gathered.make((self._number, each), state.arriving(self._pieces[each]))
            for j, (n, _) in enumerate(self._tensors(each)):
                self._rank.computed.make((self._number, each, j, "gathered"), n * element)
        self._rank.gathered.drop((self._number, k))

    def _release(self, k: int) -> None:
        if self._gathers:
            self._there.discard(k)
            self._drop([(self._number, k, j, "gathered") for j in range(len(self._pieces[k].tensors))])

    def _as_made(self, k: int) -> bool:
        """Whether gradients stay in the dtype in which backward makes them."""
        piece = self._pieces[k]
        return piece.gradients == piece.parameters * size(self._rank.state.plan.gradients)

    def _sum(self, k: int) -> None:
        """A piece's gradients are there: added to those before, in the dtype that they stay in, or divided."""
        rank, state = self._rank, self._rank.state
        piece, element = self._pieces[k], size(state.plan.gradients)
        if self._divides:
            rank.computed.make((self._number, k, "bucket"), piece.parameters * element)
        if not self.seen and (self._divides or not self._as_made(k)):
            pool = rank.summed if self._divides else rank.computed
            for j, (n, e) in enumerate(self._tensors(k)):
                key = (self._number, k, j, "gradient")
                pool.make(key, state.gradients(n, e))
                rank.at_end.append(key)
        rank.computed.drop((self._number, k, "bucket"))


def _by_node(piece: PieceCost) -> dict[tuple[bool, int], list[tuple[int, Life]]]:
    found: dict[tuple[bool, int], list[tuple[int, Life]]] = defaultdict(list)
    for m, life in enumerate(piece.lives.lives):
        found[life.forward, life.at].append((m, life))
    return found
