"""A rule's text spelled out for one call: which dims its arguments point to, which operands it has. Pure.

``"... dim:v, [i] -> ... dim:i"`` becomes ``"d0 v, i -> d0 i"`` where a call has two dims and ``dim=-1``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from onecard._torch.names import OpOverload
from onecard.errors import RuleError
from onecard.rules.call import Call
from onecard.rules.notation import ELLIPSIS, Signature, Term, names_of, parse
from onecard.rules.rule import Form

_NAMED = ("whole", "nonempty", "even")


class SpelledBy(NamedTuple):
    """All of a call that its rule's spelling depends on; calls of other sizes are alike.

    Attributes:
        func: the operator; ``names``: of its operands; ``operands``, ``results``: how many dims each has.
        values: of the arguments that point to dims, ``keepdim`` and ``output_mask``.
        same: whether the first result has the shape of the first operand.
    """

    func: OpOverload
    names: tuple[str, ...]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    values: tuple[tuple[str, Any], ...]
    same: bool

    def value(self, name: str) -> Any:
        return dict(self.values).get(name)


def spelled(form: Form, call: Call) -> Form:
    """The rule as one call has it: terms of absent operands and results left out, every dim named.

    Example:
        >>> import torch
        >>> call = Call(torch.ops.aten.unbind.int, (torch.empty(4, 2, 3), 1), {})
        >>> call.results = [torch.empty(4, 3)] * 2
        >>> spelled(Form("... dim:_ -> ...*", nonempty="..."), call).text
        'd0 _ d1 -> d0 d1, d0 d1'
    """
    stated, found = parse(form.text), (len(call.operands), len(call.results))
    if not is_open(form.text) and (len(stated.operands), len(stated.results)) == found:
        return form
    values = tuple([(name, _frozen(call.values.get(name))) for name in _asked(form.text)])
    operands, results = tuple([t.dim() for t in call.operands]), tuple([t.dim() for t in call.results])
    same = any(value == () for _, value in values) and call.results[0].shape == call.operands[0].shape
    return _spelled(
        form, tuple(form.sizes.items()), SpelledBy(call.func, tuple(call.names), operands, results, values, same)
    )


@lru_cache(4096)
def is_open(text: str) -> bool:
    """Whether a call's arguments and ranks decide which dims a rule is about."""
    signature = parse(text)
    return any(term.placed or term.last or term.repeated for term in (*signature.operands, *signature.results))


@lru_cache(4096)
def _asked(text: str) -> tuple[str, ...]:
    """The arguments whose values the spelling looks at."""
    signature = parse(text)
    pointing = [argument for term in (*signature.operands, *signature.results) for argument, _ in term.placed]
    return (*dict.fromkeys(pointing), "keepdim", "output_mask")


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


@lru_cache(4096)
def _spelled(form: Form, sizes: Any, seen: SpelledBy) -> Form:
    present = _present(parse(form.text), seen)
    if not is_open(form.text):
        return replace(form, text=str(present))
    if (len(present.operands), len(present.results)) != (len(seen.operands), len(seen.results)):
        return form  # ``bind`` says what does not fit
    terms, ranks = (*present.operands, *present.results), (*seen.operands, *seen.results)
    if any(term.placed for term in terms):
        return _named(form, seen, terms, ranks)
    return replace(form, text=_text([_last(*pair) for pair in zip(terms, ranks, strict=True)], seen))


def _named(form: Form, seen: SpelledBy, terms: Sequence[Term], ranks: Sequence[int]) -> Form:
    """With a name for each dim, as "..." may have to go around those to which arguments point."""
    places = [_places(term, rank, seen) for term, rank in zip(terms, ranks, strict=True)]
    counts = [_rest(term, rank, p) for term, rank, p in zip(terms, ranks, places, strict=True)]
    rest = [f"d{i}" for i in range(max(counts))]
    made = [
        _placed(_last(term, rank), place, rest[len(rest) - count :] if count >= 0 else None)
        for term, rank, place, count in zip(terms, ranks, places, counts, strict=True)
    ]
    split = len(seen.operands)
    stated = {name for term in terms for _, name in term.placed} - {"_", "-"}
    known = {"...": rest} | {name: _several(form, name, made[:split], made[split:]) for name in stated}
    traits: dict[str, Any] = {name: _spelled_names(getattr(form, name), known) for name in _NAMED}
    return replace(form, text=_text(made, seen), **traits)


def _text(terms: Sequence[Term], seen: SpelledBy) -> str:
    split = len(seen.operands)
    return str(Signature(tuple(terms[:split]), tuple(terms[split:])))


def _last(term: Term, rank: int) -> Term:
    """As many of the last dims as the tensor has."""
    more = len(term.dims) - rank
    return Term(term.dims[more:] if term.last and more > 0 else term.dims, term.sources)


