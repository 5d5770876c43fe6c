"""Lines of the function that asks before a replay whether all that the step has read is as it was.

What one holder has is asked for at once, and objects are compared by identity first, all of them in one call of C.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from operator import attrgetter, call, itemgetter
from typing import Any

from onecard.static.code.source import Code, Source
from onecard.static.guards.guard import OF_CODE, Guard
from onecard.static.guards.lookup import ABSENT
from onecard.static.guards.seen import Seen
from onecard.static.guards.unchanged import Small

_CONTENTS = attrgetter("cell_contents")


def checks(seen: Seen, source: Source) -> Iterator[Code]:
    """Lines that return MISS where something is not as it was."""
    if seen.never:
        yield source.code("return MISS")
    by_kind: dict[str, list[Guard]] = {}
    for guard in seen.guards:
        by_kind.setdefault(guard.place.kind, []).append(guard)
    yield from _of_objects(source, "cell", by_kind.get("cell", []))
    yield from _of_objects(source, "slot", by_kind.get("slot", []))
    entries: dict[tuple[str, int], list[Guard]] = {}
    for guard in (*by_kind.get("entry", []), *by_kind.get("class", [])):
        entries.setdefault((guard.place.kind, id(guard.place.holder)), []).append(guard)
    for (kind, _), guards in entries.items():
        yield from _of_one(source, kind, guards)
    for guard in by_kind.get("whole", []):
        yield source.code("if not is_still({}, {}): return MISS", *map(source.slot, (guard.place.holder, guard.must)))
    for guard in by_kind.get("answer", []):
        yield source.code("if differs({}(), {}): return MISS", *map(source.slot, (guard.place.holder, guard.must)))
    yield from _of_code(source, by_kind.get("code", []))


def _of_objects(source: Source, kind: str, guards: list[Guard]) -> Iterator[Code]:
    """Cells, or slots, of many objects."""
    there = [g for g in guards if g.must is not ABSENT]
    for guard in guards:
        if guard.must is ABSENT:
            yield source.code("if now_at({}) is not {}: return MISS", source.slot(guard.place), source.slot(ABSENT))
    if there and kind == "cell":
        yield _compared(source, source.code("map({}, {})", source.slot(_CONTENTS), _holders(source, there)), there)
    elif there:
        getters = source.slot([g.place.key.__get__ for g in there])
        now = source.code("map({}, {}, {})", source.slot(call), getters, _holders(source, there))
        yield _compared(source, now, there)


def _of_code(source: Source, guards: list[Guard]) -> Iterator[Code]:
    """The functions that have run have the code and the defaults that they had."""
    for key in OF_CODE if guards else ():
        chosen = [g for g in guards if g.place.key == key]
        now = source.code("map({}, {})", source.slot(attrgetter(key)), _holders(source, chosen))
        yield source.code("if not all(map(is_, {}, {})): return MISS", now, source.slot([g.must for g in chosen]))


def _holders(source: Source, guards: Sequence[Guard]) -> Code:
    return source.slot([g.place.holder for g in guards])


def _compared(source: Source, now: Code, guards: Sequence[Guard]) -> Code:
    """Several values, by identity first."""
    bare = tuple(g.must.container if isinstance(g.must, Small) else g.must for g in guards)
    values = source.slot(tuple(g.must for g in guards))
    words = "if not all(map(is_, {}, {})) and any(map(differs, {}, {})): return MISS"
    return source.code(words, now, source.slot(bare), now, values)


def _of_one(source: Source, kind: str, guards: list[Guard]) -> Iterator[Code]:
    """Several entries of one holder."""
    holder: Any = guards[0].place.holder
    own: Any = vars(holder) if kind == "class" else holder
    there = [g for g in guards if g.must is not ABSENT]
    gone = [g for g in guards if g.must is ABSENT]
    plain = type(own) in (dict, types.MappingProxyType)
    if gone and plain:
        keys = source.slot([g.place.key for g in gone])
        yield source.code("if not {}.keys().isdisjoint({}): return MISS", source.slot(own), keys)
    elif gone:
        places = source.slot([g.place for g in gone])
        yield source.code("if any(now_at(p) is not {} for p in {}): return MISS", source.slot(ABSENT), places)
    if (
        not plain and isinstance(own, dict) and type(own).__getitem__ is not dict.__getitem__
    ):  # a library's own kind of dict
        for g in there:
            names = map(source.slot, (g.place, g.must))
            yield source.code("if differs(now_at({}), {}): return MISS", *names)
    elif len(there) == 1:
        value = there[0].must
        bare = source.slot(value.container if isinstance(value, Small) else value)
        now = source.code("{}[{}]", source.slot(own), source.slot(there[0].place.key))
        yield source.code("if (x := {}) is not {} and differs(x, {}): return MISS", now, bare, source.slot(value))
    elif there:
        get = source.slot(itemgetter(*(g.place.key for g in there)))
        yield _compared(source, source.code("{}({})", get, source.slot(own)), there)
