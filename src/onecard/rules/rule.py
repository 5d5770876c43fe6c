"""A rule with its traits (Form), and bound to the shapes of one call (Bound). Pure: no mesh, no layouts.

``Form`` is what a row of the table states. ``bind`` gives each factor a number and a size, so that ``decide``
works on small integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from onecard.errors import RuleError
from onecard.rules.notation import ELLIPSIS, WHOLE, Signature, Term, names_of, parse, parse_linear

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Form:
    """One operator's sharding rule: its signature and what is known of its factors and operands.

    Attributes:
        text: the signature, e.g. ``"m k, k n -> m n"``.
        whole: factors that must not be cut (``"k"``, or ``"..."``).
        linear: where a pending sum may enter, as a sum of products of the schema's names (``"self + mat1 * mat2"``).
        moves: the operator only moves elements, so a pending operand of any kind passes through it (all operands alike).
        keeps: the reduction that a pending operand may be under and its results then are too (a maximum of maxima).
        reduce: what joins the results when a factor is missing from them: one operator of ``Partial``, or one a result.
        nonempty: factors of which every rank must have at least one element.
        even: factors that are cut only if all shards have equal sizes.
        unread: operands of which only shape and dtype matter (``zeros_like``): nothing is sent for them.
        sizes: sizes of factors that the shapes alone do not tell.
    """

    text: str
    whole: str = ""
    linear: str = ""
    moves: bool = False
    keeps: str = ""
    reduce: str | tuple[str, ...] = "sum"
    nonempty: str = ""
    even: str = ""
    unread: str = ""
    sizes: dict[str, int] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Bound:
    """A form bound to shapes: factors are numbers, with sizes; absent operands are gone.

    Attributes:
        operands, results: for each, for each dim, its factors from outer to inner.
        names, sizes: of each factor.
        free: factors that may be cut.
        terms: the linear expression as operand numbers; empty if nothing pending may enter.
        sources: for each result, the operands that it depends on.
        reduce: for each result, what joins it over a factor that it lacks.
        moves, nonempty, even, unread, keeps: as in ``Form``.
        products: for each product that is summed over a factor, the factors that it runs over; ``stated``: multiply-adds, where
            the row says them.
        picked: operands of which as much is read as the call gives; ``views``: it only names memory, and reads none.
        pieces: factors that are cut in one piece only, because a hook needs positions along them (see ``Row.positions``).
        pattern: what it shares with bounds of other sizes; None where sizes decide more than what layouts cost.
        parts: by its name, the numbers of each factor that is taken apart (see ``refine``).
    """

    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    free: frozenset[int]
    terms: tuple[tuple[int, ...], ...]
    sources: tuple[frozenset[int], ...]
    reduce: tuple[str, ...]
    moves: bool
    nonempty: frozenset[int]
    even: frozenset[int]
    unread: frozenset[int] = frozenset()
    keeps: str = ""
    products: tuple[frozenset[int], ...] = ()
    stated: int | None = None
    picked: frozenset[int] = frozenset()
    views: bool = False
    pieces: frozenset[int] = frozenset()
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False)
    pattern: Pattern | None = field(default=None, compare=False)

    @property
    def macs(self) -> int:
        """Multiply-adds of the call: what the row states, else those of the products that the factors tell."""
        if self.stated is not None:
            return self.stated
        return sum(prod(self.sizes[factor] for factor in factors) for factors in self.products)

    def factor(self, name: str) -> int | None:
        """The number of a factor by its name; None if it fell away (size one, or its operand is absent)."""
        if name in self.parts:
            raise RuleError(
                f"factor {name!r} is in parts here; a hook that needs its positions says positions={name!r}"
            )
        return self.names.index(name) if name in self.names else None

    def factors(self, name: str) -> tuple[int, ...]:
        """The numbers of a factor's parts, outermost first; () if it fell away."""
        return self.parts.get(name) or tuple(i for i, known in enumerate(self.names) if known == name)


def bind(
    form: Form, operand_names: Sequence[str], operands: Sequence[Shape], results: Sequence[Shape], positions: str = ""
) -> Bound:
    """Bind a form to the shapes of one call.

    Args:
        form: the rule.
        operand_names: schema names of the tensor operands that are present (in a list: the list's name).
        operands, results: their shapes.
        positions: factors that are cut in one piece only; "*": all.

    Raises:
        RuleError: the rule does not fit the shapes.

    Example:
        >>> b = bind(Form("m k, k n -> m n"), ["self", "mat2"], [(4, 6), (6, 8)], [(4, 8)])
        >>> dict(zip(b.names, b.sizes))
        {'m': 4, 'k': 6, 'n': 8}
    """
    signature = parse(form.text)
    if len(signature.operands) != len(operands) or len(signature.results) != len(results):
        raise RuleError(
            f"rule {form.text!r} states {len(signature.operands)} operand(s) and {len(signature.results)} result(s), "
            f"the call has {len(operands)} {list(operand_names)} and {len(results)}"
        )
    shapes = [*operands, *results]
    sizes = _solve(form, _spread(signature, shapes, form.text), shapes)
    names = tuple(name for name, size in sizes.items() if size != 1)
    ones = tuple(tuple(n == 1 for n in shape) for shape in shapes)
    like = _like(form, tuple(operand_names), names, ones, positions)
    return replace(like, sizes=tuple(sizes[name] for name in names))


