"""YAML as configuration files use it: objects, lists, texts, numbers. Whatever else the language has is refused by its line.

Not one of the packages that read all of YAML, so that nothing has to be installed, and so that each value knows its line.
Plain words mean what YAML 1.1 says, as in PyYAML: ``no`` is False, ``'no'`` a text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from onecard.errors import PlanError
from onecard.planning.json_text import DEEPEST, Located, Way

_KEY = re.compile(
    r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s\-?:,\[\]{}#&*!|>'"%@`][^\n]*?|[-?:][^\s][^\n]*?)\s*:(?=\s|$)"""
)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]")
_INT = re.compile(r"[-+]?(?:0|[1-9][\d_]*)")
_FLOAT = re.compile(r"[-+]?\d[\d_]*\.[\d_]*(?:[eE][-+]\d+)?|\.\d[\d_]*(?:[eE][-+]\d+)?")
_DOUBTFUL = re.compile(
    r"[-+]?0[\d_]+|[-+]?0[xob][\da-fA-F_]+|[-+]?\d[\d_]*(?::[0-5]?\d)+(?:\.[\d_]*)?|\d{4}-\d\d?-\d\d?.*"
)
_WORDS: dict[str, Any] = {
    **dict.fromkeys(("true", "yes", "on"), True), **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("null", "~"), None),
}  # fmt: skip
_NOT_READ = {
    "&": "an anchor", "*": "an alias", "!": "a tag", "|": "a text in lines", ">": "a folded text", "?": "a complex key",
    "%": "a directive", "@": "the sign @", "`": "the sign `", ",": "a comma",
    **dict.fromkeys("]}", "a bracket that nothing opens"),
}  # fmt: skip


@dataclass
class _Line:
    number: int
    indent: int
    text: str


def read_yaml(text: str, name: str) -> Located:
    """A YAML text with the line of each value.

    Raises:
        PlanError: with ``name:line``: what is no YAML, or more of it than is read here.

    Example:
        >>> found = read_yaml("a: 1 # one\\nb:\\n  c: 'no'\\n  d: [x, 2.5]\\ne:\\n- 1\\n", "x.yaml")
        >>> found.value, found.where(("b", "d"))
        ({'a': 1, 'b': {'c': 'no', 'd': ['x', 2.5]}, 'e': [1]}, 'x.yaml:4')
    """
    return _Yaml(text, name).read()


