"""Write one rank's safetensors file: header, then each piece where it lies in memory, with checksums on the way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard.checkpoint.format.crc import crc32
from onecard.checkpoint.format.files import OutputFile
from onecard.checkpoint.format.index import BLOCK, CODES
from onecard.checkpoint.format.pieces import Share, chunks, memory

TOGETHER = 4 << 20  # bytes of a write: few enough for the cache, which has them for the checksums

Content = Callable[[int], Iterable[Tensor]]  # the bytes of the i-th share, in stretches


def header_of(shares: Sequence[Share]) -> tuple[bytes, list[int]]:
    """What a safetensors file begins with, and where each share's data begin in the file."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    starts = []
    for share in shares:
        code, shape = stored(share.source.dtype, tuple(b - a for a, b in share.box))
        table[_key(share, table)] = {"dtype": code, "shape": shape, "data_offsets": [at, at + share.nbytes]}
        starts.append(at)
        at += share.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in starts]


def stored(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, list[int]]:
    """A dtype and a shape as the files have them.

    >>> stored(torch.bfloat16, (2, 3)), stored(torch.complex128, (2,))
    (('BF16', [2, 3]), ('U8', [2, 16]))
    """
    if dtype in CODES:
        return CODES[dtype], list(shape)
    return "U8", [*shape, dtype.itemsize]


def _key(share: Share, table: dict[str, Any]) -> str:
    """The name of a tensor; of a part of it with the part, as an index."""
    name = share.source.name
    if share.box != tuple((0, n) for n in share.source.shape) or name in table:
        name += "[" + ",".join(f"{a}:{b}" for a, b in share.box) + "]"
    while name in table:  # somebody calls a tensor so
        name += "'"
    return name


def write_shares(path: Path, shares: Sequence[Share], content: Content, told: Callable[[int], None]) -> dict[str, Any]:
    """Write the file; ``told`` hears of the bytes as they are written. Returns what the index needs to know."""
    header, starts = header_of(shares)
    with OutputFile(path) as file:
        file.write(header)
        sums = []
        for i in range(len(shares)):
            sums.append(_write(file, content(i), told))
    return {
        "size": file.size,
        "header": len(header),
        "crc32": f"{crc32(header):08x}",
        "starts": starts,
        "sums": sums,
    }


def _write(file: OutputFile, stretches: Iterable[Tensor], told: Callable[[int], None]) -> str:
    """Write stretches of bytes one after another; the checksums of their blocks."""
    sums, running, at = [], 0, 0
    for stretch in stretches:
        data = memory(stretch)
        for start in range(0, data.nbytes, TOGETHER):
            piece = data[start : start + TOGETHER]
            file.write(piece)
            told(piece.nbytes)
            while piece.nbytes:
                part = piece[: BLOCK - at]
                running = crc32(part, running)
                at += part.nbytes
                piece = piece[part.nbytes :]
                if at == BLOCK:
                    sums.append(running)
                    running = at = 0
    if at:
        sums.append(running)
    return "".join(f"{s:08x}" for s in sums)


def from_memory(shares: Sequence[Share]) -> Content:
    """The bytes of shares where the tensors are."""
    return lambda i: chunks(shares[i].source.values(shares[i].box))


class Staging:
    """A copy of what a rank writes, so that training may go on; its memory is used again by the next save."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def copy(self, shares: Sequence[Share]) -> Content:
        """Copy shares, and give their bytes from the copy."""
        sizes = [share.nbytes for share in shares]
        if self._memory is None or self._memory.numel() < sum(sizes):
            self._memory = None
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=_on_gpu(shares), device="cpu")
        copies = self._memory[: sum(sizes)].split(sizes) if sizes else ()
        for share, place in zip(shares, copies, strict=True):
            _fill(place, share.source.values(share.box))
        return lambda i: (copies[i],)


def _fill(place: Tensor, part: Tensor) -> None:
    part = part.resolve_conj().resolve_neg() if part.is_conj() or part.is_neg() else part
    if place.storage_offset() % part.dtype.itemsize == 0 and part.numel():
        place.view(part.dtype).view(part.shape).copy_(part)
        return
    at = 0
    for stretch in chunks(part):
        place[at : at + stretch.numel()].copy_(stretch)
        at += stretch.numel()


def _on_gpu(shares: Sequence[Share]) -> bool:
    return any(part.device.type == "cuda" for share in shares for _, part in share.source.holdings)
