"""DistributedBatchSampler: this rank's batches of indices, for programs that read their own data on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np

from onecard.comm.world import world
from onecard.errors import LayoutError


class DistributedBatchSampler:
    """Batches of indices for one of several ranks, as ``batch_sampler`` of a ``DataLoader``.

    A step's samples are ``num_replicas * batch_size`` neighbours of one order that all ranks share; each rank takes a run of
    them. Every sample comes once, on one rank, and all ranks have equally many batches. What is left at the end is divided as
    evenly as can be; fewer samples than ranks join the last batch. So the last batches may differ in length:
    ``onecard.token_mean`` is the mean over all samples then.

    Args:
        dataset: anything with a length.
        batch_size: samples of one rank in a step.
        num_replicas, rank: how many ranks see different data, and which of them this is; all ranks of the world if left
            out. Ranks that share a model (tensor parallel) have the same.
        shuffle: draw the order anew in each pass, from the pass' number alone (``set_epoch``).
        drop_last: leave out what does not fill a step.

    Raises:
        LayoutError: a rank that there is not, no samples for some rank, or a state of another dataset.

    Source: ``paddle.io.DistributedBatchSampler``, whose orders it has; that one fills the last batches up with samples that
    were there before.

    Example:
        >>> [list(DistributedBatchSampler(range(10), 2, num_replicas=2, rank=rank)) for rank in range(2)]
        [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> None:
        self.dataset, self.batch_size, self.shuffle, self.drop_last = dataset, batch_size, shuffle, drop_last
        self.nranks = world.get_world_size() if num_replicas is None else num_replicas
        self.local_rank = world.get_rank() if rank is None else rank
        self.epoch = 0
        self._begins = 0  # the sample of the order with which the next pass begins
        self._pass = (0, 0)  # of the pass that was begun last: its number, and its first sample
        self._given = 0
        self._check()

    def _check(self) -> None:
        for name, value, least in (("batch_size", self.batch_size, 1), ("num_replicas", self.nranks, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise LayoutError(
                    f"DistributedBatchSampler: {name} is {value!r}; want a whole number of at least {least}"
                )
        if not isinstance(self.local_rank, int) or not 0 <= self.local_rank < self.nranks:
            raise LayoutError(
                f"DistributedBatchSampler: there is no rank {self.local_rank!r} among {self.nranks}; they count from 0. Where "
                "ranks share a model: num_replicas=hcg.data().size, rank=hcg.data().index"
            )
        samples, step = len(self.dataset), self.nranks * self.batch_size
        if samples < self.nranks or (self.drop_last and samples < step):
            raise LayoutError(
                f"DistributedBatchSampler: {samples} samples are not enough for {self.nranks} ranks"
                + (f" with {self.batch_size} each and drop_last=True" if samples >= self.nranks else "")
                + ": some rank would have no batch, and the others would wait for it"
            )

    def set_epoch(self, epoch: int) -> None:
        """The number of the next pass, from which its order is drawn."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Batches of the next pass, on every rank."""
        return len(self._steps(self._begins))

    def __iter__(self) -> Iterator[list[int]]:
        begins, self._begins = self._begins, 0
        self._pass, self._given = (self.epoch, begins), 0
        order = np.arange(len(self.dataset))
        if self.shuffle:
            np.random.RandomState(self.epoch).shuffle(order)
            self.epoch += 1
        for start, end in self._steps(begins):
            self._given += 1
            each, more = divmod(end - start, self.nranks)
            first = start + self.local_rank * each + min(self.local_rank, more)
            yield order[first : first + each + (self.local_rank < more)].tolist()

    def _steps(self, begins: int) -> list[tuple[int, int]]:
        """The (start, end) of each step's samples in the order."""
        samples, step = len(self.dataset), self.nranks * self.batch_size
        steps = [(start, min(start + step, samples)) for start in range(begins, samples, step)]
        if steps and steps[-1][1] - steps[-1][0] < step:
            start, end = steps.pop()
            if not self.drop_last and (end - start >= self.nranks or not steps):
                steps.append((start, end))
            elif not self.drop_last:
                steps[-1] = (steps[-1][0], end)
        return steps

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Where a pass is: the same on all ranks, and for any number of them.

        Args:
            batches: how many of this pass' batches the program has used; left out: as many as were given out, which with workers
                of a ``DataLoader`` are more, because they read ahead.
        """
        used = self._given if batches is None else batches
        number, begins = self._pass
        steps = self._steps(begins)
        at = begins if not used else steps[min(used, len(steps)) - 1][1]
        return {"epoch": number, "sample": at, "samples": len(self.dataset), "shuffle": self.shuffle}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there: the next pass has the samples that were left, none twice. Ranks and batch size may be others."""
        if (state["samples"], state["shuffle"]) != (len(self.dataset), self.shuffle):
            raise LayoutError(
                f"DistributedBatchSampler: the state is of {state['samples']} samples, shuffle={state['shuffle']}; here are "
                f"{len(self.dataset)}, shuffle={self.shuffle}, in another order"
            )
        self.epoch, self._begins = state["epoch"], state["sample"]
        left = state["samples"] - state["sample"]
        if 0 < left < self.nranks and not self.drop_last:
            raise LayoutError(
                f"DistributedBatchSampler: {left} samples are left of the pass, fewer than {self.nranks} ranks: go on with "
                f"{left} ranks or fewer, or begin the next pass: set_epoch({state['epoch'] + 1})"
            )
        if not self._steps(self._begins):  # the pass is over
            self.epoch, self._begins = state["epoch"] + 1, 0
