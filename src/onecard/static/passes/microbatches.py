"""Gradient merge of a step (``to_static(k_steps=)``): recorded on its first microbatch, without doing it; then the whole step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from onecard._torch.names import tree_leaves
from onecard.comm.base.warned import warn
from onecard.errors import RecordingError
from onecard.place.layout import is_merged
from onecard.static.guards.results import in_parts
from onecard.static.passes import verdicts
from onecard.static.passes.dependence import Doubt, Kind, Verdict
from onecard.static.passes.doubts import doubts
from onecard.static.passes.merge import merged
from onecard.static.passes.once import Once, cut
from onecard.static.passes.whole_counts import is_whole, with_whole_counts
from onecard.static.step.step import AnyStep, Output, RecordedStep
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.spec import Spec


@dataclass(frozen=True)
class Microbatches:
    """How many there are, and whether gradients are their mean (``avg``) or their sum; None: as the loss says."""

    k_steps: int
    avg: bool | None
    sketched: ClassVar[bool] = False
    """Whether the step is written down without being done, and never runs as it is: no rank has all of it."""

    def ranks_of(self, recording: RecordedStep) -> tuple[int, ...]:
        """The ranks that do one step together, each its own part of it: none."""
        return ()

    def everyone(self, recording: RecordedStep) -> tuple[int, ...]:
        """The ranks that record a step together, so that none can go on where one fails: none."""
        return ()

    def around(self) -> AbstractContextManager[Any]:
        """What the step is recorded in."""
        return nullcontext()

    def look_at(self, name: str, leaves: Sequence[Any]) -> tuple[int, ...]:
        """A call of the step of a name is about to be replayed on these arguments; the ranks that compare them."""
        return ()

    def first(self, leaves: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """The arguments of the first microbatch: of each tensor the first part of this rank's rows.

        Raises:
            RecordingError: a tensor that cannot be cut in so many parts. Names it.
        """
        self._check_alike([(names[i], x) for i, x in enumerate(leaves) if _is_cut(x)])
        return [self._first(x, names[i]) if _is_cut(x) else x for i, x in enumerate(leaves)]

    def given(self, recording: RecordedStep, parts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """A graph's inputs for the whole batch, those that are cut by microbatches replaced by the first one's."""
        local = {i: x._local if isinstance(x, DistTensor) else x for i, x in enumerate(parts)}
        inputs = recording.inputs
        return [local[k.where[1]] if k.kind == "argument" else x for k, x in zip(inputs, given, strict=True)]

    def _as_seen(
        self, recording: RecordedStep, seen: Verdict | None
    ) -> tuple[bool, dict[int, bool] | None, dict[int, int] | None]:
        """Whether gradients are averaged; which results are sums or means, be they what gradients are or not; which have rows."""
        if self.avg is not None or seen is None:
            return self.avg is not False, None, None
        leaves = _positions(recording)
        if len(leaves) != len(seen.results):
            return verdicts.averaged(seen), None, None
        rows = {leaves[i]: degree for i, degree in verdicts.in_rows(seen).items()}
        return verdicts.averaged(seen), {leaves[i]: sums for i, sums in verdicts.joined(seen).items()}, rows

    def _check_alike(self, given: list[tuple[str, Tensor]]) -> None:
        """Of all arguments a microbatch has to be the same rows."""
        if not given:
            raise RecordingError(
                f"k_steps={self.k_steps}: no argument is a tensor with rows, so that there is no batch to cut. Give the batch to "
                "the step as tensors, or in lists, tuples and dicts of them"
            )
        lengths = [x.shape[0] for _, x in given]
        most = max(lengths, key=lengths.count)  # the batch is what most of them are as long as; among equals the first
        first, batch = next((name, x) for name, x in given if x.shape[0] == most)
        for name, x in given:
            if x.shape[0] != most:
                if self.k_steps == 1:  # nothing is cut
                    continue
                raise RecordingError(
                    f"k_steps={self.k_steps}: argument {name!r} has {x.shape[0]} rows where {first!r} has {most}, and both would "
                    f"be cut in {self.k_steps}. What is no batch should be read by the step, not given"
                )
            if _ranks(x) != _ranks(batch):
                raise RecordingError(
                    f"k_steps={self.k_steps}: argument {name!r} is {_lies(x)}, {first!r} is {_lies(batch)}: their microbatches "
                    "would be other rows. Lay both out alike (onecard.shard_tensor, reshard)"
                )

    def _first(self, x: Tensor, name: str) -> Tensor:
        local = x._local if isinstance(x, DistTensor) else x
        if self.k_steps == 1 and not x.requires_grad:  # it is the batch, however it is divided
            return x
        rows, rest = divmod(local.shape[0], self.k_steps)
        if rest or not rows:
            raise RecordingError(
                f"k_steps={self.k_steps}: argument {name!r} has {local.shape[0]} rows{' here' if local is not x else ''}, which "
                f"cannot be cut in {self.k_steps} of one size. Give it a batch that {self.k_steps} divides, "
                f"DataLoader(..., drop_last=True). What is no batch should be read by the step, not given"
            )
        if x.requires_grad:
            raise RecordingError(
                f"k_steps={self.k_steps}: argument {name!r} takes gradients, which belong to the whole batch: pass x.detach()"
            )
        part = local.narrow(0, 0, rows)
        if not isinstance(x, DistTensor):
            return part
        dims, parts = x._spec.layout.dims, x.shape[0] // max(local.shape[0], 1)
        even = x._spec.here and parts * local.shape[0] == x.shape[0]
        if dims and (is_merged(dims[0]) or not even):
            raise RecordingError(
                f"k_steps={self.k_steps}: argument {name!r}, {x._spec!r}, is not cut evenly over the ranks in its first dim, so "
                "that the ranks' microbatches would differ in size. Drop the last rows, or pad them"
            )
        return wrap(part, _rows(x._spec, x.shape[0] // self.k_steps))

    def _judge(self, name: str, doubts: Sequence[Doubt]) -> None:
        """Where numbers are not one card's: gradients are refused, what the step returns or keeps is told.

        What batch norm takes of a microbatch is told as well: whoever cuts a batch trains so. ``avg`` says that a loop over
        microbatches is meant; then all of it is at most told.

        Raises:
            RecordingError: nobody has said so, and gradients are not the batch's.
        """
        if self.k_steps == 1:  # one microbatch is the batch
            return
        refused = [doubt.words for doubt in doubts if doubt.gradients and self.avg is None]
        if refused:
            raise RecordingError(f"{name}: k_steps={self.k_steps}: {'. Also, '.join(refused)}. {_MEANT}")
        for doubt in doubts:
            warn(f"{name}: k_steps={self.k_steps}: {doubt.words}")

    def counting(self, recording: AnyStep, seen: Verdict | None = None) -> AnyStep:
        """The recording of the first microbatch, which divides by what the whole batch counts."""
        learns = {e.where for e in recording.effects if e.kind == "gradient"}
        results = results_of(recording, seen)
        terms = seen.terms if seen is not None else ()
        graph = with_whole_counts(
            recording.graph, self.k_steps, not self.sketched, learns, self.avg is None, results, terms
        )
        return recording if graph is recording.graph else recording.with_graph(graph)

    def merged(
        self,
        recording: AnyStep,
        leaves: Sequence[Any],
        whole: Callable[[], BatchRows | None] = lambda: None,
        late: Collection[fx.Node] = (),
        seen: Verdict | None = None,
        once: Once | None = None,
        more: Sequence[Doubt] = (),
    ) -> AnyStep:
        """The recording of all microbatches, from that of the first one and the arguments of the whole step.

        Args:
            seen: how its loss and its results depend on the rows of the batch.
            whole: of a call that ran as it is, on the whole batch: what is no part of the batch is as long there as here. Asked
                for only where a result was put together.
            more: what else is doubted.
            late: see ``merge.merged``. ``once``: what of the graph runs once, if the caller knows it.
        """
        check_mergeable(recording)
        if once is None:
            recording = self.counting(recording, seen)
            once = Once(recording.graph, training=not self.sketched)
        told, counts = doubts(recording.graph, self.k_steps, leaves, once, seen if self.avg is None else None)
        if self.avg is None and seen is not None:
            out: Any = next(iter(reversed(recording.graph.nodes))).args[0]
            shown = [out[at] for at in _positions(recording)]
            whole_ones = {
                i for i, node in enumerate(shown) if is_whole(node) or node in once.tail or once.made_of_batch(node)
            }
            told = [*verdicts.said(seen, self.k_steps, whole_ones), *told]
        self._judge(recording.name, [*told, *more])
        results = {r.position: r.spec for r in recording.results if isinstance(r, Output)}
        average, sums, rows = self._as_seen(recording, seen)
        made = recording.with_graph(
            merged(
                recording.graph,
                self.k_steps,
                average,
                results,
                late,
                not self.sketched,
                sums,
                None if late else once,
                rows,
            )
        )
        made.inputs = tuple(
            replace(known, spec=known.spec and leaves[known.where[1]]._spec, facts=node.meta["tensor"])
            if cut(node)
            else known
            for known, node in zip(recording.inputs, made.graph.find_nodes(op="placeholder"), strict=True)
        )
        for known, node in zip(made.inputs, made.graph.find_nodes(op="placeholder"), strict=True):
            node.meta["input"] = known
        old: Any = next(iter(reversed(recording.graph.nodes))).args[0]
        new: Any = next(iter(reversed(made.graph.nodes))).args[0]
        made.results, made.counts = tuple(_as_whole(r, old, new) for r in recording.results), counts
        made.results = tuple(_of_batch(i, r, seen) for i, r in enumerate(made.results))
        _check_results(recording, made, rows_of(leaves, ()).batch, whole)
        return made


_MEANT = (
    "Take the batch as it is: k_steps=1 (a Plan: microbatches=1; a Strategy: pipeline.accumulate_steps=1, or no gradient_merge). "
    "Or say that a loop over microbatches is meant: avg=True (to_static(..., plan=, avg=True); a Strategy: microbatch_loss=True "
    "beside its microbatches)"
)


def _positions(recording: RecordedStep) -> list[int]:
    """The outputs of the graph that are given back."""
    return [r.position for r in recording.results if isinstance(r, Output)]


def results_of(recording: RecordedStep, seen: Verdict | None) -> dict[int, Kind]:
    """How the outputs of the graph depend on the rows of the batch, where it is known."""
    positions = _positions(recording)
    if seen is None or len(positions) != len(seen.results):
        return {}
    return {at: kind for at, kind in zip(positions, seen.results, strict=True) if kind is not None}


def _of_batch(i: int, result: Any, seen: Verdict | None) -> Any:
    """A number that the step returns as it is, as it returned it for the whole batch."""
    return seen.values.get(i, result) if seen is not None and type(result) in (int, float) else result


@dataclass(frozen=True)
class BatchRows:
    """How long the batch of a call was, and each of its results (None: it has no rows)."""

    batch: int | None
    results: tuple[int | None, ...]


def rows_of(given: Any, results: Any) -> BatchRows:
    """The rows of a call, from its arguments and what it returned."""
    lengths = [x.shape[0] for x in tree_leaves(given) if _is_cut(x)]
    batch = max(lengths, key=lengths.count) if lengths else None
    with suppress(RecordingError):  # told where the step is recorded
        results = in_parts(results, "")
    return BatchRows(batch, tuple(x.shape[0] if _is_cut(x) else None for x in tree_leaves(results)))


def _check_results(
    recording: RecordedStep, made: RecordedStep, batch: int | None, whole: Callable[[], BatchRows | None]
) -> None:
    """What was put together of the microbatches' rows has to be as long as the program itself makes it."""
    old: Any = next(iter(reversed(recording.graph.nodes))).args[0]
    new: Any = next(iter(reversed(made.graph.nodes))).args[0]
    joined = {}
    for i, result in enumerate(made.results):
        if isinstance(result, Output):
            before, after = old[result.position].meta.get("tensor"), new[result.position].meta.get("tensor")
            if before is not None and after is not None and before[0] != after[0]:
                joined[i] = before[0][0], after[0][0] if result.spec is None else result.spec.shape[0]
    known = whole() if joined else None
    if known is None or batch is None or known.batch is None or len(known.results) != len(made.results):
        return
    for i, (rows, length) in joined.items():
        wanted = known.results[i]
        if wanted is None or length * known.batch != wanted * batch:
            raise RecordingError(
                f"k_steps: result {i} of the step has {rows} rows for a microbatch, and {wanted or 'no'} for a batch of "
                f"{known.batch}: it is no part of the batch, and each microbatch has its own. Return what is as long as the "
                "batch, or one number"
            )


