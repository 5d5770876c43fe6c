"""What a program leaves: parameters, gradients, buffers and what it returns, of all ranks against one card's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import tree_flatten, tree_map
from onecard.proof.alike import block_in
from onecard.proof.seen import Value, Watched
from onecard.proof.whole import Whole, apart, scale_of, whole
from onecard.proof.words import ranks_of

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
        made: of each rank what has made it: an entry, and which of its values.
    """

    what: str
    kind: str
    off: float
    ranks: tuple[int, ...] = ()
    why: str = ""
    local: Mapping[int, Tensor] | None = None
    right: Mapping[int, Tensor] | None = None
    made: tuple[tuple[int, int, int], ...] = ()


Part = Callable[[Tensor], Tensor]


def compare(ranks: Sequence[Watched], one: Watched, bound: float) -> tuple[list[Result], list[str]]:
    """All results of the ranks beside one card's, in the order in which they arise, and names that have no partner."""
    ranks = _of_one_mesh(ranks, bound)
    theirs, mine = _by_kind([one]), _by_kind(ranks)
    owners = _owners(ranks, mine, theirs, bound)
    results: list[Result] = []
    for (kind, step), tables in sorted(mine.items(), key=lambda item: (item[0][1], _ORDER.index(item[0][0]))):
        right = theirs.get((kind, step), {})
        for known, held in _by_owner(tables, owners).items():
            if kind == "final":  # a stage's parameters are the matter of the ranks that have gradients of them
                trained = {
                    r for t in _gradients(mine) for r in _by_owner(t, owners).get(known, {}) if _here(t, held, r)
                }
                held = {r: each for r, each in held.items() if not trained or r in trained}
            if known in right:
                names = list(dict.fromkeys(name for name, _, _ in held.values()))
                what = _WORDS[kind] + (names[0] if len(names) == 1 else known)
                what += f" in step {step + 1}" if kind == "gradient" else ""
                values = {rank: value for rank, (_, value, _) in held.items()}
                parts = {rank: part for rank, (_, _, part) in held.items()}
                result = _result(what, kind, values, right[known][0].local, parts, bound)
                results.append(replace(result, made=_made(values)))
    results += _returned(ranks, one, bound)
    unpaired = {
        name for name, held in mine.get(("initial", 0), {}).items() if all((r, name) not in owners for r in held)
    }
    return results, sorted(unpaired)


def _made(values: Mapping[int, Value]) -> tuple[tuple[int, int, int], ...]:
    return tuple((rank, *value.made) for rank, value in values.items() if value.made is not None)


_ORDER = ("initial", "gradient", "final", "buffer")
BEGIN = "the initial value of "
_WORDS = {"initial": BEGIN, "gradient": "the gradient of ", "final": "", "buffer": "the buffer "}
Tables = dict[str, dict[int, Value]]
Owners = dict[tuple[int, str], tuple[str, Part]]


def _by_kind(ranks: Sequence[Watched]) -> dict[tuple[str, int], Tables]:
    found: dict[tuple[str, int], Tables] = defaultdict(dict)
    for rank, watched in enumerate(ranks):
        for held in watched.held:
            found[held.kind, held.step if held.kind == "gradient" else 0].setdefault(held.name, {})[rank] = held.value
    return found


def _of_one_mesh(ranks: Sequence[Watched], bound: float) -> list[Watched]:
    """What lies on several meshes, each of which has its own part of the whole, as experts do: put together on each of them."""
    found: dict[tuple[str, str, int], dict[int, Value]] = defaultdict(dict)
    for rank, watched in enumerate(ranks):
        for held in watched.held:
            found[held.kind, held.name, held.step][rank] = held.value
    made: dict[tuple[int, str, str, int], Value] = {}
    for key, values in found.items():
        meshes = {value.spec.layout.mesh for value in values.values() if value.spec is not None}
        for mesh in meshes if len(meshes) > 1 else ():
            mine = {
                r: value for r, value in values.items() if value.spec is not None and value.spec.layout.mesh is mesh
            }
            each = whole(mine, bound)
            if each.value is not None and not each.odd:
                made |= {(rank, *key): replace(value, local=each.value, spec=None) for rank, value in mine.items()}
    return [
        replace(watched, held=[replace(x, value=made.get((r, x.kind, x.name, x.step), x.value)) for x in watched.held])
        for r, watched in enumerate(ranks)
    ]  # fmt: skip


def _gradients(mine: Mapping[tuple[str, int], Tables]) -> list[Tables]:
    return [tables for (kind, _), tables in mine.items() if kind == "gradient"]


def _here(tables: Tables, held: Mapping[int, tuple[str, Value, Part]], rank: int) -> bool:
    value = tables.get(held[rank][0], {}).get(rank) if rank in held else None
    return value is not None and (value.spec is None or value.spec.here)


def _by_owner(tables: Tables, owners: Owners) -> dict[str, dict[int, tuple[str, Value, Part]]]:
    """The ranks' values by the name that they have on one card."""
    found: dict[str, dict[int, tuple[str, Value, Part]]] = {}
    for name, values in tables.items():
        for rank, value in values.items():
            if (rank, name) in owners:
                known, part = owners[rank, name]
                found.setdefault(known, {})[rank] = name, value, part
    return found


