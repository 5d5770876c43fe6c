"""Names that go away: until when each works, and the call that takes its place. A row of ``TABLE`` is all that it needs.

Four kinds of rows, told apart by how they are written: ``onecard.graph`` (a module), ``onecard.split`` (a name in one),
``onecard.prove(wide=)`` (an argument), ``onecard.to_static(without='equal')`` (a value of an argument).
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).parent
_NOT_USERS = (f"{_ROOT}/", f"{Path(importlib.__file__).parent}/", "<frozen importlib")
_FORM = re.compile(r"(?P<path>[\w.]+)(?:\((?P<argument>\w+)=(?:'(?P<value>\w+)')?\))?")


@dataclass(frozen=True, slots=True)
class Old:
    """Something that works for a while yet.

    Attributes:
        name: what it is called; new: what takes its place, of the same kind.
        since: the first version that warns; gone: the first that has it no more, a minor version later at least.
        call: the call that works, where the new name does not say it.
    """

    name: str
    new: str
    since: str
    gone: str
    call: str = ""

    def __str__(self) -> str:
        words = f"{self.name} is deprecated since onecard {self.since}, and gone in {self.gone}"
        return f"{words}; write {self.call or self.new}"

    def part(self, of: str, which: str) -> str:
        """``path``, ``argument`` or ``value`` of one of its names; "" where there is none."""
        found = _FORM.fullmatch(of)
        return (found[which] or "") if found else ""


_ROOMS = {
    "graph": "static", "parallel": "train", "modules": "train.modules", "message_report": "reports.messages",
    "operator_report": "reports.operators",
}  # fmt: skip
_PASSES = {"apart": "decompositions", "names": "noop_views", "equal": "common_subexpressions"}
_WITHOUT = "onecard.to_static(without='{}')"
TABLE = (
    *(Old(f"onecard.{old}", f"onecard.{new}", "0.1.0", "0.2.0") for old, new in _ROOMS.items()),
    *(Old(_WITHOUT.format(old), _WITHOUT.format(new), "0.1.0", "0.2.0") for old, new in _PASSES.items()),
)


def tell(old: Old) -> None:
    """A ``DeprecationWarning`` at the user's line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    there = frame.f_globals
    warnings.warn_explicit(
        str(old),
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        there.get("__name__", "<unknown>"),
        there.setdefault("__warningregistry__", {}),
    )


def modules() -> dict[str, Old]:
    """The rows of modules, by the address without ``onecard.``."""
    return {old.name.partition(".")[2]: old for old in TABLE if "(" not in old.name and _is_module(old.new)}


def value(call: str, argument: str, given: str) -> str:
    """The present value of an argument for the one that is given; an old one is told.

    Example:
        >>> value("onecard.to_static", "without", "inplace")
        'inplace'
    """
    for old in TABLE:
        if old.name == f"{call}({argument}='{given}')":
            tell(old)
            return old.part(old.new, "value")
    return given


def install(table: Iterable[Old]) -> None:
    """Let old names and arguments work; called once all modules of the table are there."""
    for old in table:
        holder, name = _held(old.part(old.name, "path"))
        if old.part(old.name, "value") or ("(" not in old.name and _is_module(old.new)):
            continue  # asked for where they are read: by value(), by the finder of addresses
        if "(" in old.name:
            setattr(holder, name, _renamed(getattr(holder, name), old))
        else:
            holder.__getattr__ = _getting(holder, name, old)


def _held(path: str) -> tuple[Any, str]:
    """The module or class that has a name, and the name."""
    above, _, name = path.rpartition(".")
    try:
        return importlib.import_module(above), name
    except ModuleNotFoundError:
        holder, last = _held(above)
        return getattr(holder, last), name


def _renamed(fn: Callable[..., Any], old: Old) -> Callable[..., Any]:
    before, now = old.part(old.name, "argument"), old.part(old.new, "argument")

    @functools.wraps(fn)
    def call(*args: Any, **given: Any) -> Any:
        if before in given:
            if now in given:
                raise TypeError(f"{fn.__qualname__}: {before}= and {now}= are one argument: leave {before}= out")
            tell(old)
            given[now] = given.pop(before)
        return fn(*args, **given)

    return call


def _getting(module: ModuleType, name: str, old: Old) -> Callable[[str], Any]:
    otherwise = module.__dict__.get("__getattr__")

    def get(asked: str) -> Any:
        if asked == name:
            tell(old)
            holder, last = _held(old.new)
            return getattr(holder, last)
        if otherwise is None:
            raise AttributeError(f"module {module.__name__!r} has no attribute {asked!r}")
        return otherwise(asked)

    return get


def _is_module(name: str) -> bool:
    path = _ROOT.joinpath(*name.split(".")[1:])
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