def _placed(term: Term, places: dict[int, str], rest: Sequence[str] | None) -> Term:
    """The dims that "..." stands for, and among them those to which arguments point."""
    if ELLIPSIS not in term.dims or rest is None:
        return term
    left, at = iter(rest), term.dims.index(ELLIPSIS)
    dims = [(places.get(i) or next(left),) for i in range(len(rest) + len(places))]
    return Term((*term.dims[:at], *dims, *term.dims[at + 1 :]), term.sources)


def _present(signature: Signature, seen: SpelledBy) -> Signature:
    """Terms of absent tensors left out, repeated ones as often as there are tensors."""
    kept = _kept(signature.operands, seen)
    operands = _repeat([signature.operands[i] for i in kept], len(seen.operands))
    number = {old: new for new, old in enumerate(kept)}
    results = [
        term if term.sources is None else replace(term, sources=tuple(number[i] for i in term.sources if i in number))
        for term in _wanted(_repeat(signature.results, len(seen.results)), seen)
    ]
    return Signature(tuple(operands), tuple(results))


def _kept(terms: Sequence[Term], seen: SpelledBy) -> list[int]:
    """The numbers of the terms whose arguments the call gives. A repeated one is for all between the others'."""
    stated = [a.name for a in seen.func._schema.arguments if "Tensor" in str(a.type) and not a.is_out]
    several = next((i for i, term in enumerate(terms) if term.repeated), len(terms))
    behind = len(terms) - several - 1
    if behind < 0 and (len(terms) <= len(seen.operands) or len(terms) != len(stated)):
        return list(range(len(terms)))
    names = dict(enumerate(stated[:several]))
    names |= {several + 1 + i: name for i, name in enumerate(stated[len(stated) - behind :] if behind > 0 else ())}
    return [i for i in range(len(terms)) if i == several or names.get(i, "") in seen.names]


def _repeat(terms: Sequence[Term], count: int) -> list[Term]:
    left = count - sum(not term.repeated for term in terms)
    return [t for term in terms for t in ([replace(term, repeated=False)] * max(left, 0) if term.repeated else [term])]


def _wanted(results: list[Term], seen: SpelledBy) -> Sequence[Term]:
    """Backward operators are asked for some gradients only; of an absent weight there is none."""
    mask = seen.value("output_mask") or ()
    if len(results) == len(seen.results) or len(mask) != len(results):
        return results
    return [term for term, wanted in zip(results, mask, strict=True) if wanted][: len(seen.results)]


def _places(term: Term, rank: int, seen: SpelledBy) -> dict[int, str]:
    """Position -> factor of the dims to which arguments point."""
    count = rank - sum(dim != ELLIPSIS for dim in term.dims)
    found: dict[int, str] = {}
    for argument, factor in term.placed:
        if factor == "-" and not seen.value("keepdim"):
            continue
        name = "_" if factor == "-" else factor
        value = seen.value(argument)
        at = _pointed(value, count, seen.same)
        several = not isinstance(value, int) and name != "_"
        for i, place in enumerate(at):
            spelled = f"{name}{i}" if several else name
            if found.setdefault(place, spelled) != spelled:
                pair = " and ".join(argument for argument, _ in term.placed)
                raise RuleError(
                    f"{seen.func}: its rule says of {pair} that they point to dims of their own, and in this call they "
                    f"point to dim {place} alike; a row's function can say which rule holds then"
                )
    return found


def _pointed(value: Any, count: int, same: bool) -> tuple[int, ...]:
    """The dims that an argument lists, in order: of None all, of an empty list all or, if that changes nothing, none."""
    if isinstance(value, int):
        return (value % count,) if count else ()
    if value == () and same:
        return ()
    return tuple(sorted({d % count for d in value or range(count)})) if count else ()


def _rest(term: Term, rank: int, places: dict[int, str]) -> int:
    """How many dims ``...`` stands for."""
    return rank - len(term.dims) + 1 - len(places) if ELLIPSIS in term.dims else 0


def _several(form: Form, name: str, operands: Sequence[Term], results: Sequence[Term]) -> list[str]:
    """What a factor is called once it is spelled out: of a list ``r`` stands for ``r0 r1``."""
    ours = re.compile(rf"{name}\d*")
    sides = [dict.fromkeys(n for t in side for n in t.factors if ours.fullmatch(n)) for side in (operands, results)]
    mixed = any(name in side and len(side) > 1 for side in sides)
    if mixed or (all(sides) and set(sides[0]) != set(sides[1])):
        among, comes = (" ".join(side) or "nothing" for side in sides)
        raise RuleError(
            f"rule {form.text!r}: {name!r} is {among} among the operands and {comes} among the results of this call; a list of "
            "dims gives each a factor of its own, so it has to be pointed to by the same argument on both sides"
        )
    return list(sides[0] or sides[1])


def _spelled_names(text: str, known: dict[str, list[str]]) -> str:
    return " ".join(n for name in sorted(names_of(text)) for n in known.get(name, [name])) if text else text
