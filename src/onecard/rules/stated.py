"""What a row says, held against the operator's schema: faults that need no sample to be seen. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from onecard.errors import RuleError
from onecard.place.reductions import REDUCTION, REDUCTIONS
from onecard.rules.call import Call
from onecard.rules.notation import Signature, names_of, parse, parse_linear
from onecard.rules.registry import Row, rows
from onecard.rules.rule import Form

_POINTS = re.compile(r"(Optional\[)?(List\[)?int\]*")


def check_row(name: str, row: Row) -> None:
    """Refuse a row that cannot be right.

    Raises:
        RuleError: which row, what is wrong with it, and what can be stated instead.
    """
    schemas = schemas_of(name)
    for option in ("local", "instead", "results"):
        value = getattr(row, option)
        if value is not None and not callable(value):
            raise RuleError(f"row {name!r}: {option}={value!r} is no function")
    if row.hint is not None:
        _check_names(name, "hint", [row.hint[0]], schemas)
    if isinstance(row.form, Form):
        _check_traits(name, row.form, schemas)
        check_form(name, row.form, row)


def checked_form(name: str, form: Callable[[Call], Form | str | None]) -> Callable[[Call], Form | None]:
    """A row's function, of which each rule that it returns is checked."""

    @wraps(form)
    def rule(call: Call) -> Form | None:
        found = form(call)
        if not isinstance(found, Form | str | None):
            raise RuleError(
                f"row {name!r}: its function returned {found!r}; want the rule's text, a Form, or None for no rule"
            )
        made = Form(found) if isinstance(found, str) else found
        if made is not None:
            check_form(name, made, rows[name])
        return made

    return rule


def check_form(name: str, form: Form, row: Row) -> None:
    """Refuse a rule that cannot be right: ``check_row`` for what a row's function returns.

    Example:
        >>> check_form("mm", Form("m k, k n -> m q"), Row(("mm",), Form("m k, k n -> m q")))
        Traceback (most recent call last):
            ...
        onecard.errors.RuleError: row 'mm', "m k, k n -> m q": factor 'q' of result 0 is in no operand, ...
    """
    signature, schemas = parse(form.text), schemas_of(name)
    _check_counts(name, form, signature, schemas)
    _check_arguments(name, form, signature, schemas)
    _check_reductions(name, form, signature)
    _check_sources(name, form, signature, row)


def _check_traits(name: str, form: Form, schemas: Sequence[Any]) -> None:
    """Traits name factors of the rule and operands of the operator. (A function may name those of its other rules.)"""
    signature = parse(form.text)
    factors = {n for term in (*signature.operands, *signature.results) for n in term.factors}
    for trait in ("whole", "nonempty", "even"):
        missing = sorted(names_of(getattr(form, trait)) - factors)
        if missing:
            raise RuleError(
                f"row {_row(name, form)}: {trait}={getattr(form, trait)!r} names {missing[0]!r}, which is no factor of the "
                f"rule; its factors are {', '.join(sorted(factors - {'_'}))}"
            )
    linear = [operand for term in parse_linear(form.linear) for operand in term]
    _check_names(_row(name, form), "linear", linear, schemas)
    _check_names(_row(name, form), "unread", sorted(names_of(form.unread)), schemas)


def schemas_of(name: str) -> list[Any]:
    """The schemas of the operators that a row is for: every overload, unless it names one."""
    namespace, _, rest = name.rpartition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
    if packet is None:
        return []
    overloads = [overload] if overload else packet.overloads()
    return [getattr(packet, o)._schema for o in overloads if o in packet.overloads()]


def _row(name: str, form: Form) -> str:
    return f'{name!r}, "{form.text}"'


