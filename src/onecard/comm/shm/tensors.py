"""Tensors as the plain memory that the algorithms move, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onecard.errors import CommunicationError, each_ranks_own


def here(tensor: Tensor, *others: Tensor) -> bool:
    """Whether tensors are in the memory of this host. Raises CommunicationError for those that have none of their own."""
    for each in (tensor, *others):
        if type(each) is not Tensor:
            _check_memory(each)
    return tensor.device.type == "cpu"


def _check_memory(tensor: Tensor) -> None:
    """Subclasses may stand for other tensors, and then have no data, or none yet."""
    try:
        if Tensor.data_ptr(tensor) or not tensor.numel() or tensor.device.type != "cpu":
            return
    except RuntimeError:  # FakeTensor
        pass
    name = type(tensor).__name__
    if hasattr(tensor, "placements"):
        raise CommunicationError(each_ranks_own(f"a {name}"))
    raise CommunicationError(
        f"a {name} has no memory that could be sent. Where a program is only traced (torch.compile, make_fx), messages cannot "
        "be recorded yet: run it eagerly. Elsewhere pass the plain tensor that it stands for"
    )


def dense(tensor: Tensor, read: bool = True) -> Tensor:
    """The tensor itself if its elements lie in order; else a copy (without `read`: room for one) that `fill` returns."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    with torch.no_grad():
        if not read:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return tensor.detach().resolve_conj().resolve_neg().contiguous()


def fill(tensor: Tensor, values: Tensor) -> None:
    """Writes into a tensor whose elements do not lie in order; nothing that autograd would record."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.detach().copy_(values)


def cut(tensor: Tensor, count: int, size: int, name: str) -> list[Tensor]:
    """`size` flat parts of `count` elements each. Raises ValueError if that is not the whole tensor."""
    if tensor.numel() != count * size:
        raise ValueError(
            f"{name} of {size} ranks: the larger tensor has {tensor.numel()} elements, {size} times the smaller one's "
            f"{count} would be {count * size}"
        )
    flat = dense(tensor).view(-1)
    return [flat[start * count : (start + 1) * count] for start in range(size)]


def split(tensor: Tensor, sizes: Sequence[int], parts: int, name: str) -> list[Tensor]:
    """The parts of a tensor along its first dim, equal ones for empty `sizes`. Raises ValueError."""
    length = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if length % parts:
            raise ValueError(f"all_to_all: the {name}'s first dim, {length}, does not divide by {parts} ranks")
        sizes = [length // parts] * parts
    if len(sizes) != parts or sum(sizes) != length:
        raise ValueError(
            f"all_to_all: the {name} has first dim {length}, its split sizes for {parts} ranks are {sizes}"
        )
    return list(dense(tensor).split(list(sizes)))
