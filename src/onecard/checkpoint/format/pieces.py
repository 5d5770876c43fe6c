"""Which rank writes which box: a function of the layouts alone, so that all ranks know it without a message."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from onecard.checkpoint.format.crc import crc32
from onecard.checkpoint.format.index import DTYPES, name_of
from onecard.checkpoint.format.merging import holders
from onecard.checkpoint.format.objects import keys_of
from onecard.checkpoint.format.portions import Own, Portion
from onecard.comm.world import world
from onecard.errors import CheckpointError
from onecard.moves.transfer import box_of
from onecard.place.boxes import Box, meet, split, view, volume, whole
from onecard.place.layout import Layout
from onecard.tensor import DistTensor, from_dtensor, reshard
from onecard.train.shard import Shard

SPLIT = 4 << 20  # bytes: smaller boxes are written by one of the ranks that hold them
BUFFER = 8 << 20  # bytes of the one buffer through which goes what cannot be written, or read, where it lies
_SAMPLE = 256  # elements of a plain tensor that ranks compare


@dataclass(frozen=True, slots=True, eq=False)
class StateTensor:
    """A tensor of a state as this rank has it.

    Attributes:
        holdings: the boxes of the whole that are here, each with its values.
        layout: which rank has which box; None for a plain tensor, of which every rank has all.
        apart: each rank says itself what it has.
        own: the ranks may have other values: then it becomes rows, one for each.
        held: then, what all have said: boxes, and the ranks that hold them.
        alias: another tensor of the same memory, which is written in its place.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    holdings: tuple[tuple[Box, Tensor], ...] = ()
    layout: Layout | None = None
    apart: bool = False
    own: bool = False
    held: tuple[tuple[Box, tuple[int, ...]], ...] = ()
    alias: str | None = None

    def words(self) -> str:
        """What all ranks must say alike of it."""
        where = (
            "in parts" if self.apart else "plain" if self.layout is None else f"[{self.layout}] on {self.layout.mesh!r}"
        )
        same = f", the same memory as {self.alias!r}" if self.alias else ""
        return f"{name_of(self.dtype)} {list(self.shape)} {where}{same}"

    def own_words(self) -> dict[str, Any]:
        """What this rank alone can say of it: its boxes, and a sample of each."""
        word = {"dtype": name_of(self.dtype), "shape": list(self.shape), "alias": self.alias}
        if self.own:
            data = b"".join(bytes(memory(part)) for _, values in self.holdings for part in chunks(values))
            return {**word, "own": hashlib.sha256(data).hexdigest()}
        return {**word, "boxes": [[list(map(list, box)), sample(part)] for box, part in self.holdings if volume(box)]}

    def values(self, box: Box) -> Tensor:
        """A box of the whole that is here."""
        return next(view(part, held, box) for held, part in self.holdings if _within(box, held))


def _within(box: Box, held: Box) -> bool:
    return all(low <= a and b <= high for (a, b), (low, high) in zip(box, held, strict=True))


@dataclass(frozen=True, slots=True)
class Share:
    """A box of a tensor that one rank writes."""

    source: StateTensor
    box: Box
    rank: int

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return volume(self.box) * self.source.dtype.itemsize


def sources_of(tensors: Mapping[str, Tensor | Portion | Own]) -> dict[str, StateTensor]:
    """What this rank has of each tensor. Pending sums are reduced, merged dims laid out in one piece: all ranks call it."""
    found: dict[str, StateTensor] = {}
    first: dict[Any, str] = {}
    for name, x in sorted(tensors.items()):
        if isinstance(x, DistTensor) and x.mesh.size < world.get_world_size():
            x = Portion(x, None)  # others may have it on a mesh of their own, as ZeRO beside cut layers does
        if isinstance(x, Own):
            here = _source(name, x.tensor, None)
            found[name] = StateTensor(name, here.dtype, here.shape, here.holdings, apart=True, own=True)
            continue
        if isinstance(x, Portion):
            key = keys_of(x.tensor)[-1], tuple(box for box, _ in x.part.boxes()) if x.part is not None else None
            found[name] = _apart(name, x, first.get(key))
        else:
            key = keys_of(x)[-1], None
            found[name] = _source(name, x, first.get(key))
        first.setdefault(key, name)
    return found


def _apart(name: str, portion: Portion, alias: str | None) -> StateTensor:
    here, part = _source(name, portion.tensor, None), portion.part
    shape = here.shape if part is None else tuple(part.shape)
    return StateTensor(name, here.dtype, shape, in_whole(here.holdings, part), apart=True, alias=alias)


def in_whole(holdings: Sequence[tuple[Box, Tensor]], part: Shard | None) -> tuple[tuple[Box, Tensor], ...]:
    """Boxes of a local tensor as boxes of the whole one that it is a part of."""
    if part is None:
        return tuple(holdings)
    found = []
    for held, values in holdings:
        for box, index in part.boxes():
            here = tuple((i.start, i.stop) for i in index)
            common = meet(held, here)
            if common is not None:
                moved = tuple((a - s + w, b - s + w) for (a, b), (s, _), (w, _) in zip(common, here, box, strict=True))
                found.append((moved, view(values, held, common)))
    return tuple(found)


