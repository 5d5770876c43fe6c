"""Decisions of the same calls in many sizes: what is known of a pattern is what would be decided anew."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from math import prod

from onecard import ProcessMesh
from onecard.moves.resharding import seconds
from onecard.place.layout import Layout
from onecard.rules.decide import decide
from onecard.rules.notation import parse
from onecard.rules.rule import Bound, Form, bind

GRID = ProcessMesh([[0, 1], [2, 3], [4, 5]], ["dp", "tp"])
FORMS = (
    Form("m k, k n -> m n", linear="a * b"),
    Form("n, m k, k n -> m n", linear="a + b * c"),
    Form("m n, m n -> m n", linear="a + b"),
    Form("m c -> m c", whole="c"),
    Form("b m k, b k n -> b m n", linear="a * b"),
    Form("m n -> m, m", reduce=("max", "sum")),
    Form("m n -> n m", moves=True),
    Form("m k, k -> m", nonempty="m", linear="a * b"),
    Form("v c, m -> m c", even="m", whole="v"),
    Form("m n -> (m n)", moves=True),
    Form("b (m n), b -> b m n", linear="a"),
)
SIZES = (0, 1, 2, 3, 4, 6, 7, 64, 4096)
Shapes = list[tuple[int, ...]]


def shapes_of(r: random.Random, form: Form) -> tuple[Shapes, Shapes]:
    """Sizes for the factors; now and then a dim of an operand broadcasts."""
    signature = parse(form.text)
    size = {name: r.choice(SIZES) for name in "bckmnv"}
    operands = [
        tuple(1 if len(dim) == 1 and r.random() < 0.08 else prod(size[n] for n in dim) for dim in term.dims)
        for term in signature.operands
    ]
    terms = zip(signature.operands, operands, strict=True)
    there = {n for term, shape in terms for dim, s in zip(term.dims, shape, strict=True) if s != 1 for n in dim}
    results = [
        tuple(prod(size[n] if n in there else 1 for n in dim) for dim in term.dims) for term in signature.results
    ]
    return operands, results


def layout_of(r: random.Random, ndim: int) -> Layout:
    dims: list[list[int]] = [[] for _ in range(ndim)]
    pending = []
    for axis in r.sample(range(2), 2):
        use = r.choice(["sum", None, *range(ndim), *range(ndim)])
        if use == "sum":
            pending.append((axis, "sum"))
        elif isinstance(use, int):
            dims[use].append(axis)
    return Layout.make(GRID, tuple(map(tuple, dims)), tuple(sorted(pending)))


def compare(r: random.Random, form: Form) -> str:
    """One call, decided with what is known of its pattern and without."""
    operands, results = shapes_of(r, form)
    bound = bind(form, list("abc"[: len(operands)]), operands, results)
    layouts = [layout_of(r, len(shape)) for shape in operands]
    hinted = {r.randrange(2): r.choice(sorted(bound.free))} if bound.free and r.random() < 0.3 else {}

    def decided(rule: Bound) -> tuple[object, ...] | None:
        found = decide(rule, layouts, [(s, 4) for s in operands], [(s, 4) for s in results], seconds, hinted=hinted)
        return found and (found.operands, found.results, found.uses, found.seconds, found.bound is rule)

    assert decided(bound) == decided(replace(bound, pattern=None)), (form.text, operands, layouts, hinted)
    return "by sizes" if bound.pattern is None else "known"


def test_a_known_pattern_is_decided_as_if_it_were_new():
    r, seen = random.Random(0), Counter()
    for _ in range(600):
        form = r.choice(FORMS)
        seen[compare(r, form), form.text] += 1
    kinds = Counter(kind for kind, _ in seen.elements())
    assert min(kinds.values()) > 100, kinds
    assert {text for kind, text in seen if kind == "known"} >= {form.text for form in FORMS[:7]}
    assert {text for kind, text in seen if kind == "by sizes"} >= {form.text for form in FORMS[7:]}
