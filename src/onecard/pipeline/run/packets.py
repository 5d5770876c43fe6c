"""What a stage hands to the next: any nest of tensors, described once for each kind of microbatch. Pure but for torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads
from onecard.errors import ScheduleError
from onecard.tensor.convert import reshard
from onecard.tensor.dist_tensor import DistTensor

CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class PacketSlot:
    """A tensor in a packet."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    def empty(self, device: torch.device) -> Tensor:
        """Memory for it."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class PacketForm:
    """The form of a packet: its nest, its tensors, and what is no tensor, which must always be the same.

    Example:
        >>> form, tensors = PacketForm.of({"x": torch.ones(2), "scale": 3})
        >>> PacketForm.loads(form.dumps()) == form, form.join([torch.zeros(2)])
        (True, {'x': tensor([0., 0.]), 'scale': 3})
    """

    nest: Any
    entries: tuple[Any, ...]  # a Slot or a constant

    @staticmethod
    def of(value: Any, stage: int = 0) -> tuple[PacketForm, list[Tensor]]:
        """The form of a value, and its tensors.

        Raises:
            ScheduleError: something in it is neither a tensor nor a constant that can be sent.
        """
        leaves, nest = tree_flatten(value)
        strange = next((x for x in leaves if not isinstance(x, (Tensor, *CONSTANTS))), None)
        if strange is not None:
            raise ScheduleError(
                f"stage {stage} returns a {type(strange).__name__}: what stages hand on is tensors, numbers, texts and None, in "
                "tuples, lists and dicts; a class of your own is registered with torch.utils._pytree.register_pytree_node"
            )
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        return PacketForm(nest, tuple(_slot(x) if isinstance(x, Tensor) else x for x in leaves)), tensors

    @property
    def slots(self) -> list[PacketSlot]:
        """Those of its tensors."""
        return [entry for entry in self.entries if isinstance(entry, PacketSlot)]

    def join(self, tensors: Sequence[Tensor]) -> Any:
        """The value with these tensors."""
        rest = iter(tensors)
        return tree_unflatten([next(rest) if isinstance(e, PacketSlot) else e for e in self.entries], self.nest)

    def dumps(self) -> bytes:
        """As bytes, for the other end."""
        entries = [
            [list(e.shape), str(e.dtype).removeprefix("torch."), e.needs_grad]
            if isinstance(e, PacketSlot)
            else {"is": e}
            for e in self.entries
        ]
        return json.dumps([treespec_dumps(self.nest), entries]).encode()

    @staticmethod
    def loads(data: bytes) -> PacketForm:
        """The form that ``dumps`` wrote."""
        nest, entries = json.loads(data)
        made = [
            e["is"] if isinstance(e, dict) else PacketSlot(tuple(e[0]), getattr(torch, e[1]), e[2]) for e in entries
        ]
        return PacketForm(treespec_loads(nest), tuple(made))


def _slot(x: Tensor) -> PacketSlot:
    return PacketSlot(tuple(x.shape), x.dtype, x.requires_grad)


def split(value: Any, sizes: Sequence[int], what: str = "the batch") -> list[Any]:
    """A nest of tensors cut along their first dim; what is no tensor goes to every part.

    Raises:
        ScheduleError: a tensor of another length.

    Example:
        >>> split((torch.arange(3), "mean"), [2, 1])
        [(tensor([0, 1]), 'mean'), (tensor([2]), 'mean')]
    """
    leaves, nest = tree_flatten(value)
    for x in leaves:
        if isinstance(x, Tensor) and (not x.dim() or x.shape[0] != sum(sizes)):
            raise ScheduleError(
                f"{what} holds a tensor of shape {list(x.shape)}, but microbatches of {list(sizes)} make {sum(sizes)}: every "
                "tensor has the batch as its first dim"
            )
    cut = [_parts(x, sizes) if isinstance(x, Tensor) else [x] * len(sizes) for x in leaves]
    return [tree_unflatten([parts[i] for parts in cut], nest) for i in range(len(sizes))]


def _parts(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Microbatches lie as the batch does: rows that follow each other are on one rank of dp, and all ranks shall have some."""
    parts = x.split(list(sizes))
    if not isinstance(x, DistTensor):
        return parts
    mesh, where = x.mesh, x.placements
    return [part if part.placements == where else reshard(part, mesh, where) for part in parts]


def join(values: Sequence[Any]) -> Any:
    """What ``split`` cut, whole again.

    Raises:
        ScheduleError: a number for each microbatch, which has no batch dim.
    """
    flat = [tree_flatten(value) for value in values]
    made = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if isinstance(leaves[0], Tensor) and not leaves[0].dim():
            raise ScheduleError(
                "the last stage returns one number for each microbatch, of which no batch can be joined: ask for the loss, with "
                "labels, or let it return one for each sample"
            )
        made.append(torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0])
    return tree_unflatten(made, flat[0][1])


def batch_size(value: Any) -> int:
    """The length of the first tensor's first dim; ScheduleError if there is none."""
    first = next((x for x in tree_flatten(value)[0] if isinstance(x, Tensor) and x.dim()), None)
    if first is None:
        raise ScheduleError(
            f"a batch without a tensor to cut into microbatches: {type(value).__name__}; every rank of a pipeline is given the "
            "whole batch, as on one card: the first stage reads the inputs, the last the labels, all of them its size"
        )
    return int(first.shape[0])


def signature(value: Any) -> tuple[Any, ...]:
    """What the form of packets may depend on: shapes, dtypes and constants of a microbatch."""
    leaves, nest = tree_flatten(value)
    return (repr(nest), *((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x)[:80] for x in leaves))
