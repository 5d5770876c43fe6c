"""prove: every strategy that a row allows for one call, run shard by shard and compared with the whole."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.rules.call import tensors_in
from onecard.rules.decide import Decision
from onecard.rules.registry import find
from onecard.rules.verify.captured import Captured, copied
from onecard.rules.verify.missed import search
from onecard.rules.verify.split import coordinates, mismatch
from onecard.rules.verify.trial import Trial, Unfit


@dataclass(frozen=True, slots=True)
class Wrong:
    """A strategy that a row allows and that gives a wrong result, or a rule that does not fit its call."""

    operator: str
    rule: str
    why: str
    layouts: str = ""
    shapes: str = ""
    where: str = ""
    seed: int = 0

    def __str__(self) -> str:
        lines = [f"{self.operator}  {self.rule}", f"  {self.why}"]
        lines += [f"  layouts {self.layouts}"] if self.layouts else []
        lines += [f"  shapes  {self.shapes}  seed {self.seed}" + (f"  from {self.where}" if self.where else "")]
        return "\n".join(lines)


@dataclass(slots=True)
class CallProof:
    """What was found out about one call.

    Attributes:
        call: the call; ``rule``: its row's text, "" if it has none.
        proved: strategies that gave the one-card result.
        wrong: those that did not.
        missed: operand layouts that the row forbids though the operator, run as it is, gives the right result; the
            results' layouts with each.
        refuted: operand layouts that it forbids with reason.
    """

    call: Captured
    rule: str = ""
    proved: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)
    refuted: set[str] = field(default_factory=set)


def verify_call(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    mesh_shape: Sequence[int] = (2,),
    *,
    missed: bool = True,
    seed: int = 0,
    limit: int = 300,
) -> CallProof:
    """Prove an operator's row on one call, by brute force, in this process.

    For every strategy that the row allows the operands are cut (or, where pending, replaced by random summands), the
    operator runs once for each coordinate of the mesh with the row's hook applied, and the results are put together and
    compared with the one-card result in shape, dtype and value.

    Args:
        func: an operator, e.g. ``torch.ops.aten.mm.default``.
        args, kwargs: whole tensors and static arguments; they are not written to.
        mesh_shape: ranks along each axis.
        missed: also look for operand layouts that the row forbids without need (meshes with one axis only). The
            operator runs on shards that may not fit, which a few kernels do not survive.
        seed: of the random summands, and of the choice of strategies where there are more than ``limit``.
        limit: strategies to try at most; of those with merged dims a quarter of it in addition.

    Example:
        >>> import torch
        >>> a, b = torch.randn(4, 6).double(), torch.randn(6, 3).double()
        >>> result = verify_call(torch.ops.aten.mm.default, (a, b))
        >>> result.proved, result.wrong, result.missed
        (10, [], {})
    """
    return prove(Captured(func, tuple(args), dict(kwargs or {})), mesh_of(mesh_shape), missed, seed, limit)


def mesh_of(shape: Sequence[int]) -> ProcessMesh:
    """A mesh of ranks 0, 1, ... with axes x, y, z."""
    return ProcessMesh(np.arange(prod(shape)).reshape(tuple(shape)), ["x", "y", "z"][: len(shape)])


def prove(call: Captured, mesh: ProcessMesh, missed: bool = False, seed: int = 0, limit: int = 300) -> CallProof:
    """``verify_call`` for a captured call on a mesh."""
    result = CallProof(call)
    row = find(call.func)
    if row is None:
        return result
    try:
        trial = Trial(call, row, mesh, seed)
    except Unfit as fault:
        result.rule = fault.rule
        if fault.why:
            result.wrong.append(_wrong(result, fault.why, None, seed))
        return result
    result.rule = trial.rule
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on one card the same call warned already
        _try_all(result, trial, missed, seed, limit)
    return result


def _try_all(result: CallProof, trial: Trial, missed: bool, seed: int, limit: int) -> None:
    found = list(trial.strategies())
    plain, of_parts = ([d for d in found if (d.bound is trial.bound) is whole] for whole in (True, False))
    for decision in (*_sampled(plain, limit, seed), *_sampled(of_parts, -(-limit // 4), seed)):
        why = trial.fault(decision)
        if why:
            result.wrong.append(_wrong(result, why, decision, seed))
        else:
            result.proved += 1
    why = _instead_fault(trial)
    if why:
        result.wrong.append(_wrong(result, why, None, seed))
    if missed and trial.mesh.ndim == 1:
        result.missed, result.refuted = search(trial)


def _sampled(found: list[Decision], limit: int, seed: int) -> list[Decision]:
    return found if len(found) <= limit else random.Random(seed).sample(found, limit)


def _instead_fault(trial: Trial) -> str:
    """Why a row's ``instead`` is not the operator itself, on whole tensors; "" if it is."""
    if trial.row.instead is None or len(trial.bound.free) == len(trial.bound.names):
        return ""
    try:
        got = list(tensors_in(trial.row.instead(*copied(trial.whole[0]), **copied(trial.whole[1]))))
    except Exception as error:  # whatever it raises is a fault of the row
        return f"{type(error).__name__} in its instead=: {error}"
    if len(got) != len(trial.results):
        return f"its instead= gives {len(got)} result(s), the operator {len(trial.results)}"
    for n, whole in enumerate(trial.results):
        layout = Layout.replicated(trial.mesh, whole.dim())
        why = mismatch(whole, layout, dict.fromkeys(coordinates(trial.mesh), got[n]), True, trial.tolerance)
        if why:
            return f"result {n} of its instead=: {why}"
    return ""


def _wrong(result: CallProof, why: str, decision: Decision | None, seed: int) -> Wrong:
    call, layouts = result.call, ""
    if decision is not None:
        layouts = f"{_list(decision.operands)} -> {_list(decision.results)}"
    return Wrong(call.name, result.rule, why, layouts, _shapes(call), call.where, seed)


def _list(layouts: Sequence[Layout]) -> str:
    return " | ".join(map(repr, layouts)) or "nothing"


def _shapes(call: Captured) -> str:
    def show(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(show, value))}]"
        return repr(value)

    return ", ".join([*map(show, call.args), *(f"{k}={show(v)}" for k, v in call.kwargs.items())])
