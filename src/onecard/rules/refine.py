"""refine: a rule whose factors are taken apart where operands have merged dims, so that their parts are factors. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from onecard.place.layout import Layout
from onecard.place.parts import common, is_merged
from onecard.rules.rule import Bound, Shape

Sizes = dict[int, Shape]  # of factors that are taken apart: the sizes of their parts, outermost first


def refine(bound: Bound, layouts: Sequence[Layout]) -> Bound:
    """The rule in terms of the parts of its operands' merged dims; itself if there is nothing to take apart.

    Of operands whose parts cross each other the larger one counts. A factor that must be whole, or in one piece, stays.

    Example:
        >>> from onecard.place.parts import Part
        >>> from onecard.place.mesh import ProcessMesh
        >>> from onecard.rules.rule import Form, bind
        >>> bound = bind(Form("m k, k n -> m n"), ["self", "mat2"], [(12, 5), (5, 7)], [(12, 7)])
        >>> mesh = ProcessMesh([0, 1], ["x"])
        >>> merged = Layout.make(mesh, ((Part(3, ()), Part(4, (0,))), ()))
        >>> fine = refine(bound, [merged, Layout.replicated(mesh, 2)])
        >>> fine.names, fine.sizes, fine.operands[0]
        (('m', 'k', 'n', 'm.1'), (3, 5, 7, 4), ((0, 3), (1,)))
    """
    parts: Sizes = {}
    order = sorted(range(len(layouts)), key=lambda i: -_elements(bound, i))
    for i in order:
        for factors, dim in zip(bound.operands[i], layouts[i].dims, strict=True):
            if is_merged(dim):
                parts |= _fitted(bound, factors, [part.size for part in dim], parts) or {}
    return apart(bound, parts)


def _elements(bound: Bound, operand: int) -> int:
    return prod(bound.sizes[factor] for dim in bound.operands[operand] for factor in dim)


def _fitted(bound: Bound, factors: Sequence[int], sizes: Sequence[int], parts: Sizes) -> Sizes | None:
    """The factors of one dim, taken apart further so that they make up parts of these sizes; None if they cannot."""
    known = [parts.get(factor, (bound.sizes[factor],)) for factor in factors]
    found = common([n for each in known for n in each], sizes)
    if found is None:
        return None
    made, at = {}, 0
    for factor in factors:
        stop = at
        while prod(found[at:stop]) < bound.sizes[factor]:
            stop += 1
        made[factor], at = found[at:stop], stop
    fixed = bound.pieces | (frozenset(factors) - bound.free)
    return None if any(len(each) > 1 and factor in fixed for factor, each in made.items()) else made


def apart(bound: Bound, parts: Mapping[int, Shape]) -> Bound:
    """The rule with factors taken apart. The outermost part of a factor keeps its number; the others follow all numbers."""
    numbers: dict[int, tuple[int, ...]] = {}
    names, sizes = list(bound.names), list(bound.sizes)
    for factor, each in parts.items():
        if len(each) < 2:
            continue
        sizes[factor] = each[0]
        numbers[factor] = (factor, *range(len(sizes), len(sizes) + len(each) - 1))
        sizes += each[1:]
        names += [f"{bound.names[factor]}.{i}" for i in range(1, len(each))]
    if not numbers:
        return bound

    def dims(terms: Sequence[Sequence[tuple[int, ...]]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(tuple(tuple(n for f in dim for n in numbers.get(f, (f,))) for dim in term) for term in terms)

    def all_of(factors: frozenset[int]) -> frozenset[int]:
        return frozenset(n for f in factors for n in numbers.get(f, (f,)))

    return replace(
        bound,
        operands=dims(bound.operands),
        results=dims(bound.results),
        names=tuple(names),
        sizes=tuple(sizes),
        free=all_of(bound.free),
        nonempty=all_of(bound.nonempty),
        even=all_of(bound.even),
        products=tuple(map(all_of, bound.products)),
        parts={bound.names[factor]: each for factor, each in numbers.items()},
        pattern=None,
    )
