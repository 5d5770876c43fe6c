"""Whether the ranks of a loader read alike: the same samples in the same order, asked as a pass begins and as it ends."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from onecard.comm.agree.agree import first_to_say, when_met
from onecard.comm.base.state import Kept
from onecard.comm.world import world
from onecard.errors import CommunicationError
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
