"""JSON whose values know their lines: strict reading of files that people write. Pure but for the file that is read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from onecard.errors import PlanError
from onecard.planning.wanted import near

Value = TypeVar("Value")
Way = tuple[str | int, ...]
"""Keys and indices that lead to a value."""

DEEPEST = 64  # objects in objects; files of settings have three or four
LARGEST = 2**24  # bytes of a file of settings


@dataclass(frozen=True)
class Located:
    """A value of a JSON text, and on which line each value in it begins."""

    name: str
    value: Any
    lines: Mapping[Way, int]

    def where(self, way: Way = ()) -> str:
        """``file:line`` of a value, or of what it lies in.

        Example:
            >>> located('{"a":\\n {"b": 1}}', "x.json").where(("a", "b"))
            'x.json:2'
        """
        while way and way not in self.lines:
            way = way[:-1]
        return f"{self.name}:{self.lines.get(way, 1)}"


def text_of(path: Path) -> str:
    """What a text file says; PlanError where it cannot be read as one."""
    try:
        if path.is_dir():
            raise PlanError(f"{path}: is a folder; name a file in it")
        if not path.is_file():
            raise PlanError(f"{path}: does not exist, or is no file")
        if path.stat().st_size > LARGEST:
            raise PlanError(f"{path}: has {path.stat().st_size:,} bytes; files of settings are small")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise PlanError(f"{path}: is no text (UTF-8)") from None
    except (OSError, ValueError) as error:  # a name with a zero byte is a ValueError
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def located(text: str, name: str) -> Located:
    """A JSON text, read strictly: no key twice, no NaN, nothing behind its end.

    Raises:
        PlanError: with ``name:line`` and what is wrong.

    Example:
        >>> located('{"a": 1,\\n "a": 2}', "x.json")
        Traceback (most recent call last):
        onecard.errors.PlanError: x.json:2: the key 'a' is there twice (first on line 1)
    """
    if _depth(text) > DEEPEST:
        raise PlanError(f"{name}:1: more than {DEEPEST} objects or lists within each other")
    try:
        value = json.loads(text, parse_constant=lambda word: _no_number(name, text, word))
    except json.JSONDecodeError as error:
        raise PlanError(f"{name}:{error.lineno}: no JSON: {error.msg[0].lower()}{error.msg[1:]}") from None
    except ValueError as error:  # a number of thousands of digits
        if isinstance(error, PlanError):
            raise
        raise PlanError(f"{name}:1: {str(error).partition(';')[0]}") from None
    lines: dict[Way, int] = {}
    _Walk(text, name, lines).value(())
    return Located(name, value, lines)


def _no_number(name: str, text: str, word: str) -> NoReturn:
    line = text[: max(text.find(word), 0)].count("\n") + 1
    raise PlanError(f"{name}:{line}: {word} is no number of JSON; write one")


_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[^\s{}\[\]:,"]+|[{}\[\]:,])')


def _depth(text: str) -> int:
    deep = most = 0
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|[{}\[\]]', text):
        deep += token in "{[" or -(token in "}]")
        most = max(most, deep)
    return most


class _Walk:
    """Goes through the tokens of a text that is JSON, and notes lines."""

    def __init__(self, text: str, name: str, lines: dict[Way, int]) -> None:
        self.text, self.name, self.lines = text, name, lines
        self.at = self.counted = 0
        self.line = 1

    def token(self) -> str:
        found = _TOKEN.match(self.text, self.at)
        assert found is not None  # json.loads has read it
        begin, self.at = found.start(1), found.end()
        self.line += self.text.count("\n", self.counted, begin)
        self.counted = begin
        return found[1]

    def value(self, way: Way, token: str = "") -> None:
        token = token or self.token()
        self.lines[way] = self.line
        if token == "{":
            self.members(way)
        elif token == "[":
            self.items(way)

    def members(self, way: Way) -> None:
        token = self.token()
        while token != "}":
            here = (*way, json.loads(token))
            if here in self.lines:
                raise PlanError(
                    f"{self.name}:{self.line}: the key {here[-1]!r} is there twice (first on line {self.lines[here]})"
                )
            line = self.line
            self.token()  # the colon
            self.value(here)
            self.lines[here] = line
            token = self.token()
            if token == ",":
                token = self.token()

    def items(self, way: Way) -> None:
        token, count = self.token(), 0
        while token != "]":
            self.value((*way, count), token)
            token, count = self.token(), count + 1
            if token == ",":
                token = self.token()


def written(value: Any, version: int) -> str:
    """A dataclass as JSON with its name and a version, a field on each line."""
    data = {"onecard": type(value).__name__, "version": version}
    data |= {field.name: getattr(value, field.name) for field in fields(value)}
    return "{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in data.items()) + "\n}\n"


def source(given: str | Path | Mapping[str, Any], kind: str) -> Located:
    """JSON that is given as a text, by its file, or as what ``json.loads`` gives."""
    if isinstance(given, Mapping):
        return Located(f"{kind}.from_json", dict(given), {})
    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        return located(given, f"{kind}.from_json")
    if not isinstance(given, (str, Path)) or not str(given).strip():
        got = "an empty text" if isinstance(given, str) else type(given).__name__
        raise PlanError(f"{kind}.from_json: want a JSON text, the path of a file, or a dict, not {got}")
    return located(text_of(Path(given)), str(given))


def read(make: type[Value], found: Located, version: int) -> Value:
    """The dataclass that ``written`` wrote; fields that are left out have their defaults.

    Raises:
        PlanError: with file, line and field: another kind or version, a field that there is not, a value that cannot be.
    """
    kind, data = make.__name__, found.value
    if not isinstance(data, dict):
        raise PlanError(f"{found.where()}: want an object with the key 'onecard', as {kind}.to_json writes it")
    if data.get("onecard") != kind:
        said = f"'onecard' is {data['onecard']!r}" if "onecard" in data else "the key 'onecard' is missing"
        raise PlanError(f'{found.where(("onecard",))}: {said}; a {kind} has "onecard": "{kind}"', "onecard")
    _check_version(kind, found, version)
    known = {field.name for field in fields(make)}  # type: ignore[arg-type]
    for name in data.keys() - {"onecard", "version"} - known:
        raise PlanError(f"{found.where((name,))}: {kind} has no field {name!r}{near(name, known)}", name)
    values = {name: _tuples(value) for name, value in data.items() if name in known}
    try:
        return make(**values)
    except PlanError as error:
        raise PlanError(f"{found.where((*error.field.split('.'),))}: {error}", error.field) from None
    except TypeError as error:  # a field without a default is missing
        raise PlanError(f"{found.where()}: {kind}: {str(error).partition('() ')[2]}") from None


def _check_version(kind: str, found: Located, version: int) -> None:
    said = found.value.get("version")
    if type(said) is int and said == version:
        return
    if said is None:
        why = f"the key 'version' is missing; write \"version\": {version}"
    elif type(said) is int and said > version:
        why = f"version {said} is newer than this onecard, which reads version {version}: take a newer onecard"
    else:
        why = f'version {said!r} is not one that this onecard reads; write "version": {version}'
    raise PlanError(f"{found.where(('version',))}: {kind}: {why}", "version")


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
