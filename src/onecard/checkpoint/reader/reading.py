"""Read boxes of tensors from files: straight into memory where it fits, else through one bounded buffer; checksums on the way."""

from __future__ import annotations

from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from onecard.checkpoint.format.crc import crc32
from onecard.checkpoint.format.files import InputFile
from onecard.checkpoint.format.folder import CheckpointWarning, check_size
from onecard.checkpoint.format.index import BLOCK, File, FilePiece
from onecard.checkpoint.format.pieces import BUFFER, memory
from onecard.checkpoint.reader.virtual import View, Virtual, stretches
from onecard.comm.base.warned import warn
from onecard.errors import CheckpointError
from onecard.place import boxes
from onecard.place.boxes import Box

SMALL = 64  # bytes of a stretch


class Reader:
    """The open files of a checkpoint. ``bytes_read`` counts what was asked of them."""

    def __init__(self, folder: Path, files: dict[str, File], links: bool = False) -> None:
        self._folder, self._files, self._links = folder, files, links
        self._open: dict[str, InputFile] = {}
        self._stack = ExitStack()
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.bytes_read = 0
        self._unlike: list[str] = []

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        if self._unlike:
            found, self._unlike = self._unlike, []
            more = f"; so are {len(found) - 1} others" if found[1:] else ""
            warn(
                f"of tensors that become one, what has no dims is taken from the first: {found[0]}{more}",
                CheckpointWarning,
            )

    def file(self, name: str) -> InputFile:
        """A file, checked when it is opened: its size, and what comes before the data."""
        if name not in self._open:
            file, said = self._stack.enter_context(InputFile(self._folder, name, self._links)), self._files[name]
            check_size(file, said.size)
            if said.crc32 is not None:
                header = file.read(0, said.header)
                self.bytes_read += said.header
                if f"{crc32(header):08x}" != said.crc32:
                    raise CheckpointError(
                        f"{file.path} is damaged: the checksum of its header, {said.header} bytes, does not fit"
                    )
            self._open[name] = file
        return self._open[name]

    def read(self, name: str, virtual: Virtual, need: Box, out: Tensor) -> None:
        """Fill a tensor with a box of a saved one.

        Args:
            name: the tensor's, for errors.
            need: in the whole tensor.
            out: of the box's shape; any strides, dtype and device.
        """
        for view in virtual.views:
            found = view.part(need)
            if found is not None:
                common, ranges = found
                fixed = [d for d in range(len(view.stored)) if d not in view.order]
                place = boxes.view(out, need, common)
                place = place.reshape(*place.shape, *[1] * len(fixed)) if fixed else place
                place = place.permute(_inverse((*view.order, *fixed)))
                self._read(name, virtual.dtype, view, ranges, place)
        for other, beside in virtual.beside:
            self.read(other, beside, need, theirs := torch.empty_like(out, device="cpu"))
            if theirs != out.cpu():
                self._unlike.append(f"{name!r} is {out.item()}, and {other!r} was {theirs.item()}")
                break

    def _read(self, name: str, dtype: torch.dtype, view: View, ranges: Box, place: Tensor) -> None:
        """Ranges of a piece, in the file's order of dims."""
        if not place.numel():
            return
        piece, item = view.piece, dtype.itemsize
        run = max(1, _run(view.stored, ranges))
        # Without checksums nothing is read that is not wanted, unless that lies in so small stretches that they would cost more.
        alone = run * item >= (SMALL if piece.crc32 is None else 4 * BLOCK)
        for limit in (run, min(run, BUFFER // item)) if alone else (BUFFER // item,):
            parts = stretches(view.stored, ranges, limit)
            found = [(first, count, boxes.view(place, ranges, box)) for first, count, box in parts]
            if limit * item <= BUFFER or all(
                count == part.numel() and _is_memory(part, dtype) for _, count, part in found
            ):
                break
        for first, count, part in found:
            if count == part.numel() and _is_memory(part, dtype):
                self._straight(name, piece, first * item, _bytes(part))
            else:
                data = self._buffered(name, piece, first * item, count * item).view(dtype)
                part.copy_(data.as_strided(part.shape, _strides(view.stored)))

    def _straight(self, name: str, piece: FilePiece, start: int, out: Tensor) -> None:
        """A stretch of a piece into memory; blocks of which it has only a part go through the buffer."""
        data, file = memory(out), self.file(piece.file)
        if piece.crc32 is None:
            self._fill(file, data, piece.offset + start)
            return
        at, stop = 0, data.nbytes
        while at < stop:
            block, inside = divmod(start + at, BLOCK)
            size = min(BLOCK, piece.bytes - block * BLOCK)
            if inside == 0 and stop - at >= size:
                part = data[at : at + size]
                self._fill(file, part, piece.offset + block * BLOCK)
                self._check(name, piece, block, part)
                at += size
            else:
                take = min(size - inside, stop - at)
                data[at : at + take] = memory(self._buffered(name, piece, start + at, take))
                at += take

    def _buffered(self, name: str, piece: FilePiece, start: int, size: int) -> Tensor:
        """Some bytes of a piece in the buffer, checked: with all of the blocks that they are in."""
        low, high = start, start + size
        if piece.crc32 is not None:
            low, high = low // BLOCK * BLOCK, min(piece.bytes, -(-high // BLOCK) * BLOCK)
        if self._buffer.numel() < high - low + 16:
            self._buffer = torch.empty(max(high - low + 16, BUFFER + 2 * BLOCK), dtype=torch.uint8, device="cpu")
        shift = -(start - low) % 16  # so that what is wanted is aligned to any dtype
        held = self._buffer[shift : shift + high - low]
        data = memory(held)
        self._fill(self.file(piece.file), data, piece.offset + low)
        if piece.crc32 is not None:
            for block in range(low // BLOCK, -(-high // BLOCK)):
                self._check(name, piece, block, data[block * BLOCK - low : (block + 1) * BLOCK - low])
        return held[start - low : start - low + size]

    def _fill(self, file: InputFile, data: memoryview, offset: int) -> None:
        self.bytes_read += file.read_into([data], offset)

    def _check(self, name: str, piece: FilePiece, block: int, data: memoryview) -> None:
        assert piece.crc32 is not None
        if f"{crc32(data):08x}" != piece.crc32[8 * block : 8 * block + 8]:
            start = piece.offset + block * BLOCK
            raise CheckpointError(
                f"{self._folder / piece.file} is damaged: bytes {start:,} to {start + data.nbytes:,}, of tensor {name!r}, "
                "do not fit their checksum. Take another step's, onecard.checkpoint.verify tells which are whole"
            )


def _is_memory(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether bytes of a file can be read straight into a tensor."""
    return x.dtype == dtype and x.device.type == "cpu" and x.is_contiguous() and not x.is_conj() and not x.is_neg()


def _bytes(x: Tensor) -> Tensor:
    x = x.reshape(-1)
    return x.as_strided(x.shape, (1,)).view(torch.uint8)


def _run(stored: tuple[int, ...], ranges: Box) -> int:
    """How many elements of a box stand together in the array.

    >>> _run((4, 6), ((1, 3), (0, 6))), _run((4, 6), ((1, 3), (2, 4))), _run((2, 4, 6), ((0, 2), (1, 3), (0, 6)))
    (12, 2, 12)
    """
    run = 1
    for (a, b), n in zip(reversed(ranges), reversed(stored), strict=True):
        run *= b - a
        if b - a < n:
            break
    return run


def _strides(stored: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(stored[d + 1 :]) for d in range(len(stored)))


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(d) for d in range(len(order)))


__all__ = ["Reader"]
