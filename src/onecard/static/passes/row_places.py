"""The numbers of a batch's rows: where they lie once they are repeated, and what is chosen and added by them.

``x[token]`` and ``total.index_add(0, token, made)`` keep rows apart where ``token`` names, for each entry, the row that it is of.
Such are ``torch.arange(rows)``, and what only repeats and moves it: the tokens of a router's choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from onecard._torch.names import tree_map
from onecard.rules.call import Call
from onecard.rules.registry import find
from onecard.rules.rule import Bound
from onecard.static.passes.dependence import ALIKE, ORDER, PLACES, ROWS, Kind, told
from onecard.static.passes.row_numbers import is_real

_MOVES = (
    "unsqueeze", "squeeze", "expand", "repeat", "clone", "contiguous", "view", "_unsafe_view", "reshape", "alias", "detach", "t",
    "transpose", "permute", "_to_copy",
)  # fmt: skip
Known = Sequence[Kind | None]


def moved(call: Call, kinds: Known) -> Kind | None:
    """Numbers of rows that are only moved or repeated."""
    kind = kinds[0] if len(kinds) == 1 else None
    row = find(call.func)
    if kind is None or kind.how not in (PLACES, ORDER) or call.schema.functional not in _MOVES or row is None:
        return None
    if call.schema.functional == "repeat":
        more = len(call.repeats) - call.self.dim()
        return replace(kind, dim=kind.dim + more, before=kind.before * call.repeats[kind.dim + more])
    bound = row.bound_for(call)
    place = None if bound is None or call.results[0].is_floating_point() else factor_of(bound, 0, kind)
    if bound is None or place is None:
        return None
    factor, within = place
    for dim, factors in enumerate(bound.results[0]):
        if factor in factors:
            return replace(kind, dim=dim, before=within * outer_of(bound, factors, factor))
    return None


def picked(call: Call, given: Sequence[Tensor], kinds: Known, rows: int) -> Kind | None:
    """``x[arange(rows), y]``, ``x[token]``: of each row what it says itself."""
    (x, *indices), (kind, *others) = given, kinds
    by_dim = call.schema.functional == "index_select"
    dim = call.dim % x.dim() if by_dim else 0
    at = [call.values["index"]] if by_dim else call.values["indices"]
    if kind is None or kind.how != ROWS or kind.dim != dim or kind.size != rows or x.shape[dim] != rows:
        return None
    if not isinstance(at[0], Tensor) or not others or others[0] is None or others[0].how != PLACES:
        return None
    place = _from_behind(indices[0], others[0])
    if place is None:
        return None
    for index, other in zip(indices, others, strict=True):
        if _from_behind(index, other) != place and not _alike_at(index, other, place[0]):
            return None
    found = others[0]
    wide = max(index.dim() for index in indices) - indices[0].dim()
    return Kind(ROWS, dim + found.dim + wide, found.before, rows, kind.degree, "", kind.learns)


def _from_behind(index: Tensor, kind: Kind | None) -> tuple[int, int, int] | None:
    """Where the rows lie in an index, as it is expanded with others."""
    if kind is None or kind.how not in (ROWS, PLACES) or index.dtype == torch.bool:
        return None
    return kind.dim - index.dim(), kind.before, index.shape[kind.dim]


def _alike_at(index: Tensor, kind: Kind | None, dim: int) -> bool:
    """Whether an index says the same for all rows: columns, as masks name them beside rows (``mask[rows, columns]``)."""
    apart = kind is None or kind.how == ALIKE
    return apart and index.dtype != torch.bool and (index.dim() < -dim or index.shape[dim] == 1)


def added(call: Call, given: Sequence[Tensor], kinds: Known, rows: int) -> Kind | None:
    """``total.index_add(0, token, made)``: into each row what is its own."""
    if len(given) != 3:
        return None
    (total, index, source), (into, places, kind) = given, kinds
    dim = call.dim % max(total.dim(), 1)
    if kind is None or kind.how != ROWS or kind.dim != dim or kind.degree or total.shape[dim] != rows:
        return None
    of_rows = into is not None and (into.how, into.dim, into.size, into.degree) == (ROWS, dim, rows, 0)
    if not of_rows and (into is None or not into.alike(dim)):
        return None
    along = dim if index.dim() == source.dim() > 1 else 0
    same = places is not None and (places.how, places.dim, places.before) == (PLACES, along, kind.before)
    if not same or kind.size != rows or index.shape[along] != source.shape[dim]:
        return None
    return Kind(ROWS, dim, 1, rows)


def bagged(call: Call, given: Sequence[Tensor], kinds: Known, rows: int) -> Kind | None:
    """``embedding_bag`` of rows that each have as many entries: a bag is a row."""
    (_, indices, offsets, *weights), (table, kind, _, *others) = given, kinds
    ours = [kind, *others[: len(weights)]]
    if any(k is None or (k.how, k.dim, k.before, k.size, k.degree) != (ROWS, 0, 1, rows, 0) for k in ours) or told(
        table
    ):
        return None
    begins = torch.arange(rows, device="cpu") * (indices.shape[0] // rows)
    each = is_real(offsets) and torch.equal(offsets.to(begins), begins)
    return Kind(ROWS, size=rows) if each and not call.values.get("include_last_offset") else None


USES = {
    "index": picked, "index_select": picked, "index_add": added, "scatter_add": added, "_embedding_bag": bagged,
    "_embedding_bag_forward_only": bagged,
}  # fmt: skip


def factor_of(bound: Bound, operand: int, kind: Kind) -> tuple[int, int] | None:
    """The factor in which the rows of an operand lie, and how many combinations are ahead of them within it."""
    dims, outer = bound.operands[operand], 1
    for factor in dims[kind.dim] if kind.dim < len(dims) else ():
        size = bound.sizes[factor]
        within, rest = divmod(kind.before, outer)
        if not rest and size % (within * kind.size or 1) == 0 and within < size:
            return factor, within
        outer *= size
    return None


def of_two_rows(call: Call, kinds: Known, filled: Sequence[bool]) -> Call | None:
    """A call that a microbatch of one row makes, as one of two rows makes it: to a rule a dim of one is no factor.

    ``filled``: of each operand, whether it may have as many rows. None if two rows cannot make it.
    """
    if not any(filled):
        return _of_two_rows(call, kinds, filled)
    found = _of_two_rows(call, kinds, [False] * len(kinds))  # of one row, which goes with any number
    return found if found is not None else _of_two_rows(call, kinds, filled)


def _of_two_rows(call: Call, kinds: Known, filled: Sequence[bool]) -> Call | None:
    row = next(k for k in kinds if k is not None)
    length = next(x.shape[k.dim] for x, k in zip(call.operands, kinds, strict=True) if k is not None)
    behind = next(k.dim - x.dim() for x, k in zip(call.operands, kinds, strict=True) if k is not None)
    longer = dict[int, Tensor]()
    for x, kind, may in zip(call.operands, kinds, filled, strict=True):
        dim = kind.dim if kind is not None else behind + x.dim()
        if kind is not None or (may and dim >= 0 and x.shape[dim] == length):
            longer[id(x)] = x.new_empty([2 * n if d == dim else n for d, n in enumerate(x.shape)])
    args, kwargs = tree_map(lambda x: longer.get(id(x), x) if isinstance(x, Tensor) else x, call.given)
    if call.schema.functional in _SIZED:
        if (size := _longer_size(call, row)) is None:
            return None
        args = (args[0], size, *args[2:])
    made = Call(call.func, args, {k: v for k, v in kwargs.items() if k not in _PLACED})
    try:
        made.results = made.meta_results()
    except (RuntimeError, NotImplementedError, IndexError, ValueError):
        return None
    return made if made.results[0].numel() == 2 * call.results[0].numel() else None


_SIZED = ("view", "_unsafe_view", "reshape", "expand")
_PLACED = ("device", "layout", "pin_memory")


def _longer_size(call: Call, kind: Kind) -> list[int] | None:
    """The size that a view asks for, of two rows: a row ahead of all other dims stays there.

    Two dims of one at the beginning are not told apart.
    """
    before, now = [*call.self.shape], [*call.results[0].shape]
    dim = len(now) - len(before) + kind.dim
    if call.schema.functional != "expand":
        if kind.dim or kind.before != 1 or not now or (now != before and now[:2] == [1, 1]):
            return None
        dim = 0
    elif now[dim] != before[kind.dim]:
        return None
    now[dim] *= 2
    return now


def outer_of(bound: Bound, factors: Sequence[int], factor: int) -> int:
    """How many combinations of other factors are ahead of one in a dim."""
    found = 1
    for other in factors[: factors.index(factor)]:
        found *= bound.sizes[other]
    return found
