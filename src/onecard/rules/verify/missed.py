"""missed: operand layouts that a row forbids though the bare operator, run on them shard by shard, would be right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from math import prod

from onecard.layout import Layout
from onecard.rules.decide import Decision, exactly
from onecard.rules.verify.split import mismatch
from onecard.rules.verify.trial import Trial, one_axis_layouts

LARGEST_SEARCH = 3000
# Kernels that read or write out of bounds on shapes that do not fit.
UNCHECKED = re.compile(r"nll_loss2d|batch_norm|scaled_dot_product|pool|unique|embedding_bag|rnn|gru|lstm")
# Kernels that take any shape they are given and end the process on shards that do not fit together.
_UNCHECKED = (
    "_reshape_alias",
    "reflection_pad",
    "replication_pad",
    "as_strided",
    "_scaled_dot_product",
    "_unsafe",
    "nll_loss2d",
)


def search(trial: Trial) -> tuple[dict[str, str], set[str]]:
    """Try every one-axis layout of the operands that the rule forbids.

    Returns:
        Those that are right, with their results' layouts; and those that are not. A layout can be right by accident of
        the numbers (a mask that is all true), so only what no other call refutes is worth telling.
    """
    right: dict[str, str] = {}
    refuted: set[str] = set()
    choices = [_layouts(trial, i) for i in range(len(trial.operands))]
    if trial.call.schema.name.startswith(_UNCHECKED):
        return right, refuted
    unsafe = UNCHECKED.search(trial.call.schema.name)
    if unsafe or trial.written or not trial.values or prod(map(len, choices)) > LARGEST_SEARCH:
        return right, refuted
    for layouts in product(*choices):
        if all(layout.is_replicated for layout in layouts) or exactly(trial.bound, layouts) is not None:
            continue
        found = _right_as(trial, layouts)
        words = " x ".join(map(_short, layouts))
        if found:
            right[words] = ", ".join(map(_short, found))
        else:
            refuted.add(words)
    return right, refuted


def _layouts(trial: Trial, i: int) -> list[Layout]:
    """One-axis layouts of an operand worth asking about."""
    tensor, mesh = trial.operands[i], trial.mesh
    if i in trial.bound.unread:
        return [Layout.replicated(mesh, tensor.dim())]
    # Cutting a dim of size one tells nothing.
    layouts = [
        layout
        for layout in one_axis_layouts(mesh, tensor.dim())
        if layout.is_replicated or _size(tensor.shape, layout) > 1
    ]
    # A comparison of random numbers is often right by accident on summands.
    if tensor.is_floating_point() and tensor.numel() and any(t.is_floating_point() for t in trial.results):
        layouts.append(Layout.make(mesh, ((),) * tensor.dim(), ((0, "sum"),)))
    return layouts


def _size(shape: Sequence[int], layout: Layout) -> int:
    dim = layout.dim_of(0)
    return 1 if dim is None else shape[dim]


def _right_as(trial: Trial, layouts: Sequence[Layout]) -> list[Layout]:
    """Layouts that make the local results right, one for each result; empty if there are none."""
    try:
        # The meta function refuses most of what the kernel would not survive.
        bare = Decision(tuple(layouts), (), (), 0.0)
        trial.run(bare, None, meta=True)
        results, _ = trial.run(bare, None)
    except Exception:  # shards that the kernel does not take
        return []
    found = []
    for whole, local in zip(trial.results, results, strict=True):
        options = list(one_axis_layouts(trial.mesh, whole.dim()))
        for op in ("sum", "max", "min") if whole.is_floating_point() else ():
            options.append(Layout.make(trial.mesh, ((),) * whole.dim(), ((0, op),)))
        right = next((layout for layout in options if not mismatch(whole, layout, local, True, trial.tolerance)), None)
        if right is None:
            return []
        found.append(right)
    return found


def _short(layout: Layout) -> str:
    return repr(layout).partition("=")[2]
