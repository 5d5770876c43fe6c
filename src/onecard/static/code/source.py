"""Functions that are written for one recording, out of words of this package and numbered slots.

What a program or a file gives (names, numbers, objects) is held in slots and never becomes text: no name can be code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_NO_CODE = "{!r} is no code: only a slot holds what was given"


class Code(str):
    """A piece of text that a ``Source`` has made of its own words."""

    __slots__ = ()


class Source:
    """The names that functions read, and what their text is made of.

    Example:
        >>> source = Source()
        >>> add = source.function(source.code("x"), [source.code("return x + {}", source.slot("; import os"))])
        >>> add("text")
        'text; import os'
        >>> source.code("return {}", "import os")
        Traceback (most recent call last):
        TypeError: 'import os' is no code: only a slot holds what was given
    """

    def __init__(self, **words: Any) -> None:
        self.names = words
        self._slots: dict[int, Code] = {}
        self._variables = 0

    def slot(self, value: Any) -> Code:
        """A name for a value."""
        known = self._slots.get(id(value))
        if known is None:
            known = self._slots[id(value)] = Code(f"g{len(self._slots)}")
            self.names[known] = value  # it is kept, so that its identity stays its own
        return known

    def variable(self) -> Code:
        """A new name for what a line gives."""
        self._variables += 1
        return Code(f"v{self._variables}")

    @staticmethod
    def code(words: str, *parts: str) -> Code:
        """Words of this package, with pieces of code in place of ``{}``."""
        for part in parts:
            if type(part) is not Code:
                raise TypeError(_NO_CODE.format(part))
        return Code(words.format(*parts))

    @staticmethod
    def joined(between: str, parts: Iterable[Code]) -> Code:
        """Pieces of code, one after the other."""
        held = [*parts]
        for part in held:
            if type(part) is not Code:
                raise TypeError(_NO_CODE.format(part))
        return Code(between.join(held))

    def function(self, arguments: Code, lines: Iterable[Code]) -> Callable[..., Any]:
        """The function with these lines."""
        body = self.joined("\n    ", [self.code("def made({}):", arguments), *lines])
        exec(compile(body, "<recording>", "exec"), self.names)
        return self.names.pop("made")

    def value(self, code: Code) -> Any:
        """What an expression gives now."""
        return self.function(self.code(""), [self.code("return {}", code)])()