class _Yaml:
    def __init__(self, text: str, name: str) -> None:
        self.name, self.at = name, 0
        self.lines: list[_Line] = []
        self.where: dict[Way, int] = {(): 1}
        for number, line in enumerate(text.split("\n"), 1):
            bare = self.without_comment(line.rstrip("\r"), number)
            odd = _CONTROL.search(line.rstrip("\r"))
            if odd is not None:
                raise self.stop(number, f"the character {odd[0]!r} is not one of a text")
            if "\t" in bare[: len(bare) - len(bare.lstrip())]:
                raise self.stop(number, "a tab begins the line; YAML is indented with blanks")
            if bare.strip() and not (bare.startswith(("---", "...")) and not bare[3:].strip()):
                self.lines.append(_Line(number, len(bare) - len(bare.lstrip(" ")), bare.strip()))
            elif bare.startswith("---") and self.lines:
                raise self.stop(number, "a second document begins; one is read")

    def stop(self, number: int, why: str) -> PlanError:
        return PlanError(f"{self.name}:{number}: {why}")

    def without_comment(self, line: str, number: int) -> str:
        quote = ""
        for i, here in enumerate(line):
            if quote:
                quote = "" if here == quote and not (quote == '"' and _escaped(line, i)) else quote
            elif here in "'\"" and (i == 0 or line[i - 1] in " \t[{,:-"):
                quote = here
            elif here == "#" and (i == 0 or line[i - 1] in " \t"):
                return line[:i]
        return line

    def read(self) -> Located:
        value = self.block((), self.lines[0].indent, 0) if self.lines else None
        if self.at < len(self.lines):
            raise self.stop(
                self.lines[self.at].number, "the line belongs to nothing above it; mind how far it is indented"
            )
        return Located(self.name, value, self.where)

    def block(self, way: Way, indent: int, depth: int) -> Any:
        """What begins at this line, so far indented."""
        line = self.lines[self.at]
        if depth > DEEPEST:
            raise self.stop(line.number, f"more than {DEEPEST} objects or lists within each other")
        self.where.setdefault(way, line.number)
        if line.text == "-" or line.text.startswith("- "):
            return self.items(way, indent, depth)
        if _KEY.match(line.text):
            return self.members(way, indent, depth)
        self.at += 1
        return self.scalar(line.text, line.number)

    def members(self, way: Way, indent: int, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while self.at < len(self.lines) and self.lines[self.at].indent == indent:
            line = self.lines[self.at]
            found = _KEY.match(line.text)
            if found is None or line.text.startswith("- "):
                raise self.stop(line.number, f"want 'name: value', not {line.text[:40]!r}")
            key = str(self.scalar(found[1], line.number)) if found[1][0] in "'\"" else found[1]
            if key in made:
                raise self.stop(line.number, f"the key {key!r} is there twice (first on line {self.where[*way, key]})")
            self.where[*way, key] = line.number
            made[key] = self.value_of(line, line.text[found.end() :].strip(), (*way, key), indent, depth)
        self.check_indent(indent)
        return made

    def items(self, way: Way, indent: int, depth: int) -> list[Any]:
        made: list[Any] = []
        while self.at < len(self.lines) and self.lines[self.at].indent == indent:
            line = self.lines[self.at]
            if not (line.text == "-" or line.text.startswith("- ")):
                break
            here, rest = (*way, len(made)), line.text[1:].strip()
            self.where[here] = line.number
            if _KEY.match(rest) or rest.startswith("- "):
                line.indent, line.text = indent + len(line.text) - len(rest), rest
                made.append(self.block(here, line.indent, depth + 1))
            else:
                made.append(self.value_of(line, rest, here, indent, depth))
        return made

    def check_indent(self, indent: int) -> None:
        if self.at < len(self.lines) and self.lines[self.at].indent > indent:
            raise self.stop(self.lines[self.at].number, "the line is indented further than what it belongs to")

    def value_of(self, line: _Line, rest: str, way: Way, indent: int, depth: int) -> Any:
        """What stands behind a key or a dash, or below it."""
        self.at += 1
        if rest:
            return self.scalar(rest, line.number)
        below = self.lines[self.at] if self.at < len(self.lines) else None
        dashes = below is not None and (below.text == "-" or below.text.startswith("- "))
        if (
            below is None
            or below.indent < indent
            or (below.indent == indent and not (dashes and not line.text.startswith("-")))
        ):
            return None
        return self.block(way, below.indent, depth + 1)

    def scalar(self, text: str, number: int) -> Any:
        """A value on one line."""
        if text[0] in "[{":
            value, end = self.flow(text, 0, number, 0)
            if text[end:].strip():
                raise self.stop(number, f"{text[end:].strip()[:40]!r} stands behind the bracket's end")
            return value
        if text[0] in "'\"":
            value, end = self.quoted(text, 0, number)
            if text[end:].strip():
                raise self.stop(number, f"{text[end:].strip()[:40]!r} stands behind the quote's end")
            return value
        if text[0] in _NOT_READ:
            raise self.stop(
                number, f"{text[:40]!r} is {_NOT_READ[text[0]]}, which is not read here; write the value itself"
            )
        if _KEY.match(text) or text.startswith("- "):
            raise self.stop(number, f"{text[:40]!r} begins an object or a list; write it on a line of its own")
        return self.plain(text, number)

    def plain(self, text: str, number: int) -> Any:
        if text.lower() in _WORDS and text in (text.lower(), text.capitalize(), text.upper()):
            return _WORDS[text.lower()]
        if text in ("-", ":"):
            raise self.stop(number, f"{text!r} is no value")
        if len(text) < 400 and _DOUBTFUL.fullmatch(text):
            raise self.stop(number, f"{text} may be a number or a text; write a plain number, or '{text}' in quotes")
        if len(text) < 400 and _INT.fullmatch(text):
            return int(text.replace("_", ""))
        if len(text) < 400 and _FLOAT.fullmatch(text):
            return float(text.replace("_", ""))
        return text

    def quoted(self, text: str, at: int, number: int) -> tuple[str, int]:
        pattern = r'"(?:[^"\\]|\\.)*"' if text[at] == '"' else r"'(?:[^']|'')*'"
        found = re.compile(pattern).match(text, at)
        if found is None:
            raise self.stop(number, f"the quote {text[at]} is not closed on its line")
        if text[at] == "'":
            return found[0][1:-1].replace("''", "'"), found.end()
        try:
            return json.loads(found[0]), found.end()
        except ValueError:
            raise self.stop(number, f"{found[0][:40]} has an escape that is not read here") from None

    def flow(self, text: str, at: int, number: int, depth: int) -> tuple[Any, int]:
        """A list or an object in brackets; the place behind it."""
        if depth > DEEPEST:
            raise self.stop(number, f"more than {DEEPEST} brackets within each other")
        opened, at = text[at], at + 1
        close = "]" if opened == "[" else "}"
        made: Any = [] if opened == "[" else {}
        while True:
            at = _after_blanks(text, at)
            if text[at : at + 1] == close:
                return made, at + 1
            value, at = self.flow_item(text, at, number, depth)
            at = _after_blanks(text, at)
            if opened == "{":
                if text[at : at + 1] != ":":
                    raise self.stop(number, "want 'name: value' in these brackets")
                item, at = self.flow_item(text, _after_blanks(text, at + 1), number, depth)
                made[str(value)] = item
                at = _after_blanks(text, at)
            else:
                made.append(value)
            if text[at : at + 1] == ",":
                at += 1
            elif text[at : at + 1] != close:
                raise self.stop(number, f"the bracket {opened} is not closed on its line")

    def flow_item(self, text: str, at: int, number: int, depth: int) -> tuple[Any, int]:
        here = text[at : at + 1]
        if here and here in "[{":
            return self.flow(text, at, number, depth + 1)
        if here and here in "'\"":
            return self.quoted(text, at, number)
        found = re.compile(r"[^,\[\]{}:]*(?::(?!\s|$)[^,\[\]{}:]*)*").match(text, at)
        assert found is not None  # it takes nothing, too
        word = found[0].strip()
        if word.endswith(":") or not word or word[0] in _NOT_READ:
            raise self.stop(number, f"{text[at : at + 20]!r} is no value of a list")
        return self.plain(word, number), found.end()


def _after_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t":
        at += 1
    return at


def _escaped(line: str, i: int) -> bool:
    count = 0
    while i - count > 0 and line[i - count - 1] == "\\":
        count += 1
    return count % 2 == 1