def _check_counts(name: str, form: Form, signature: Signature, schemas: Sequence[Any]) -> None:
    """As many operands and results as some overload may have."""
    operands = [_span(a.type for a in s.arguments if not a.is_out) for s in schemas]
    results = [_span(r.type for r in s.returns) for s in schemas]
    for what, terms, spans in (("operand", signature.operands, operands), ("result", signature.results, results)):
        stated = len(terms)
        if any(term.repeated for term in terms):
            spans = [(0, float("inf")) if high >= stated - 1 else (low, high) for low, high in spans]
        if what == "result":  # a result that nobody asked for is absent
            spans = [(min(low, 1), high) for low, high in spans]
        if spans and not any(low <= stated <= high for low, high in spans):
            counts = " or ".join(sorted({_count(low, high) for low, high in spans}))
            raise RuleError(
                f"row {_row(name, form)}: it states {stated} {what}(s), the operator has {counts} tensor {what}(s): give one "
                f"term for each, in the order of the schema\n  {schemas[0]}"
            )


def _check_arguments(name: str, form: Form, signature: Signature, schemas: Sequence[Any]) -> None:
    """``dim:v`` points with an argument that lists dims."""
    known = {a.name for s in schemas for a in s.arguments if _POINTS.fullmatch(str(a.type))}
    for argument in (a for term in (*signature.operands, *signature.results) for a, _ in term.placed):
        if schemas and argument not in known:
            listed = f"such arguments are {', '.join(sorted(known))}" if known else "it has no such argument"
            raise RuleError(
                f"row {_row(name, form)}: {argument!r} is no argument of the operator that is a dim or a list of them; {listed}"
            )


def _count(low: int, high: float) -> str:
    return str(low) if low == high else f"{low} or more" if high == float("inf") else f"{low} to {high:.0f}"


def _span(types: Any) -> tuple[int, float]:
    """The least and the greatest number of tensors that arguments of these types hold."""
    low, high = 0, 0.0
    for kind in map(str, types):
        if "Tensor" in kind:
            several = "List" in kind or "[" in kind
            optional = kind.startswith("Optional") or "?" in kind or several
            low, high = low + (not optional), high + (float("inf") if several else 1)
    return low, high


def _check_names(row: str, trait: str, names: Sequence[str], schemas: Sequence[Any]) -> None:
    known = {a.name for s in schemas for a in s.arguments if "Tensor" in str(a.type)}
    for name in names:
        if schemas and name not in known:
            raise RuleError(
                f"row {row}: {trait}= names {name!r}, which is no tensor operand; the operands are {', '.join(sorted(known))}"
            )


def _check_reductions(name: str, form: Form, signature: Signature) -> None:
    if isinstance(form.reduce, tuple) and len(form.reduce) != len(signature.results):
        raise RuleError(
            f"row {_row(name, form)}: reduce={form.reduce!r} is for {len(form.reduce)} result(s), the rule states "
            f"{len(signature.results)}"
        )
    given = [form.reduce] if isinstance(form.reduce, str) else [*form.reduce]
    for trait, op in (*(("reduce", op) for op in given), ("keeps", form.keeps)):
        if op and not REDUCTION.fullmatch(op):
            raise RuleError(
                f"row {_row(name, form)}: {trait}={op!r} is no reduction; there are {', '.join(REDUCTIONS)} and norm2.0 and "
                "its like"
            )


def _check_sources(name: str, form: Form, signature: Signature, row: Row) -> None:
    """Each factor of a result comes from an operand, is never cut, is made by the row's hook, or is hinted."""
    if row.local is not None:
        return
    hinted = {row.hint[1]} if row.hint is not None else set()
    allowed = names_of(form.whole) | hinted | {"_"}
    known = {n for term in signature.operands for n in term.factors}
    for number, term in enumerate(signature.results):
        for factor in term.factors:
            if factor not in known | allowed:
                dims = " ".join("_" if n == factor else n for n in term.factors)
                raise RuleError(
                    f"row {_row(name, form)}: factor {factor!r} of result {number} is in no operand, so no rank could know "
                    f"which part of it is its own. If it is an operand's dim, give it that factor's name; if all of it comes "
                    f'of each part, write "_", a dim that is never cut: "{dims}"; if the operator is told its size, adapt '
                    "that with local="
                )
