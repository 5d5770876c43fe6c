"""What a field may be, and the words where it is not. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onecard.errors import PlanError


class Fields:
    """Checks fields of one value; each error names the field, what it is, and what works."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.kind = type(value).__name__

    def stop(self, field: str, why: str) -> PlanError:
        """The error for a field; its value is said."""
        return PlanError(f"{self.kind}: {field}={getattr(self.value, field)!r}: {why}", field)

    def whole(self, *names: str, least: int = 1) -> None:
        """Whole numbers; bool, float and text are none."""
        for name in names:
            value = getattr(self.value, name)
            if type(value) is not int:
                hint = f"; write {name}={value.strip()}" if isinstance(value, str) and value.strip().isdecimal() else ""
                raise self.stop(name, f"want a whole number, not a {spoken(value)}{hint}")
            if value < least:
                raise self.stop(name, f"want {least} or more")
            if value >= 2**40:
                raise self.stop(name, "is beyond any machine; want less than 2**40")

    def yes_or_no(self, *names: str) -> None:
        """True or False, nothing that is like one."""
        for name in names:
            if type(getattr(self.value, name)) is not bool:
                raise self.stop(name, f"want True or False, not a {spoken(getattr(self.value, name))}")

    def one_of(self, name: str, choices: Sequence[Any]) -> None:
        """One of a few values, of the same type."""
        value = getattr(self.value, name)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise self.stop(name, f"want one of {', '.join(map(repr, choices))}")


def spoken(value: Any) -> str:
    """What a value is, in a person's words.

    Example:
        >>> spoken("8"), spoken(8.0), spoken(None), spoken([1])
        ('string', 'number with a point', 'nothing', 'list')
    """
    names = {str: "string", float: "number with a point", int: "number", bool: "yes-or-no value", dict: "object"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)
