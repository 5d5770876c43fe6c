"""Fields that are checked as they are set, and the words where one cannot be. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar

from onecard.errors import StrategyError
from onecard.planning.json_text import near
from onecard.planning.wanted import spoken

Check = Callable[[str, Any], Any]
"""What a field may be: of its path and what is given, the value that is kept; StrategyError where it cannot be."""


def stop(path: str, value: Any, why: str) -> StrategyError:
    """The error for a field.

    Example:
        >>> print(stop("sharding.stage", 4, "want one of 1, 2, 3"))
        Strategy: sharding.stage=4: want one of 1, 2, 3
    """
    return StrategyError(f"Strategy: {path}={value!r}: {why}", path)


def yes_or_no(path: str, value: Any) -> bool:
    """True or False, nothing that is like one."""
    if type(value) is not bool:
        raise stop(path, value, f"want True or False, not a {spoken(value)}")
    return value


def whole(least: int = 1, rest: bool = False, none: bool = False) -> Check:
    """A whole number; with ``rest`` -1 too, which means what there is; with ``none`` None too."""

    def check(path: str, value: Any) -> Any:
        if (none and value is None) or (rest and type(value) is int and value == -1):
            return value
        if type(value) is not int:
            hint = f"; write {value.strip()}" if isinstance(value, str) and value.strip().isdecimal() else ""
            raise stop(path, value, f"want a whole number, not a {spoken(value)}{hint}")
        if value < least or value >= 2**62:
            others = " (or -1: all that there are)" if rest else " (or None)" if none else ""
            raise stop(path, value, f"want {least} or more{others}, below 2**62")
        return value

    return check


def number(above: float = 0.0) -> Check:
    """A number beyond another one, as a float."""

    def check(path: str, value: Any) -> float:
        if type(value) not in (int, float) or not above < value < float("inf"):
            raise stop(path, value, f"want a number above {above:g}")
        return float(value)

    return check


def one_of(*choices: Any, also: Mapping[Any, Any] | None = None) -> Check:
    """One of a few values of the same type; ``also``: other spellings, and which of them they mean."""

    def check(path: str, value: Any) -> Any:
        if isinstance(value, str) and also:
            value = also.get(value, value)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise stop(path, value, f"want one of {', '.join(map(repr, choices))}")
        return value

    return check


def names(what: str) -> Check:
    """Strings, kept as a tuple; one string is one of them."""

    def check(path: str, value: Any) -> tuple[str, ...]:
        listed = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple | set) else None
        if listed is None or not all(isinstance(each, str) and each for each in listed):
            raise stop(path, value, f"want a list of {what}")
        return tuple(sorted(listed)) if isinstance(value, set) else listed

    return check


class Checked:
    """A dataclass whose fields are checked whenever they are set; a subclass says what each may be.

    Attributes:
        checks: by field. ``elsewhere``: names that Paddle has, and what takes their place. ``path``: in front of its fields.
    """

    checks: ClassVar[Mapping[str, Check]]
    elsewhere: ClassVar[Mapping[str, str]] = {}
    path: ClassVar[str] = ""
    _owner = ""  # whose it is, once it may not be changed any more

    def __setattr__(self, name: str, value: Any) -> None:
        known = self._known(name)
        if self._owner:
            raise stop(
                f"{self.path}{name}",
                value,
                f"is set too late: the strategy belongs to {self._owner}. Set it before that is made, or make another one",
            )
        object.__setattr__(self, name, known(f"{self.path}{name}", value))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            self._known(name)
        except StrategyError as fault:
            raise AttributeError(str(fault), name=name) from None
        raise AttributeError(name)

    def _known(self, name: str) -> Check:
        path = f"{self.path}{name}"
        if name in self.elsewhere:
            raise StrategyError(f"Strategy has no {path!r}. In its place: {self.elsewhere[name]}", path)
        if name not in self.checks:
            raise StrategyError(f"Strategy has no {path!r}{near(name, {*self.checks})}", path)
        return self.checks[name]

    def as_dict(self) -> dict[str, Any]:
        """Its fields, sections as dicts, tuples as lists: what JSON can hold."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}  # type: ignore[arg-type]

    def update(self, given: Mapping[str, Any]) -> None:
        """Set several fields: all of them, or none."""
        found = {name: self._known(name)(f"{self.path}{name}", value) for name, value in given.items()}
        for name, value in found.items():
            setattr(self, name, value)


def section(kind: type[Checked]) -> Check:
    """A section: one of its kind, which is copied, or a dict of its fields, whose other fields are the defaults."""

    def check(path: str, value: Any) -> Checked:
        made = kind()
        if isinstance(value, kind):
            value = {name: getattr(value, name) for name in kind.checks}
        if not isinstance(value, Mapping):
            raise stop(path, value, f"want a dict of {', '.join(kind.checks)}, not a {spoken(value)}")
        made.update({str(name): each for name, each in value.items()})
        return made

    return check


def _plain(value: Any) -> Any:
    if isinstance(value, Checked):
        return value.as_dict()
    return [*value] if isinstance(value, Sequence) and not isinstance(value, str) else value