def _owners(
    ranks: Sequence[Watched],
    mine: Mapping[tuple[str, int], Tables],
    theirs: Mapping[tuple[str, int], Tables],
    bound: float,
) -> Owners:
    """Whose part each rank's parameter is on one card: by name, else by its first value.

    Stages have names of their own: of several with the same first value, that which follows what came before is meant.
    """
    found: Owners = {}
    alone = {name: values[0].local for name, values in theirs.get(("initial", 0), {}).items()}
    listed = [*alone]
    for rank, watched in enumerate(ranks):
        last, named = -1, {held.name for held in watched.held if held.kind == "initial"} == {*alone}
        for held in watched.held:
            if held.kind != "initial" or held.value.spec is not None:
                continue
            after, same = listed.index(held.name) if named else last + 1, [held.name] if held.name in alone else []
            others = [] if held.sure else [*listed[after + 1 :], *listed[:after]]
            for other in [*(same if held.sure else listed[after : after + 1]), *same, *others]:
                part = _shard_of(held.value, alone[other], bound) or _part_of(held.value.local, alone[other], bound)
                if part is not None:
                    found[rank, held.name], last = (other, part), listed.index(other)
                    break
    for name, values in mine.get(("initial", 0), {}).items():
        laid = {rank: value for rank, value in values.items() if value.spec is not None}
        for other in [name, *alone] if name in alone else listed if laid else []:
            joined = whole(laid, bound).value if laid else None
            if joined is not None and joined.shape == alone[other].shape and apart(joined, alone[other]) <= bound:
                found |= {(rank, name): (other, _all) for rank in laid}
                break
        for rank in values if name in alone else ():  # another first value: compared as it is
            found.setdefault((rank, name), (name, _all))
    modules = {(rank, _module(name)): _module(known) for (rank, name), (known, _) in found.items()}
    for kind in ("buffer", "final"):
        for name, values in mine.get((kind, 0), {}).items():
            for rank in values:
                module = modules.get((rank, _module(name)), _module(name))
                if (known := module + name[len(_module(name)) :]) in theirs.get((kind, 0), {}):
                    found.setdefault((rank, name), (known, _all))
    return found


def _module(name: str) -> str:
    """The module of a parameter or buffer: all of its name but the last word."""
    return name[: len(name) - len(name.split(".")[-1].split(" ")[-1])]


def _all(x: Tensor) -> Tensor:
    return x


def _shard_of(value: Value, right: Tensor, bound: float) -> Part | None:
    """The part that a layer says it is, which may be several pieces of the whole."""
    shard = value.shard
    fits = shard is not None and shard.shape == tuple(right.shape) and apart(shard.take(right), value.local) <= bound
    return shard.take if shard is not None and fits else None


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
    if len({value.spec.layout.mesh for value in values.values() if value.spec is not None}) > 1:
        values = {rank: _alone(value) for rank, value in values.items()}
    first = next(iter(values.values()))
    if first.spec is not None:
        held = whole({rank: value for rank, value in values.items() if value.spec is not None}, bound)
        if held.odd or held.why:
            return _odd(what, kind, held, right, bound)
        layout, mesh = held.layout, held.layout.mesh
        if held.value is None and layout.pending:  # summands of which some ranks have none
            return Result(what, kind, 0.0)
        if tuple(first.spec.shape) != tuple(right.shape):
            return Result(what, kind, float("inf"), (), f"{list(first.spec.shape)}, on one card {list(right.shape)}")
        want = {rank: layout.local_part(right, mesh.coordinate(rank)) for rank in held.local}
        local: dict[int, Tensor] = dict(held.local)
        if layout.pending and held.value is not None:
            local, want = {min(held.local): held.value}, {min(held.local): right}
        off = _furthest(local, want, right)
        return Result(what, kind, off, _wrong(local, want, bound) if off > bound else (), "", local, want)
    local = {rank: value.local for rank, value in values.items() if rank in parts}
    want = {rank: parts[rank](right) for rank in local}
    odd = tuple(rank for rank, x in local.items() if want[rank].shape != x.shape)
    if odd:
        has = f"{ranks_of(odd)} {'has' if len(odd) == 1 else 'have'} {list(local[odd[0]].shape)}"
        why = f"{has}, which is no part of one card's {list(want[odd[0]].shape)}"
        return Result(what, kind, float("inf"), odd, why)
    off = _furthest(local, want, right)
    return Result(what, kind, off, _wrong(local, want, bound) if off > bound else (), "", local, want)


def _furthest(local: Mapping[int, Tensor], want: Mapping[int, Tensor], right: Tensor) -> float:
    """How far the ranks' parts are from what they should be, relatively to the largest number of the whole."""
    scale = max(scale_of(right), 1e-12)
    return max((apart(x, want[rank]) * scale_of(x, want[rank]) / scale for rank, x in local.items()), default=0.0)


def _alone(value: Value) -> Value:
    """A value that lies on a mesh of this rank alone: a plain one, whose part of the whole another rank's mesh does not say."""
    return replace(value, spec=None) if value.spec is not None and value.spec.layout.mesh.size == 1 else value


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


def frozen(result: Any, value: Callable[[Any], Any]) -> Any:
    """What a program returns, as it is now: tensors as ``Value``."""
    return tree_map(value, result)


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
    value = right.local if isinstance(right, Value) else torch.tensor(right, dtype=_kind(right), device="cpu")
    values = {
        rank: x if isinstance(x, Value) else Value(torch.tensor(x, dtype=_kind(x), device="cpu"), None)
        for rank, x in leaves.items()
        if isinstance(x, Value | SCALARS)
    }
    if not values:
        return Result(what, "returned", float("inf"), (), "is on no rank")
    return replace(_of_leaf(what, values, value, bound), made=_made(values))


def _of_leaf(what: str, values: Mapping[int, Value], value: Tensor, bound: float) -> Result:
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
