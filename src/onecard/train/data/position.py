"""Where a loader is: the pass, how much of it has been given out, and the random state from which its order was drawn.

The order is not kept but drawn again: a sampler draws it all from the state in which its generator was as the pass began.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from onecard.errors import LayoutError


class Position:
    """The position of one loader; ``batches`` of ``size`` samples have been given out in the pass number ``passes``."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.passes, self.batches, self.size = 0, 0, loader.batch_size
        self.ended = False
        self._generator = loader.generator or getattr(loader.sampler, "generator", None)
        self._random: Tensor | None = None  # torch's generator as the pass began
        self._drawn_from: Tensor | None = None  # the loader's own, if it has one
        self._resumed: Mapping[str, Any] | None = None

    @contextmanager
    def beginning(self) -> Iterator[int]:
        """Around what draws the order of a pass; gives how many samples of it have been read before."""
        resumed, self._resumed = self._resumed, None
        program = torch.get_rng_state()
        if resumed is not None:
            torch.set_rng_state(resumed["random"])
            if self._generator is not None and resumed["generator"] is not None:
                self._generator.set_state(resumed["generator"])
        else:
            self.passes, self.batches = self.passes + 1, 0
        self.ended = False
        self._random = torch.get_rng_state()
        self._drawn_from = None if self._generator is None else self._generator.get_state()
        try:
            yield self.batches
        finally:
            if resumed is not None:
                torch.set_rng_state(program)

    def state(self, from_first: Callable[[Any], Any]) -> dict[str, Any]:
        """What continues this pass; ``from_first`` gives a value of a rank that reads to those that do not."""
        begun = self.passes > 0 and not self.ended
        return {
            "passes": self.passes,
            "batches": self.batches,
            "batch_size": self.size,
            "ended": self.ended,
            "random": self._random if begun else None,
            "generator": from_first(self._drawn_from) if begun and self._generator is not None else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on where a state says: the next pass that is begun is the rest of that one."""
        self.passes, self.batches, self.ended = state["passes"], state["batches"], state["ended"]
        self._resumed = state if state["random"] is not None else None
        before = state["batch_size"]
        if before != self.size and self._resumed is not None:
            self.batches = self._in_other_batches(before)

    def _in_other_batches(self, before: int | None) -> int:
        samples = self.batches * (before or 0)
        if not before or not self.size or samples % self.size:
            raise LayoutError(
                f"shard_dataloader: {self.batches} batches of {before} samples were read of this pass, after which no batch of "
                f"{self.size} begins. Go on with batch_size={before} to the end of the pass, or with one that divides {samples}"
            )
        return samples // self.size


def skipped(indices: Iterator[Any], batches: int) -> Iterator[Any]:
    """Batches of indices but the first ones, which are drawn now.

    >>> list(skipped(iter([[0, 1], [2, 3], [4]]), 2))
    [[4]]
    """
    for _ in range(batches):
        if next(indices, None) is None:
            return iter(())
    return chain([], indices)


def begun(indices: Iterator[Any]) -> Iterator[Any]:
    """The same indices, the first one drawn now: a sampler draws its permutation when it is first asked."""
    return chain(list(islice(indices, 1)), indices)
