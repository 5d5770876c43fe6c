"""missed: operand layouts that a row forbids though the bare operator, run on them shard by shard, would be right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from math import prod

from onecard.place.layout import Layout
from onecard.rules.decide import Decision, exactly
from onecard.rules.verify.split import mismatch
from onecard.rules.verify.trial import Trial, one_axis_layouts

LARGEST_SEARCH = 3000
# Kernels that do not check the shapes they are given, and may end the process on shards that do not fit together.
UNCHECKED = re.compile(
    r"^(_reshape_alias|as_strided|_unsafe)|nll_loss2d|batch_norm|scaled_dot_product|pool|_pad|unique|embedding_bag|rnn|gru|lstm"
)


def search(trial: Trial) -> tuple[dict[str, str], set[str]]:
    """Try every one-axis layout of the operands that the rule forbids.

    Returns:
        Those that are right, with their results' layouts; and those that are not. A layout can be right by accident of
        the numbers (a mask that is all true), so only what no other call refutes is worth telling.
    """
    right: dict[tuple[Layout, ...], tuple[Layout, ...]] = {}
    allowed: dict[tuple[Layout, ...], tuple[Layout, ...]] = {}
    refuted: set[str] = set()
    choices = [_layouts(trial, i) for i in range(len(trial.operands))]
    unsafe = UNCHECKED.search(trial.call.schema.name)
    if unsafe or trial.written or not trial.values or prod(map(len, choices)) > LARGEST_SEARCH:
        return {}, set()
    for layouts in product(*choices):
        decision = exactly(trial.bound, layouts)
        if decision is not None:
            allowed[layouts] = decision.results
            continue
        found = _right_as(trial, layouts)
        if found:
            right[layouts] = found
        else:
            refuted.add(_words(layouts))
    known = allowed | right
    missed = {_words(layouts): results for layouts, results in right.items() if not _idle(layouts, results, known)}
    return {words: ", ".join(map(_short, results)) for words, results in missed.items()}, refuted


def _idle(
    layouts: tuple[Layout, ...], results: tuple[Layout, ...], known: dict[tuple[Layout, ...], tuple[Layout, ...]]
) -> bool:
    """Whether an operand's layout changes nothing: with that operand replicated the results are the same."""
    for i, layout in enumerate(layouts):
        whole = Layout.replicated(layout.mesh, layout.ndim)
        if layout is not whole and known.get((*layouts[:i], whole, *layouts[i + 1 :])) == results:
            return True
    return False


def _words(layouts: Sequence[Layout]) -> str:
    return " x ".join(map(_short, layouts))


def _layouts(trial: Trial, i: int) -> list[Layout]:
    """One-axis layouts of an operand worth asking about."""
    tensor, mesh = trial.operands[i], trial.mesh
    if i in trial.bound.unread:
        return [Layout.replicated(mesh, tensor.dim())]
    # Few kernels expect a shard to be empty, so those are not asked about.
    last = (mesh.size - 1,)
    layouts = [
        layout
        for layout in one_axis_layouts(mesh, tensor.dim())
        if layout.is_replicated or 0 not in layout.local_shape(tensor.shape, last)
    ]
    # A comparison of random numbers is often right by accident on summands.
    if tensor.is_floating_point() and tensor.numel() and any(t.is_floating_point() for t in trial.results):
        layouts.append(Layout.make(mesh, ((),) * tensor.dim(), ((0, "sum"),)))
    return layouts


def _right_as(trial: Trial, layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """Layouts that make the local results right, one for each result; empty if there are none."""
    try:
        # The meta function refuses most of what the kernel would not survive.
        bare = Decision(tuple(layouts), (), (), 0.0, trial.bound)
        trial.run(bare, None, meta=True)
        results, _ = trial.run(bare, None)
    except Exception:  # shards that the kernel does not take
        return ()
    found = []
    for whole, local in zip(trial.results, results, strict=True):
        options = list(one_axis_layouts(trial.mesh, whole.dim()))
        for op in ("sum", "max", "min") if whole.is_floating_point() else ():
            options.append(Layout.make(trial.mesh, ((),) * whole.dim(), ((0, op),)))
        right = next((layout for layout in options if not mismatch(whole, layout, local, True, trial.tolerance)), None)
        if right is None:
            return ()
        found.append(right)
    return tuple(found)


def _short(layout: Layout) -> str:
    return repr(layout).partition("=")[2]
