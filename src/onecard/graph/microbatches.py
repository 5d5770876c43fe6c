"""Gradient merge of a step (``to_static(k_steps=)``): recorded on its first microbatch, without doing it; then the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onecard.errors import RecordingError
from onecard.graph.passes.merge import cut, merged
from onecard.graph.recording import Output, Recording
from onecard.layout import is_merged
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.spec import Spec


@dataclass(frozen=True)
class Microbatches:
    """How many there are, and whether gradients are their mean (``avg``) or their sum."""

    k_steps: int
    avg: bool

    def first(self, leaves: Sequence[Any], names: Sequence[str]) -> list[Any]:
        """The arguments of the first microbatch: of each tensor the first part of this rank's rows.

        Raises:
            RecordingError: a tensor that cannot be cut in so many parts. Names it.
        """
        return [self._first(x, names[i]) if _is_cut(x) else x for i, x in enumerate(leaves)]

    def _first(self, x: Tensor, name: str) -> Tensor:
        local = x._local if isinstance(x, DistTensor) else x
        rows, rest = divmod(local.shape[0], self.k_steps)
        if rest or not rows:
            raise RecordingError(
                f"k_steps={self.k_steps}: argument {name!r} has {local.shape[0]} rows{' here' if local is not x else ''}, which "
                f"cannot be cut in {self.k_steps} of one size. What is no batch should be read by the step, not given"
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

    def merged(self, recording: Recording, leaves: Sequence[Any]) -> Recording:
        """The recording of all microbatches, from that of the first one and the arguments of the whole step."""
        _check(recording)
        results = {r.position: r.spec for r in recording.results if isinstance(r, Output)}
        made = recording.with_graph(merged(recording.graph, self.k_steps, self.avg, results))
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
        made.results = tuple(_as_whole(r, old, new) for r in recording.results)
        return made


def asked(k_steps: int, avg: bool) -> Microbatches | None:
    """What ``to_static`` is asked for; None: nothing.

    Raises:
        RecordingError: no number of microbatches.
    """
    if type(k_steps) is not int or k_steps < 1:
        raise RecordingError(
            f"k_steps={k_steps!r}: how many microbatches a batch is cut in is a whole number, 1 or more"
        )
    return Microbatches(k_steps, avg) if k_steps > 1 else None


def _is_cut(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0


def _check(recording: Recording) -> None:
    if found := [i.name for i in recording.inputs if i.kind == "gradient"]:
        raise RecordingError(
            f"k_steps: the step adds to {found[0]}, which was there before it: call optimizer.zero_grad() in the step, before "
            "backward() or after optimizer.step()"
        )
    if recording.questions is not None and any(cut(n) and n.users for n in recording.questions.nodes):
        raise RecordingError(
            "k_steps: the step asks (ask=True) about values of its batch, of which each microbatch has its own"
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
