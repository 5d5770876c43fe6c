"""Checkpoints that others have pickled, read without running what is in them: torch.save files and torch's DCP folders.

Only ``convert`` comes here. ``torch.load(weights_only=True)`` makes tensors and plain values alone; the metadata of a DCP folder
is read by an unpickler that knows the names of that format and makes records of them, no objects, and refuses every other name.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard.checkpoint.format.files import InputFile
from onecard.checkpoint.reader.plain import allowed, plain
from onecard.errors import CheckpointError

METADATA = ".metadata"
_LARGEST = 1 << 30  # bytes of metadata
_DCP = "torch.distributed.checkpoint."
_RECORDS = {
    "Metadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta", "TensorProperties",
    "TensorStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo",
}  # fmt: skip


class Record:
    """What an object of the metadata says, as attributes; it can do nothing."""

    def __new__(cls, *said: Any) -> Record:
        self = object.__new__(cls)
        self.__dict__["said"] = said
        return self

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_DCP) and name in _RECORDS:
            return Record
        if (module, name) == ("torch.serialization", "_get_layout"):
            return Record
        if module in ("pathlib", "pathlib._local") and name in (
            "PosixPath",
            "WindowsPath",
            "PurePosixPath",
            "PureWindowsPath",
            "Path",
        ):
            return Record
        if (module, name) == ("torch", "Size"):
            return torch.Size
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"{METADATA} names {module}.{name}, which no checkpoint needs: it may run code, and is not read"
        )

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError(f"{METADATA} refers to an object outside of it, and is not read")


def read_torch_file(path: Path) -> Any:
    """The state in a file of ``torch.save``; its tensors stay in the file until they are read, but in the format before zip."""
    if not path.stat().st_size:
        raise CheckpointError(f"{path} is empty: it was never written, or its writer was stopped")
    packed = zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals(allowed()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is told here, if it is a fault
            return plain(torch.load(path, map_location="cpu", weights_only=True, mmap=packed))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, LookupError, TypeError) as fault:
        raise CheckpointError(f"{path} is not read: {_why(path, packed, fault)}") from None


def _why(path: Path, packed: bool, fault: Exception) -> str:
    """What is wrong with a file that torch does not read, in a sentence."""
    if found := re.findall(r"(?:GLOBAL|class) ([\w.]+)", str(fault)):
        return (
            f"it holds more than tensors and plain values: an object of {found[0]}, and to make one code would run. Save what "
            "is in it: model.state_dict() for a module, a dict for settings"
        )
    with path.open("rb") as file:
        begins = file.read(4)
    if not packed and not begins.startswith(b"\x80"):
        return "it is cut off: the end is missing" if begins == b"PK\x03\x04" else "it is no file of torch.save"
    return f"it is damaged, or no file of torch.save ({str(fault).splitlines()[0].partition('. ')[0]})"


def read_dcp(folder: Path) -> Any:
    """The state in a folder of ``torch.distributed.checkpoint``, of whole tensors."""
    with InputFile(folder, METADATA) as file:
        if file.size > _LARGEST:
            raise CheckpointError(f"{file.path} has {file.size:,} bytes; metadata have at most {_LARGEST:,}")
        text = file.read(0, file.size)
    try:
        said = _Reader(io.BytesIO(text)).load()
        items: dict[str, list[tuple[Any, Any]]] = {}
        for index, info in said.storage_data.items():
            items.setdefault(index.fqn, []).append((index, info))
        values = {name: _value(folder, name, what, items[name]) for name, what in said.state_dict_metadata.items()}
        return _nested(values, said.planner_data or {})
    except CheckpointError:
        raise
    except Exception as fault:
        raise CheckpointError(
            f"{folder / METADATA} says what no checkpoint has: {type(fault).__name__}: {fault}"
        ) from None


def _value(folder: Path, name: str, what: Any, items: list[tuple[Any, Any]]) -> Any:
    if not hasattr(what, "chunks"):
        return _item(folder, items[0][1])
    size = torch.Size(what.size)
    made: Tensor | None = None
    for index, info in items:
        part = _item(folder, info)
        if made is None:
            if prod(size) * part.itemsize > sum(i.length for _, i in items):
                raise CheckpointError(f"{folder}: tensor {name!r} {list(size)} is larger than what there is of it")
            made = torch.empty(size, dtype=part.dtype, device="cpu")
        start = index.offset or [0] * len(size)
        made[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part
    return made


def _item(folder: Path, info: Any) -> Any:
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{folder}: {info.relative_path} was written with extensions (compression), which are not read"
        )
    with InputFile(folder, str(info.relative_path)) as file:
        if not 0 <= info.offset <= info.offset + info.length <= file.size:
            raise CheckpointError(
                f"{file.path}: bytes {info.offset:,} to {info.offset + info.length:,} are not in it: it was cut off"
            )
        data = file.read(info.offset, info.length)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as fault:
        raise CheckpointError(
            f"{folder / str(info.relative_path)} is damaged, or holds more than plain values: {fault}"
        ) from None


def _nested(values: dict[str, Any], paths: dict[str, tuple[Any, ...]]) -> Any:
    """The state that a planner has made flat, with its dicts and lists."""
    root: dict[Any, Any] = {}
    for name, value in values.items():
        path = paths.get(name, (name,))
        place = root
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
    return _with_lists(root)


def _with_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = {key: _with_lists(item) for key, item in value.items()}
    if made and all(isinstance(key, int) for key in made) and sorted(made) == list(range(len(made))):
        return [made[i] for i in range(len(made))]
    return _with_counts(made)


def _with_counts(value: dict[Any, Any]) -> dict[Any, Any]:
    """An optimizer's state dict with its counts as numbers: DCP writes all keys as text, and leaves out what is empty."""
    groups = value.get("param_groups")
    if not isinstance(groups, list) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        return value
    count_of = {str(number): number for group in groups for number in group["params"]}
    states = value.get("state", {})
    return {**value, "state": {count_of.get(key, key): state for key, state in states.items()}, "param_groups": groups}
