"""The rows of a batch in microbatches, one behind the other through a plain model: where each row stands for itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard._torch.hooks import LeftBehind
from onecard._torch.names import tree_flatten, tree_leaves, tree_unflatten
from onecard.auto.stages.between import BetweenStages
from onecard.auto.stages.look import RowLook, numbers_kept
from onecard.errors import PlanError
from onecard.place.layout import Layout
from onecard.place.parts import axes_of
from onecard.static.guards.results import in_parts
from onecard.tensor import DistTensor, reshard
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.moves import FromLocal, ToLocal
from onecard.tensor.random_operators.of_batch import OfBatch
from onecard.tensor.spec import Spec, contiguous_stride

WAYS = 8
"""Of a model that calls other functions from step to step: so many are looked at, then the 16th, 32nd, ..."""


_Lies = dict[tuple[int, ...], tuple[int, int] | None]


@dataclass
class InMicrobatches(LeftBehind):
    """The forward of a model, in microbatches where it trains and its batch can be cut.

    So that stages work at the same time: while the second one has the first microbatch, the first stage has the next. Backward
    goes through them in the other order. All forwards come first (GPipe).

    Attributes:
        forward: the model's own; module: the model; count: how many microbatches.
        axes: mesh axes along which rows are divided.
        between: has seen which functions of torch a forward called.
    """

    module: nn.Module
    forward: Callable[..., Any]
    count: int
    axes: tuple[str, ...]
    between: BetweenStages
    looking: bool = False
    _joins: dict[Any, list[bool]] = field(default_factory=dict)
    _lies: dict[Any, dict[Any, _Lies]] = field(default_factory=dict)
    _ways: dict[Any, set[int]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> InMicrobatches:
        module = memo.get(id(self.module), self.module)
        return InMicrobatches(module, copy.deepcopy(self.forward, memo), self.count, self.axes, self.between)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        cut = [] if self.looking or not torch.is_grad_enabled() else self._cut(leaves)
        if not cut:
            return self.forward(*args, **kwargs)
        joins, lies = self._looked_at(leaves, cut, tree)
        draws, found = OfBatch(self.count, *_divided(leaves[cut[0]], self.count), lies), []
        for k in range(self.count):
            part = [_part(x, k, self.count) if i in cut else x for i, x in enumerate(leaves)]
            # What Python draws, it draws for the whole batch: the same for each microbatch, and once.
            with self.between.within(k), draws.microbatch(k), nullcontext() if k == self.count - 1 else numbers_kept():
                given, named = tree_unflatten(part, tree)
                self.between.way = 0
                found.append(in_parts(self.forward(*given, **named), "a model"))
            self._check_way(self.between.way, leaves, cut, tree)
        made, out = [tree_leaves(one) for one in found], tree_flatten(found[0])[1]
        whole = [
            self._joined(same) if rows else same[0] for rows, same in zip(joins, zip(*made, strict=True), strict=True)
        ]
        return tree_unflatten(whole, out)

    def _cut(self, leaves: Sequence[Any]) -> list[int]:
        """Which arguments are the batch, as the entrance has divided it; none where it cannot be cut in so many."""
        batch = [(i, x) for i, x in enumerate(leaves) if isinstance(x, DistTensor) and x.ndim]
        if not batch:
            return []
        rows = len(batch[0][1])
        batch = [(i, x) for i, x in batch if len(x) == rows]
        even = all(
            not x.requires_grad
            and (not x._spec.here or (len(x._local) % self.count == 0 and rows % len(x._local) == 0 < len(x._local)))
            for _, x in batch
        )
        return [i for i, _ in batch] if even and rows % self.count == 0 else []

    def _joined(self, parts: Sequence[DistTensor]) -> Any:
        """Rows of all microbatches, as they lay in the batch: each rank's own, in their order."""
        mesh, first = parts[0].process_mesh, parts[0]
        kept = zip(mesh.dim_names, first.placements, strict=True)
        ways: list[Placement] = [
            Shard(0) if name in self.axes else p if isinstance(p, Shard) and p.dim else Replicate() for name, p in kept
        ]
        parts = [x if list(x.placements) == ways else reshard(x, mesh, ways) for x in parts]
        shape = torch.Size((len(first) * len(parts), *first.shape[1:]))
        spec = Spec.make(Layout.of(mesh, first.ndim, ways), shape, contiguous_stride(shape), first.dtype, first.device)
        local = [ToLocal.apply(x) for x in parts]
        # Of a stage elsewhere there is nothing to put together; torch's cat would leave empty parts out of second derivatives.
        return FromLocal.apply(torch.cat(local) if spec.here else reduce(torch.add, local), spec)

    def _looked_at(self, leaves: Sequence[Any], cut: Sequence[int], tree: Any) -> tuple[list[bool], _Lies]:
        """Which results have rows, and where random numbers have them: from a look at the first call of each kind.

        Raises:
            PlanError: rows do not stand for themselves.
        """
        key, sizes = self._kind(leaves, cut), tuple(x.shape for x in leaves if isinstance(x, Tensor))
        lies = self._lies.setdefault(key, {})
        if key not in self._joins or (any(lies.values()) and sizes not in lies):
            self._joins[key], lies[sizes] = self._look(leaves, cut, tree)
        return self._joins[key], lies.get(sizes, {})

    def _kind(self, leaves: Sequence[Any], cut: Sequence[int]) -> Any:
        kinds = (((x.ndim, x.dtype) if isinstance(x, Tensor) else type(x)) for x in leaves)
        return tuple(kinds), tuple(cut), tuple(module.training for module in self.module.modules())

    def _look(self, leaves: Sequence[Any], cut: Sequence[int], tree: Any) -> tuple[list[bool], _Lies]:
        self.looking, way = True, self.between.way
        try:
            look = RowLook(self.module, self.count, leaves, cut, tree)
            return look.joins(), look.lies
        finally:
            self.looking, self.between.way = False, way

    def _check_way(self, way: int, leaves: Sequence[Any], cut: Sequence[int], tree: Any) -> None:
        """Behind a forward: one that called other functions than those before it is looked at as it is now.

        A flag that a program sets later, a hook, another module. Of a model that goes another way in each step, the first ones
        are looked at, then some: each look takes longer than a step.

        Raises:
            PlanError: rows do not stand for themselves any more.
        """
        key = self._kind(leaves, cut)
        seen = self._ways.setdefault(key, set())
        if way in seen:
            return
        seen.add(way)
        due = 1 < len(seen) <= WAYS or (len(seen) > WAYS and not len(seen) & (len(seen) - 1))
        if due and self._look(leaves, cut, tree)[0] != self._joins[key]:
            raise PlanError(
                f"parallelize: microbatches={self.count}: {type(self.module).__name__} gives back other results than at first: "
                "microbatches=1, or oc.to_static(step, plan=plan)",
                "microbatches",
            )


def _divided(x: DistTensor, count: int) -> tuple[int, int]:
    """How many rows a microbatch has, and over how many ranks they are divided."""
    mesh = x._spec.layout.mesh
    return len(x) // count, prod(mesh.shape[axis] for axis in axes_of(x._spec.layout.dims[0]))


def _part(x: Any, k: int, count: int) -> DistTensor:
    """The k-th microbatch of a batch: on each rank of its own rows."""
    shape = torch.Size((len(x) // count, *x.shape[1:]))
    spec = x._spec
    local = x._local if not spec.here else x._local.narrow(0, k * (len(x._local) // count), len(x._local) // count)
    return wrap(local, Spec.make(spec.layout, shape, contiguous_stride(shape), spec.dtype, spec.device))
