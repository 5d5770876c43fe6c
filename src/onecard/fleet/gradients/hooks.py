"""Whoever reads ``p.grad`` of a parameter whose gradients are summands has them summed first.

Backward leaves what it made in the gradient, as on one card, and sends nothing. ``Tensor.grad`` is a property here: reading it
sums what is pending in the parameter's family, that is in its model. So no line between ``backward()`` and ``step()``, the
optimizer's own included, sees one rank's gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import get_default_nowrap_functions
from torch.utils.weak import WeakIdKeyDictionary

from onecard import recorded
from onecard._torch import leaves, patches
from onecard._torch import names as _torch
from onecard.comm.base.state import Kept
from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.gradients import sums, twins
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.tensor import DistTensor
from onecard.train.unreduced import Family, Summed, is_due, is_held, of, read, watch_alike, write

_owners: Kept[Any] = Kept(WeakIdKeyDictionary)
"""Of gradients that were read. An attribute of theirs would be taken along by torch.save."""


_in_stages: Kept[bool] = Kept(bool)

models: Kept[WeakKeyDictionary[Any, int]] = Kept(WeakKeyDictionary)
"""Models that take in what has come into them since they were last called, by numbers that are alike on all ranks."""


def take_in(parameters: Sequence[Tensor]) -> None:
    """Parameters that nobody knows may have come into a model of which only parts were called since."""
    new = [p for p in parameters if of(p) is None and not isinstance(p, DistTensor)]
    for model in sorted(models.here, key=models.here.__getitem__) if new else ():
        model.take_in(new)


def share_data(parameter: Tensor, group: Ranks, family: Family | None = None, dtype: torch.dtype | None = None) -> None:
    """Say that the ranks of a group hold copies of this parameter and see different data, and in which dtype gradients add up."""
    if isinstance(parameter, DistTensor):
        watch_alike(parameter).data = group
    elif group.size > 1 or sums.has_sums(parameter) or _widens(parameter, dtype):
        state = watch(parameter, family)
        state.data, state.dtype = group, dtype if _widens(parameter, dtype) else None
    else:
        watch_alike(parameter).data = group


def _widens(p: Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and p.is_floating_point() and torch.promote_types(p.dtype, dtype) != p.dtype


def leave_to_optimizer(parameter: Tensor, axis: str) -> None:
    """Say that an optimizer averages a parameter's gradient along an axis of the grid itself, if nobody has it summed before."""
    state = of(parameter)
    if state is not None and state.data is not None and sums.adds_up(parameter):
        state.rest = get_hybrid_communicate_group().data(axis)


def sync(parameters: Iterable[Tensor], step: bool = False) -> None:
    """Sum the gradients of these parameters over the ranks that have summands of them; once for each backward.

    ``step``: an optimizer is about to step, which may sum along an axis itself. All ranks call it at the same place, with the
    same parameters. Who reads ``p.grad`` does it for the whole model; an optimizer's ``step``, and clipping, do for theirs.
    """
    given = [*map(twins.trained, parameters)]
    take_in(given)
    for p in given:
        if is_due(p) and not isinstance(p, DistTensor) and sums.has_sums(p):
            watch(p)  # one that was read from a file has its mark alone
    sums.sync(given, step)


def watch(p: Tensor, family: Family | None = None) -> Summed:
    """Begin to know of a parameter's gradient; ``family``: that of its model."""
    state = watch_alike(p)
    if state.family is None:
        state.family = Family([p])
        state.summand = state.uneven = read(p) is not None
        state.known = -1 if state.summand else 0
        state.trained = p.requires_grad
        state.place(read(p))
        _hook(p)
    if family is not None and family is not state.family:
        state.known = -1 if state.is_unknown() else family.backwards
        state.family = family
    return state


def _hook(p: Tensor) -> None:
    if not (p.is_floating_point() or p.is_complex()) or not p.is_leaf:
        return
    trained = p.requires_grad
    p.requires_grad_(True)  # one that is frozen now may be trained later
    me = weakref.ref(p)
    _torch.hook_first(p, lambda grad: _before(me(), grad))
    leaves.hook_first_behind(p, _after)
    p.requires_grad_(trained)


def _before(p: Any, grad: Tensor) -> Tensor | None:
    """Backward is about to add a summand: what is whole already is put aside, where a sum of both would count it often."""
    state = of(p)
    if state is None or state.family is None:
        return None
    # A recording, and who compares it, hold gradients themselves.
    if state.placed is None and recorded.recorder is None and is_held(p):
        state.placed = read(p)
    known = read(p)
    if _torch.has_hooks_beside(p):  # which see the whole one, as on one card: a clipping of a summand is none
        state.hooked = True
        return sums.whole(p, grad)
    if known is not None and state.dtype is not None and state.summand:
        state.widen(p)
    elif known is not None and not state.summand and (state.dtype is not None or not sums.adds_up(p)):
        state.kept = known
        write(p, None)
        _torch.queue_callback(partial(_back, weakref.ref(p)))
    return None


