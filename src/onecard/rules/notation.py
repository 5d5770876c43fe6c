"""The notation of a sharding rule: text -> Signature. ``"m k, k n -> m n"`` names the factors of operands and results.

Grammar::

    signature := terms "->" terms          operands, then results, in the order of the operator's schema
    terms     := term ("," term)*
    term      := dim* ["@" number+]        no dims: a scalar; "@0 2": this result is computed from operands 0 and 2 only
    dim       := factor | "(" factor+ ")" | "..." | "_"

``(a b)`` is one dim made of two factors, ``a`` the outer one. ``...`` stands for leading dims that broadcast as numpy's
do. ``_`` is a dim of its own that is never cut.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from onecard.errors import RuleError

Dim = tuple[str, ...]
ELLIPSIS: Dim = ("...",)
WHOLE: Dim = ("_",)
_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z]\w*|_|\(|\)|@[ \d]*)")


@dataclass(frozen=True, slots=True)
class Term:
    """The dims of one operand or result; ``sources`` are the operands that a result depends on (None: all)."""

    dims: tuple[Dim, ...]
    sources: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Signature:
    """A rule as read: one term for each operand and each result."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]


@lru_cache(4096)
def parse(text: str) -> Signature:
    """Read a rule.

    Raises:
        RuleError: with a caret under the fault.

    Example:
        >>> parse("m k, k n -> m n").results
        (Term(dims=(('m',), ('n',)), sources=None),)
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise _fault(text, len(text), "expected '->' between operands and results")
    if "->" in right:
        raise _fault(text, len(left) + 2 + right.index("->"), "a second '->'")
    operands = _terms(text, left, 0, None)
    results = _terms(text, right, len(left) + 2, len(operands))
    known = {name for term in operands for dim in term.dims for name in dim}
    for term in results:
        for name in (name for dim in term.dims for name in dim):
            if name == "..." and name not in known:
                raise _fault(text, text.rindex(name), "'...' in a result but in no operand")
    return Signature(operands, results)


def _terms(text: str, part: str, start: int, sources: int | None) -> tuple[Term, ...]:
    """The terms of one side; ``sources``: how many operands there are for '@' to name (None: it does not belong here)."""
    if not part.strip():
        # "-> m" has no operand and "m ->" no result; a lone scalar operand is written "()" .
        return ()
    terms, at = [], start
    for piece in part.split(","):
        terms.append(_term(text, piece, at, sources))
        at += len(piece) + 1
    return tuple(terms)


def _term(text: str, piece: str, start: int, sources: int | None) -> Term:
    dims: list[Dim] = []
    named: tuple[int, ...] | None = None
    group: list[str] | None = None
    seen: set[str] = set()
    at = 0
    while piece[at:].strip():
        match = _TOKEN.match(piece, at)
        where = start + at + len(piece[at:]) - len(piece[at:].lstrip())
        if match is None:
            raise _fault(text, where, "expected a factor name, '(', '...', '_' or '@'")
        token, at = match.group(1), match.end()
        if token == "(":
            if group is not None:
                raise _fault(text, where, "'(' inside '('")
            group = []
        elif token == ")":
            if group is None:
                raise _fault(text, where, "')' without '('")
            if group:
                dims.append(tuple(group))
            group = None
        elif token.startswith("@"):
            named = _sources(text, token, where, sources)
        else:
            if group is not None and token in ("...", "_"):
                raise _fault(text, where, f"'{token}' inside '( )'")
            if token in seen:
                raise _fault(text, where, f"{'' if token == '...' else 'factor '}'{token}' more than once in a term")
            if token != "_":
                seen.add(token)
            if group is not None:
                group.append(token)
            else:
                dims.append((token,))
    if group is not None:
        raise _fault(text, start + len(piece), "'(' is never closed")
    return Term(tuple(dims), named)


def _sources(text: str, token: str, where: int, operands: int | None) -> tuple[int, ...]:
    numbers = tuple(int(number) for number in token[1:].split())
    if operands is None:
        raise _fault(text, where, "'@' belongs to a result, not to an operand")
    if not numbers:
        raise _fault(text, where, "'@' names no operand; write '@0' or '@0 2'")
    if max(numbers) >= operands:
        raise _fault(text, where, f"'@' names operand {max(numbers)} of {operands}")
    return numbers


def _fault(text: str, at: int, why: str) -> RuleError:
    return RuleError(f"cannot read this rule: {why}\n  {text}\n  {' ' * at}^")


def names_of(text: str) -> frozenset[str]:
    """Factor names in a list such as ``whole="h w"``."""
    return frozenset(re.findall(r"\.\.\.|\w+", text))


@lru_cache(4096)
def parse_linear(text: str) -> tuple[tuple[str, ...], ...]:
    """``"self + mat1 * mat2"`` as a sum of products of operand names.

    Example:
        >>> parse_linear("self + mat1 * mat2")
        (('self',), ('mat1', 'mat2'))
    """
    if not text.strip():
        return ()
    terms = tuple(tuple(name.strip() for name in term.split("*")) for term in text.split("+"))
    for name in (name for term in terms for name in term):
        if not re.fullmatch(r"\w+", name):
            raise RuleError(f"cannot read linear={text!r}: {name!r} is not an operand's name; want 'a + b * c'")
    return terms
