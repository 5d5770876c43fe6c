"""What a program leaves: parameters, gradients, buffers and what it returns, of all ranks against one card's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import tree_flatten, tree_map
from onecard.proof.alike import block_in
from onecard.proof.watch import Value, Watched
from onecard.proof.whole import Whole, apart, scale_of, whole

SCALARS = int | float | complex


@dataclass(frozen=True, slots=True)
class Result:
    """One thing that both programs leave.

    Attributes:
        what: "gradient of fc.weight in step 1"; kind: initial, gradient, final, buffer, returned.
        off: how far it is from one card's, relatively to its largest number; inf: it has another shape, or is not there.
        ranks: whose part is wrong.
        why: in words, where numbers do not say it.
        local, right: each wrong rank's part and what it should be.
        pending: its parts are summands.
    """

    what: str
    kind: str
    off: float
    ranks: tuple[int, ...] = ()
    why: str = ""
    local: Mapping[int, Tensor] | None = None
    right: Mapping[int, Tensor] | None = None


Part = Callable[[Tensor], Tensor]


def compare(ranks: Sequence[Watched], one: Watched, bound: float) -> tuple[list[Result], list[str]]:
    """All results of the ranks beside one card's, in the order in which they arise, and names that have no partner."""
    theirs = _by_kind([one])
    mine = _by_kind(ranks)
    pairs = _pairs(mine, theirs, bound)
    results: list[Result] = []
    for (kind, step), tables in sorted(mine.items(), key=lambda item: (item[0][1], _ORDER.index(item[0][0]))):
        right = theirs.get((kind, step), {})
        for name, values in tables.items():
            known, parts = pairs.get(name, ("", {}))
            if kind == "final":  # a stage's parameters are the matter of the ranks that have gradients of them
                grads = [table.get(name, {}) for (k, _), table in mine.items() if k == "gradient"]
                mine_alone = {r for table in grads for r, v in table.items() if v.spec is None or v.spec.here}
                values = {rank: value for rank, value in values.items() if not mine_alone or rank in mine_alone}
            if known in right:
                what = f"{_WORDS[kind]}{name}" + (f" in step {step + 1}" if kind == "gradient" else "")
                results.append(_result(what, kind, values, right[known][0].local, parts, bound))
    results += _returned(ranks, one, bound)
    unpaired = [
        name for name in {n for (kind, _), t in mine.items() if kind == "initial" for n in t} if name not in pairs
    ]
    return results, sorted(unpaired)


_ORDER = ("initial", "gradient", "final", "buffer")
_WORDS = {"initial": "the initial value of ", "gradient": "the gradient of ", "final": "", "buffer": "the buffer "}


def _by_kind(ranks: Sequence[Watched]) -> dict[tuple[str, int], dict[str, dict[int, Value]]]:
    found: dict[tuple[str, int], dict[str, dict[int, Value]]] = defaultdict(dict)
    for rank, watched in enumerate(ranks):
        for held in watched.held:
            found[held.kind, held.step if held.kind == "gradient" else 0].setdefault(held.name, {})[rank] = held.value
    return found


def _pairs(mine: Any, theirs: Any, bound: float) -> dict[str, tuple[str, dict[int, Part]]]:
    """For each parameter of the ranks the one card's, and what part of that each rank has: by name, else by initial value."""
    found: dict[str, tuple[str, dict[int, Part]]] = {}
    alone: dict[str, Tensor] = {name: values[0].local for name, values in theirs.get(("initial", 0), {}).items()}
    for name, values in mine.get(("initial", 0), {}).items():
        candidates = [name, *(other for other in alone if other != name)] if name in alone else [*alone]
        for other in candidates:
            parts = _parts(values, alone[other], bound)
            if parts is not None:
                found[name] = other, parts
                break
        else:
            if name in alone:  # another initial value: compared as it is
                found[name] = name, {rank: _all for rank in values}
    for kind in ("buffer", "final"):
        for name in mine.get((kind, 0), {}):
            if name not in found and name in theirs.get((kind, 0), {}):
                found[name] = name, {rank: _all for rank in mine[kind, 0][name]}
    return found


def _all(x: Tensor) -> Tensor:
    return x


def _parts(values: Mapping[int, Value], right: Tensor, bound: float) -> dict[int, Part] | None:
    """Which part of a value each rank has; None: it is not this value."""
    first = next(iter(values.values()))
    if first.spec is not None:
        held = whole(values, bound)
        fits = held.value is not None and held.value.shape == right.shape and apart(held.value, right) <= bound
        return {rank: _all for rank in values} if fits else None
    found: dict[int, Part] = {}
    for rank, value in values.items():
        part = _part_of(value.local, right, bound)
        if part is None:
            return None
        found[rank] = part
    return found


def _part_of(local: Tensor, right: Tensor, bound: float) -> Part | None:
    if not local.numel():
        return lambda x: x.reshape(-1)[:0].view(local.shape)
    if local.shape == right.shape:
        return _all if apart(local, right) <= bound else None
    at = block_in(local, right, bound)
    if at is not None:
        return lambda x: x[at]
    if local.dim() == 1 and local.numel() <= right.numel():  # a piece of the flattened tensor, as ZeRO cuts them
        flat, length = right.reshape(-1), local.numel()
        near = (flat[: flat.numel() - length + 1] - local[0]).abs() <= bound * max(scale_of(right), 1e-12)
        for start in near.nonzero().flatten().tolist():
            if apart(flat[start : start + length], local) <= bound:
                return partial(_piece, start=start, length=length)
    return None


