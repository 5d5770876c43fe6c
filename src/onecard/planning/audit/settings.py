"""Settings: named values of a file with their lines. Readers take them by name and type; what is left was not understood."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onecard.errors import PlanError
from onecard.planning.wanted import spoken

LARGEST = 2**40
Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Understood:
    """A setting, and what it means here; where it stands, "" if no file says it."""

    name: str
    value: str
    means: str
    where: str = ""


@dataclass(frozen=True, slots=True)
class Ignored:
    """A setting that changes nothing of what is judged, or is not known; near: one that is, of nearly the same name."""

    name: str
    where: str
    near: str = ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a setting is written in a kind of file, for the words of errors; words: whether every value is a text there."""

    example: str
    words: bool = False
    yes: str = "true"
    no: str = "false"


JSON = Dialect('"{name}": {value}')
TOML = Dialect("{name} = {value}")
YAML = Dialect("{name}: {value}")
ARGUMENTS = Dialect("--{name} {value}", words=True)


@dataclass
class Settings:
    """Values by name, each with ``file:line``.

    Attributes:
        file: what is read.
        values, lines: by the full name of a setting ("zero_optimization.stage").
        dialect: how one is written.
        understood: what was taken so far, and its meaning.
    """

    file: str
    values: Mapping[str, Any]
    lines: Mapping[str, str]
    dialect: Dialect
    understood: list[Understood] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)

    def where(self, name: str) -> str:
        """``file:line`` of a setting, or of the section that it would be in."""
        while name not in self.lines and "." in name:
            name = name.rpartition(".")[0]
        return self.lines.get(name, f"{self.file}:1")

    def stop(self, name: str, why: str, works: Any = None) -> PlanError:
        """The error for a setting: file, line, name, value, and what works."""
        write = f"; write {self.written(name, works)}" if works is not None else ""
        return PlanError(
            f"{self.where(name)}: {name.rpartition('.')[2]} is {self.values.get(name)!r}: {why}{write}", name
        )

    def written(self, name: str, value: Any) -> str:
        """A setting as the file would say it."""
        text = {True: self.dialect.yes, False: self.dialect.no}.get(value, value) if isinstance(value, bool) else value
        return self.dialect.example.format(name=name.rpartition(".")[2], value=text).rstrip()

    def has(self, name: str) -> bool:
        """Whether the file says something of it, and not null."""
        self.known.add(name)
        return self.values.get(name) is not None

    def is_auto(self, name: str) -> bool:
        """Whether it is left to the program."""
        return self.values.get(name) == "auto"

    def take(self, name: str, means: str = "") -> Any:
        """The value as it is; it counts as understood."""
        self.known.add(name)
        self.taken.add(name)
        if means:
            self.says(name, means)
        return self.values.get(name)

    def says(self, name: str, means: str) -> None:
        """Notes what a setting that the file has means; the last word counts."""
        self.taken.add(name)
        if name not in self.values:
            return
        self.understood = [u for u in self.understood if u.name != name]
        self.understood.append(Understood(name, _shown(self.values.get(name)), means, self.where(name)))

    def assumed(self, name: str, value: Any, means: str) -> None:
        """Notes what no file says and was assumed."""
        if not any(said.name == name for said in self.understood):
            self.understood.append(Understood(name, str(value), means))

    def whole(self, name: str, default: int, means: str = "", least: int = 1) -> int:
        """A whole number; ``means`` may hold it ("tp={}"). What is "auto", null or missing has the default."""
        value = self.take(name)
        if value is None or value == "auto":
            return default
        number = self._number(name, value, whole=True, example=max(least, 8))
        if not least <= number < LARGEST:
            raise self.stop(name, f"want {least} or more" if number < least else "is beyond any machine", max(least, 8))
        if means:
            self.says(name, means.format(number))
        return int(number)

    def number(self, name: str, default: float, means: str = "") -> float:
        """Any number."""
        value = self.take(name)
        if value is None or value == "auto":
            return default
        number = self._number(name, value, whole=False, example=1.0)
        if means:
            self.says(name, means.format(number))
        return number

    def flag(self, name: str, default: bool = False, means: str = "") -> bool:
        """True or false."""
        value = self.take(name)
        if value is None or value == "auto":
            return default
        if self.dialect.words:
            value = str(value).lower() != "false"  # what follows a flag belongs to the program
        if type(value) is not bool:
            raise self.stop(name, f"a {spoken(value)}; want {self.dialect.yes} or {self.dialect.no}", True)
        if means and value:
            self.says(name, means)
        return value

    def choice(self, name: str, choices: Mapping[str, Any], default: Any = None, means: str = "") -> Any:
        """One of some words, whatever their case; gives what it stands for."""
        value = self.take(name)
        if value is None or value == "auto":
            return default
        by_case = {key.lower(): made for key, made in choices.items()}
        if not isinstance(value, str) or value.lower() not in by_case:
            raise self.stop(name, f"want one of {', '.join(choices)}")
        made = by_case[value.lower()]
        if means:
            self.says(name, means.format(made))
        return made

    def text(self, name: str, means: str = "") -> str | None:
        """A text, or None."""
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise self.stop(name, f"a {spoken(value)}; want a text")
        if means and value is not None:
            self.says(name, means.format(value))
        return value

    def _number(self, name: str, value: Any, whole: bool, example: float) -> float:
        kind = "a whole number" if whole else "a number"
        if self.dialect.words and isinstance(value, str):
            return self._read(name, value, whole, kind, example)
        if type(value) is int or (type(value) is float and not whole):
            return value
        if type(value) is float and value.is_integer() and abs(value) < LARGEST:
            return int(value)  # 1e3
        text = value.strip() if isinstance(value, str) else ""
        works = text if text.isdecimal() and len(text) < 13 else example
        raise self.stop(name, f"a {spoken(value)}; want {kind}", works)

    def _read(self, name: str, value: str, whole: bool, kind: str, example: float) -> float:
        if "\0" in value:
            raise PlanError(
                f"{self.where(name)}: --{name} is {shown(value)}, which is not known here; say it: {_define(value)}"
            )
        try:
            return int(value.replace("_", "")) if whole and len(value) < 20 else float(value)
        except ValueError:
            raise self.stop(name, f"want {kind}", example) from None

    def left(self) -> tuple[Ignored, ...]:
        """The settings that nobody took, each with one of nearly the same name that would have been."""
        import difflib

        names = sorted(self.known - set(self.values))
        return tuple(
            Ignored(name, self.where(name), next(iter(difflib.get_close_matches(name, names, 1, 0.88)), ""))
            for name in self.values
            if name not in self.taken
        )


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Objects in objects as names with points; lists stay values.

    Example:
        >>> flat({"a": {"b": 1, "c": {}}, "d": [2]})
        {'a.b': 1, 'a.c': {}, 'd': [2]}
    """
    if not isinstance(value, dict) or (name and not value):
        return {name: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= flat(item, f"{name}.{key}" if name else str(key))
    return found


def shown(text: str) -> str:
    """A text in which unknown variables stand by their names.

    Example:
        >>> shown("a/" + chr(0) + "NODES" + chr(0))
        'a/$NODES'
    """
    parts = text.split("\0")
    return "".join(f"${part.removeprefix('$')}" if i % 2 else part for i, part in enumerate(parts))


def _define(text: str) -> str:
    names = [name for name in dict.fromkeys(text.split("\0")[1::2]) if name.isalnum() or name.isidentifier()]
    return " ".join(f"--define {name}=..." for name in names) or "write the number, or --set the field"


def _shown(value: Any) -> str:
    text = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    if isinstance(text, Sequence) and not isinstance(text, str):
        text = f"{len(text)} values" if len(text) > 4 else ", ".join(map(str, text))
    return shown(str(text))[:60]