def asked(k_steps: int, avg: bool | None) -> Microbatches | None:
    """What ``to_static`` is asked for; None: nothing.

    Raises:
        RecordingError: no number of microbatches.
    """
    if type(k_steps) is not int or k_steps < 1:
        raise RecordingError(
            f"k_steps={k_steps!r}: how many microbatches a batch is cut in is a whole number, 1 or more"
        )
    return Microbatches(k_steps, avg) if k_steps > 1 else None


def _ranks(x: Tensor) -> int:
    """Over how many ranks the rows are cut."""
    return x.shape[0] // max(x._local.shape[0], 1) if isinstance(x, DistTensor) else 1


def _lies(x: Tensor) -> str:
    return repr(x._spec) if isinstance(x, DistTensor) else "whole on each rank"


def _is_cut(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def asks_of_batch(recording: RecordedStep) -> bool:
    """Whether a step asks (``ask``) for values of its batch."""
    return recording.conditions is not None and any(cut(n) and n.users for n in recording.conditions.nodes)


def check_mergeable(recording: RecordedStep) -> None:
    """Whether a step can run on microbatches: it makes its gradients."""
    if found := [i.name for i in recording.inputs if i.kind == "gradient"]:
        raise RecordingError(
            f"k_steps: the step adds to {found[0]}, which was there before it: call optimizer.zero_grad() in the step, before "
            "backward() or after optimizer.step(), not with set_to_none=False. If it does so, the parameter is in no group of "
            "the optimizer, so that nobody clears its gradient: give it to one (optimizer.add_param_group), freeze it "
            "(requires_grad_(False)), or call model.zero_grad() in the step"
        )


def _as_whole(result: Any, old: Any, new: Any) -> Any:
    """A result that is put together of those of all microbatches: as long as they are together."""
    if not isinstance(result, Output) or result.spec is None or not result.spec.shape:
        return result
    before, after = old[result.position].meta["tensor"][0], new[result.position].meta["tensor"][0]
    if before == after:
        return result
    return replace(result, spec=_rows(result.spec, result.spec.shape[0] * after[0] // before[0]))


def _rows(spec: Spec, rows: int) -> Spec:
    """A spec with another length of the first dim."""
    shape = torch.Size((rows, *spec.shape[1:]))
    return Spec.make(spec.layout, shape, spec.stride, spec.dtype, spec.device)
