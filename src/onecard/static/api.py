"""record and to_static: functions that are run once as they are, written down, and replayed from then on."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from onecard._torch.graphs import emptied
from onecard._torch.names import tree_leaves, tree_unflatten
from onecard.comm.agree import check
from onecard.comm.agree.joint import joint_step
from onecard.comm.base.state import faked, unrecorded
from onecard.comm.base.warned import warn
from onecard.comm.world import world
from onecard.errors import RecordingError
from onecard.static.call import flat, name_of, recorded, sketched_again
from onecard.static.capture.autocast import autocast
from onecard.static.capture.undo import Undo
from onecard.static.guards.before import Before
from onecard.static.guards.held import HeldValues
from onecard.static.passes import PASSES, StaticOptions, chosen
from onecard.static.passes.microbatches import BatchRows, Microbatches, rows_of
from onecard.static.recording import Recording
from onecard.static.run.agreed import all_or_none, all_record
from onecard.static.run.bound import BoundRecording
from onecard.static.run.elsewhere import in_order, settle, watch_copies
from onecard.static.run.rechecked import Recounted, given_to
from onecard.static.step import refusals
from onecard.static.step.step import ANEW, MISS
from onecard.static.whole_batch import first_replay
from onecard.train.zero.blocks import as_parts, reached

ENOUGH = 2  # recordings that were not what the step does: after so many it runs as it is


def record(fn: Callable[..., Any]) -> Callable[..., Recording]:
    """Run a step once, as it is, and give what it did as a ``Recording``.

    Args:
        fn: a function of tensors, numbers, and lists, tuples and dicts of them; forward, backward, clipping and optimizer of
            one step, or a part of it.

    Returns:
        A function of the same arguments that returns the recording. The step has been done.

    Raises:
        RecordingError: the step depends on values in a way that a graph cannot hold. Names the line.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> def step(x):
        ...     (x * weight).sum().backward()
        >>> recording = record(step)(torch.ones(2))
        >>> [str(node.target) for node in recording.nodes("forward")][:2]
        ['aten.mul.Tensor', 'aten.sum.default']
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Recording:
        leaves, names, tree = flat(fn, args, kwargs)
        return recorded(fn, leaves, names, tree, StaticOptions(without=[*PASSES]))[0]

    return run


def to_static(
    fn: Callable[..., Any],
    limit: int = 8,
    without: Sequence[str] = (),
    ask: bool = False,
    kernels: str = "eager",
    also: Sequence[str] = (),
    memory_limit: int | None = None,
    backend: str = "eager",
    k_steps: int = 1,
    avg: bool | None = None,
    stages: Microbatches | None = None,
) -> Static:
    """A function or module that records its first steps and replays them: the same numbers, without Python between operators.

    The first call runs as it is (optimizers make their states then); the second is recorded; later ones are replays. What is
    no tensor and no float (ints, bools, strings) and every shape belongs to the recording: where it changes, the step is
    recorded anew. At calls 3, 4, 8, 16, ... (later each 512th) the step runs as it is and is compared with the recording, call
    by call: what the recording did not know of is told, with the line and both values.

    Args:
        fn: as for ``record``. A module is replayed without gradients; to train, record the step that calls it.
        limit: how many recordings are kept. Beyond it, calls run as they are, with a warning.
        without: passes that are left out (``onecard.static.passes.PASSES``), to find out which one is at fault. "rows": rows that
            go where data says (of experts) go to all ranks, so that a file can hold the recording.
        ask: what Python reads of tensors (``if mask.all()``, also inside libraries) is not refused, but computed again before
            each replay; another answer makes a new recording. It costs that computation. Of a batch that is cut (microbatches,
            stages) the whole is asked.
        kernels: "eager": those that eager runs, and its bits. "fastest": for each product of float32 on the CPU the fastest one
            at hand, measured once for each shape and remembered; each product is within 1e-6 of eager's.
        also: what is done only where it is asked for: "recompute" (cheap results of forward are computed again in backward, not
            kept; bits stay); "bfloat16" or "float16" (the step ahead of ``backward()`` runs as under ``torch.autocast``, in that
            dtype; the latter wants a ``GradScaler`` in the step).
        memory_limit: bytes that may be alive at once on this rank, parameters and states included: as little is recomputed as
            it takes. Where all of it is not enough, a warning says what remains.
        backend: "inductor": torch's compiler makes one function of each run of operators between messages. It takes a compiler
            of C++ (on a GPU, Triton), and minutes; numbers are those of its kernels, within rounding.
        k_steps: gradient merge: from the second call on the batch (all tensors among the arguments, by their rows) is cut in so
            many microbatches. Forward and backward run for one after the other; gradients are added up; what uses them (messages,
            clipping, the optimizer) runs once. Memory is that of one microbatch.
        stages: the step as a pipeline, ``onecard.Stages(...)``: each rank runs its part of the program. In place of ``k_steps``.
        avg: None: gradients, and results that are one number, are put together as the step has them: a loss that is a mean over
            rows gives means, one that is a sum sums; what is neither is told. True: means; False: sums, whatever they are.

    Returns:
        What is called in place of ``fn``. ``recordings`` are those made so far.

    Source: ``paddle.jit.to_static``; ``torch.compile``; ``k_steps`` and ``avg`` of Paddle's gradient merge.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.5)
        >>> @to_static
        ... def step(x):
        ...     optimizer.zero_grad()
        ...     loss = (x * weight).sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> [step(torch.ones(2)).item() for _ in range(4)]
        [2.0, 1.0, 0.0, -1.0]
        >>> len(step.recordings)
        1
    """
    return Static(fn, StaticOptions(limit, without, ask, kernels, also, memory_limit, backend, k_steps, avg, stages))


