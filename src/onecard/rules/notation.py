"""The notation of a sharding rule: text -> Signature. ``"m k, k n -> m n"`` names the factors of operands and results.

Grammar::

    signature := terms "->" terms          operands, then results, in the order of the operator's schema
    terms     := term ("," term)*
    term      := dims ["*"] ["@" number+]  "*": as many such terms as there are; "@0 2": computed from operands 0 and 2 only
    dims      := dim* | "[" dim* "]"       none: a scalar; "[m n]": as many of the last of these as the tensor has
    dim       := factor | "(" factor+ ")" | "..." | "_" | placed
    placed    := argument ":" (factor | "_" | "-")

``(a b)`` is one dim made of two factors, ``a`` the outer one. ``...`` stands for leading dims that broadcast as numpy's
do. ``_`` is a dim of its own that is never cut. ``dim:v`` is the dim to which the argument ``dim`` points, wherever that
is; ``...`` then is all others in their order, and dims written after them are not counted. A list of dims gives each a
factor of its own (None, and an empty list unless it changes nothing: all dims). ``dim:-`` is gone from a result, or of
size one with ``keepdim=True``. What depends on the call so is spelled out by ``rules.spelling``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from onecard.errors import RuleError

Dim = tuple[str, ...]
ELLIPSIS: Dim = ("...",)
WHOLE: Dim = ("_",)
_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z]\w*:(?:[A-Za-z]\w*|_|-)|[A-Za-z]\w*|_|[()\[\]*]|@[ \d]*)")


@dataclass(frozen=True, slots=True)
class Term:
    """The dims of one operand or result.

    Attributes:
        dims: those that the text writes out.
        sources: the operands that a result depends on (None: all).
        placed: (argument, factor) of the dims to which arguments point.
        last: the tensor may have fewer of the dims: the last ones. ``repeated``: there are several such tensors, or none.
    """

    dims: tuple[Dim, ...]
    sources: tuple[int, ...] | None = None
    placed: tuple[tuple[str, str], ...] = ()
    last: bool = False
    repeated: bool = False

    @property
    def factors(self) -> tuple[str, ...]:
        """The names in it, "_" and "..." among them."""
        return (*(name for dim in self.dims for name in dim), *(name for _, name in self.placed if name != "-"))

    def __str__(self) -> str:
        """The text of a term that is spelled out."""
        dims = " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in self.dims) or "()"
        return dims if self.sources is None else f"{dims} @{' '.join(map(str, self.sources))}"


@dataclass(frozen=True, slots=True)
class Signature:
    """A rule as read: one term for each operand and each result."""

    operands: tuple[Term, ...]
    results: tuple[Term, ...]

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"


@lru_cache(4096)
def parse(text: str) -> Signature:
    """Read a rule.

    Raises:
        RuleError: with a caret under the fault.

    Example:
        >>> parse("m k, k n -> m n").results
        (Term(dims=(('m',), ('n',)), sources=None, placed=(), last=False, repeated=False),)
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise _fault(text, len(text), "expected '->' between operands and results")
    if "->" in right:
        raise _fault(text, len(left) + 2 + right.index("->"), "a second '->'")
    operands = _terms(text, left, 0, None)
    results = _terms(text, right, len(left) + 2, len(operands))
    known = {name for term in operands for name in term.factors}
    if any("..." in term.factors for term in results) and "..." not in known:
        raise _fault(text, text.rindex("..."), "'...' in a result but in no operand")
    for side in (operands, results):
        if sum(term.repeated for term in side) > 1:
            raise _fault(text, text.rindex("*"), "a second '*': how many tensors are whose?")
    if any(t.repeated for t in operands) and any(t.sources is not None for t in results):
        raise _fault(text, text.index("@"), "'@' counts operands, and '*' leaves open how many there are")
    numbered = re.search(r"\b[A-Za-z]\w*\d\b(?!:)", text) if any(t.placed for t in (*operands, *results)) else None
    if numbered:
        raise _fault(
            text, numbered.start(), "beside dims that an argument points to, names that end in a number are taken"
        )
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
    reader, at = _Reader(text, sources), 0
    while piece[at:].strip():
        match = _TOKEN.match(piece, at)
        where = start + at + len(piece[at:]) - len(piece[at:].lstrip())
        if match is None:
            raise _fault(text, where, "expected a factor name, '(', '...', '_' or '@'")
        reader.read(match.group(1), where)
        at = match.end()
    return reader.term(start + len(piece))


class _Reader:
    """Reads one term token by token."""

    def __init__(self, text: str, sources: int | None) -> None:
        self.text, self.operands = text, sources
        self.dims: list[Dim] = []
        self.placed: list[tuple[str, str]] = []
        self.sources: tuple[int, ...] | None = None
        self.group: list[str] | None = None
        self.seen: set[str] = set()
        self.bracket = ""
        self.repeated = False

    def read(self, token: str, at: int) -> None:
        if token in ("(", ")"):
            self._group(token, at)
        elif token in ("[", "]"):
            if (token, self.bracket) not in (("[", ""), ("]", "[")) or (token == "[" and self.dims):
                raise _fault(self.text, at, f"'{token}' where none belongs: '[m n]' is all of a term")
            self.bracket += token
        elif token == "*":
            self.repeated = True
        elif token.startswith("@"):
            self.sources = _sources(self.text, token, at, self.operands)
        elif ":" in token:
            self._place(token, at)
        else:
            self._factor(token, at)

    def _group(self, token: str, at: int) -> None:
        if token == "(":
            if self.group is not None:
                raise _fault(self.text, at, "'(' inside '('")
            self.group = []
            return
        if self.group is None:
            raise _fault(self.text, at, "')' without '('")
        if self.group:
            self.dims.append(tuple(self.group))
        self.group = None

    def _place(self, token: str, at: int) -> None:
        argument, _, factor = token.partition(":")
        if self.dims != [ELLIPSIS] or self.group is not None:
            raise _fault(self.text, at, f"{token!r} belongs right after '...', which stands for the other dims")
        if factor == "-" and self.operands is None:
            raise _fault(self.text, at, "':-' belongs to a result, not to an operand")
        self._once(factor, at)
        self.placed.append((argument, factor))

    def _factor(self, token: str, at: int) -> None:
        if token in ("...", "_") and (self.group is not None or (token == "..." and self.bracket)):
            raise _fault(self.text, at, f"'{token}' inside '{'( )' if self.group is not None else '[ ]'}'")
        self._once(token, at)
        if self.group is not None:
            self.group.append(token)
        else:
            self.dims.append((token,))

    def _once(self, name: str, at: int) -> None:
        if name in self.seen:
            kind = "" if name == "..." else "factor "
            raise _fault(self.text, at, f"{kind}{name!r} more than once in a term")
        self.seen |= {name} - {"_", "-"}

    def term(self, end: int) -> Term:
        if self.group is not None:
            raise _fault(self.text, end, "'(' is never closed")
        if self.bracket == "[":
            raise _fault(self.text, end, "'[' is never closed")
        return Term(tuple(self.dims), self.sources, tuple(self.placed), bool(self.bracket), self.repeated)


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
