"""Folders and files of others that can be read as they are: safetensors, alone or in Hugging Face's folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onecard.checkpoint.format import tree
from onecard.checkpoint.format.files import InputFile
from onecard.checkpoint.format.index import CODES, File, FilePiece, Index, IndexEntry, check_entry
from onecard.errors import CheckpointError

HF_INDEX = "model.safetensors.index.json"
HF_FILE = "model.safetensors"
_LARGEST = 100_000_000  # bytes of a header, as in safetensors
_DTYPES = {code: dtype for dtype, code in CODES.items()}


def read_safetensors(path: Path) -> Index:
    """One file as an index. Links are followed, here and below: Hugging Face's cache consists of them."""
    return _index(path.parent, {path.name: None})


def read_huggingface(folder: Path) -> Index:
    """A folder of Hugging Face's: the files that its index names, or the only one."""
    if not (folder / HF_INDEX).exists():
        return read_safetensors(folder / HF_FILE)
    with InputFile(folder, HF_INDEX, links=True) as file:
        if file.size > _LARGEST:
            raise CheckpointError(f"{file.path} has {file.size:,} bytes; it should have at most {_LARGEST:,}")
        text = file.read(0, file.size)
    try:
        where = json.loads(text)["weight_map"]
        names: dict[str, Any] = {}
        for tensor, name in where.items():
            names.setdefault(str(name), []).append(tensor)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise CheckpointError(f"{folder / HF_INDEX} is damaged: {type(fault).__name__}: {fault}") from None
    return _index(folder, names)


def _index(folder: Path, files: dict[str, Any]) -> Index:
    index = Index(folder, {}, {}, None)
    for name, wanted in files.items():
        with InputFile(folder, name, links=True) as file:
            header, length = _header(file)
            index.files[name] = File(file.size, length, None)
        for tensor in header if wanted is None else wanted:
            if tensor not in header:
                raise CheckpointError(f"{folder / name} does not have {tensor!r}, which {HF_INDEX} says it has")
            index.tensors[tensor] = _entry(folder, name, tensor, header[tensor], index.files)
        _check_all(folder / name, header, index.files[name])
    index.state = dict(tree.flat(list(index.tensors)))
    return index


def _header(file: InputFile) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(file.read(0, 8), "little") if file.size >= 8 else _LARGEST + 1
    if length > min(_LARGEST, file.size - 8):
        raise CheckpointError(
            f"{file.path} is not a safetensors file, or was cut off: its header would have {length:,} bytes"
        )
    try:
        header = json.loads(file.read(8, length), object_pairs_hook=_once)
        about = header.pop("__metadata__", None) or {}
        if not all(isinstance(text, str) for text in about.values()):
            raise ValueError("its __metadata__ are not texts")
    except (ValueError, AttributeError, TypeError, RecursionError) as fault:
        raise CheckpointError(f"{file.path}: its header is damaged: {fault}") from None
    return header, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, each of whose keys is there once."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it names {next(name for name in names if names.count(name) > 1)!r} twice")
    return made


def _check_all(path: Path, header: dict[str, Any], file: File) -> None:
    """Whether the tensors of a file follow one another from the first byte of the data to the last, as in any that is whole."""
    try:
        places = sorted((*_both(said["data_offsets"]), name) for name, said in header.items())
    except (KeyError, TypeError, ValueError) as fault:
        raise CheckpointError(f"{path}: its header is damaged: {type(fault).__name__}: {fault}") from None
    at = 0
    for first, last, name in places:
        if first != at or last < first:
            how = "are another's as well" if first < at else f"follow {first - at:,} bytes that are nobody's"
            raise _not_whole(path, f"bytes {first:,} to {last:,} of its data, of {name!r}, {how}")
        at = last
    if at != file.size - file.header:
        raise _not_whole(path, f"after its tensors there are {file.size - file.header - at:,} bytes that are nobody's")


def _not_whole(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged, or not what was meant to be written: {what}. In a safetensors file each byte of the data belongs to "
        "one tensor"
    )


def _both(offsets: Any) -> tuple[int, int]:
    start, stop = offsets
    if type(start) is not int or type(stop) is not int or start < 0:
        raise ValueError(f"{offsets!r} are no offsets")
    return start, stop


def _entry(folder: Path, file: str, name: str, said: Any, files: dict[str, File]) -> IndexEntry:
    try:
        dtype, shape = _DTYPES[said["dtype"]], tuple(said["shape"])
        start, stop = said["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
            raise ValueError(f"{shape} {start} {stop}")
    except (KeyError, TypeError, ValueError) as fault:
        raise CheckpointError(f"{folder / file}: what its header says of {name!r} cannot be: {fault}") from None
    piece = FilePiece(file, tuple((0, n) for n in shape), files[file].header + start, stop - start, None)
    entry = IndexEntry(dtype, shape, (piece,))
    check_entry(folder / file, name, entry, files)
    return entry
