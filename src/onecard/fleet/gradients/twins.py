"""The distributed parameters of ``group_sharded_parallel``: what each stands for, and which of their gradients are summed.

Their gradients are averaged over the ranks that see other data, by ZeRO's own machinery. Those of a layer that stages share,
or of a sequence parallel one, have summands on ranks beyond: parts are summed with parts, after they were cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from onecard.errors import FleetError
from onecard.place.layout import Layout
from onecard.tensor import DistTensor
from onecard.tensor.convert import shard_tensor
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.spec import Spec
from onecard.train import shard as shards
from onecard.train import unreduced
from onecard.train.shard import held, noted

_NAME = "_onecard_twin"
LOCAL = "_onecard_local"  # of a plain parameter: what it stands for
_ACCUM = "_onecard_accum"  # of a twin: in which dtype gradients add up
_LOSSES = "_onecard_losses"  # of a twin of an expert: of how many ranks' losses backward's gradient is a sum


def add_up_in(twin: Any, dtype: torch.dtype | None) -> None:
    """Have a twin's gradients add up in a wider dtype."""
    if dtype is not None and twin.is_floating_point() and torch.promote_types(twin.dtype, dtype) != twin.dtype:
        twin.grad_dtype = dtype  # torch takes no other gradient, else
        setattr(twin, _ACCUM, dtype)


def sum_of_losses(twin: Any, losses: int) -> None:
    """Say of how many ranks' losses the gradient that backward leaves is a sum: of an expert, which is sent their tokens."""
    if losses > 1:
        setattr(twin, _LOSSES, losses)


def losses_of(twin: Any) -> int:
    """So many."""
    return int(getattr(twin, _LOSSES, 1))


@dataclass(eq=False)
class Twin:
    """What a distributed parameter needs to know of the plain one whose memory it has.

    Attributes:
        reducer: averages its gradient over its mesh.
        zero: a gradient for a rank that has none, from the parameter.
        plain: the plain parameter, if it is still there.
        summed: the gradient to which the summands of other ranks were added, as it was then.
        twice: to which backward has added since.
    """

    reducer: Any
    zero: Any
    plain: Any
    summed: tuple[Any, int] | None = None
    twice: bool = False


def pair(twin: Any, plain: Tensor, reducer: Any, zero: Any) -> None:
    """Say whose twin a distributed parameter is."""
    setattr(twin, _NAME, Twin(reducer, zero, weakref.ref(plain)))
    unreduced.leave(plain)
    if (what := noted(plain)) is not None:  # one that is not marked is whole, also where its own memory is given up
        shards.note(twin, what)


def twin_of(p: Any) -> Twin | None:
    """What a parameter of ``group_sharded_parallel`` stands for; None of others."""
    return getattr(p, _NAME, None) if isinstance(p, DistTensor) else None


def trained(p: Any) -> Any:
    """The twin of a plain parameter that has one; itself otherwise."""
    local = getattr(p, LOCAL, None)
    return p if local is None else local.twin


def summand(twin: Any, grad: Tensor) -> DistTensor:
    """A rank's own gradient as a distributed one: the average over the ranks, still to be taken."""
    layout = Layout.make(twin.mesh, ((),) * twin.dim(), ((0, "avg"),))
    grad = grad.to(getattr(twin, _ACCUM, grad.dtype))
    if (losses := losses_of(twin)) > 1:
        grad = grad / losses
    return wrap(grad, Spec.make(layout, twin.shape, tuple(grad.stride()), grad.dtype, grad.device))


def lay_out_gradient(twin: Any) -> None:
    """A plain gradient that the program has put there, and backward is about to add to: whole on each rank, as one card has it.

    Raises:
        FleetError: it is a part of a buffer, in which the program would look for it.
    """
    if unreduced.is_part(twin.grad):
        raise FleetError(
            f"a gradient of shape {list(twin.shape)} was set to a part of another tensor, which would not see the average: under "
            "group_sharded_parallel a rank keeps a part of each gradient. Let backward make it (p.grad = None), and read p.grad "
            "after backward; torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) knows the norm of all"
        )
    twin.grad = shard_tensor(twin.grad, twin.mesh, [Replicate()] * twin.mesh.ndim)


def finish(parameters: Iterable[Any]) -> None:
    """Average what is pending over the ranks that see other data; each keeps its part."""
    for reducer in {id(t.reducer): t.reducer for p in parameters if (t := twin_of(p)) is not None}.values():
        reducer.finish()


def fill(missing: Iterable[Any]) -> None:
    """Zeros in place of gradients that this rank has not, cut as the others are, and those that average with it have not either.

    A rank beyond has them. Nobody but these is asked: of other parameters, and on other ranks, none may be missing.
    """
    of_reducer: dict[int, tuple[Any, set[Any]]] = {}
    for p in missing:
        twin: Any = twin_of(p)
        p.grad = twin.zero(p)
        of_reducer.setdefault(id(twin.reducer), (twin.reducer, set()))[1].add(p)
    for reducer, params in of_reducer.values():
        reducer.sum_of(params)


def is_summed(p: Any) -> bool:
    """Whether other ranks' summands are in its gradient."""
    twin = twin_of(p)
    return twin is not None and twin.summed is not None and twin.summed[0]() is p.grad and p.grad is not None


def note(p: Any) -> None:
    """They are, from now on."""
    twin = twin_of(p)
    if twin is not None and p.grad is not None:
        twin.twice = False
        twin.summed = weakref.ref(p.grad), p.grad._version


def added(p: Any) -> None:
    """Backward is about to add to its gradient: what others' summands are in already, they may not be added to again."""
    twin: Any = twin_of(p)
    if p.grad is None:
        twin.twice = False
    elif held(p).sums and is_summed(p):
        twin.twice = twin.summed[1] == p.grad._version or bool(p.grad._local.any())  # else it was zeroed in place
        twin.summed = None


def check(parameters: Iterable[Any]) -> None:
    """Before sums.

    Raises:
        FleetError: backward has added to a gradient that was summed, and not zeroed since.
    """
    for p in parameters:
        twin = twin_of(p)
        if twin is not None and twin.twice and p.grad is not None:
            raise FleetError(
                f"backward has added to a gradient of shape {list(p.shape)} that was summed over ranks before: call zero_grad() "
                "after the optimizer's step, and clip no earlier than after the last backward of a step"
            )
