"""Of an operator: whether it is linear in what it is given, and whether its result has nothing of that. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from onecard.rules.call import Call, Schema
from onecard.rules.registry import bound_of
from onecard.rules.traits import traits_of
from onecard.static.passes.row_numbers import rounds

_FILLED = ("zeros", "ones", "full", "empty", "zero", "fill", "scalar_tensor", "empty_strided")
SUMS = ("add", "sub", "rsub")
_LINEAR = ("nan_to_num", "neg", "to", "contiguous", "expand", "as_strided", "_unsafe_view", "stack", "unsqueeze")


def is_linear(call: Call, operands: Collection[int]) -> bool:
    """Whether an operator is known to be linear in some of its operands together (numbers that are added left aside)."""
    if rounds(call, operands):
        return False
    if call.schema.views or traits_of(call.func).copies or call.schema.functional in _LINEAR:
        return True
    scaled = call.schema.functional in ("mul", "div") and call.values.get("rounding_mode") is None  # integers, too
    if (scaled or call.schema.functional in SUMS) and len(call.operands) == 1:
        return True
    bound = bound_of(call)
    if bound is None or not (bound.terms or bound.moves):
        return False
    in_terms = {i for term in bound.terms for i in term}
    each = all(len({*operands} & {*term}) < 2 for term in bound.terms)
    return bound.moves or (in_terms.issuperset(operands) and each)


def makes_alike(schema: Schema) -> bool:
    """Whether an operator's result is the same for all rows, whatever it is given."""
    return schema.effects or fills(schema)


def lifts(schema: Schema, made: Any) -> bool:
    """Whether a call brings a number into the step: ``torch.tensor(3.0)`` is made out of sight, and lifted."""
    return schema.functional in ("lift_fresh", "lift_fresh_copy") and made.numel() == 1


def fills(schema: Schema) -> bool:
    """Whether an operator writes the same into all elements."""
    return schema.functional.removeprefix("new_").removesuffix("_like") in _FILLED