def _piece(x: Tensor, start: int, length: int) -> Tensor:
    return x.reshape(-1)[start : start + length]


def _result(
    what: str, kind: str, values: Mapping[int, Value], right: Tensor, parts: Mapping[int, Part], bound: float
) -> Result:
    first = next(iter(values.values()))
    if first.spec is not None:
        held = whole({rank: value for rank, value in values.items() if value.spec is not None}, bound)
        if held.odd or held.why:
            return _odd(what, kind, held, right, bound)
        if held.value is None:
            return Result(what, kind, 0.0)
        if held.value.shape != right.shape:
            return Result(what, kind, float("inf"), (), f"{list(held.value.shape)}, on one card {list(right.shape)}")
        off = apart(held.value, right)
        mesh = held.layout.mesh
        want = {rank: held.layout.local_part(right, mesh.coordinate(rank)) for rank in mesh.process_ids}
        local = (
            {rank: held.local[rank] for rank in want} if not held.layout.pending else {mesh.process_ids[0]: held.value}
        )
        want = want if not held.layout.pending else {mesh.process_ids[0]: right}
        return Result(what, kind, off, _wrong(local, want, bound) if off > bound else (), "", local, want)
    local = {rank: value.local for rank, value in values.items() if rank in parts}
    want = {}
    for rank, x in local.items():
        part = parts[rank](right)
        if part.shape != x.shape:
            why = f"rank {rank} has {list(x.shape)}, its part of one card's is {list(part.shape)}"
            return Result(what, kind, float("inf"), (rank,), why)
        want[rank] = part
    scale = max(scale_of(right), 1e-12)
    off = max((apart(x, want[rank]) * scale_of(x, want[rank]) / scale for rank, x in local.items()), default=0.0)
    return Result(what, kind, off, _wrong(local, want, bound) if off > bound else (), "", local, want)


def _odd(what: str, kind: str, held: Whole, right: Tensor, bound: float) -> Result:
    """Copies that are not equal: those that are not one card's, where that can be told."""
    if held.why or held.layout.pending or held.value is None or held.value.shape != right.shape:
        return Result(what, kind, 1.0, held.odd, held.why or "copies are not equal", held.local)
    want = {rank: held.layout.local_part(right, held.layout.mesh.coordinate(rank)) for rank in held.local}
    off = max(apart(x, want[rank]) for rank, x in held.local.items())
    return Result(what, kind, max(off, 2 * bound), _wrong(held.local, want, bound) or held.odd, "", held.local, want)


def _wrong(local: Mapping[int, Tensor], want: Mapping[int, Tensor], bound: float) -> tuple[int, ...]:
    scale = max((scale_of(x) for x in want.values()), default=1.0)
    return tuple(
        rank for rank, x in local.items() if apart(x, want[rank]) * scale_of(x, want[rank]) > bound * max(scale, 1e-12)
    )


# -- what is returned --------------------------------------------------------------------------------------------------------


def frozen(result: Any) -> Any:
    """What a program returns, as it is now: tensors as ``Value``."""
    return tree_map(lambda x: Value.of(x) if isinstance(x, Tensor) else x, result)


def _returned(ranks: Sequence[Watched], one: Watched, bound: float) -> list[Result]:
    want, tree = tree_flatten(one.returned)
    found = [tree_flatten(watched.returned) for watched in ranks]
    has = [
        rank for rank, (leaves, kind) in enumerate(found) if kind == tree and not (leaves == [None] and want != [None])
    ]
    if not has:
        return (
            []
            if not want
            else [Result("what is returned", "returned", float("inf"), (), "has another form on every rank")]
        )
    results = []
    for i, right in enumerate(want):
        what = "what is returned" + (f" [{i}]" if len(want) > 1 else "")
        leaves = {rank: found[rank][0][i] for rank in has}
        if isinstance(right, Value | SCALARS):
            results.append(_leaf(what, leaves, right, bound))
        elif any(x is not None and x != right for x in leaves.values() if isinstance(x, str)):
            results.append(
                Result(what, "returned", 1.0, tuple(has), f"{next(iter(leaves.values()))!r}, on one card {right!r}")
            )
    return [x for x in results if x is not None]


def _leaf(what: str, leaves: Mapping[int, Any], right: Any, bound: float) -> Result:
    value = right.local if isinstance(right, Value) else torch.tensor(right, dtype=_kind(right))
    values = {
        rank: x if isinstance(x, Value) else Value(torch.tensor(x, dtype=_kind(x)), None)
        for rank, x in leaves.items()
        if isinstance(x, Value | SCALARS)
    }
    if not values:
        return Result(what, "returned", float("inf"), (), "is on no rank")
    if next(iter(values.values())).spec is not None:
        return _result(what, "returned", values, value, {}, bound)
    local = {rank: x.local for rank, x in values.items()}
    parts = {rank: _part_of(x, value, bound) or _all for rank, x in local.items()}
    result = _result(what, "returned", values, value, parts, bound)
    same = len({tuple(x.shape) for x in local.values()}) == 1 and value.is_floating_point()
    if result.off > bound and same and len(local) > 1:  # of a rank's own part of the batch: their mean, or their sum
        stacked = torch.stack([*local.values()])
        for total in (stacked.mean(0), stacked.sum(0)):
            if total.shape == value.shape and apart(total, value) <= bound:
                return Result(what, "returned", apart(total, value))
    return result


def _kind(x: Any) -> torch.dtype | None:
    return torch.float64 if isinstance(x, float) else None