def complete(sources: dict[str, StateTensor], words: Mapping[str, Any]) -> dict[str, StateTensor]:
    """The tensors of all ranks, from what this one has and what all have said."""
    made = {name: source for name, source in sources.items() if not source.apart}
    for name, word in words.items():
        mine = sources[name].holdings if name in sources else ()
        alias = word["alias"] if word["alias"] in words else None
        dtype, shape = DTYPES[word["dtype"]], tuple(word["shape"])
        if word["rows"]:
            row = (world.get_rank(), world.get_rank() + 1)
            mine = tuple(((row, *box), part[None]) for box, part in mine)
        made[name] = StateTensor(name, dtype, shape, mine, apart=True, held=holders(word), alias=alias)
    return dict(sorted(made.items()))


def local_holdings(x: Any) -> tuple[tuple[Box, Tensor], ...]:
    """What of a tensor lies here: all of a plain one, a box of a distributed one that is reduced and in one piece."""
    if not isinstance(x, DistTensor):
        return ((whole(x.shape), x.detach()),)
    layout, me = x._spec.layout, world.get_rank()
    return ((held_box(layout, x.shape, me), x._local),) if me in layout.mesh else ()


def _source(name: str, x: Any, alias: str | None) -> StateTensor:
    if isinstance(x, torch.distributed.tensor.DTensor):
        x = from_dtensor(x)
    if x.is_meta:
        raise CheckpointError(
            f"tensor {name!r} {list(x.shape)} has no values (meta): materialize the module before it is saved. In a pipeline: it "
            "was made anew, on this rank, of parameters that only other stages have. Change an average in place "
            "(average.lerp_(p, 0.1)), or keep it as a module and update that in the recorded step"
        )
    if x.layout not in (torch.strided,) or x.is_quantized or getattr(x, "is_nested", False):
        raise CheckpointError(f"tensor {name!r} is sparse, nested or quantized: save x.to_dense() or x.dequantize()")
    if not isinstance(x, DistTensor):
        return StateTensor(name, x.dtype, tuple(x.shape), local_holdings(x), alias=alias)
    x = x.reduce_partial()
    if x._spec.layout.merged:
        x = reshard(x, x.mesh, list(x._spec.layout.in_one_piece().placements))
    x._refresh()
    return StateTensor(name, x.dtype, tuple(x.shape), local_holdings(x), x._spec.layout, alias=alias)


def plan(sources: dict[str, StateTensor], size: int) -> list[Share]:
    """Who writes what, of all ranks: every element once, of several that hold a box the one that has least to do."""
    load: Counter[int] = Counter()
    found = []
    for source in sources.values():
        if source.alias is not None:
            continue
        held = source.held if source.apart else _holders(source.layout, source.shape, size)
        for box, ranks in held:
            nbytes = volume(box) * source.dtype.itemsize
            parts = split(box, max(1, min(len(ranks), nbytes // SPLIT)))
            for part in parts:
                rank = min(ranks, key=lambda r: (load[r], r))
                load[rank] += max(1, volume(part) * source.dtype.itemsize)
                found.append(Share(source, part, rank))
    # As in files that safetensors writes: large elements first, so that each tensor is aligned.
    return sorted(found, key=lambda s: -s.source.dtype.itemsize)


@lru_cache(maxsize=4096)
def _holders(layout: Layout | None, shape: tuple[int, ...], size: int) -> Sequence[tuple[Box, Sequence[int]]]:
    if layout is None or not prod(shape):
        return [(whole(shape), range(size) if layout is None else layout.mesh.process_ids)]
    found: dict[Box, list[int]] = {}
    for rank in layout.mesh.process_ids:
        box = box_of(layout, shape, rank)
        if volume(box):
            found.setdefault(box, []).append(rank)
    return list(found.items())


def held_box(layout: Layout | None, shape: Sequence[int], rank: int) -> Box:
    """What a rank of its mesh holds of a tensor."""
    if layout is None:
        return whole(shape)
    return box_of(layout, tuple(shape), rank)


def chunks(x: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor in order, as stretches of bytes in this host's memory: views where it lies in one piece there."""
    if not x.numel():
        return
    x = x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x
    if x.is_contiguous() and x.device.type == "cpu":
        yield _bytes(x)
    elif x.nbytes <= BUFFER or not x.dim():
        yield _bytes(x.cpu().contiguous())
    elif x.shape[0] == 1:
        yield from chunks(x[0])
    else:
        for part in x.split(max(1, BUFFER * x.shape[0] // x.nbytes)):
            yield from chunks(part)


def _bytes(x: Tensor) -> Tensor:
    x = x.reshape(-1)
    return x.as_strided(x.shape, (1,)).view(torch.uint8)  # a single element may have any stride, and torch 2.15 minds


def memory(x: Tensor) -> memoryview:
    """The bytes of a tensor of bytes."""
    array: Any = x.numpy()
    return memoryview(array)


def sample(x: Tensor) -> str:
    """A digest of a few elements, which ranks compare where all should hold the same."""
    if not x.numel():
        return ""
    some = x.reshape(-1)[:: max(1, x.numel() // _SAMPLE)] if x.is_contiguous() else x.flatten()[:_SAMPLE]
    return f"{crc32(memory(next(chunks(some.cpu().contiguous())))):08x}"
