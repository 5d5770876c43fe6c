"""A program as text: statements that mean the same on one card and on a mesh, and what their helpers are on either."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import onecard as oc

# Ranks as a mesh names them; a program takes one.
MESHES: tuple[tuple[Any, ...], ...] = (
    (0, 1),
    (0, 1, 2),
    (1, 0),
    ((0, 1), (2, 3)),
    (0, 1, 2, 3),
    (2, 0, 1),
    ((3, 1), (0, 2)),
)


def axes_of(ranks: tuple[Any, ...]) -> int:
    """How many axes a mesh has."""
    return 1 if isinstance(ranks[0], int) else 2


def size_of(ranks: tuple[Any, ...]) -> int:
    """How many ranks a mesh has."""
    return int(np.size(ranks))


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        seed: of which it was drawn; ``ranks``: its mesh.
        setup: statements that run once; ``body``: those that run in each of ``steps`` steps, which know ``step``.
        look: compare what each statement makes as soon as it is made, not only at the end.
    """

    seed: int
    ranks: tuple[Any, ...]
    setup: tuple[str, ...]
    body: tuple[str, ...]
    steps: int
    look: bool

    @property
    def lines(self) -> tuple[str, ...]:
        """All statements."""
        return self.setup + self.body

    def run(self) -> Iterator[tuple[int, int]]:
        """(number of a statement, step) in the order in which they run."""
        yield from ((i, 0) for i in range(len(self.setup)))
        for step in range(self.steps):
            yield from ((len(self.setup) + i, step) for i in range(len(self.body)))

    def without(self, dropped: Sequence[int]) -> Program:
        """The program without some of its statements."""
        kept = [i for i in range(len(self.lines)) if i not in set(dropped)]
        cut = len(self.setup)
        setup, body = ([self.lines[i] for i in kept if (i < cut) is first] for first in (True, False))
        return Program(self.seed, self.ranks, tuple(setup), tuple(body), self.steps, self.look)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers while it trains."""
        return any("ropout" in line or "normal_" in line or "Transformer" in line for line in self.lines)


def helpers(mesh: oc.ProcessMesh | None) -> dict[str, Any]:
    """The names that statements use; ``mesh``: None on one card."""
    shared = {
        "torch": torch, "nn": nn, "F": F, "copy": copy, "normal": normal, "ints": ints, "cuts": {}, "step": 0,
        "Shard": oc.Shard, "Replicate": oc.Replicate, "Partial": oc.Partial,
    }  # fmt: skip
    if mesh is None:
        return shared | {
            "put": lambda x, *placements: x,
            "move": lambda x, *placements: x.clone(),
            "lay": lambda module, cuts: module,
            "ready": lambda optimizer: optimizer,
        }

    def lay(module: nn.Module, cuts: dict[str, Any]) -> nn.Module:
        def cut(name: str, part: nn.Module, mesh: oc.ProcessMesh) -> None:
            for key, parameter in list(part.named_parameters(recurse=False)):
                placements = cuts.get(f"{name}.{key}" if name else key)
                if placements and not isinstance(parameter, oc.DistTensor):
                    setattr(part, key, oc.shard_tensor(parameter, mesh, placements))

        return oc.shard_layer(module, mesh, cut)

    return shared | {
        "put": lambda x, *placements: put(x, mesh, placements),
        "move": lambda x, *placements: (oc.reshard(x, mesh, placements) if isinstance(x, oc.DistTensor) else x).clone(),
        "lay": lay,
        "ready": oc.shard_optimizer,
    }


def put(x: Tensor, mesh: oc.ProcessMesh, placements: Sequence[Any]) -> Tensor:
    """A tensor on the mesh; where it is pending, every rank holds a summand that is neither the whole nor nothing."""
    if not any(p.is_partial() for p in placements) or not x.is_floating_point():
        return oc.shard_tensor(x, mesh, placements)
    share, place = 1.0, mesh.coordinate()
    for i, size, placement in zip(place or (), mesh.shape, placements, strict=False):
        if placement.is_partial():
            share *= (1.0 + 0.7 * (size - 1), *[-0.7] * (size - 1))[i]
    cut = [oc.Replicate() if p.is_partial() else p for p in placements]
    return oc.from_local(oc.shard_tensor(x, mesh, cut).to_local() * share, mesh, placements, shape=x.shape)


def normal(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def ints(seed: int, high: int, *shape: int) -> Tensor:
    """Integers below ``high``."""
    return torch.from_numpy(np.random.default_rng(seed).integers(high, size=shape))
