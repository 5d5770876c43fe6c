"""Experts by marks that are right and dear: told once, with the bytes, what they could be, and the calls that send rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onecard._torch.names import in_backward
from onecard.comm.base import record
from onecard.comm.base.state import Kept, machine
from onecard.comm.base.warned import warn
from onecard.comm.issue import trace
from onecard.moves import resharding
from onecard.place.layout import Layout
from onecard.place.parts import axes_of
from onecard.tensor.dist_tensor import DistTensor

LEAST = 1 << 20
"""Bytes of a call, sent by this rank, below which nothing is said."""
MANY = 1 << 10
_told: Kept[set[tuple[str, str]]] = Kept(set)
_lists: Kept[dict[tuple[str, str], int]] = Kept(dict)
"""By operator and line: the memory of the first matrix that was gathered there."""

CURE = (
    "The result is right. What sends rows alone: tokens sorted by expert, torch.nn.functional.grouped_mm on stacked weights "
    '(transformers: experts_implementation="grouped_mm"), and y[index] or index_add; on a mesh of one axis also a loop over '
    "weights[e] of the parameter. Or fleet.meta_parallel.MoELayer. See docs/howto/experts.md"
)


class CostlyExpertsWarning(UserWarning):
    """Experts are cut along an axis, and their weights, or all tokens' buffers, travel along it where rows would do.

    Said once for each operator and line, of calls that send 1 MiB or more. The result is right.
    """


def look(operator: str, operands: Sequence[Any], moves: Sequence[tuple[int, Layout]]) -> None:
    """Products of a stack of experts, and what takes a stack apart, as decided; ``moves``: which operands go where."""
    if operator not in ("bmm", "baddbmm", "einsum", "_grouped_mm", "unbind") or not _now():
        return
    stacks = [x for x in operands if isinstance(x, DistTensor) and x.dim() == 3]
    for i, target in moves:
        x = operands[i]
        if not isinstance(x, DistTensor):
            continue
        sent, layout = _sent(x, target), x._spec.layout
        if operator in ("unbind", "_grouped_mm"):
            if getattr(x, "_is_param", False) and x.dim() == 3 and layout.axes(0) and not target.axes(0):
                _tell(operator, sent, f"gather the weights of all {x.shape[0]} experts", "")
            continue
        for stack in stacks:
            axes = [a for a, _ in layout.pending if stack is not x and a in axes_of(stack._spec.layout.dims[0])]
            if axes and layout.dims[0] == ():
                ranks = x.mesh.shape[axes[0]]
                least = x.numel() * x.element_size() // ranks * (ranks - 1) // ranks
                _tell(
                    operator,
                    sent,
                    f"sum buffers {list(x.shape)} for all experts over the ranks",
                    f"; their rows are {least:,}",
                )


def expert(x: DistTensor, operator: str) -> None:
    """One expert of a stack that is cut along an axis that divides its tokens, too: its weights will be summed over the ranks."""
    axes = [a for a in axes_of(x._spec.layout.dims[0]) if x.mesh.shape[a] > 1]
    if x.dim() != 3 or not axes or not _now():
        return
    ranks, size = x.mesh.shape[axes[0]], x.numel() // max(1, x.shape[0]) * x.element_size()
    sent, token = 2 * size * (ranks - 1) // ranks, 2 * min(x.shape[1:]) * x.element_size()
    words = f"sum the weights of one expert of {x.shape[0]} over the ranks"
    _tell(operator, sent, words, f", for each expert; a token there and back is {token:,}")


def for_rows(x: Any, axes: Sequence[int], operator: str, rows: int) -> None:
    """A matrix that is gathered for chosen rows: of the second matrix on one line it is told, as of a list of experts."""
    if not isinstance(x, DistTensor) or x.dim() != 2 or operator not in ("mm", "addmm", "linear") or not _now():
        return
    layout = x._spec.layout
    if not any(a in axes for dim in layout.dims for a in axes_of(dim)):
        return
    if len(_lists.here) >= MANY:
        _lists.here.clear()
    here = x._local.untyped_storage().data_ptr()
    if _lists.here.setdefault((operator, record.user_line()), here) == here:
        return
    kept = [tuple(a for a in axes_of(dim) if a not in axes) for dim in layout.dims]
    sent = _sent(x, Layout.make(x.mesh, tuple(kept), layout.pending))
    least = 2 * rows * min(x.shape) * x.element_size() // max(x.mesh.shape[a] for a in axes)
    if sent > least:
        _tell(
            operator,
            sent,
            "gather the weights of one expert for its rows",
            f", for each expert; these rows there and back are {least:,}",
        )


def _now() -> bool:
    """Whether a user's forward runs that sends."""
    return not (in_backward() or trace.tracing() or trace.faking())


def _sent(x: DistTensor, target: Layout) -> int:
    steps = resharding.plan(tuple(x.shape), x.element_size(), x._spec.layout, target, machine.here)
    return sum(step.bytes for step in steps)


def _tell(operator: str, sent: int, what: str, bound: str) -> None:
    source = record.user_line()
    if sent < LEAST or (operator, source) in _told.here:
        return
    if len(_told.here) >= MANY:
        _told.here.clear()
    _told.here.add((operator, source))
    words = f"{operator} sends {sent:,} bytes from this rank to {what}{bound}. {CURE}"
    warn(words, CostlyExpertsWarning)
