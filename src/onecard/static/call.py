"""One call of a step, recorded, rewritten and bound; or only written down, where no rank has all of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from onecard._torch.graphs import emptied
from onecard._torch.names import tree_flatten
from onecard.comm.base.state import faked
from onecard.comm.base.warned import warn
from onecard.comm.issue.groups import Group
from onecard.errors import OnecardError, RecordingError
from onecard.static.capture.autocast import autocast
from onecard.static.capture.capture import Capture
from onecard.static.capture.questions import WholeQuestions
from onecard.static.capture.script import StepScript
from onecard.static.capture.unmade import left_unmade, make_all
from onecard.static.guards.before import changed_itself, still_before
from onecard.static.guards.numbers import plain
from onecard.static.passes import RewrittenGraph, StaticOptions, fitting, rewritten, row_draws, withheld
from onecard.static.passes.additive import Additive
from onecard.static.passes.dependence import Doubt, Verdict
from onecard.static.passes.microbatches import BatchRows, Microbatches, asks_of_batch
from onecard.static.passes.verdicts import is_mean
from onecard.static.recording import Recording
from onecard.static.run.agreed import ReplayTurn, all_or_none, check_agreed, together
from onecard.static.run.bound import bind, kinds_of
from onecard.static.run.difference import between
from onecard.static.run.elsewhere import check_begins, make_room
from onecard.static.run.rechecked import Checks
from onecard.static.step import refusals
from onecard.static.step.step import AnyStep, Output
from onecard.static.whole_batch import WholeBatch, calls_of


def name_of(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def flat(fn: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[str], Any]:
    """The leaves of the arguments, their names, and their form."""
    leaves, tree = tree_flatten((args, kwargs))
    call = fn.forward if isinstance(fn, nn.Module) else fn
    try:
        bound = inspect.signature(call).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        bound = {}
    if sum(len(tree_flatten(v)[0]) for v in bound.values()) != len(leaves):
        return leaves, [f"argument {i}" for i in range(len(leaves))], tree
    names = []
    for name, value in bound.items():
        count = len(tree_flatten(value)[0])
        names += [name] if count == 1 else [f"{name}[{i}]" for i in range(count)]
    return leaves, names, tree


def roots_given(fn: Any, leaves: Sequence[Any]) -> list[tuple[str, Any]]:
    """Modules and optimizers that a call itself names, and those by which the function's maker calls them (``step_roots``)."""
    given = [("model", fn), *((f"argument{i}", x) for i, x in enumerate(leaves)), *getattr(fn, "step_roots", ())]
    given += [("self", getattr(fn, "__self__", None))]
    return [(name, x) for name, x in given if isinstance(x, nn.Module | Optimizer)]


@dataclass(frozen=True)
class _Written:
    """A run that is written down: of a step in microbatches the first of them, which is taken back."""

    capture: Capture
    recording: Recording
    result: Any
    batch: WholeBatch | None
    seen: Verdict | None
    late: Sequence[Doubt]
    ranks: tuple[int, ...]
    """Those that record a step together, so that none can go on where one fails."""
    without_data: bool
    """Whether it was written down without being done."""


def recorded(
    fn: Any,
    leaves: Sequence[Any],
    names: Sequence[str],
    tree: Any,
    options: StaticOptions,
    whole: BatchRows | None = None,
) -> tuple[Any, ...]:
    """One run, recorded and bound; what it returns. A run on a microbatch is taken back.

    Where ranks do one step together, each its own part of it, what one of them refuses at any point all refuse at once.
    """
    if options.microbatches is not None and options.microbatches.sketched:
        with left_unmade():
            return _recorded(fn, leaves, names, tree, options, whole)
    make_all()
    return _recorded(fn, leaves, names, tree, options, whole)


