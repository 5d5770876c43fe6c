"""What a loss calls: operators and their settings, seen while it runs; and whether one of them bends a sum over rows."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor

from onecard._torch.modes import DispatchMode
from onecard._torch.names import OpOverload, fake_tensors, tree_leaves, tree_map
from onecard.comm.base import record
from onecard.rules.call import schema_of
from onecard.static.passes.additive import Additive
from onecard.static.passes.dependence import MIXED
from onecard.static.passes.row_kinds import NOT_LINEAR
from onecard.tensor.dist_tensor import DistTensor

LARGE = 1 << 16  # elements of a row
_SCALES = ("add", "sub", "rsub", "mul", "div")
"""Operators of a tensor and a number, which is no setting: where it comes from values, each call has another."""
_TABLES = ("index", "index_select", "gather", "embedding", "take")
"""Operators that pick from their first argument: weights of classes, by labels."""


class LossCalls(DispatchMode):
    """Sees what a loss calls, in order: operators, with what is no size, and which tensor holds the weights of classes.

    A loss that calls the same divides by the same.

    Attributes:
        alone: whether it is this rank's own: what messages and distributed tensors call depends on what is known of them.
    """

    keeps_values = True

    def __init__(self, values: Any, labels: Any) -> None:
        super().__init__()
        self._found: list[tuple[Any, ...]] = []
        self.alone = not any(isinstance(x, DistTensor) for x in tree_leaves((values, labels)))
        # Of those that are made in it none is held: what takes the identity of one that is gone was made later.
        self._known = {id(x) for x in tree_leaves((values, labels)) if isinstance(x, Tensor)}

    def __enter__(self) -> LossCalls:
        record.observers.here.append(self._sends)
        super().__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        super().__exit__(*fault)
        record.observers.here.remove(self._sends)

    def _sends(self, message: Any) -> None:
        self.alone = False

    @property
    def key(self) -> int:
        """Of all calls."""
        return hash(tuple(self._found))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if isinstance(result, Tensor) and result.is_meta:  # a decision, which is made once
            return result
        if func is torch.ops.aten.detach.default:  # autograd's, where there is a graph
            self._known.add(id(result))
            return result
        known, (places, table) = self._known, _settings(func)
        self._found.append(
            (
                func,
                *(
                    id(args[i])
                    if i == table and isinstance(args[i], Tensor) and id(args[i]) not in known
                    else _setting(args[i])
                    for i in places
                    if i < len(args)
                ),
                *map(_setting, (kwargs or {}).values()),
            )
        )
        made = (result,) if isinstance(result, Tensor) else tree_leaves(result)
        known.update(id(x) for x in made if isinstance(x, Tensor))
        return result


def _setting(x: Any) -> Any:
    """What of an argument is the same for each microbatch: of a tensor that it is there."""
    if isinstance(x, Tensor):
        return Tensor
    if isinstance(x, list | tuple):
        return tuple(map(_setting, x))
    return x if isinstance(x, bool | int | float | str | torch.dtype) else None


@functools.lru_cache(maxsize=4096)
def _settings(func: OpOverload) -> tuple[tuple[int, ...], int]:
    """The arguments of an operator that are no sizes, and no numbers that a value is scaled by; which of them holds the weights
    of classes, -1 if none does."""
    scales = schema_of(func).functional in _SCALES
    kinds = [(str(a.type), a.name) for a in func._schema.arguments]
    places = (
        i
        for i, (kind, name) in enumerate(kinds)
        if name == "ignore_index" or not ("SymInt" in kind or (scales and "Tensor" not in kind))
    )
    names = [name for _, name in kinds]
    weights = next((names.index(name) for name in ("weight", "pos_weight") if name in names), -1)
    return tuple(places), 0 if schema_of(func).functional in _TABLES else weights


def bends_sums(loss_fn: Callable[[Any, Any], Any], value: Any, labels: Any, rows: int, count: int) -> str:
    """What in a loss is not linear in a sum or mean over rows, with its line; "": nothing that is known to be.

    Where a sum lies decides whether calls with a few rows show it: of ``clamp(max=2)`` nothing is seen below 2.

    Args:
        value: what the model returns for ``rows`` rows; ``labels``: those of ``count`` rows.
    """
    shapes = [x.shape for x in tree_leaves((value, labels)) if isinstance(x, Tensor)]
    taken = {n for shape in shapes for n in shape[1:]}
    few = next(n for n in itertools.count(5, 2) if taken.isdisjoint((n, 2 * n)))
    large = any(2 * few * x.numel() // max(rows, 1) > LARGE for x in tree_leaves(value) if isinstance(x, Tensor))
    verdict = None
    # A loss that reads values cannot be seen so where there are none, nor one of fewer rows where that is refused.
    # No graph is made, which somebody may count; what learns is known by what it is given. A loss of several ranks (parallel
    # cross entropy) is not looked at: each would choose other sizes.
    with suppress(Exception), _without_messages(), fake_tensors() if large else nullcontext(), torch.no_grad():
        for k in (1, 2):
            mine = tree_map(lambda x: _of_rows(x, k * few, rows, True) if isinstance(x, Tensor) else x, value)  # noqa: B023
            theirs = tree_map(lambda x: _of_rows(x, k * few, count, False) if isinstance(x, Tensor) else x, labels)  # noqa: B023
            batch = [x for x in tree_leaves((mine, theirs)) if isinstance(x, Tensor) and x.dim()]
            look = Additive(batch, verdict, k)
            with look:
                result = loss_fn(mine, theirs)
            verdict = look.returned(result)
    found = verdict.results[0] if verdict is not None and verdict.results else None
    # What takes some rows by their number (a loss in chunks) may be right; calls with rows apart and together show it.
    return found.where if found is not None and found.how == MIXED and found.where.endswith(NOT_LINEAR) else ""


@contextmanager
def _without_messages() -> Iterator[None]:
    def refuse(message: Any) -> None:
        raise RuntimeError(f"{message} of a loss that is looked at")

    record.observers.here.append(refuse)
    try:
        yield
    finally:
        record.observers.here.remove(refuse)


def _of_rows(x: Tensor, count: int, rows: int, is_value: bool) -> Tensor:
    """Some rows of a tensor: the first ones, over and over; what has none as it is."""
    each, rest = divmod(x.shape[0], rows) if x.dim() and rows else (0, 1)
    shape = [*x.shape] if rest else [count * each, *x.shape[1:]]
    learns = is_value and x.is_floating_point()
    if is_value:  # the same at each look: numbers that differ follow the rows
        made = torch.linspace(0.1, 0.9, max(math.prod(shape), 1), device="cpu")[: math.prod(shape)].view(shape)
        return made.to(x.device, x.dtype).requires_grad_(learns)
    if rest:
        return x.clone()
    return x[torch.arange(count * each, device=x.device) % x.shape[0]]
