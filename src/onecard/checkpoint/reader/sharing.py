"""Tensors of a state that share memory: what a checkpoint has of them must fit, or the one that is read last would win."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecard.checkpoint.format.objects import keys_of
from onecard.checkpoint.reader.reading import Reader
from onecard.checkpoint.reader.virtual import Virtual
from onecard.errors import CheckpointError
from onecard.place.boxes import Box, shape_of


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A place in memory, and the box of a saved tensor that is to be read into it."""

    name: str
    saved: Virtual
    box: Box
    local: Tensor


def check(todo: Sequence[Filled], reader: Reader) -> None:
    """Whether all that is wanted of the same memory agrees; only what overlaps is read, into memory of its own.

    Raises:
        CheckpointError: it does not, so that not all can be loaded.
    """
    for group in _overlapping(todo):
        first = group[0].local
        trial = torch.zeros(first.untyped_storage().nbytes(), dtype=torch.uint8, device=first.device)
        contents = []
        for item in group:
            content = torch.empty(shape_of(item.box), dtype=item.local.dtype, device=first.device)
            reader.read(item.name, item.saved, item.box, content)
            content = content.neg_() if item.local.is_neg() else content  # as it lies there
            _twin(item.local, trial).copy_(content)
            contents.append(content)
        for item, content in zip(group, contents, strict=True):
            if not torch.equal(_bits(_twin(item.local, trial)), _bits(content)):
                others = sorted({other.name for other in group} - {item.name})
                raise CheckpointError(
                    f"{item.name!r} shares memory with {', '.join(map(repr, others[:3]))} in the state, and their saved values "
                    "differ: they cannot all be loaded. Give them memory of their own, or leave the others out"
                )


def _overlapping(todo: Sequence[Filled]) -> Iterator[list[Filled]]:
    """What lies in the same stretch of a storage, but for tensors that are the same in memory and in the files."""
    by_storage: dict[int, list[tuple[int, int, Filled]]] = {}
    for item in todo:
        if item.local.numel() and type(item.local) in (Tensor, torch.nn.Parameter):
            start = int(item.local.storage_offset()) * item.local.itemsize
            span = sum((n - 1) * int(s) for n, s in zip(item.local.shape, item.local.stride(), strict=True))
            place = item.local.untyped_storage()._cdata
            by_storage.setdefault(place, []).append((start, start + (span + 1) * item.local.itemsize, item))
    for items in by_storage.values():
        group: list[Filled] = []
        end = -1
        for start, stop, item in sorted(items, key=lambda each: each[:2]):
            if start >= end:
                yield from _unlike(group)
                group = []
            group.append(item)
            end = max(end, stop)
        yield from _unlike(group)


def _unlike(group: list[Filled]) -> Iterator[list[Filled]]:
    if len({(keys_of(item.local)[-1], item.box, _contents(item.saved)) for item in group}) > 1:
        yield group


def _contents(saved: Virtual) -> Any:
    """What is equal only for tensors of equal values: their pieces, or the checksums of these."""
    return saved.dtype, tuple(
        (v.box, v.stored, v.start, v.order, v.piece.crc32 or (v.piece.file, v.piece.offset)) for v in saved.views
    )


def _twin(local: Tensor, trial: Tensor) -> Tensor:
    """The same view of other memory."""
    made = trial[: trial.numel() // local.itemsize * local.itemsize].view(local.dtype)
    made = made.as_strided(local.shape, local.stride(), local.storage_offset())
    return made.conj() if local.is_conj() else made


def _bits(x: Tensor) -> Tensor:
    return x.resolve_conj().contiguous().reshape(-1).view(torch.uint8)


__all__ = ["Filled", "check"]
