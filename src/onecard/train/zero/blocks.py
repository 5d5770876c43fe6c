"""Parameters of ZeRO stage 3, whole while a block of a model runs: gathered in one message before it, and ahead of it.

A block's parameters are gathered before its forward and before its backward, and given up after each. What autograd keeps of
them (views, too) is over one memory that is emptied and filled again, so it is right whenever it is read. What reads a
parameter outside of its block meets the part.

Source: FSDP (Zhao et al., arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from onecard import recorded
from onecard._torch import names as _torch
from onecard._torch.hooks import LeftBehind
from onecard._torch.leaves import outside_transforms
from onecard._torch.names import tree_leaves
from onecard.comm.base.state import Kept
from onecard.comm.base.warned import warn
from onecard.tensor import DistTensor
from onecard.tensor.buckets import Cut, start_gather
from onecard.tensor.spec import Spec
from onecard.train.zero.block_names import BlockSpec, blocks_of
from onecard.train.zero.gathered import GatheredParameter
from onecard.train.zero.reducer import hook

Policy = bool | Callable[[str, nn.Module], bool]

reached: Kept[WeakSet[ParameterBlocks]] = Kept(WeakSet)
"""Of whose parameters a program has some before it, whole, which it may write to: a replay, which reads the parts, asks first."""


class Hook(LeftBehind):
    """A hook on modules that stays with them: a copy of a module does not have it."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call: Callable[..., Any] | None = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Hook:
        made = Hook(_nothing)
        made._call = None
        return made


def _nothing() -> None:
    pass


class Unit:
    """The pieces of a block, gathered and given up together."""

    def __init__(self, name: str, pieces: list[GatheredParameter], gives_up: bool) -> None:
        self.name, self.pieces, self.gives_up = name, pieces, gives_up
        GatheredParameter.together(pieces)
        self.shown = False
        self.seen_outside = False  # shown while the program itself runs
        self.stays = False  # read outside of its block by what autograd may keep: whole until the next step
        self.inputs, self.waiting = 0, set[int]()  # gradients that its backward is still to make
        self._end: Callable[[], None] | None = None

    def start(self, later: bool = True) -> None:
        """Start gathering, if nobody has."""
        if self.shown or self._end is not None:
            return
        with torch.no_grad(), outside_transforms():
            for piece in self.pieces:
                piece.mend()
                piece.allocate()
            self._end = start_gather([piece.cut() for piece in self.pieces], "parameters", later, f"block {self.name}")

    def ready(self) -> None:
        """Whole now."""
        if self.shown:
            return
        self.start(later=False)
        end, self._end = self._end, None
        with torch.no_grad(), outside_transforms():
            end()  # type: ignore[misc]
        for piece in self.pieces:
            piece.show()
        self.shown = True

    def parts_were_written(self) -> bool:
        """Whether the program has written to the parts while it was shown the wholes."""
        return any(piece.part_was_written() for piece in self.pieces)

    def refresh(self) -> None:
        """The wholes are gathered once more, with what the program has written to either."""
        with torch.no_grad():
            for piece in self.pieces:
                piece.take_back()
        self.shown = self.seen_outside = False
        self.ready()

    def leave(self) -> None:
        """The program goes on while the parameters are whole."""
        if not self.seen_outside:
            self.seen_outside = True
            for piece in self.pieces:
                piece.remember()

    def release(self, keep: bool = False) -> None:
        """Parts again. ``keep``: what its backward is still to make stays noted."""
        if self._end is not None:
            self._end()  # what is under way writes to the memory
            self._end = None
        with torch.no_grad(), outside_transforms():
            for piece in self.pieces:
                known = recorded.recorder is None or piece.was_written()
                piece.forget(self.shown, self.shown and (self.seen_outside or known))
            for piece in self.pieces:
                piece.give_up()
        self.shown = self.seen_outside = False
        if not keep:
            self.inputs, self.waiting = 0, set()


