"""Whether the ranks of a loader read alike: the same samples in the same order, asked as a pass begins and as it ends; and
parts of one shape, asked for each batch that a ``collate_fn`` of the user's makes."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from onecard._torch.names import tree_leaves
from onecard.comm.agree.agree import first_to_say, when_met
from onecard.comm.base import record
from onecard.comm.base.state import Kept, machine
from onecard.comm.issue import collectives, groups
from onecard.comm.world import world
from onecard.errors import CommunicationError, LayoutError
from onecard.moves.resharding import Step
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh

_loaders: Kept[Counter[str]] = Kept(Counter)


class LoaderOrder:
    """The orders of a loader's passes. Loaders are told apart by their ranks, and by how many those have made."""

    def __init__(self, loader: DataLoader[Any], meshes: Sequence[ProcessMesh]) -> None:
        ranks = str(sorted({rank for mesh in meshes for rank in mesh.process_ids}))
        _loaders.here[ranks] += 1
        self.loader, self.passes = loader, 0
        self.label = f"data/{ranks}/{_loaders.here[ranks]}"
        self.here = any(mesh.coordinate() is not None for mesh in meshes)

    def begin(self) -> PassOrder:
        """The order of the next pass."""
        self.passes += 1
        return PassOrder(self)

    def begin_unseen(self) -> None:
        """Begin a pass of which only the loader sees the indices: compare the generator that they are drawn from."""
        self.passes += 1
        sampler = self.loader.sampler
        if hasattr(sampler, "generator"):  # those that draw have it; None is torch's own
            state = torch.get_rng_state() if sampler.generator is None else sampler.generator.get_state()
            digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8).hexdigest()
            words = f"shuffles with a generator in another state (seed {_seed(self.loader)})"
            number = self.passes
            when_met(lambda: self.compare(number, "generator", digest, words))

    def compare(self, number: int, what: str, digest: str, words: str) -> None:
        """Leave this rank's word for the others.

        Raises:
            CommunicationError: another rank left another word.
        """
        first = first_to_say(f"{self.label}/{number}/{what}", f"{digest}|{words}") if self.here else None
        if first is None or first[1].partition("|")[0] == digest:
            return
        rank, theirs = first[0], first[1].partition("|")[2]
        raise CommunicationError(
            f"shard_dataloader: the ranks do not read the same samples in pass {number} over "
            f"{type(self.loader.dataset).__name__}, so that a batch would hold some of them twice and others never\n"
            f"  rank {rank}: {theirs}\n  rank {world.get_rank()}: {words}\n"
            "Seed all ranks alike before the first batch, torch.manual_seed(0), or give the loader a generator: "
            "DataLoader(..., shuffle=True, generator=torch.Generator().manual_seed(0)). A sampler must give every rank all "
            "batches in one order, so no DistributedSampler: onecard takes this rank's part of each."
        )


class PassOrder:
    """The order of one pass, as this rank's sampler gives it."""

    def __init__(self, loader: LoaderOrder) -> None:
        self.loader, self.number = loader, loader.passes
        self.seed = _seed(loader.loader)  # now: while a dataset reads, torch's generator is another
        self.digest, self.batches, self.ended = 0, 0, False

    def add(self, indices: Sequence[Any]) -> None:
        """The next batch of indices; the first one is compared at once."""
        self.digest = zlib.crc32(repr(indices).encode(), self.digest)
        self.batches += 1
        if self.batches == 1:
            more = ", ..." if len(indices) > 6 else ""
            self._compare("first batch", f"begins with samples {str(indices[:6])[:-1]}{more}]")

    def end(self) -> None:
        """There are no more batches."""
        if not self.ended:
            self.ended = True
            self._compare("whole pass", f"has read {self.batches} batches in another order")

    def _compare(self, what: str, words: str) -> None:
        digest, said = f"{self.digest:08x}", f"{words} (seed {self.seed})"
        when_met(lambda: self.loader.compare(self.number, what, digest, said))


def _seed(loader: DataLoader[Any]) -> int:
    """The seed of the generator that shuffles."""
    generator = getattr(loader.sampler, "generator", None)
    return torch.initial_seed() if generator is None else generator.initial_seed()


def same_shapes(batch: Any, mesh: ProcessMesh, axis: int) -> bool:
    """Whether the parts of a batch have the same shapes on all ranks along an axis, but for dim 0.

    One small message, on every rank of the mesh.
    """
    group, digest = groups.group(mesh, axis), zlib.crc32(repr(_shapes(batch)).encode())
    mine = torch.tensor([digest, -digest], device=world.device())
    if record.observers.here:
        layout = Layout.replicated(mesh, 1)
        step = Step("all_reduce", axis, layout, layout, bytes=mine.nbytes, seconds=machine.here.message(mine.nbytes))
        reason = "a collate_fn of the user's may pad"
        record.tell(record.Notice(step, "shard_dataloader", "shapes", (2,), reason, record.user_line(), explicit=True))
    record.serving.here = ("shard_dataloader", "shapes", (2,))
    return torch.equal(collectives.all_reduce(mine, group, "max"), mine)


def refuse_shapes(batch: Any, mesh: ProcessMesh, axis: int) -> NoReturn:
    """Say the shapes of each rank's part, which differ; called on every rank of the mesh.

    Raises:
        LayoutError: always.
    """
    group = groups.group(mesh, axis)
    words = ", ".join(f"[part, {str(shape)[1:-1]}] {dtype}" for shape, dtype in _shapes(batch))
    every = [
        collectives.broadcast_object(f"rank {world.get_rank()}: {words}", group, index) for index in range(group.size)
    ]
    cut = ", ".join("onecard.Shard(0)" if a == axis else "onecard.Replicate()" for a in range(mesh.ndim))
    raise LayoutError(
        "shard_dataloader: every rank has read the same whole batch, and collate_fn made tensors of different shapes of it\n  "
        + "\n  ".join(every)
        + "\nSo the lengths are random: the dataset or collate_fn draws them from a generator that is not the same on all ranks "
        "(NumPy's or Python's own). Draw them from torch's, or pad to a fixed length. Or let one rank read for all, and cut "
        f"afterwards: for x in onecard.shard_dataloader(loader, mesh): x = onecard.reshard(x, mesh, [{cut}])"
    )


def _shapes(batch: Any) -> list[tuple[list[int], str]]:
    """The shape but for dim 0, and the dtype, of each tensor of a batch."""
    return [(list(t.shape[1:]), str(t.dtype)) for t in tree_leaves(batch) if isinstance(t, Tensor)]
