"""What words of a shell script stand for: variables, defaults, arithmetic. What is not known keeps its name, between zeros."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from onecard.errors import PlanError

LONGEST = 2**20  # characters of a value
_PARAMETER = re.compile(r"(#?)([A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[([@*\d]+)\])?(?:(:?[-=+?]|[%#/^,:]).*)?", re.DOTALL)
_PIECE = re.compile(r"(?:\0[^\0]*\0|[^\s\0])+")
_NAME = re.compile(r"[A-Za-z_]\w*|\d|[@*#?$!-]")
_SIGNS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


def unknown(name: str) -> str:
    """Stands for a value that is not known."""
    return f"\0{name}\0"


class Values:
    """Variables, and words in their light."""

    def __init__(self, name: str, known: Mapping[str, str]) -> None:
        self.name = name
        self.known: dict[str, list[str]] = {key: [value] for key, value in known.items()}

    def assign(self, name: str, values: list[str], add: bool, array: bool) -> None:
        """``name=...`` or ``name+=...``."""
        before = self.known.get(name, [])
        if add and not array:
            values = [*before[:-1], (before[-1] if before else "") + values[0]] if before else values
        elif add:
            values = before + values
        if sum(map(len, values)) > LONGEST:
            raise PlanError(f"{self.name}: the variable {name} grows beyond {LONGEST:,} characters")
        self.known[name] = values

    def fields(self, text: str, line: int) -> list[str]:
        """A word as the words that it becomes: expansions outside quotes are split at blanks."""
        words: list[str] = []
        current, started = "", False
        for part, quoted, whole in self._parts(text, line):
            if whole is not None:  # "${array[@]}"
                if whole:
                    words += [current + whole[0], *whole[1:-1]] if len(whole) > 1 else []
                    current, started = whole[-1] if len(whole) > 1 else current + whole[0], True
            elif quoted:
                current, started = current + part, True
            else:
                pieces = _PIECE.findall(part)
                if part[:1].isspace() and started:
                    words, current, started = [*words, current], "", False
                for i, piece in enumerate(pieces):
                    if i:
                        words, current = [*words, current], ""
                    current, started = current + piece, True
                if part[-1:].isspace() and started:
                    words, current, started = [*words, current], "", False
            if len(current) > LONGEST or len(words) > LONGEST:
                raise PlanError(f"{self.name}:{line}: a word grows beyond {LONGEST:,} characters")
        return [*words, current] if started else words

    def joined(self, text: str, line: int) -> str:
        """A word as one text, as the value of an assignment."""
        parts = [" ".join(whole) if whole is not None else part for part, _, whole in self._parts(text, line)]
        if sum(map(len, parts)) > LONGEST:
            raise PlanError(f"{self.name}:{line}: a value grows beyond {LONGEST:,} characters")
        return "".join(parts)

    def _parts(self, text: str, line: int) -> list[tuple[str, bool, list[str] | None]]:
        """(text, whether it is kept together, items of an array in place of it)."""
        found: list[tuple[str, bool, list[str] | None]] = []
        at, quoted = 0, False
        while at < len(text):
            here = text[at]
            if here == '"':
                quoted, at = not quoted, at + 1
                found.append(("", True, None))
            elif here == "'" and not quoted:
                end = text.find("'", at + 1)
                found.append((text[at + 1 : end], True, None))
                at = end + 1
            elif here == "\\":
                follows = text[at + 1 : at + 2]
                kept = "\\" if quoted and follows not in '$`"\\\n' else ""
                found.append((kept + follows.strip("\n"), True, None))
                at += 2
            elif here == "`":
                end = text.find("`", at + 1)
                end = len(text) if end < 0 else end
                found.append((unknown(text[at : end + 1].replace("\0", "")), quoted, None))
                at = end + 1
            elif here == "$" and at + 1 < len(text) and (text[at + 1] in "({" or _NAME.match(text, at + 1)):
                at, part, whole = self._expansion(text, at, line)
                found.append((part, quoted, whole if quoted or whole is None else None))
                if whole is not None and not quoted:
                    found[-1] = (" ".join(whole), False, None)
            else:
                end = next((i for i in range(at + 1, len(text)) if text[i] in "\"'\\`$"), len(text))
                found.append((text[at:end], True, None))
                at = end
        return found

    def _expansion(self, text: str, at: int, line: int) -> tuple[int, str, list[str] | None]:
        """Where it ends, its value, its items if it is all of an array."""
        if text[at + 1] == "(":
            end = _closing(text, at + 1)
            if text.startswith("$((", at) and text[end - 1 : end] == ")":
                return end + 1, self.arithmetic(text[at + 3 : end - 1], line), None
            return end + 1, unknown(text[at : end + 1].replace("\0", "")), None
        if text[at + 1] == "{":
            end = _closing(text, at + 1)
            return (end + 1, *self._braced(text[at + 2 : end], line))
        name = _NAME.match(text, at + 1)
        assert name is not None  # the caller has looked
        return name.end(), self.value(name[0]), None

    def _braced(self, inner: str, line: int) -> tuple[str, list[str] | None]:
        found = _PARAMETER.fullmatch(inner)
        if found is None:
            return unknown(inner.replace("\0", "")), None
        length, name, index, sign = found[1], found[2], found[3], found[4] or ""
        values = self.known.get(name)
        if length:
            return (str(len(values) if index else len(values[0])) if values else "0"), None
        default = inner[found.end(4) :] if sign else ""
        given = values is not None and (values != [""] or not sign.startswith(":"))
        if sign.lstrip(":") in ("-", "=") and not given:
            return self.joined(default, line), None
        if sign.lstrip(":") == "+":
            return (self.joined(default, line) if given else ""), None
        if sign and sign.lstrip(":") not in ("-", "=", "?"):
            return unknown(inner.replace("\0", "")), None
        if index in ("@", "*"):
            return "", list(values) if values is not None else [unknown(name)]
        if index and values is not None and index.isdecimal():
            return (values[int(index[:6])] if int(index[:6]) < len(values) else ""), None
        return self.value(name), None

    def value(self, name: str) -> str:
        """Of a variable; its name between zeros if it has none."""
        values = self.known.get(name)
        return unknown(name) if values is None else values[0] if values else ""

    def arithmetic(self, text: str, line: int) -> str:
        """``$((...))`` of whole numbers; what cannot be computed is not known."""
        plain = self.joined(text, line)
        if "\0" in plain or len(plain) > 200:
            return unknown(plain.split("\0")[1] if "\0" in plain else "$((...))")
        try:
            return str(self._number(ast.parse(plain.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError, OverflowError):
            names = [name for name in re.findall(r"[A-Za-z_]\w*", plain) if name not in self.known]
            return unknown(names[0] if names else "$((...))")

    def _number(self, node: Any) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int(self.value(node.id))
        if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
            made = _SIGNS[type(node.op)](self._number(node.left), self._number(node.right))
            if abs(made) < 2**80:
                return made
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        raise ValueError(node)


def _closing(text: str, at: int) -> int:
    """Where the bracket at a place closes; the text's end if it does not."""
    pairs, opened = {"(": ")", "{": "}"}, [] if at >= len(text) else [text[at]]
    at += 1
    while at < len(text) and opened:
        here = text[at]
        if here == pairs[opened[-1]]:
            opened.pop()
        elif here == "\\":
            at += 1
        elif here in "'\"" and not (here == "'" and opened[-1] == "{"):
            end = text.find(here, at + 1)
            at = len(text) if end < 0 else end
        elif here == "(" or (here == "{" and text[at - 1] == "$"):
            opened.append(here)
        at += 1
    return max(at - 1, 0) if not opened else len(text)