def _back(known: Any) -> None:
    """The end of a backward that added nothing (``torch.autograd.grad``)."""
    p = known()
    state = of(p)
    if state is not None and state.kept is not None and state.wide is None and read(p) is None:
        write(p, state.kept)
        state.kept = None


def _after(p: Tensor) -> None:
    state = of(p)
    if state is not None:
        if state.dtype is not None and not state.hooked:
            state.widen(p)
        state.summand, state.uneven = (state.summand, state.uneven) if state.hooked else (True, True)
        state.looked = state.hooked = state.asked = False
        if state.family is not None:
            state.family.backwards += 1
            if state.placed is not None and not _in_stages.here and state.family.task != (task := _torch.graph_task()):
                state.family.task = task
                _torch.queue_callback(partial(_show, state.family))


def _show(family: Family) -> None:
    """The end of a backward into a buffer of the program, which reads it without asking for a gradient."""
    family.task = -1
    sums.sync(q for q in family.members() if of(q).is_unknown())  # type: ignore[union-attr]


@contextmanager
def in_stages(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Inside, backward runs for microbatches, while other stages are elsewhere: what a buffer shows is summed at the end."""
    with _in_stages.during(True):
        yield
    if any((state := of(p)) is not None and state.placed is not None for p in parameters):
        sync(parameters)


def look(p: Tensor, state: Summed) -> None:
    """Somebody reads a gradient: sum what is pending in its family."""
    # Within a backward the others' are not made yet.
    sums.sync([p] if _torch.in_backward() else [q for q in state.family.members() if of(q).is_unknown()])  # type: ignore[union-attr]


def asked(inputs: Sequence[Any], found: Sequence[Any]) -> tuple[Any, ...]:
    """What ``torch.autograd.grad`` has found for its inputs, with the gradients of watched parameters summed.

    Raises:
        FleetError: they have a graph (``create_graph=True``).
    """
    made, mine = [*found], []
    for i, (p, grad) in enumerate(zip(inputs, found, strict=True)):
        state = of(p)
        if state is None or state.family is None or isinstance(p, DistTensor) or not sums.has_sums(p):
            continue
        if grad is not None:
            refuse_graph(grad, "fleet.distributed_model")
        state.asked = True
        if not state.hooked:
            mine.append(i)
        state.hooked = False  # one that has hooks was summed before them
    if mine:
        whole = sums.asked([inputs[i] for i in mine], [found[i] for i in mine])
        for i, grad in zip(mine, whole, strict=True):
            made[i] = grad
    return tuple(made)


def refuse_graph(grad: Tensor, call: str) -> None:
    """A gradient of one rank's samples, of which more is to be computed, is refused."""
    if grad.requires_grad:
        raise FleetError(
            f"torch.autograd.grad(..., create_graph=True) for parameters of {call}: a rank has the gradient of its own samples, "
            "and what is computed of it would not be what one card computes of all. By marks it is: "
            "oc.shard_layer(model, mesh), oc.shard_optimizer(opt, oc.ShardingStage1('dp', mesh))"
        )


_given_up: Kept[bool] = Kept(bool)


def given_up() -> AbstractContextManager[None]:
    """Inside, gradients are read to be dropped: nothing is summed for it."""
    return _given_up.during(True)


def _get(x: Tensor) -> Tensor | None:
    state = of(x)
    recorded.asked_gradient(x)
    if state is not None:
        if state.is_unknown() and not (_given_up.here and state.dtype is None and sums.adds_up(x)):
            look(x, state)  # also of what is given up, where a part of it may stand beside it
        state.looked = True
        if (grad := read(x)) is not None:
            _owners.here[grad] = weakref.ref(x)
    return read(x)


def owner_of(grad: Tensor) -> Tensor | None:
    """The watched parameter of which a tensor is the gradient, as it was read."""
    known = _owners.here.get(grad)
    p = None if known is None else known()
    return p if p is not None and read(p) is grad else None


def _set(x: Tensor, value: Tensor | None) -> None:
    state = of(x)
    before = None if state is None else read(x)
    write(x, value)
    if state is not None:
        state.assign(before, value)


def install() -> None:
    """Reading a gradient is a call."""
    ours = property(_get, _set, lambda x: _set(x, None), "See torch.")
    get_default_nowrap_functions()  # torch keeps its own getters, which torch 2.11's compiler reads when it is imported
    patches.replace("torch.Tensor.grad", torch.Tensor, "grad", lambda _: ours)
