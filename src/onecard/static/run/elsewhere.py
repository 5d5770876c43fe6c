"""What other ranks of a pipeline have: its memory is given back here, and its place is kept, for all to look alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onecard._torch import patches
from onecard.comm.base.record import words_of
from onecard.comm.world.world import get_rank
from onecard.errors import RecordingError
from onecard.static.guards.places import at, optimizer_at
from onecard.static.passes.once import words
from onecard.static.run.rechecked import given_to
from onecard.static.step.step import MISS, Elsewhere, RecordedStep
from onecard.tensor.dist_tensor import DistTensor, wrap
from onecard.tensor.staged import note_read, note_stage, own_stages
from onecard.train import copied, unmade
from onecard.train.absent import Absent, let_go


def watch_copies() -> None:
    """Some tensors will be absent: copies of them are seen, ahead of recordings, which note the functions that a step reads."""
    copied.seen(Absent)


def settle(step: RecordedStep, roots: Sequence[Any]) -> None:
    """Give back the memory of what this rank has not, and note who has what."""
    if step.elsewhere:
        patches.begin()  # conversions are seen, also where all parameters are here
        own_stages.here = tuple(sorted({i for known in step.elsewhere if known.here for i in known.stages}))
    for known in step.elsewhere:
        x = _there(known, roots)
        if x is None:
            continue
        local = x._local if isinstance(x, DistTensor) else x
        unmade.make(local) if known.here else unmade.forget(local)
        for tensor in (x, local):
            note_stage(tensor, known.here, known.stages)
        if not known.here and local.dim() and local.numel() and local.untyped_storage().nbytes():
            if not local.untyped_storage().resizable():  # of a file, or of NumPy's
                local.data = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device=local.device)
            local.untyped_storage().resize_(0)
        if not known.here:
            let_go(local, known.stages, words_of(x) or known.name)


def in_order(step: RecordedStep, roots: Sequence[Any]) -> None:
    """States in the order in which the optimizer makes them, whoever has them: as on all ranks."""
    names: dict[Any, list[Any]] = {}
    for known in step.elsewhere:
        if known.where[0] == "state":
            _, *place, key = known.where
            names.setdefault(tuple(place), []).append(key)
    for (root, group, i), keys in names.items():
        held = roots[root].state[optimizer_at(roots[root]).param_groups[group]["params"][i]]
        values = {key: held[key] for key in (*keys, *held) if key in held}
        held.clear()
        held.update(values)


def make_room(step: RecordedStep, roots: Sequence[Any]) -> None:
    """An entry for the states of each parameter of which a step makes some, as the optimizer makes it; the others' states."""
    for effect in step.effects:
        if effect.kind == "new state":
            _, root, group, i, _ = effect.where
            roots[root].state[optimizer_at(roots[root]).param_groups[group]["params"][i]]  # a defaultdict
    settle(step, roots)
    elsewhere = {known.where for known in step.elsewhere}
    for known in step.inputs:
        if known.kind in ("parameter", "buffer", "state", "tensor") and known.where not in elsewhere:
            x = at(known.where, roots, ())
            unmade.make(x._local if isinstance(x, DistTensor) else x)
            note_read(x)


def check_begins(bound: Any, leaves: Sequence[Any], names: Sequence[str]) -> None:
    """Whether the first replay of a step that is cut into stages can run here: other ranks would wait in the midst of it.

    Raises:
        RecordingError: it does not fit the call, or reads what only other ranks have.
    """
    given = given_to(bound, leaves)
    if given is MISS:
        said = (bound.seen_differs() or bound.difference(leaves, names)).removeprefix("what differs: ")
        raise RecordingError(
            f"{bound.recording.name} changes each time what it reads itself: {said}. A step that is cut into stages cannot run "
            "as it is, and a replay would repeat what was read. Count in a tensor (t = torch.zeros(()); t += 1), or between the "
            "calls of the step"
        )
    bound.replay  # noqa: B018 - it is made now
    nodes = bound.recording.graph.find_nodes(op="placeholder")
    for known, node, value in zip(bound.recording.inputs, nodes, given, strict=True):
        if isinstance(value, Absent) and any(user.op != "output" for user in node.users):
            user = next(user for user in node.users if user.op != "output")
            raise RecordingError(
                f"{bound.recording.name}: {words(user)} reads {known.name}, which other stages of the pipeline have, on rank "
                f"{get_rank()} as well. A state that no gradient meets belongs to no stage: keep it beside its parameter's "
                "states (optimizer.state[p]), and use it in p's own update"
            )


def _there(known: Elsewhere, roots: Sequence[Any]) -> Tensor | None:
    """The tensor; None of a state that the step is about to make."""
    kind, *rest = known.where
    if kind == "state":
        root, group, i, key = rest
        held = roots[root].state[optimizer_at(roots[root]).param_groups[group]["params"][i]]
        if key not in held and known.here:
            return None
        if key not in held:
            held[key] = _empty(known)
    found: Tensor = at(known.where, roots, ())
    return found


def absent(known: Elsewhere) -> Tensor:
    """A tensor in the place of one that only other ranks have."""
    x = _empty(known)
    local = x._local if isinstance(x, DistTensor) else x
    if local.dim() and local.numel():
        local.untyped_storage().resize_(0)
    note_stage(x, False, known.stages)
    let_go(local, known.stages, known.name)
    return x


def _empty(known: Elsewhere) -> Tensor:
    shape, stride, dtype, device = known.facts
    local = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return local if known.spec is None else wrap(local, known.spec)
