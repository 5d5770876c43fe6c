"""What a rank holds of a parameter: its part of the whole, over whom its gradient is summed, which of it counts in norms.

On a plain parameter, as the manual level has them, it is noted. A distributed one's layout says it, or cuts further what is noted
(ZeRO beside tensor parallel layers). Norms, checkpoints and the sums of gradients ask here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.place.boxes import Box, cut, slices, whole

_NAME = "_onecard_shard"


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring rows of the whole. ``owned``: this rank counts them in norms; a copy of them elsewhere does not."""

    start: int
    length: int
    owned: bool = True


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a parameter.

    Attributes:
        shape: of the whole parameter.
        dim: along which it is cut; -1: this rank has all of it.
        runs: of the whole along ``dim``, in the order in which they lie here.
        group: the ranks that hold the other runs.
        sums: groups whose ranks' gradients are summands of the gradient (sequence parallel, a shared embedding).
        copies: (start, length) of the whole along ``dim`` that lie on several ranks of ``group``, each with a summand of
            their gradient (key and value heads fewer than ranks). The same on all ranks.
        experts: ranks that have other experts in this one's place and send it their tokens: its gradient is of the data of
            all of them, and copies of it lie beyond them.
        also: (dim, start, length): along a second dim, too, it is a part among ``group``.
        settled: its layer, which is given a part of the sequence, has its gradient summed itself.
    """

    shape: tuple[int, ...]
    dim: int = -1
    runs: tuple[Run, ...] = ()
    group: Ranks | None = None
    sums: tuple[Ranks, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    experts: Ranks | None = None
    also: tuple[int, int, int] | None = None
    settled: bool = False

    def is_cut(self) -> bool:
        """Whether other ranks have other parts."""
        return self.group is not None and self.group.size > 1

    def is_cut_among(self, ranks: Ranks) -> bool:
        """Whether these ranks have other parts."""
        return self.group is not None and {*ranks.ranks} <= {*self.group.ranks}

    def is_all(self) -> bool:
        """Whether the runs are the whole, in its order."""
        at = 0
        if self.also is not None and self.also[2] != self.shape[self.also[0]]:
            return False
        for run in self.runs:
            if run.start != at:
                return False
            at += run.length
        return self.dim < 0 or at == self.shape[self.dim]

    def boxes(self) -> Iterator[tuple[Box, tuple[slice, ...]]]:
        """For each run: the box of the whole, and where it lies in the local tensor."""
        there = here = whole(self.shape)
        if self.also is not None:
            dim, start, length = self.also
            there, here = cut(there, dim, start, start + length), cut(here, dim, 0, length)
        if self.dim < 0:
            yield there, slices(here)
            return
        at = 0
        for run in self.runs:
            local = cut(here, self.dim, at, at + run.length)
            at += run.length
            yield cut(there, self.dim, run.start, run.start + run.length), slices(local)

    def owned(self) -> list[tuple[int, int]]:
        """(start, length) along ``dim`` in the local tensor of what this rank counts."""
        starts = [0, *accumulate(run.length for run in self.runs)]
        return [(at, run.length) for at, run in zip(starts, self.runs, strict=False) if run.owned]

    def take(self, x: Tensor) -> Tensor:
        """The runs of a whole tensor, one after the other: a copy."""
        if self.also is not None:
            x = x.narrow(*self.also)
        if self.dim < 0:
            return x.clone()
        return torch.cat([x.narrow(self.dim, run.start, run.length) for run in self.runs], self.dim)


def note(parameter: Tensor, what: Shard | str) -> None:
    """Note what a parameter is a part of; a name where that is not known."""
    setattr(parameter, _NAME, what)


def noted(parameter: Any) -> Shard | str | None:
    """What is noted of a parameter, a name where it is not known; None if nothing is noted."""
    return getattr(parameter, _NAME, None)


def held(parameter: Tensor) -> Shard:
    """What a parameter is a part of; one that nobody marked is whole.

    Raises:
        FleetError: it belongs to a layer that is cut, which does not know it.
    """
    what = noted(parameter)
    if isinstance(what, str):
        raise FleetError(
            f"{what} is a parameter that this layer, which is cut, does not know: is it a part, or the same on all ranks? "
            "fleet.mark(layer.name, layer.group, dim) says that it is this rank's part; layer.register_part(name, parameter, "
            "fleet.Held(tuple(parameter.shape))) that it is whole. weight_norm and spectral_norm make such ones, of a part's norm"
        )
    return what or Shard(tuple(parameter.shape))
