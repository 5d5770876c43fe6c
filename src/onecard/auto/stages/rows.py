"""The rows of a batch in microbatches, one behind the other through a plain model: where each row stands for itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.func import functional_call

from onecard._torch import fakes
from onecard._torch import names as _torch
from onecard._torch.hooks import LeftBehind
from onecard._torch.names import tree_flatten, tree_leaves, tree_map, tree_unflatten
from onecard.errors import PlanError
from onecard.place.layout import Layout
from onecard.static.passes.additive import Additive
from onecard.static.passes.dependence import ALIKE, ROWS, Kind, Verdict
from onecard.tensor import DistTensor, reshard
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.moves import FromLocal, ToLocal
from onecard.tensor.spec import Spec, contiguous_stride


@dataclass
class InMicrobatches(LeftBehind):
    """The forward of a model, in microbatches where it trains and its batch can be cut.

    So that stages work at the same time: while the second one has the first microbatch, the first stage has the next. Backward
    goes through them in the other order. All forwards come first (GPipe).

    Attributes:
        forward: the model's own; module: the model; count: how many microbatches.
        axes: mesh axes along which rows are divided.
        around: is entered with a microbatch's number.
    """

    module: nn.Module
    forward: Callable[..., Any]
    count: int
    axes: tuple[str, ...]
    around: Callable[[int], Any]
    looking: bool = False
    _joins: dict[Any, list[bool]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> InMicrobatches:
        module = memo.get(id(self.module), self.module)
        return InMicrobatches(module, copy.deepcopy(self.forward, memo), self.count, self.axes, self.around)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))
        cut = [] if self.looking or not torch.is_grad_enabled() else self._cut(leaves)
        if not cut:
            return self.forward(*args, **kwargs)
        joins = self._looked_at(leaves, cut, tree)
        found = []
        for k in range(self.count):
            part = [_part(x, k, self.count) if i in cut else x for i, x in enumerate(leaves)]
            with self.around(k):
                given, named = tree_unflatten(part, tree)
                found.append(self.forward(*given, **named))
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
        shape = (len(first) * len(parts), *first.shape[1:])
        spec = Spec.make(Layout.of(mesh, first.ndim, ways), shape, contiguous_stride(shape), first.dtype, first.device)
        return FromLocal.apply(torch.cat([ToLocal.apply(x) for x in parts]), spec)

    # -- whether it may be cut ---------------------------------------------------------------------------------------------

    def _looked_at(self, leaves: Sequence[Any], cut: Sequence[int], tree: Any) -> list[bool]:
        """Which results have rows; the others are the same for all microbatches.

        Raises:
            PlanError: rows do not stand for themselves.
        """
        kinds = (*((x.ndim, x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves), len(leaves[cut[0]]))
        key = kinds[:-1], self.module.training, tuple(cut)
        if key not in self._joins:
            self.looking = True
            try:
                self._joins[key] = self._look(leaves, cut, tree)
            finally:
                self.looking = False
        return self._joins[key]

    def _look(self, leaves: Sequence[Any], cut: Sequence[int], tree: Any) -> list[bool]:
        rows = len(leaves[cut[0]])
        try:
            with _torch.fake_tensors():
                state = {name: _without_data(x) for name, x in _state(self.module)}
                seen, first = self._run(state, leaves, cut, tree, rows // self.count, None)
                seen, results = self._run(state, leaves, cut, tree, rows, seen)
        except PlanError:
            raise
        except Exception as why:
            raise self._refused(f"a look at one of them without data ends in {type(why).__name__}: {why}") from why
        written = [name for name, x in state.items() if not isinstance(x, nn.Parameter) and x._version]
        if seen.normalized:
            raise self._refused(f"batch norm at {seen.normalized[0]} takes the mean and variance of the batch")
        if seen.open or seen.unsure:
            raise self._refused("a number in it may count rows")
        if written:
            raise self._refused(f"it writes to its buffer {written[0]!r}, once for each microbatch")
        kinds = iter(seen.results)
        return [self._joins_rows(i, next(kinds) if isinstance(x, Tensor) else None, x, before)
                for i, (x, before) in enumerate(zip(results, first, strict=True))]  # fmt: skip

    def _run(
        self, state: Any, leaves: Sequence[Any], cut: Sequence[int], tree: Any, rows: int, before: Verdict | None
    ) -> tuple[Verdict, list[Any]]:
        """What a look at so many rows shows, and what the model gives back."""
        given = [_without_data(x, rows if i in cut else None) for i, x in enumerate(leaves)]
        looker = Additive([given[i] for i in cut], before, 1 if before is None else self.count)
        args, kwargs = tree_unflatten(given, tree)
        with torch.random.fork_rng(devices=[]), looker:
            out = functional_call(self.module, state, args, kwargs, strict=False)
        return looker.returned(out), tree_leaves(out)

    def _joins_rows(self, i: int, kind: Kind | None, x: Any, before: Any) -> bool:
        """Whether a result has a row for each of the batch, and not the same for all microbatches."""
        if not isinstance(x, Tensor):
            if x is before or (type(x) is type(before) and isinstance(x, int | float | str) and x == before):
                return False
            raise self._refused(f"what it gives back, {type(x).__name__}, is no tensor, or goes by the number of rows")
        if kind is None or (kind.how == ALIKE and kind.dims is None):
            return False
        if (
            kind.how == ROWS
            and (kind.dim, kind.before, kind.degree, kind.order) == (0, 1, 0, 0)
            and len(x) == kind.size
        ):
            return True
        raise self._refused(
            f"result {i} of its forward, {list(x.shape)}, is no row for each of the batch"
            + (f": {kind.where}" if kind.where else "")
            + (
                " (a loss that the model computes itself: return the outputs, and compute it outside)"
                if not x.ndim
                else ""
            )
        )

    def _refused(self, why: str) -> PlanError:
        return PlanError(
            f"parallelize: microbatches={self.count}: {type(self.module).__name__} goes through its stages in microbatches, and "
            f"{why}. Its numbers would not be one card's: microbatches=1, or oc.to_static(step, plan=plan), which knows the loss",
            "microbatches",
        )


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=True)
    yield from module.named_buffers(remove_duplicate=True)


def _without_data(x: Any, rows: int | None = None) -> Any:
    """A tensor of the same shape, with so many rows, in the mode that makes tensors without data."""
    if not isinstance(x, Tensor):
        return x
    shape = x.shape if rows is None else (rows, *x.shape[1:])
    made = torch.empty(shape, dtype=x.dtype, device=fakes.device_of(x))
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _part(x: Any, k: int, count: int) -> DistTensor:
    """The k-th microbatch of a batch: on each rank of its own rows."""
    shape = (len(x) // count, *x.shape[1:])
    spec = x._spec
    local = x._local if not spec.here else x._local.narrow(0, k * (len(x._local) // count), len(x._local) // count)
    return wrap(local, Spec.make(spec.layout, shape, contiguous_stride(shape), spec.dtype, spec.device))
