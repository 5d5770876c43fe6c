"""Whether what a ``collate_fn`` makes of a part of a batch are the rows that it makes of them among all: looked at, not asked.

One that stacks its samples makes each row of one sample. One that packs graphs, mixes, sorts, centres, counts or numbers them
makes other values of a part, of the same shapes.
"""

from __future__ import annotations

import copy
import dataclasses
import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from onecard._torch.names import tree_leaves
from onecard.comm.base import record
from onecard.comm.base.state import machine
from onecard.comm.issue import collectives, groups
from onecard.comm.world import world
from onecard.errors import LayoutError
from onecard.moves.resharding import Step
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.train.data.part import ReadBatch, mapped, reads_together


def looked_at(number: int) -> bool:
    """Whether parts of this batch, counted from 1, are compared with the whole: the first, and ever fewer.

    >>> [n for n in range(1, 20) if looked_at(n)]
    [1, 2, 4, 8, 16]
    """
    return number & (number - 1) == 0


def are_of_the_whole(loader: DataLoader[Any], read: ReadBatch) -> bool:
    """Whether this rank's samples become the same rows alone as among all of the batch; True where that cannot be tried here.

    The samples are read once more, in this process; a dataset that reads in its workers alone raises here, and nothing is said.
    """
    rows = slice(read.start, read.start + read.length)
    if not read.length or read.length == len(read.indices):
        return True
    with suppress(Exception), _random_kept() as rewind:
        samples = _fetched(loader.dataset, read.indices)
        others = _copied(samples)  # some take apart what they are given
        rewind()
        alone = _fetched(loader.dataset, read.indices[rows]) if reads_together(loader.dataset) else samples[rows]
        rewind()
        part = loader.collate_fn(alone)
        rewind()
        return _alike(part, loader.collate_fn(others), len(samples), rows)
    return True


def _fetched(dataset: Any, indices: list[Any]) -> list[Any]:
    return list(dataset.__getitems__(indices)) if hasattr(dataset, "__getitems__") else [dataset[i] for i in indices]


def _copied(samples: list[Any]) -> list[Any]:
    try:
        return copy.deepcopy(samples)
    except Exception:
        return list(samples)


def _alike(part: Any, whole: Any, size: int, rows: slice) -> bool:
    """Whether a part is made of a whole's rows."""
    if isinstance(whole, Tensor):
        return isinstance(part, Tensor) and _same_rows(part, whole, size, rows)
    if type(part) is not type(whole):
        return False
    if isinstance(whole, Mapping):
        return part.keys() == whole.keys() and all(_alike(part[k], whole[k], size, rows) for k in whole)
    if dataclasses.is_dataclass(whole):
        return _alike(_fields(part), _fields(whole), size, rows)
    if isinstance(whole, list | tuple):
        if len(whole) == size and len(part) == rows.stop - rows.start and not isinstance(whole[0], Tensor):
            return _equal(part, whole[rows])
        return len(part) == len(whole) and all(_alike(p, w, size, rows) for p, w in zip(part, whole, strict=True))
    return _equal(part, whole)


def _same_rows(part: Tensor, whole: Tensor, size: int, rows: slice) -> bool:
    if not is_rows(whole, size) or not is_rows(part, rows.stop - rows.start):
        return False
    mine = whole[rows]
    if part.shape != mine.shape or part.dtype != mine.dtype:
        return False
    # What is computed row by row may be rounded otherwise where there are more of them.
    floats = mine.is_floating_point() or mine.is_complex()
    return torch.allclose(part, mine, rtol=1e-4, atol=1e-6, equal_nan=True) if floats else torch.equal(part, mine)


def is_rows(value: Tensor, size: int) -> bool:
    """Whether a tensor has one row for each sample."""
    return _is_dense(value) and value.dim() > 0 and value.shape[0] == size


def _is_dense(value: Tensor) -> bool:
    return value.layout is torch.strided and not value.is_nested


