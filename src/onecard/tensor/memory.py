"""Settling a pending sum together with everything that shares its memory.

A sum that one operator needed whole stays whole for the next one, so it is summed once. Its views must follow. What a
tensor's *layout* becomes may depend only on the program, which is the same on all ranks, and never on who else on this
rank happens to hold the memory (a rank may keep a ``to_local()`` for a log): or else ranks would disagree about which
messages are due. So settling always changes the layouts of the tensor and its views; the memory decides only whether the
sum can be made where it lies or needs a new place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

if TYPE_CHECKING:
    from onecard.tensor.dist_tensor import DistTensor

A_VIEW = "a view of a pending sum that was settled since"


class Family:
    """Pending tensors over one memory: those in ``same`` hold all of its elements, those in ``parts`` only some."""

    __slots__ = ("parts", "same")

    def __init__(self, first: DistTensor) -> None:
        self.same = [TensorWeakRef(first)]
        self.parts: list[TensorWeakRef] = []


def join(base: DistTensor, view: DistTensor) -> None:
    """Note that a pending view shares its base's memory."""
    family = base._family
    if family is None:
        family = base._family = Family(base)
    if view.numel() == base.numel():
        family.same.append(TensorWeakRef(view))
        view._family, view._part_of = family, base._part_of
    else:
        family.parts.append(TensorWeakRef(view))
        view._part_of = family


def settle(x: DistTensor, reduce: Callable[[Tensor, bool], Tensor]) -> None:
    """Sum a pending tensor and its views.

    Args:
        x: the tensor.
        reduce: from this rank's summand, and whether it may be overwritten, to the sum.
    """
    same = _alive(x._family.same) if x._family is not None else [x]
    if len(same) > 1 and _holds_all(x._local, same):
        memory = x._local.untyped_storage()
        flat = x._local.new_empty(0).set_(memory, 0, (x._local.numel(),))  # type: ignore[call-overload]
        reduce(flat, True)
        _relabel(x, same)
    else:
        adopt(x, reduce(x._local, len(same) == 1 and _users(x._local) == 1))


def adopt(x: DistTensor, total: Tensor) -> None:
    """Take the sum of a pending tensor, of its local shape, as its value and that of its views."""
    same = _alive(x._family.same) if x._family is not None else [x]
    if len(same) == 1:
        x._local = total
    else:
        old = x._local.untyped_storage()
        fresh = x._local.new_empty(old.nbytes() // x._local.element_size())
        fresh.copy_(x._local.new_empty(0).set_(old, 0, (fresh.numel(),)))  # type: ignore[call-overload]
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in x._local.stride())  # an expanded dim
        _like(fresh, x._local)[once].copy_(total[once])
        for member in same:
            member._local = _like(fresh, member._local)
    _relabel(x, same)


def is_part(x: DistTensor) -> bool:
    """Whether a tensor is a view of some elements of a pending one."""
    return x._part_of is not None


def _relabel(x: DistTensor, same: list[DistTensor]) -> None:
    """Nobody is pending any more. A part no longer shares memory with what it was taken from."""
    parts = _alive(x._family.parts) if x._family is not None else []
    if x._part_of is not None and _alive(x._part_of.same):
        parts = [*parts, *same]
    for part in parts:
        part._cut_off = A_VIEW
    for member in same:
        member._spec = member._spec.with_layout(member._spec.layout.settled())
        member._family = member._part_of = None


def _alive(references: list[TensorWeakRef]) -> list[DistTensor]:
    return [member for reference in references if (member := reference()) is not None]


def _holds_all(local: Tensor, same: list[DistTensor]) -> bool:
    """Whether these tensors, and nobody else, see a memory that holds nothing else."""
    alone = len({id(member._local) for member in same}) == _users(local)
    return alone and local.untyped_storage().nbytes() == local.nbytes


def _users(local: Tensor) -> int:
    """How many tensors share this one's memory (the storage handle made here counts as one more)."""
    storage = local.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1


def _like(memory: Tensor, local: Tensor) -> Tensor:
    return memory.as_strided(local.size(), local.stride(), local.storage_offset())