class ParameterBlocks:
    """The blocks of a model, and hooks that gather and give up their parameters.

    Args:
        model: its forward and backward are those of a step.
        pieces: by the parameter that a module sees.
        policy: whether a block gives its parameters up after forward, for all or by (name, module).
        ahead: start gathering the next block's parameters while one computes.
        blocks: which modules they are; found if left out.
    """

    def __init__(
        self,
        model: nn.Module,
        pieces: dict[Any, GatheredParameter],
        policy: Policy,
        ahead: bool,
        blocks: BlockSpec = None,
    ) -> None:
        self.ahead = ahead
        self.steps = 0
        self.twice = False  # a backward has made a graph of its own, which reads what it has read
        self.ends: Callable[[list[GatheredParameter]], None] = lambda pieces: (
            None
        )  # called as a block's forward has ended
        self._unit_of: dict[int, Unit] = {}
        self.units: list[Unit] = []
        self._order: list[Unit] = []  # of the last forward
        self._now: list[Unit] = []
        self._tasks: set[int] = set()
        for name, module, parameters in blocks_of(model, pieces, blocks):
            gives_up = policy(name, module) if callable(policy) else policy
            unit = Unit(name, [pieces[p] for p in parameters], gives_up)
            for piece in unit.pieces:
                piece.x._blocks = self
                self._unit_of[id(piece.seen)] = unit
            self.units.append(unit)
            module.register_forward_pre_hook(Hook(self._before(unit)), with_kwargs=True, prepend=True)
            module.register_forward_hook(Hook(self._after(unit)), always_call=False)
            for i, p in enumerate(parameters):
                hook(p, None, self._accumulated(unit, i))
        model.register_forward_pre_hook(Hook(lambda *_: self._begin()), prepend=True)
        model.register_forward_hook(Hook(lambda *_: self._leave()))

    def begin_step(self) -> None:
        """An optimizer is about to update the parts."""
        self.steps += 1
        self.release()

    def release(self) -> None:
        """All are parts, and nothing is to be read again."""
        self.twice = False
        for unit in self.units:
            unit.stays = False
            unit.release()

    def want(self, parameter: Any) -> None:
        """Somebody reaches for a plain parameter by name: whole now, and until the next step if autograd may keep it."""
        unit = self._unit_of.get(id(parameter))
        if unit is None or (unit.shown and not (unit.seen_outside and unit.parts_were_written())):
            return
        unit.refresh() if unit.shown else unit.ready()
        unit.leave()
        unit.stays = unit.stays or torch.is_grad_enabled()
        reached.here.add(self)

    def lend(self, x: Any, given: Tensor) -> None:
        """Somebody has the memory in which a parameter is whole, by its part: it is not emptied again, others are filled."""
        for piece in (piece for unit in self.units if unit.shown for piece in unit.pieces):
            if piece.x is x:
                piece.lent = True
                if recorded.recorder is None:
                    piece.kept.append((TensorWeakRef(given), self.steps))

    def _tell_kept(self) -> None:
        """A step later somebody still has memory that a parameter has no longer."""
        for unit in self.units:
            for piece in unit.pieces:
                kept = [(ref, at) for ref, at in piece.kept if ref() is not None]
                piece.kept = [(ref, at) for ref, at in kept if at == self.steps]  # put aside, and perhaps back again
                if len(kept) > len(piece.kept):
                    warn(
                        f"the program keeps weight.data or weight.detach() of a parameter {[*piece.whole_spec.shape]} of block "
                        f"{unit.name!r}: whole parameters are given up after use, and what is kept has the values of that time. "
                        "Keep what model.parameters() gives, which follows later updates, or a clone()",
                    )

    def given(self, x: Any) -> None:
        """Somebody has ``part.data``, to which writes are not counted."""
        for piece in (piece for unit in self.units if unit.shown and unit.seen_outside for piece in unit.pieces):
            if piece.x is x:
                piece.part_given = True

    def told(self) -> None:
        """Parts are as the wholes that the program has written to."""
        with torch.no_grad():
            for piece in (piece for unit in self.units if unit.shown and unit.seen_outside for piece in unit.pieces):
                # A recording has no copies that change nothing; of ``p.data`` nobody knows.
                if recorded.recorder is None or piece.was_written() or piece.lent:
                    piece.take_back()

    def only_parts(self) -> list[Unit]:
        """What the program has written is the parts', and all are parts; the units that autograd may still read."""
        self.told()
        kept = [unit for unit in self.units if unit.shown and self._stays(unit)]
        self.release()
        return kept

    def whole_again(self, units: Iterable[Unit]) -> None:
        """Units that autograd may still read."""
        for unit in units:
            unit.stays = True
            unit.ready()
            unit.leave()
            reached.here.add(self)

    def _begin(self) -> None:
        if _torch.graph_task() < 0:
            if recorded.recorder is None:
                self._tell_kept()
            for unit in self.units:  # shown since a forward without a backward: the program may have written to it
                again = unit.shown and self._stays(unit)
                unit.release(keep=True)
                if again:
                    unit.ready()
                    unit.leave()
            self._order, self._now = self._now or self._order, []

    def _leave(self) -> None:
        for unit in self.units:
            if unit.shown:
                unit.leave()
                if any(piece.seen is not piece.x for piece in unit.pieces):
                    reached.here.add(self)
            if not torch.is_grad_enabled() and not self._stays(unit):
                unit.release()

    def _stays(self, unit: Unit) -> bool:
        return self.twice or unit.stays

    def _before(self, unit: Unit) -> Callable[..., None]:
        def run(module: nn.Module, args: Any, kwargs: Any) -> None:
            unit.ready()
            if _torch.graph_task() >= 0:  # run again in backward
                return
            self._now.append(unit)
            self._start_beside(unit, 1)
            if torch.is_grad_enabled():
                for x in tree_leaves((args, kwargs)):
                    if isinstance(x, Tensor) and x.requires_grad and not any(x is p.seen for p in unit.pieces):
                        unit.inputs += 1
                        x.register_hook(lambda grad: self._input_done(unit))

        return run

    def _after(self, unit: Unit) -> Callable[..., None]:
        def run(module: nn.Module, args: Any, result: Any) -> None:
            grads = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
            for x in grads if torch.is_grad_enabled() else ():
                x.register_hook(lambda grad: self._backward(unit))
            self.ends(unit.pieces)
            gives_up = unit.gives_up or not torch.is_grad_enabled()
            if _torch.graph_task() < 0 and gives_up and not self._stays(unit):
                unit.release(keep=True)

        return run

    def _start_beside(self, unit: Unit, step: int) -> None:
        """Start gathering for the block that came after (or before) this one in the last forward."""
        order = self._order if step > 0 else self._now
        if self.ahead and unit in order:
            at = order.index(unit) + step
            if 0 <= at < len(order):
                order[at].start()

    def _backward(self, unit: Unit) -> None:
        """The backward of a block begins."""
        task = _torch.graph_task()
        self.twice = self.twice or torch.is_grad_enabled()
        if task not in self._tasks:
            self._tasks.add(task)
            _torch.queue_callback(lambda: self._finish(task))
        if not unit.waiting:
            unit.waiting = {i for i, p in enumerate(unit.pieces) if p.seen.requires_grad}
        unit.ready()
        self._start_beside(unit, -1)

    def _accumulated(self, unit: Unit, i: int) -> Callable[[Any], None]:
        def run(parameter: Any) -> None:
            unit.waiting.discard(i)
            self._perhaps_done(unit)

        return run

    def _input_done(self, unit: Unit) -> None:
        unit.inputs -= 1
        self._perhaps_done(unit)

    def _perhaps_done(self, unit: Unit) -> None:
        if not unit.waiting and unit.inputs <= 0 and self._tasks and not self._stays(unit):
            unit.release()

    def _finish(self, task: int) -> None:
        self._tasks.discard(task)
        for unit in self.units if not self._tasks else ():
            if not self._stays(unit):
                unit.release()


@contextmanager
def as_parts(updates: Callable[[], bool]) -> Iterator[None]:
    """Recorded steps read parts: what a program has reached for and written is theirs, and what it reads after is theirs, too.

    Args:
        updates: whether the step has updated the parameters: then no graph of before is good, as on one card.
    """
    kept = [(blocks, blocks.only_parts()) for blocks in [*reached.here]]
    reached.here.clear()
    yield
    for blocks, units in kept if not updates() else ():
        blocks.whole_again(units)


def written_back() -> None:
    """A step that is recorded ends: what it has written to wholes is the parts', as no hook brings it there at a replay's end."""
    for blocks in [*reached.here]:
        blocks.told()


def of_marks(
    model: nn.Module,
    cuts: Iterable[tuple[DistTensor, Spec, Cut]],
    policy: Policy,
    ahead: bool,
    blocks: BlockSpec = None,
) -> ParameterBlocks:
    """Blocks of a model whose parameters are distributed tensors: (parameter, its spec without the cut, the cut)."""
    return ParameterBlocks(model, {x: GatheredParameter(cut, spec, x) for x, spec, cut in cuts}, policy, ahead, blocks)