def _fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _equal(part: Any, whole: Any) -> bool:
    try:
        return bool(np.all(part == whole))
    except Exception:
        return False


@contextmanager
def _random_kept() -> Iterator[Any]:
    """Torch's, Python's and NumPy's random numbers are those of before, within by what is given and at the end."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def rewind() -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])

    try:
        yield rewind
    finally:
        rewind()


def same_parts(batch: dict[str, Any], mesh: ProcessMesh, axis: int) -> int:
    """What of a batch differs between ranks: 0, nothing; 1, the shapes of their parts, but for dim 0, or what all of them
    have of a whole batch; 2, some rank's part is no part of the whole.

    One small message, on every rank of the mesh.
    """
    group, digest = groups.group(mesh, axis), zlib.crc32(repr(_shapes(batch["batch"])).encode())
    if batch["whole"]:
        digest = _shared(batch, digest)
    mine = torch.tensor([digest, -digest, 1 if batch["wrong"] else 0], device="cpu")
    if record.observers.here:
        layout = Layout.replicated(mesh, 1)
        step = Step("all_reduce", axis, layout, layout, bytes=mine.nbytes, seconds=machine.here.message(mine.nbytes))
        reason = "a collate_fn of the user's may pad"
        record.tell(record.Notice(step, "shard_dataloader", "shapes", (3,), reason, record.user_line(), explicit=True))
    record.serving.here = ("shard_dataloader", "shapes", (3,))
    most = collectives.all_reduce(mine, group, "max").tolist()
    return 2 if most[2] else int(most[0] != -most[1])


def _shared(batch: dict[str, Any], digest: int) -> int:
    """With what of a whole batch is no row of a sample, and so the same on all ranks."""
    found = [digest]

    def note(value: Any) -> None:
        if isinstance(value, int | float):
            found[0] = zlib.crc32(repr(value).encode(), found[0])
        elif isinstance(value, Tensor) and _is_dense(value) and not is_rows(value, batch["size"]):
            data = value.detach().cpu().contiguous().flatten()
            found[0] = zlib.crc32(data.view(torch.uint8).numpy().tobytes(), found[0])

    mapped(batch["batch"], note)
    return found[0]


def refuse_parts(batch: dict[str, Any], mesh: ProcessMesh, axis: int) -> NoReturn:
    """Say the shapes of what each rank made of one batch, which differs; called on every rank of the mesh.

    Raises:
        LayoutError: always.
    """
    group = groups.group(mesh, axis)
    words = ", ".join(f"[part, {str(shape)[1:-1]}] {dtype}" for shape, dtype in _shapes(batch["batch"]))
    every = [
        collectives.broadcast_object(f"rank {world.get_rank()}: {words}", group, index) for index in range(group.size)
    ]
    cut = ", ".join("onecard.Shard(0)" if a == axis else "onecard.Replicate()" for a in range(mesh.ndim))
    what, drawn = (
        ("shapes", "lengths are") if len({w.partition(":")[2] for w in every}) > 1 else ("values", "values are")
    )
    raise LayoutError(
        f"shard_dataloader: every rank has read the same whole batch, and collate_fn made tensors of different {what} of it\n  "
        + "\n  ".join(every)
        + f"\nSo the {drawn} random: the dataset or collate_fn draws them from a generator that is not the same on all ranks "
        "(NumPy's or Python's own). Draw them from torch's, or pad to a fixed length. Or let one rank read for all, and cut "
        f"afterwards: for x in onecard.shard_dataloader(loader, mesh): x = onecard.reshard(x, mesh, [{cut}])"
    )


def _shapes(batch: Any) -> list[tuple[list[int], str]]:
    """The shape but for dim 0, and the dtype, of each tensor of a batch."""
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    return [([] if t.is_nested else list(t.shape[1:]), str(t.dtype)) for t in tensors]


__all__ = ["are_of_the_whole", "is_rows", "looked_at", "refuse_parts", "same_parts"]
