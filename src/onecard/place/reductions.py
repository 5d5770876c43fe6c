"""What joins the values of ranks to one: the operators of ``Partial``, each with what is known of it. Pure.

Everything that asks how a reduction behaves (layouts, rules and their proof, collectives, moves between meshes) looks here.
Also joined are norms, under names such as "norm2.0": the 2-norm of 2-norms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reduction:
    """One operator.

    Attributes:
        combine: joins tensors that are stacked along dim 0.
        identity: the number that changes nothing, by dtype; None if there is none.
        idempotent: equal values join to that value.
        exact: no order of the values changes a bit of the result.
        of_truths: the operator that does the same to booleans (added up as bytes, truths would be 2).
    """

    combine: Callable[[Tensor], Tensor]
    identity: Callable[[torch.dtype], Any] | None = None
    idempotent: bool = False
    exact: bool = False
    of_truths: str = "max"


def averaged(total: Tensor, ranks: int) -> Tensor:
    """A sum over the ranks, divided in place; that of integers is rounded toward zero, as NCCL does."""
    return total.div_(ranks, rounding_mode=None if total.is_floating_point() or total.is_complex() else "trunc")


def _lowest(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _bitwise(op: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda stacked: reduce(op, stacked)


def _number(value: Any) -> Callable[[torch.dtype], Any]:
    return lambda dtype: value


_TABLE = {
    "sum": Reduction(lambda t: t.sum(0), _number(0)),
    "avg": Reduction(lambda t: averaged(t.sum(0), t.shape[0]), idempotent=True, of_truths="min"),
    "product": Reduction(lambda t: t.prod(0), _number(1), of_truths="min"),
    "max": Reduction(lambda t: t.amax(0), _lowest, idempotent=True, exact=True),
    "min": Reduction(lambda t: t.amin(0), _highest, idempotent=True, exact=True, of_truths="min"),
    "band": Reduction(_bitwise(torch.bitwise_and), _number(-1), idempotent=True, exact=True, of_truths="min"),
    "bor": Reduction(_bitwise(torch.bitwise_or), _number(0), idempotent=True, exact=True),
    "bxor": Reduction(_bitwise(torch.bitwise_xor), _number(0), exact=True, of_truths="bxor"),
}
REDUCTIONS = tuple(_TABLE)
REDUCTION = re.compile(rf"{'|'.join(REDUCTIONS)}|norm[-+.\de]+")


@lru_cache(256)
def reduction(op: str) -> Reduction:
    """What is known of an operator of ``Partial``.

    Example:
        >>> reduction("max").identity(torch.float32), reduction("norm2.0").combine(torch.tensor([3.0, 4.0]))
        (-inf, tensor(5.))
    """
    return _TABLE.get(op) or _norm(power_of(op))


def power_of(op: str) -> float:
    """The power of a norm, "norm2.0"; 0 of any other operator."""
    return float(op[4:]) if op.startswith("norm") else 0.0


def _norm(power: float) -> Reduction:
    nothing = float("inf") if power < 0 else 0.0
    return Reduction(lambda t: (t.abs() ** power).sum(0) ** (1 / power), _number(nothing))


def join(stacked: Tensor, op: str) -> Tensor:
    """The value that tensors stacked along dim 0 stand for under an operator, in their dtype."""
    found = reduction(op)
    if stacked.dtype is torch.bool:
        found = reduction(found.of_truths)
    return found.combine(stacked).to(stacked.dtype)


def commute(ops: Iterable[str]) -> bool:
    """Whether axes pending under these operators may be reduced in any order: all the same, or sums and averages.

    Example:
        >>> commute(["sum", "avg"]), commute(["max", "max"]), commute(["sum", "max"])
        (True, True, False)
    """
    distinct = set(ops)
    return len(distinct) < 2 or distinct == {"sum", "avg"}
