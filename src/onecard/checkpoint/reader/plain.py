"""What files of ``torch.save`` hold beside tensors that no code is run for: numpy's arrays, arguments, paths; as plain values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

_RECORDS = ("argparse.Namespace", "types.SimpleNamespace")
_PATHS = [
    f"{module}.{kind}" for module in ("pathlib", "pathlib._local")
    for kind in ("Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
]  # fmt: skip
_KINDS = "?bhilqBHILQefdSU"


def allowed() -> list[Any]:
    """What ``torch.serialization.safe_globals`` is given: what makes values, under the names that files have for it.

    None of it runs what a file says: numpy's own makers of arrays and numbers; records, which keep attributes.
    """
    arrays = sys.modules[np.zeros(0).__reduce__()[0].__module__]
    found: list[Any] = [np.ndarray, np.dtype, *dict.fromkeys(type(np.dtype(kind)) for kind in _KINDS)]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):  # numpy 2 and 1
        found += [(getattr(arrays, name), f"{module}.{name}") for name in ("_reconstruct", "scalar")]
    found += [SimpleNamespace, *((SimpleNamespace, name) for name in _RECORDS)]
    found += [(_path, name) for name in _PATHS]
    found += [(_dict, "collections.defaultdict"), (_list, "collections.deque"), (_when, "datetime.datetime")]
    return [*found, *((kind, f"builtins.{kind.__name__}") for kind in (list, dict, int, float, str, tuple))]


def _path(*parts: str) -> str:
    return "/".join(part.rstrip("/") if part.strip("/") else "" for part in parts) or "/"


def _dict(_: Any = None) -> dict[Any, Any]:
    return {}


def _list(given: Iterable[Any] = (), _: Any = None) -> list[Any]:
    return [*given]


def _when(*given: Any) -> str:
    made: Callable[..., datetime] = datetime
    return made(*given).isoformat(" ")


def plain(value: Any) -> Any:
    """The same with numpy's arrays as tensors, its numbers as Python's, and attributes of a record as a dict.

    Example:
        >>> plain({"args": SimpleNamespace(rate=np.float64(0.5), seeds=np.arange(2))})
        {'args': {'rate': 0.5, 'seeds': tensor([0, 1])}}
    """
    if isinstance(value, dict):
        return type(value)((key, plain(x)) for key, x in value.items()) if _holds(value.values()) else value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(plain, value)) if _holds(value) else value
    if isinstance(value, SimpleNamespace):
        return plain(vars(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy()) if value.dtype.kind in "biuf" else value.tolist()
    return value


def _holds(values: Iterable[Any]) -> bool:
    """Whether any is no plain value already: what is, stays the object that it is."""
    return any(isinstance(x, dict | list | tuple | SimpleNamespace | np.generic | np.ndarray) for x in values)
