"""Lines of the function that asks before a replay whether all that the step has read is as it was.

What one holder has is asked for at once, and objects are compared by identity first, all of them in one call of C.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, call, itemgetter
from typing import Any

from onecard.static.code.source import Code, Source
from onecard.static.guards.lookup import ABSENT
from onecard.static.guards.seen import Read, Seen
from onecard.static.guards.unchanged import Small

_CONTENTS = attrgetter("cell_contents")


def checks(seen: Seen, source: Source) -> Iterator[Code]:
    """Lines that return MISS where something is not as it was."""
    if seen.never:
        yield source.code("return MISS")
    entries: dict[tuple[str, int], list[Read]] = {}
    there = [r for r in seen.reads if r.value is not ABSENT]
    for read in seen.reads:
        if read.place.kind in ("entry", "class"):
            entries.setdefault((read.place.kind, id(read.place.holder)), []).append(read)
        elif read.value is ABSENT:
            place = source.slot(read.place)
            yield source.code("if now_at({}) is not {}: return MISS", place, source.slot(ABSENT))
    yield from _of_all(source, _CONTENTS, [r for r in there if r.place.kind == "cell"])
    slots = [r for r in there if r.place.kind == "slot"]
    getters = source.slot([r.place.key.__get__ for r in slots])
    if slots:
        yield _compared(
            source, source.code("map({}, {}, {})", source.slot(call), getters, _holders(source, slots)), slots
        )
    for (kind, _), reads in entries.items():
        yield from _of_one(source, kind, reads)
    for whole in seen.wholes:
        names = map(source.slot, (whole.holder, whole.held))
        yield source.code("if not is_still({}, {}): return MISS", *names)
    for asked in seen.asked:
        names = map(source.slot, (asked.question, asked.answer))
        yield source.code("if differs({}(), {}): return MISS", *names)
    yield from _functions(seen, source)


def _functions(seen: Seen, source: Source) -> Iterator[Code]:
    """The functions that have run have the code and the defaults that they had."""
    functions = source.slot([f for f, *_ in seen.functions.values()])
    for i, key in enumerate(("__code__", "__defaults__", "__kwdefaults__") if seen.functions else ()):
        values = source.slot([held[i + 1] for held in seen.functions.values()])
        now = source.code("map({}, {})", source.slot(attrgetter(key)), functions)
        yield source.code("if not all(map(is_, {}, {})): return MISS", now, values)


def _holders(source: Source, reads: Sequence[Read]) -> Code:
    return source.slot([r.place.holder for r in reads])


def _of_all(source: Source, get: Callable[[Any], Any], reads: list[Read]) -> Iterator[Code]:
    """The same of many objects."""
    if reads:
        yield _compared(source, source.code("map({}, {})", source.slot(get), _holders(source, reads)), reads)


def _compared(source: Source, now: Code, reads: Sequence[Read]) -> Code:
    """Several values, by identity first."""
    bare = tuple(r.value.container if isinstance(r.value, Small) else r.value for r in reads)
    values = source.slot(tuple(r.value for r in reads))
    words = "if not all(map(is_, {}, {})) and any(map(differs, {}, {})): return MISS"
    return source.code(words, now, source.slot(bare), now, values)


def _of_one(source: Source, kind: str, reads: list[Read]) -> Iterator[Code]:
    """Several entries of one holder."""
    holder: Any = reads[0].place.holder
    own: Any = vars(holder) if kind == "class" else holder
    there = [r for r in reads if r.value is not ABSENT]
    gone = [r for r in reads if r.value is ABSENT]
    plain = type(own) in (dict, types.MappingProxyType)
    if gone and plain:
        keys = source.slot([r.place.key for r in gone])
        yield source.code("if not {}.keys().isdisjoint({}): return MISS", source.slot(own), keys)
    elif gone:
        places = source.slot([r.place for r in gone])
        yield source.code("if any(now_at(p) is not {} for p in {}): return MISS", source.slot(ABSENT), places)
    if (
        not plain and isinstance(own, dict) and type(own).__getitem__ is not dict.__getitem__
    ):  # a library's own kind of dict
        for r in there:
            names = map(source.slot, (r.place, r.value))
            yield source.code("if differs(now_at({}), {}): return MISS", *names)
    elif len(there) == 1:
        value = there[0].value
        bare = source.slot(value.container if isinstance(value, Small) else value)
        now = source.code("{}[{}]", source.slot(own), source.slot(there[0].place.key))
        yield source.code("if (x := {}) is not {} and differs(x, {}): return MISS", now, bare, source.slot(value))
    elif there:
        get = source.slot(itemgetter(*(r.place.key for r in there)))
        yield _compared(source, source.code("{}({})", get, source.slot(own)), there)
