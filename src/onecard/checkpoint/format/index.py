"""The index of a checkpoint: which box of which tensor lies where, with checksums. Pure, but for reading the file.

The file is one JSON object that this module writes byte by byte the same way, so that its own SHA-256 can stand in it:
``{"onecard_checkpoint": VERSION, "sha256": HASH OF CONTENT, "content": CONTENT}``. The format: docs/checkpoint_format.md.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onecard.checkpoint.format.files import InputFile
from onecard.errors import CheckpointError
from onecard.place.boxes import Box, volume

NAME = "index.json"
VERSION = 1
BLOCK = 1 << 20  # bytes of a piece that share a CRC-32
LARGEST = 1 << 30  # bytes of an index

_HEAD = re.compile(rb'\{"onecard_checkpoint": (\d{1,9}), "sha256": "([0-9a-f]{64})", "content": ')
_TAIL = b"}\n"
_CRC = re.compile(r"(?:[0-9a-f]{8})*")
_FILE = re.compile(r"[\w.@-][\w. @-]*", re.ASCII)

# What each dtype is called in the files. The others are stored as bytes, of which the index says what they are.
CODES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
DTYPES = {name: value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A box of a tensor in a file, row-major: ``bytes`` from ``offset`` on. ``crc32``: one for each BLOCK bytes, or None."""

    file: str
    box: Box
    offset: int
    bytes: int
    crc32: str | None


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """A tensor: its pieces are all of it, and no two have an element in common."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[FilePiece, ...]


@dataclass(frozen=True, slots=True)
class File:
    """A safetensors file: its size, the length of what comes before the data, and that part's CRC-32 (None: not known)."""

    size: int
    header: int
    crc32: str | None


