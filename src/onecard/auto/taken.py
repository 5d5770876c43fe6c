"""Functions put in the place of others: in their module, and where others took them by name (``from os import remove``)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest.mock import patch

Instead = tuple[Any, str, Any]
"""A module or class, a name in it, and what takes its place."""


_TAKE_OPEN = ("bz2", "tarfile")
"""Python's own modules that took ``open`` by name."""


def put(stack: ExitStack, given: Iterable[Instead]) -> None:
    """Each in its place until the stack closes. What a holder does not have stays so."""
    there = [(holder, name, instead) for holder, name, instead in given if hasattr(holder, name)]
    pairs = [(getattr(holder, name), instead) for holder, name, instead in there if isinstance(holder, ModuleType)]
    for holder, name, instead in there:
        stack.enter_context(patch.object(holder, name, instead))
    _exchange(pairs)
    stack.callback(
        _exchange, [(instead, real) for real, instead in pairs]
    )  # also in modules that were imported meanwhile


def _exchange(pairs: list[tuple[Any, Any]]) -> None:
    """In all names of modules, the second of a pair for the first."""
    known = {id(old): new for old, new in reversed(pairs)}
    for names in _others():
        for name, value in list(names.items()):
            if id(value) in known:
                names[name] = known[id(value)]


def _others() -> Iterator[dict[str, Any]]:
    """The names of each loaded module that is the program's, or a library's that it uses."""
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        python = top in sys.stdlib_module_names and name not in _TAKE_OPEN
        if not python and top not in ("onecard", "_onecard_launcher", "torch"):
            found = getattr(module, "__dict__", None)
            if isinstance(module, ModuleType) and isinstance(found, dict):
                yield found
