"""Values in which there is nothing of the batch: along what they are the same for all rows, by the rules of operators. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onecard.rules.call import Call
from onecard.rules.rule import Bound
from onecard.static.passes import row_places
from onecard.static.passes.dependence import ALIKE, Kind

_OF_PLACES = (
    "slice",
    "split",
    "split_with_sizes",
    "flip",
    "roll",
    "index_select",
)
"""Each of their results is one that they were given, wherever it stood."""
EXPANDS = ("expand", "repeat", "expand_as", "broadcast_to")


def along(call: Call, bound: Bound, kinds: Sequence[Kind | None], r: int, lengths: Collection[int]) -> Kind | None:
    """Along which dims, or factor of one, a result is the same, as its operands are, or as it was expanded."""
    seen, varied = set[int](), set[int]()
    parts: dict[int, set[tuple[int, int]]] = {}  # of a factor, what of it is the same: where, and how long
    for i, (operand, kind) in enumerate(zip(bound.operands, kinds, strict=True)):
        part = kind if kind is not None and kind.how == ALIKE and kind.size else None
        place = None if part is None else row_places.factor_of(bound, i, part)
        mine = None if part is None or place is None else (part.dim, place[0])
        for dim, factors in enumerate(operand):
            seen |= {*factors}
            if kind is None or not kind.alike(dim):
                varied |= {f for f in factors if (dim, f) != mine}
        if place is not None and part is not None:
            parts.setdefault(place[0], set()).add((place[1], part.size))
    kept = {*bound.free}.difference(bound.pieces)  # others go by where they stand, or by how many there are
    varied |= seen - kept if call.schema.functional not in _OF_PLACES else parts.keys() - kept
    whole = {f for f, found in parts.items() if found == {(1, bound.sizes[f])}}
    known = (lambda f: True) if call.schema.functional in EXPANDS else seen.__contains__
    fixed = [
        [f for f in fs if known(f) and f not in varied and (f in whole or f not in parts)] for fs in bound.results[r]
    ]
    # A dim without factors is one that the operator makes, or does not keep apart.
    shape, first = call.results[r].shape, call.operands[0]
    bare = {d for d, n in enumerate(shape) if n == 1}
    if call.schema.functional in (*_OF_PLACES, *EXPANDS):  # what is repeated is one element, or they are all the same
        new = len(shape) - first.dim() if call.schema.functional in EXPANDS else 0
        alike = (d for d, n in enumerate(first.shape) if n == 1 or (kinds[0] is not None and kinds[0].alike(d)))
        bare |= {*range(new), *(d + new for d in alike)}
    dims = frozenset(d for d, fs in enumerate(bound.results[r]) if len(fixed[d]) == len(fs) and (fs or d in bare))
    within = [(d, f, 1, bound.sizes[f]) for d, fs in enumerate(fixed) if d not in dims for f in fs]
    one = {f: found.copy().pop() for f, found in parts.items() if len(found) == 1 and f not in varied | whole}
    within += [(d, f, *one[f]) for d, fs in enumerate(bound.results[r]) for f in fs if f in one]
    if not within:
        if beside := _side_by_side(call, kinds):
            return Kind(ALIKE, *beside, dims=dims)
        tiles = [
            d for d, fs in enumerate(bound.results[r]) if d not in dims and not fs and d >= len(shape) - first.dim()
        ]
        if call.schema.functional == "repeat" and tiles:  # of what follows in a tile each may be another
            times = shape[tiles[0]] // first.shape[tiles[0] - len(shape)]
            return Kind(ALIKE, tiles[0], 1, times, dims=dims)
        return Kind(ALIKE, dims=None if len(dims) == len(shape) else dims) if dims else None
    dim, factor, ahead, size = next((at for at in within if at[3] in lengths), within[0])
    before = row_places.outer_of(bound, bound.results[r][dim], factor) * ahead
    return Kind(ALIKE, dim, before, size, dims=dims)


def _side_by_side(call: Call, kinds: Sequence[Kind | None]) -> tuple[int, int, int] | None:
    """Of parts of one length that are put together, each the same along its length: the dim, how many, how long."""
    if call.schema.functional != "cat" or not call.operands[0].dim():
        return None
    dim = call.values.get("dim", 0) % call.operands[0].dim()
    lengths = {x.shape[dim] for x in call.operands}
    alike = all(kind is not None and kind.how == ALIKE and kind.alike(dim) for kind in kinds)
    return (dim, len(call.operands), lengths.pop()) if alike and len(lengths) == 1 else None