class Static:
    """What ``to_static`` returns: called like the function; see there."""

    def __init__(self, fn: Callable[..., Any], options: StaticOptions | None = None) -> None:
        refusals.check_runs_now(name_of(fn), fn)
        self._options = options or StaticOptions()
        if self._options.stages is not None and not isinstance(self._options.stages, Microbatches):
            raise RecordingError(
                f"{name_of(fn)}: stages={self._options.stages!r}: want onecard.Stages(k_steps, schedule='1F1B')"
            )
        self._parts = self._options.microbatches
        self._sketched = self._parts is not None and self._parts.sketched
        if self._sketched and self._options.k_steps != 1:
            raise RecordingError(
                f"{name_of(fn)}: k_steps={self._options.k_steps} beside stages=, which has its own: "
                f"stages=onecard.Stages({self._options.k_steps})"
            )
        if self._sketched:
            watch_copies()
        chosen(self._options)  # a wrong name is refused here, not at the second call
        functools.update_wrapper(self, fn if not isinstance(fn, nn.Module) else fn.forward)
        self.fn = fn
        self._bound: list[BoundRecording[Recording]] = []
        self._warm = self._full = False
        self._made = 0  # recordings of a step in stages: all ranks make them together
        self._ranks: tuple[int, ...] = ()  # who does the last one
        self._unlike = 0  # how often a recording was not what the step does
        self._whole: BatchRows | None = None  # of a call on a whole batch
        self._recounted = Recounted()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method: the object is the first argument."""
        return self if instance is None else types.MethodType(self, instance)

    @property
    def recordings(self) -> tuple[Recording, ...]:
        """Those made so far, the last one used first."""
        return tuple(bound.recording for bound in self._bound)

    def recording_of(self, *args: Any, **kwargs: Any) -> Recording:
        """Do the step once more, and give its recording as it would be kept: microbatches, passes and all."""
        leaves, names, tree = flat(self.fn, args, kwargs)
        return recorded(self.fn, leaves, names, tree, self._options, self._whole)[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ranks:  # a context costs each replay a microsecond, also one that does nothing
            return self._alone(args, kwargs)
        with joint_step(name_of(self.fn), self._ranks):
            return self._alone(args, kwargs)

    def _alone(self, args: Any, kwargs: Any) -> Any:
        """A call, as this rank does it."""
        if self._sketched:
            if faked.here or world.alone.here:
                return self._as_it_is(args, kwargs)
            self._look_at_batch(tree_leaves((args, kwargs)))
        elif check.on or faked.here or unrecorded.here or not self._warm or self._unlike >= ENOUGH:
            self._warm = True
            result = self._as_it_is(args, kwargs)
            self._whole = rows_of((args, kwargs), result) if self._parts else None
            return result
        if not reached.here.data:  # type: ignore[attr-defined]  # at each replay: len() of a WeakSet is three calls
            return self._by_recording(args, kwargs)
        with as_parts(lambda: not self._bound or self._bound[0].updates):
            return self._by_recording(args, kwargs)

    def _by_recording(self, args: Any, kwargs: Any) -> Any:
        """A call that a recording does, or that is recorded."""
        for bound in self._bound:
            checks = bound.checks
            try:
                result = bound.replay(args, kwargs) if checks.calls < checks.due else self._checked(bound, args, kwargs)
            except Exception as fault:
                bound.ended(fault)
                raise
            if result is ANEW:
                return self._miss(args, kwargs, agreed=True)
            if result is not MISS:
                checks.calls += 1
                if self._parts is not None:
                    for said in self._recounted.told(bound.recording, tree_leaves((args, kwargs))):
                        warn(f"{name_of(self.fn)}: k_steps={self._parts.k_steps}: {said}")
                if bound is not self._bound[0]:
                    self._bound.remove(bound)
                    self._bound.insert(0, bound)
                if checks.found:
                    self._drop(bound)
                return result
            if not self._bound:
                break
        return self._miss(args, kwargs)

    def _look_at_batch(self, leaves: Sequence[Any]) -> None:
        """Whether all ranks of a step that is cut into stages were given one batch; told on all while they still record."""
        ranks: list[int] = []
        with nullcontext() if self._bound else all_or_none(name_of(self.fn), "batch", lambda: ranks):
            ranks += self._parts.look_at(name_of(self.fn), leaves) if self._parts is not None else ()

    def _as_it_is(self, args: Any, kwargs: Any) -> Any:
        """One call that is neither written down nor replayed."""
        with autocast(self._options.dtype, tree_leaves((args, kwargs))):
            return self.fn(*args, **kwargs)

    def _checked(self, bound: BoundRecording, args: Any, kwargs: Any) -> Any:
        """A call in which the step runs as it is, held against the recording; MISS if that does not fit."""
        leaves, names, tree = flat(self.fn, args, kwargs)
        given: Any = given_to(bound, leaves) if tree == bound.recording.call else MISS
        if given is MISS:
            return MISS
        if self._sketched and not self._in_turn(bound, given):
            return ANEW
        if bound.checks.without_data:
            asked = bound.checks.asked
            bound.checks.sketched(functools.partial(sketched_again, self.fn, leaves, names, tree, self._options, asked))
            if not self._sketched or not bound.checks.found:
                return bound.replay(args, kwargs)
            self._drop(bound)
            return MISS
        if self._parts is None:
            result = bound.checks.hold(given, bound.roots, leaves, lambda: self._as_it_is(args, kwargs))
            if not bound.checks.found and bound.seen is not None and bound.seen.without_counts():
                bound.reading(bound.seen)
            return result
        parts = self._parts.first(leaves, names)
        given = self._parts.given(bound.recording, parts, given)
        undo = Undo(Before())
        try:
            call = tree_unflatten(parts, tree)
            bound.checks.hold(given, bound.roots, parts, lambda: self._as_it_is(*call), undo.note)
        finally:
            undo.back()
        return bound.replay(args, kwargs)

    def _drop(self, bound: BoundRecording) -> None:
        """A recording that is not what the step does: told, and made anew at the next call; the second time no more."""
        self._unlike += 1
        self._bound = []
        call = bound.checks.calls + self._sketched  # which has not been done
        said = f"{name_of(self.fn)}: call {call} does not do what was recorded, so that replays may have been wrong: "
        if self._sketched and self._unlike >= ENOUGH:
            raise RecordingError(f"{said}{bound.checks.found}. A step that is cut into stages cannot run as it is")
        then = "runs as it is from now on" if self._unlike >= ENOUGH else "is recorded anew"
        warn(f"{said}{bound.checks.found}. The step {then}; ONECARD_CHECK=0 compares nothing")

    def _miss(self, args: Any, kwargs: Any, agreed: bool = False) -> Any:
        """A call that fits no recording; ``agreed``: here it does, and another rank has to record it anew."""
        leaves, names, tree = flat(self.fn, args, kwargs)
        for i, bound in enumerate(self._bound if not agreed else ()):
            fits = bound.kinds_fit(leaves) and tree == bound.recording.call and not bound.seen_differs()
            made = bound.again() if fits else None
            result = made.replay(args, kwargs) if made is not None else MISS
            if result is ANEW:
                agreed = True
                break
            if made is not None and result is not MISS:
                self._bound[i] = made
                return result
        why = ""
        if self._bound:
            why = next((b.turn.why for b in self._bound if b.turn and b.turn.why), "") if agreed else ""
            why = why or self._changed(leaves, names)
            self._all_record(why, agreed)
        if len(self._bound) >= self._options.limit:
            if self._sketched:
                raise RecordingError(
                    f"{name_of(self.fn)}: {self._options.limit} recordings, and none fits; a step that is cut into stages cannot "
                    f"run as it is. {why}; limit= keeps more of them"
                )
            if not self._full:
                self._full = True
                warn(
                    f"{name_of(self.fn)}: {self._options.limit} recordings, and none fits; calls that fit none run as they are "
                    f"from now on. {why}",
                )
            return self._as_it_is(args, kwargs)
        if self._bound:
            warn(f"{name_of(self.fn)} is recorded anew: {why}")
        held = HeldValues([self.fn, *leaves] if self._parts is not None else [])
        recording, result = recorded(self.fn, leaves, names, tree, self._options, self._whole)
        if self._sketched:
            return self._begun(recording, args, kwargs)
        if recording.bound is not None:
            self._bound.insert(0, recording.bound)
            self._ranks = tuple(sorted({rank for line in recording.bound.checks.lines for rank in line.ranks}))
        if self._parts is None:
            return result
        if recording.bound is None:
            return self._as_it_is(args, kwargs)
        return first_replay(name_of(self.fn), recording.bound, held, args, kwargs, lambda: self._as_it_is(args, kwargs))

    def _all_record(self, why: str, agreed: bool) -> None:
        """Whoever exchanges messages with this rank records the step anew as well."""
        if not self._sketched:
            lines = {line.ranks: line for bound in self._bound for line in bound.checks.lines}
            all_record(name_of(self.fn), [*lines.values()], why)
        elif not agreed and self._bound[0].turn is not None:
            self._bound[0].turn.records(why)

    def _begun(self, recording: Recording, args: Any, kwargs: Any) -> Any:
        """The first replay of a step that has not been done: one that makes states, or the first gradients, is replayed once."""
        bound = recording.bound
        assert bound is not None and bound.turn is not None
        self._made += 1
        bound.turn.number, self._ranks = self._made, bound.turn.ranks
        try:
            with joint_step(name_of(self.fn), self._ranks):
                result = bound.replay(args, kwargs)
        except Exception as fault:
            bound.ended(fault)
            raise
        assert result is not MISS and result is not ANEW  # ``check_begins``, on all ranks
        # Later ones leave gradients, too, of parameters that other ranks have.
        again, self._warm = recording.makes_states or (not self._warm and recording.leaves_gradients), True
        if again:
            settle(recording, bound.roots)
            in_order(recording, bound.roots)
            emptied(recording.graph)  # the next call is recorded anew
        else:
            self._bound.insert(0, bound)
        return result

    def _in_turn(self, bound: BoundRecording[Recording], given: Sequence[Any]) -> bool:
        """Whether all ranks are about to replay this recording."""
        known = zip(bound.recording.inputs, given, strict=True)
        return bound.turn is None or bound.turn.replays(*(x for i, x in known if i.kind == "number"))

    def _changed(self, leaves: Sequence[Any], names: Sequence[str]) -> str:
        bound = self._bound[0]
        return bound.seen_differs() or bound.difference(leaves, names)

    def __repr__(self) -> str:
        return f"Static({name_of(self.fn)}, {len(self._bound)} recordings)"


__all__ = ["Optimizer", "Static", "record", "to_static"]