@dataclass(slots=True)
class Index:
    """A checkpoint as its index tells it. ``state`` is the nested state, with the names of tensors in their places."""

    folder: Path
    files: dict[str, File]
    tensors: dict[str, IndexEntry]
    state: Any
    step: int | None = None
    generation: int = 0
    digest: str = ""
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name in the index.

    >>> name_of(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")


def to_bytes(index: Index) -> bytes:
    """The file."""
    numbers = {name: i for i, name in enumerate(index.files)}
    content = {
        "step": index.step,
        "generation": index.generation,
        "about": index.about,
        "block": BLOCK,
        "files": [{"name": n, "size": f.size, "header": f.header, "crc32": f.crc32} for n, f in index.files.items()],
        "tensors": {
            name: {
                "dtype": name_of(entry.dtype),
                "shape": list(entry.shape),
                "pieces": [
                    {"file": numbers[p.file], "box": [list(b) for b in p.box], "offset": p.offset, "bytes": p.bytes,
                     "crc32": p.crc32} for p in entry.pieces
                ],
            }
            for name, entry in index.tensors.items()
        },
        "state": index.state,
    }  # fmt: skip
    text = json.dumps(content, allow_nan=False, ensure_ascii=True, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest()
    return b'{"onecard_checkpoint": %d, "sha256": "%s", "content": %s' % (VERSION, digest.encode(), text) + _TAIL


def read_index(folder: Path) -> Index:
    """The index of a checkpoint's folder, checked.

    Raises:
        CheckpointError: there is none, it is damaged or of another version, or says what cannot be.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; there is no checkpoint")
    with InputFile(folder, NAME) as file:
        if file.size > LARGEST:
            raise CheckpointError(f"{file.path} has {file.size:,} bytes; an index has at most {LARGEST:,}")
        text = file.read(0, file.size)
    return parse(folder, text)


def parse(folder: Path, text: bytes) -> Index:
    """The index that a file says."""
    path = folder / NAME
    head = _HEAD.match(text)
    if head is None or not text.endswith(_TAIL):
        raise CheckpointError(f"{path} is not the index of a checkpoint, or is damaged or cut off: take another step's")
    if int(head[1]) != VERSION:
        raise CheckpointError(
            f"{path} is of version {int(head[1])} of the format, and this onecard reads version {VERSION}: load it with the "
            "onecard that wrote it, or a newer one"
        )
    content = text[head.end() : -len(_TAIL)]
    digest = hashlib.sha256(content).hexdigest()
    if digest != head[2].decode():
        raise CheckpointError(
            f"{path} is damaged, or was edited: its SHA-256 is not the one that it states. Take another step's"
        )
    try:
        index = _read(folder, json.loads(content))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as fault:
        raise CheckpointError(f"{path} says what no checkpoint has: {type(fault).__name__}: {fault}") from None
    index.digest = digest
    return index


def _read(folder: Path, content: dict[str, Any]) -> Index:
    path = folder / NAME
    if content["block"] != BLOCK:
        raise ValueError(f"block {content['block']!r}")
    names = [f["name"] for f in content["files"]]
    files = {f["name"]: File(_count(f["size"]), _count(f["header"]), _crc(f["crc32"], 1)) for f in content["files"]}
    for name in names:
        if not isinstance(name, str) or not _FILE.fullmatch(name) or names.count(name) > 1:
            raise CheckpointError(f"{path}: the file name {name!r} would lead out of the folder, or is no name of ours")
    tensors = {name: _entry(path, name, entry, names, files) for name, entry in content["tensors"].items()}
    step = content["step"]
    about = content["about"]
    return Index(
        folder, files, tensors, content["state"], None if step is None else _count(step), _count(content["generation"]),
        about=about if isinstance(about, dict) else {},
    )  # fmt: skip


def _entry(path: Path, name: str, entry: dict[str, Any], names: Sequence[str], files: dict[str, File]) -> IndexEntry:
    dtype, shape = DTYPES[entry["dtype"]], tuple(_count(n) for n in entry["shape"])
    pieces = []
    for said in entry["pieces"]:
        box = tuple((_count(a), _count(b)) for a, b in said["box"])
        file, offset, size = names[_count(said["file"])], _count(said["offset"]), _count(said["bytes"])
        pieces.append(FilePiece(file, box, offset, size, _crc(said["crc32"], -(-size // BLOCK))))
    found = IndexEntry(dtype, shape, tuple(pieces))
    check_entry(path, name, found, files)
    return found


def check_entry(path: Path, name: str, entry: IndexEntry, files: dict[str, File]) -> None:
    """Whether the pieces of a tensor can be: in their files, of the right size, all of it and nothing twice."""
    where = f"{path}: tensor {name!r} {name_of(entry.dtype)} {list(entry.shape)}"
    for piece in entry.pieces:
        if len(piece.box) != len(entry.shape) or any(
            not 0 <= a <= b <= n for (a, b), n in zip(piece.box, entry.shape, strict=True)
        ):
            raise CheckpointError(f"{where}: the box {piece.box} is not in it")
        if piece.bytes != volume(piece.box) * entry.dtype.itemsize:
            raise CheckpointError(f"{where}: the box {piece.box} does not have {piece.bytes:,} bytes")
        file = files[piece.file]
        if not file.header <= piece.offset <= piece.offset + piece.bytes <= file.size:
            raise CheckpointError(
                f"{where}: bytes {piece.offset:,} to {piece.offset + piece.bytes:,} do not lie within the data of "
                f"{piece.file}, bytes {file.header:,} to {file.size:,}"
            )
    held, wanted = sum(volume(p.box) for p in entry.pieces), prod(entry.shape)
    if held != wanted or overlap([p.box for p in entry.pieces]):
        raise CheckpointError(
            f"{where}: its pieces are not all of it, each element once ({held:,} of {wanted:,} elements)"
        )


def overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of some boxes have an element in common."""
    if len(boxes) < 2 or not boxes[0]:
        return len(boxes) > 1
    at = np.array(boxes, dtype=np.int64)
    full = at[(at[:, :, 0] < at[:, :, 1]).all(axis=1)]
    for i in range(len(full) - 1):
        rest = full[i + 1 :]
        if ((rest[:, :, 0] < full[i, :, 1]) & (full[i, :, 0] < rest[:, :, 1])).all(axis=1).any():
            return True
    return False


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{number!r} is no count")
    return number


def _crc(text: Any, blocks: int) -> str | None:
    if text is not None and (not isinstance(text, str) or len(text) != 8 * blocks or not _CRC.fullmatch(text)):
        raise ValueError(f"{str(text)[:40]!r} are no {blocks} checksums")
    return text