def _recorded(
    fn: Any,
    leaves: Sequence[Any],
    names: Sequence[str],
    tree: Any,
    options: StaticOptions,
    whole: BatchRows | None,
    again: bool = True,
) -> tuple[Any, ...]:
    """``recorded``.

    Args:
        again: a step that is written down without being done, and has changed what it reads of the program's own Python (a
            library's model notes once which kind of labels it is given), is written down once more, as it then is.
    """
    parts, name, found = options.microbatches, name_of(fn), list[_Written]()
    sketched = parts is not None and parts.sketched
    kinds = kinds_of(leaves)  # as they are given: the step may change them (x.requires_grad_())

    def ranks() -> Sequence[int]:
        return found[0].ranks if sketched else ()

    with all_or_none(name, "record", ranks) if sketched else nullcontext():
        found.append(_written(fn, leaves, names, tree, options))
    capture, recording, batch = found[0].capture, found[0].recording, found[0].batch
    if batch is not None:
        rows = batch.rows if sketched else lambda: whole
        with nullcontext() if sketched else all_or_none(name, "divide", partial(_beside, recording)):
            recording = batch.parts.merged(recording, leaves, rows, seen=found[0].seen, more=found[0].late)
        if batch.asked is not None:
            batch.asked.noted(recording, capture)
    alike, lines = _alike(recording, options, ranks)
    with all_or_none(name, "bind", ranks) if sketched else nullcontext():
        before, recording = recording.graph, recording.with_graph(alike.graph)
        recording.backend = options.backend
        recording.arguments, recording.call = tuple(zip(names, kinds, strict=True)), tree
        roots = [root for _, root in capture.places.roots]
        if said := capture.left_behind():
            warn(f"{name}: {said}")
        capture.seen.settle(capture.places.roots)
        once_more = sketched and again and not faked.here and _sets_up(capture)
        if not once_more:
            if sketched:  # what the step is compared with later is not asked for
                for graph in {before, capture.recorder.graph} - {alike.graph}:
                    emptied(graph)
            # Without data there is nothing to replay, and a look at how each kernel is called fastest takes long.
            if sketched and not faked.here:
                make_room(recording, roots)
            if not faked.here and (sketched or not recording.makes_states):
                numbers = [known.name for known in recording.inputs if known.kind == "number"]
                turn = ReplayTurn(name, found[0].ranks, numbers) if sketched else None
                still = still_before(capture.before, capture.places.roots)
                recording.bound = bind(recording, roots, kinds, still, turn, capture.seen)
                if recording.bound is None:
                    return recording, plain(found[0].result)
                recording.bound.checks = Checks(capture.script, together(found[0].ranks) if sketched else lines)
                recording.bound.checks.without_data = found[0].without_data
                recording.bound.checks.asked = None if batch is None or batch.asked is None else batch.asked.kept()
                if sketched:
                    check_begins(recording.bound, leaves, names)
    if once_more:
        return _recorded(fn, leaves, names, tree, options, whole, again=False)
    return recording, plain(found[0].result)


def _beside(recording: AnyStep) -> list[int]:
    """The ranks that do a step with this one: of the meshes on which its tensors lie."""
    meshes = {known.spec.layout.mesh for known in recording.inputs if known.spec is not None and known.spec.here}
    return sorted({rank for mesh in meshes for rank in mesh.process_ids})


def _written(fn: Any, leaves: Sequence[Any], names: Sequence[str], tree: Any, options: StaticOptions) -> _Written:
    """One run, written down as it is."""
    if torch.is_inference_mode_enabled():
        raise RecordingError(f"{name_of(fn)}: recording in inference mode; use torch.no_grad()")
    parts = options.microbatches
    sketched = parts is not None and parts.sketched
    try:
        made = _run(fn, leaves, names, tree, options, sketched)
        if parts is None or not asks_of_batch(made.recording):
            return made
    except refusals.ReadsDataError:
        if parts is None or (sketched and not options.ask):
            raise
    # A microbatch has no answer for its batch, and each has one of its own. Without data libraries do not ask for what only saves
    # them work, as whether a mask leaves all. What is still asked is asked of the whole batch.
    roots = roots_given(fn, leaves)
    batch = WholeBatch(name_of(fn), fn, leaves, names, tree, roots, options, parts)
    return _run(fn, leaves, names, tree, options, True, batch.questions() if options.ask else None)


def _run(
    fn: Any,
    leaves: Sequence[Any],
    names: Sequence[str],
    tree: Any,
    options: StaticOptions,
    without_data: bool,
    asked: WholeQuestions | None = None,
) -> _Written:
    """One run. ``without_data``: of a step in microbatches, without doing it; ``asked``: what its whole batch is asked."""
    parts = options.microbatches
    first = leaves if parts is None else parts.first(leaves, names)
    name, roots = name_of(fn), roots_given(fn, leaves)
    batch = None if parts is None else WholeBatch(name, fn, leaves, names, tree, roots, options, parts, asked)
    capture = Capture(first, names, roots, options.ask, options.replayed, options.rows)
    capture.recorder.answers = None if asked is None else asked.again()
    looker = Additive(first) if parts is not None and parts.avg is not True else None
    undo = None if parts is None else capture.undone(without_data)
    fault: Exception | None = None
    try:
        around = nullcontext() if parts is None else parts.around()
        with autocast(options.dtype, leaves), around, looker or nullcontext():
            result = capture.run(fn, tree)
        if looker is not None:
            capture.recorder.note_rows(looker.passes.rows)
        calls = calls_of(capture) if batch is not None else []
        recording = Recording.of(capture.step(name, result))
    except Exception as why:
        fault = why
    finally:
        capture.settle()
        if undo is not None:
            undo.back(counts=fault is None)
    if fault is not None:
        ours = isinstance(fault, refusals.ReadsDataError) or (isinstance(fault, OnecardError) and not without_data)
        if batch is not None and not ours:
            batch.said(fault)
        raise fault
    _check_backward(recording)
    _check_repeated(capture, name, parts)
    seen, late = None, list[Doubt]()
    if batch is not None:
        seen, whole = batch.compared(looker, result, first, recording.graph, recording.tree)
        late = batch.late(recording, calls, whole, first)
        if looker is not None and parts is not None and parts.avg is None:
            of_part, of_batch = ([entry.node for entry in each] for each in (calls, whole))
            late += row_draws.note(of_part, of_batch, looker.rows, parts.k_steps, looker.drawn)
        if looker is not None:
            looker.verdict.noted.clear()  # values, which Python's collector would be waited for
        if parts is not None and parts.avg is False:
            _tell_multiple(name, parts, seen)
            seen = None
    everyone = () if parts is None else parts.everyone(recording)
    return _Written(capture, recording, result, batch, seen, late, everyone, without_data)