@lru_cache(4096)
def _like(
    form: Form,
    operand_names: tuple[str, ...],
    names: tuple[str, ...],
    ones: tuple[tuple[bool, ...], ...],
    positions: str,
) -> Bound:
    """What of a bound does not depend on sizes, but on which are one."""
    signature, split = parse(form.text), len(operand_names)
    number = {name: i for i, name in enumerate(names)}
    spread = _spread(signature, ones, form.text)
    numbered = tuple(_number(dims, one, number) for dims, one in zip(spread, ones, strict=True))
    results = len(numbered) - split
    terms, sources = _terms(form, operand_names), _sources(signature, split)
    made = Bound(
        operands=numbered[:split],
        results=numbered[split:],
        names=names,
        sizes=(0,) * len(names),  # not known here
        free=frozenset(number.values()) - _numbers(form.whole, number),
        terms=terms,
        sources=sources,
        products=_products(spread, split, terms, sources, number),
        reduce=(form.reduce,) * results if isinstance(form.reduce, str) else form.reduce,
        moves=form.moves,
        nonempty=_numbers(form.nonempty, number),
        even=_numbers(form.even, number),
        unread=frozenset(i for i, name in enumerate(operand_names) if name in names_of(form.unread)),
        keeps=form.keeps,
        pieces=frozenset(number.values()) if positions == "*" else _numbers(positions, number),
    )
    composite = any(len(dim) > 1 for dims in numbered for dim in dims)
    return made if composite or made.nonempty or made.even else replace(made, pattern=Pattern(made))


class Pattern:
    """What bounds have in common that differ in their sizes only: ``bound`` is one of them, without. Compared by identity."""

    __slots__ = ("bound",)

    def __init__(self, bound: Bound) -> None:
        self.bound = bound


def _spread(signature: Signature, shapes: Sequence[Sequence[Any]], text: str) -> list[list[tuple[str, ...]]]:
    """The dims of each term with ``...`` spelled out."""
    terms = [*signature.operands, *signature.results]
    rank = max((len(s) - len(t.dims) + 1 for t, s in zip(terms, shapes, strict=True) if ELLIPSIS in t.dims), default=0)
    return [_spread_term(term, shape, rank, text) for term, shape in zip(terms, shapes, strict=True)]


def _spread_term(term: Term, shape: Sequence[Any], rank: int, text: str) -> list[tuple[str, ...]]:
    """``.0`` is the outermost of the broadcast dims."""
    dims = list(term.dims)
    if ELLIPSIS in dims:
        at, count = dims.index(ELLIPSIS), len(shape) - len(dims) + 1
        if count >= 0:
            dims[at : at + 1] = [(f".{rank - count + i}",) for i in range(count)]
    if len(dims) != len(shape):
        raise RuleError(f"rule {text!r}: a term of {len(dims)} dim(s) meets a tensor of shape {list(shape)}")
    return dims


def _solve(form: Form, spread: list[list[tuple[str, ...]]], shapes: Sequence[Shape]) -> dict[str, int]:
    """The size of each factor. A dim of size one may stand for any single factor (it broadcasts)."""
    sizes: dict[str, int] = dict.fromkeys((n for dims in spread for dim in dims for n in dim if n != "_"), 1)
    sizes |= form.sizes
    known = set(form.sizes)
    open_dims = []
    for dims, shape in zip(spread, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) > 1:
                open_dims.append((dim, size))
            elif dim != WHOLE and size != 1:
                # A dim of size one before this one may have been a broadcast one.
                if dim[0] in known and sizes[dim[0]] not in (1, size):
                    raise RuleError(f"rule {form.text!r}: factor {dim[0]!r} is both {sizes[dim[0]]} and {size}")
                sizes[dim[0]] = size
                known.add(dim[0])
            elif dim != WHOLE:
                known.add(dim[0])
    for dim, size in open_dims:
        unknown = [name for name in dim if name not in known]
        rest = prod(sizes[name] for name in dim if name in known)
        if len(unknown) == 1 and rest and size % rest == 0:
            sizes[unknown[0]] = size // rest
            known.add(unknown[0])
        elif unknown or rest != size:
            raise RuleError(f"rule {form.text!r}: cannot split a dim of {size} into {dim} with {sizes}")
    return sizes


def _number(dims: list[tuple[str, ...]], ones: Sequence[bool], number: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    """The numbers of the factors; a dim of size one may broadcast, and has none."""
    return tuple(
        () if len(dim) == 1 and (dim == WHOLE or one) else tuple(number[n] for n in dim if n in number)
        for dim, one in zip(dims, ones, strict=True)
    )


def _numbers(text: str, number: dict[str, int]) -> frozenset[int]:
    listed = names_of(text)
    return frozenset(i for name, i in number.items() if name in listed or ("..." in listed and name[0] == "."))


def _terms(form: Form, operand_names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    terms = []
    for term in parse_linear(form.linear):
        places = tuple(i for name in term for i, present in enumerate(operand_names) if present == name)
        if places:
            terms.append(places)
    return tuple(terms)


def _sources(signature: Signature, operands: int) -> tuple[frozenset[int], ...]:
    everything = frozenset(range(operands))
    return tuple(everything if term.sources is None else frozenset(term.sources) for term in signature.results)


def _products(
    spread: Sequence[Sequence[tuple[str, ...]]], split: int, terms: Any, sources: Any, number: dict[str, int]
) -> tuple[frozenset[int], ...]:
    """For each result the factors over which operands are multiplied, if that is summed over one that they have in common."""
    names = [frozenset(name for dim in dims for name in dim if name != "_") for dims in spread]
    found = []
    for r, result in enumerate(names[split:]):
        for term in terms:
            given = [names[i] for i in term if i in sources[r]]
            if any((one & other) - result for i, one in enumerate(given) for other in given[:i]):
                found.append(frozenset(number[name] for name in result.union(*given) if name in number))
    return tuple(found)
