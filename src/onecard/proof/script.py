"""A script as a program of every rank: each has modules, arguments and output of its own."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader

from onecard.checkpoint import api as checkpoint
from onecard.comm.world import world
from onecard.errors import ProofError


class Script:
    """A file that runs as ``__main__``.

    Args:
        path: of the script; ``arguments``: its command line.
        quiet: nothing that it prints is shown.

    Raises:
        ProofError: there is no such file, or it is no Python.
    """

    def __init__(self, path: str | Path, arguments: Sequence[str] = (), quiet: bool = True) -> None:
        self.path, self.arguments, self.quiet = Path(path), [str(word) for word in arguments], quiet
        try:
            self._code = compile(self.path.read_bytes(), str(self.path), "exec")
        except OSError as fault:
            raise ProofError(f"{path}: {fault.strerror}") from fault
        except (SyntaxError, ValueError) as fault:
            raise ProofError(f"{path} is no Python program: {fault}") from fault

    def __reduce__(self) -> Any:
        return Script, (self.path, self.arguments, self.quiet)

    def __call__(self) -> None:
        """Run it, to its end."""
        module = sys.modules["__main__"]
        try:
            exec(self._code, module.__dict__)
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise ProofError(f"{self.path}: the program ended itself ({stop.code})") from stop

    def around(self, rank: int) -> AbstractContextManager[Any]:
        """What is in force while a rank runs."""
        return _Room(self, rank)


class _Room:
    """A rank's own ``__main__`` and modules of the script's folder, entered each time it runs."""

    def __init__(self, script: Script, rank: int) -> None:
        self.script = script
        self._folder = str(script.path.resolve().parent)
        main = types.ModuleType("__main__")
        main.__file__ = str(script.path)
        self._modules: dict[str, types.ModuleType] = {"__main__": main}
        self._outer: dict[str, types.ModuleType] = {}

    def __enter__(self) -> None:
        self._outer = self._taken()
        sys.modules.update(self._modules)
        self._argv, self._path, self._out = sys.argv, sys.path, sys.stdout
        sys.argv = [str(self.script.path), *self.script.arguments]
        sys.path = [self._folder, *sys.path]
        if self.script.quiet:
            sys.stdout = _NOWHERE

    def __exit__(self, *fault: Any) -> None:
        sys.argv, sys.path, sys.stdout = self._argv, self._path, self._out
        self._modules = self._taken()
        sys.modules.update(self._outer)

    def _taken(self) -> dict[str, types.ModuleType]:
        """The modules that are a rank's own, out of the table."""
        found = {name: module for name, module in [*sys.modules.items()] if name == "__main__" or self._is_own(module)}
        for name in found:
            del sys.modules[name]
        return found

    def _is_own(self, module: Any) -> bool:
        file = getattr(module, "__file__", None)
        return isinstance(file, str) and file.startswith(self._folder + os.sep) and "site-packages" not in file


class _Nowhere:
    """Where what a rank prints goes."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


_NOWHERE: Any = _Nowhere()


@contextmanager
def instead(program: Callable[..., Any]) -> Iterator[None]:
    """Inside, programs read their batches in this process, compile nothing, start nothing; a script writes no checkpoints."""
    begin = DataLoader.__init__

    def loader(self: Any, *args: Any, **given: Any) -> None:
        args = (*args[:5], 0, *args[6:]) if len(args) > 5 else args
        for name in ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "pin_memory"):
            given.pop(name, None)
        begin(self, *args, **given)

    def compiled(model: Any = None, *_: Any, **__: Any) -> Any:
        return (lambda fn: fn) if model is None else model

    def spawned(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
        fn(world.get_rank(), *args)

    found: list[tuple[Any, str, Any]] = [
        (DataLoader, "__init__", loader), (torch, "compile", compiled), (nn.Module, "compile", _nothing),
        (mp, "spawn", spawned),
    ]  # fmt: skip
    if isinstance(program, Script):
        found += [(checkpoint, "save", _nothing)]
    with ExitStack() as stack:
        for holder, name, value in found:
            stack.enter_context(patch.object(holder, name, value))
        yield


def _nothing(*_: Any, **__: Any) -> None:
    return None
