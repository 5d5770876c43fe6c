"""Queries, keys and values as one column-parallel product, cut by heads; with fewer key heads than ranks, ranks share them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.errors import FleetError
from onecard.fleet.layers.linear import ColumnParallelLinear
from onecard.train.shard import Run


class QKVParallelLinear(ColumnParallelLinear):
    """The projections to queries, keys and values, each rank with its query heads and the key heads that they attend to.

    Args:
        in_features: the width of x.
        head_dim: of one head.
        n_heads, n_kv_heads: query heads and key heads of the whole layer (as many, if left out). Heads that do not
            divide: the last rank has the rest. A key head that several ranks need is on each of them; their gradients
            are summed before the optimizer reads them.
        others: as of ``ColumnParallelLinear``. The whole weight has the rows of all queries, then keys, then values.

    Source: grouped queries of Ainslie et al. (2023).
    """

    def __init__(
        self, in_features: int, head_dim: int, n_heads: int, n_kv_heads: int | None = None, *args: Any, **options: Any
    ) -> None:
        kv = n_heads if n_kv_heads is None else n_kv_heads
        if n_heads % kv:
            raise FleetError(f"{n_heads} query heads do not share {kv} key heads evenly")
        object.__setattr__(self, "heads", (head_dim, n_heads, kv))
        options.setdefault("gather_output", False)
        super().__init__(in_features, head_dim * (n_heads + 2 * kv), *args, **options)

    heads: tuple[int, int, int]

    def _cuts(self, unit: int) -> list[list[int]]:
        head_dim, n_heads, _ = self.heads
        each = n_heads // self.group.size
        rest = n_heads - each * (self.group.size - 1)
        return [[n * head_dim for n in [each] * (self.group.size - 1) + [rest]]]

    def queries(self, place: int | None = None) -> range:
        """The query heads of a rank of the group: of this one, if none is named."""
        head_dim, place = self.heads[0], self.group.index if place is None else place
        begin = sum(self.cuts[0][:place]) // head_dim
        return range(begin, begin + self.cuts[0][place] // head_dim)

    def keys(self, place: int | None = None) -> range:
        """The key heads that its queries attend to."""
        queries, share = self.queries(place), self.heads[1] // self.heads[2]
        return range(queries.start // share, -(-queries.stop // share)) if len(queries) else range(0)

    def key_of_query(self) -> list[int]:
        """For each query head here, which of the key heads here it attends to."""
        share = self.heads[1] // self.heads[2]
        return [head // share - self.keys().start for head in self.queries()]

    def _runs(self) -> tuple[Run, ...]:
        head_dim, n_heads, kv = self.heads
        queries, keys = self.queries(), self.keys()
        runs = [Run(queries.start * head_dim, len(queries) * head_dim)]
        for begin in (n_heads, n_heads + kv):
            for head in keys:
                first = next(place for place in range(self.group.size) if head in self.keys(place))
                runs.append(Run((begin + head) * head_dim, head_dim, first == self.group.index))
        return tuple(runs)

    def _copies(self) -> tuple[tuple[int, int], ...]:
        head_dim, n_heads, kv = self.heads
        held_here = sum(len(self.keys(place)) for place in range(self.group.size))
        return ((n_heads * head_dim, 2 * kv * head_dim),) if held_here > kv else ()

    def split(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The result as (..., heads here, head_dim) queries, keys and values."""
        head_dim = self.heads[0]
        sizes = [len(self.queries()), len(self.keys()), len(self.keys())]
        q, k, v = y.unflatten(-1, (sum(sizes), head_dim)).split(sizes, -2)
        return q, k, v

    def expand(self, x: Tensor, dim: int) -> Tensor:
        """Keys or values with one head for each query head here."""
        wanted = self.key_of_query()
        if wanted == list(range(x.shape[dim])):
            return x
        return x.index_select(dim, torch.tensor(wanted, device=x.device))
