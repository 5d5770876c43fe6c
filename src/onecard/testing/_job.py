"""What the test process and its ranks say to each other, and how a rank finds the function again.

A function of a module is found by its name. One that was typed (a notebook's cell, a prompt) is in no file: it is sent whole, by
cloudpickle, with the functions, classes and values of other cells that it names.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

RAW = "__onecard_rank_function__"
"""Attribute by which `multirank` keeps the function it replaced."""


@dataclass(frozen=True)
class Where:
    """The place of a module-level function (or method): module name, file and qualified name.

    `is_typed`: it is in no file, and comes with its arguments.
    """

    module: str
    file: str | None
    qualname: str
    is_typed: bool = False


@dataclass(frozen=True)
class RankJob:
    """Everything that one rank needs. `arguments` is what `enclosed` packed, opened once the module is loaded."""

    where: Where
    arguments: bytes
    rank: int
    nproc: int
    folder: str
    timeout: float
    backend: str
    environment: dict[str, str]

    def path(self, kind: str) -> str:
        """The file of this rank in the shared folder: "out", "stack" or "board"."""
        return f"{self.folder}/{kind}{self.rank}"


@dataclass(frozen=True)
class RankReport:
    """How the function ended on one rank. `time` is time.monotonic(), comparable between the ranks of one host."""

    kind: str  # "done", "error" or "skip"
    time: float
    value: bytes = b""
    text: str = ""
    consequence: bool = False  # an error that the loss of another rank brings about
    counts: Mapping[tuple[tuple[int, ...], int], int] = field(default_factory=dict)
    code: int = 1  # exit status of an error


def enclosed(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Where, bytes]:
    """Where a rank finds `function`, and its arguments as bytes, with the function itself if it was typed.

    Raises ValueError if it cannot be found from another process, TypeError if something cannot be sent.
    """
    if not _is_typed(function):
        where = locate(function)
        return where, pack(f"an argument of {where.qualname}", (args, kwargs))
    name = function.__qualname__
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise ValueError(f"{_in_no_file(name)}. Or install what sends it to them: pip install cloudpickle") from None
    what = f"{name}, an argument of it, or something of another cell that it uses,"
    sent = pack(what, (_bare(function), args, kwargs), cloudpickle.dumps)
    return Where(function.__module__, None, name, is_typed=True), sent


def opened(job: RankJob) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The function and its arguments, in a rank."""
    if not job.where.is_typed:
        function = find(job.where)
        return function, *pickle.loads(job.arguments)  # ours: written by the parent process
    function, args, kwargs = pickle.loads(job.arguments)
    # A result whose class came along is found by its name: here when it is packed, in the notebook when it is opened.
    names = {k: v for k, v in function.__globals__.items() if not k.startswith("__")}
    sys.modules["__main__"].__dict__.update(names)
    return function, args, kwargs


def locate(function: Callable[..., Any]) -> Where:
    """Returns where a rank finds `function`. Raises ValueError if it cannot be found from another process."""
    qualname, module = function.__qualname__, function.__module__
    if "<locals>" in qualname or "<lambda>" in qualname:
        raise ValueError(
            f"{qualname} is defined inside a function, so the ranks, which are other processes, cannot find it: "
            f"define it at the top level of {module} and pass what it needs as arguments"
        )
    if _is_typed(function):
        raise ValueError(_in_no_file(qualname))
    return Where(module, getattr(sys.modules.get(module), "__file__", None), qualname)


def _is_typed(function: Callable[..., Any]) -> bool:
    """Whether it is of a notebook or a prompt, whose ``__main__`` is no file."""
    return function.__module__ == "__main__" and getattr(sys.modules["__main__"], "__file__", None) is None


def _in_no_file(name: str) -> str:
    return (
        f"{name} was typed at a prompt, where the ranks cannot find it: put it into a file. In a notebook: begin its "
        f"cell with %%writefile ranks.py, and in the next one: from ranks import {name}"
    )


def find(where: Where) -> Callable[..., Any]:
    """Finds the function in this process, below whatever decorators replaced it."""
    found: Any = _module(where)
    for name in where.qualname.split("."):
        found = getattr(found, name)
    return _bare(found)


def _bare(found: Callable[..., Any]) -> Callable[..., Any]:
    candidate: Any = found
    while candidate is not None:
        if hasattr(candidate, RAW):
            return getattr(candidate, RAW)
        candidate = getattr(candidate, "__wrapped__", None)
    return found


def _module(where: Where) -> ModuleType:
    try:
        module = importlib.import_module(where.module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where.module}.".startswith(f"{error.name}."):
            raise  # the module exists, and something that it imports does not
    else:
        if where.file is None or getattr(module, "__file__", None) == where.file or where.module == "__main__":
            return module
    return _module_from_file(where)


def _module_from_file(where: Where) -> ModuleType:
    """Loads a test file that is on no import path (pytest's importlib mode), or is hidden by another of its name."""
    spec = None if where.file is None else importlib.util.spec_from_file_location(where.module, where.file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"cannot load {where.module} from {where.file}", name=where.module)
    module = importlib.util.module_from_spec(spec)
    parent = where.module.rpartition(".")[0]
    while parent:  # a pickle imports them on the way to its module
        sys.modules.setdefault(parent, ModuleType(parent))
        parent = parent.rpartition(".")[0]
    sys.modules[where.module] = module  # before it runs: dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


def pack(what: str, value: object, dumps: Callable[[object], bytes] = pickle.dumps) -> bytes:
    """Pickles `value` by copy. Raises TypeError naming `what`."""
    # Plain pickle, not multiprocessing's: that one would pass tensors by shared memory of a process about to end.
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be sent between processes ({error}); pass plain values and tensors") from error