def _tell_multiple(name: str, parts: Microbatches, seen: Verdict | None) -> None:
    """Of a mean that is asked to be added up: gradients are another multiple of the batch's."""
    if seen is not None and is_mean(seen) and parts.k_steps > 1:
        first = "" if parts.sketched else "; those of the first call, which ran as it is, were the batch's"
        warn(
            f"{name}: k_steps={parts.k_steps}, avg=False: the loss is a mean over rows, whose gradients are added up over "
            f"microbatches: {parts.k_steps} times those of the batch{first}. avg=True, or no avg, averages them",
        )


def _check_repeated(capture: Capture, name: str, parts: Microbatches | None) -> None:
    """What each replay gives again though the program would go on is told, as a recording is compared with its step and gives up.

    Raises:
        RecordingError: it was drawn, and the batch is cut: then nobody runs the step as it is.
    """
    for said, drawn in {**capture.recorder.random.repeated, **capture.seen.repeated}.items():
        if drawn and parts is not None:
            raise RecordingError(
                f"{name}: {said}. Or draw with torch, whose numbers are new in each replay: "
                "torch.where(torch.rand(()) < 0.7, block(x), x)"
            )
        warn(said)


def _alike(
    recording: AnyStep, options: StaticOptions, ranks: Callable[[], Sequence[int]]
) -> tuple[RewrittenGraph, list[Group]]:
    """A recording's graph after the passes, and the lines on which all ranks send alike then.

    What a pass does may depend on how much a rank has (uneven parts, none at all). One after which ranks would send other
    messages than each other is left out, on all of them.
    """
    before = withheld.here
    try:
        while True:
            with all_or_none(recording.name, "rewrite", ranks) if ranks() else nullcontext():
                if options.memory_limit is None:
                    found, peak = rewritten(recording.graph, options), 0
                else:
                    found, peak = fitting(recording.graph, options)
            agreed = check_agreed(recording.name, found.messages)
            if not agreed.apart:
                break
            withheld.here = withheld.here | {agreed.apart}
            warn(
                f"{recording.name}: the pass {agreed.apart!r} is left out: after it ranks would send other messages than each "
                f"other, as their parts differ. to_static(..., without=[{agreed.apart!r}]) says so from the beginning",
            )
    finally:
        withheld.here = before
    if options.memory_limit is not None and peak > options.memory_limit:
        warn(_too_large(recording.name, peak, options.memory_limit))
    return found, agreed.lines


def sketched_again(
    fn: Any,
    leaves: Sequence[Any],
    names: Sequence[str],
    tree: Any,
    options: StaticOptions,
    asked: WholeQuestions | None,
    was: StepScript,
) -> str:
    """What differs, in words, between a step and what was written down of it without data; "" if nothing does.

    It is written down once more, without being done: nothing is computed, changed or sent.
    """
    assert options.microbatches is not None
    with left_unmade():
        return _sketched_again(fn, leaves, names, tree, options, options.microbatches, was, asked)


def _sketched_again(
    fn: Any,
    leaves: Sequence[Any],
    names: Sequence[str],
    tree: Any,
    options: StaticOptions,
    parts: Microbatches,
    was: StepScript,
    asked: WholeQuestions | None,
) -> str:
    first = parts.first(leaves, names)
    capture = Capture(first, names, roots_given(fn, first), options.ask, options.replayed)
    capture.recorder.answers = None if asked is None else asked.again()  # the guards hold: the batch gives the same
    undo = capture.undone(sketched=True)
    try:
        with autocast(options.dtype, leaves), parts.around():
            result = capture.run(fn, tree)
        capture.step(name_of(fn), result)
        found = between(was, capture.script)
    except RecordingError as why:
        found = str(why)
    finally:
        capture.settle()
        undo.back()
    emptied(capture.recorder.graph)
    return found


def _sets_up(capture: Capture) -> bool:
    """Whether the step has changed what it reads of the program's own Python."""
    return bool(capture.seen.difference()) or changed_itself(capture.before, capture.places.roots)


def _too_large(name: str, peak: int, limit: int) -> str:
    return (
        f"{name}: {peak:,} bytes are alive at its peak, over memory_limit={limit:,}, with all recomputed that is cheap. Take "
        "smaller microbatches, cut the states (ShardingStage1) or recompute whole blocks (torch.utils.checkpoint); "
        "recordings[0].cost().alive_at_peak says what it is"
    )


def _check_backward(recording: Recording) -> None:
    waits = [r for r in recording.results if isinstance(r, Output) and r.grad]
    if waits and not any(True for _ in recording.nodes("backward")):
        raise RecordingError(
            f"{recording.name} returns a tensor that waits for backward(), which a replay would not know. Put backward() and the "
            "optimizer into the recorded function, or call it under torch.no_grad()"
        )
