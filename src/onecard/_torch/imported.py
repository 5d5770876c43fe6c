"""What is changed in a library as soon as a program imports it, and only then."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[ModuleType], None]


def when_imported(stack: ExitStack, name: str, change: Change) -> None:
    """Call ``change(module)`` for a module that is there, or once it is there, until the stack closes."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    finder = _Finder(name, change)
    sys.meta_path.insert(0, finder)
    stack.callback(sys.meta_path.remove, finder)


class _Finder(MetaPathFinder):
    """Finds one module where others find it, and changes it when it has run."""

    def __init__(self, name: str, change: Change) -> None:
        self.name, self.change, self._asks = name, change, False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name or self._asks:
            return None
        self._asks = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.change(module)

            loader.exec_module = exec_module
        return spec
