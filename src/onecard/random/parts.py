"""Fill one part of a tensor with the values that the law and the key give to each element of the whole.

Element ``i`` (its row-major index in the whole tensor) takes its bits from Philox block ``i // per``, where ``per``
elements share the four words of a block. A part computes the blocks that it touches and no others, in chunks that stay
in the cache: nothing depends on how the tensor is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from onecard.random.key import Key, RowShare, tracing
from onecard.random.laws import Law
from onecard.random.philox import MASK, Word, philox
from onecard.recorded import one_node

CHUNK = {"cpu": 2**15}  # Philox blocks at a time: some int64 buffers of this length fit into a core's cache
CHUNK_ELSEWHERE = 2**22  # on a GPU few launches matter more


@one_node(0, is_pure=True)
def fill(out: Tensor, law: Law, key: Key, shape: Sequence[int] | None = None, offset: Sequence[int] = ()) -> Tensor:
    """Write random values into a part of a whole tensor, in place.

    Args:
        out: the part; a plain tensor of any strides and device.
        law: what is drawn, for the dtype of ``out``.
        key: of this draw. With a ``share`` the whole is the batch's, and ``shape`` that of its microbatch.
        shape: of the whole tensor; that of ``out`` if left out.
        offset: where ``out`` begins in the whole, for each dim.

    Returns:
        ``out``.

    Example:
        >>> from onecard.random import law
        >>> whole = fill(torch.empty(4, 5), law("normal_", torch.float32), Key(1, 2))
        >>> part = fill(torch.empty(2, 3), law("normal_", torch.float32), Key(1, 2), (4, 5), (1, 2))
        >>> torch.equal(part, whole[1:3, 2:5])
        True
    """
    whole = tuple(out.shape if shape is None else shape)
    start = tuple(offset) or (0,) * len(whole)
    if key.share is not None:
        of_batch = Key(key.low, key.high)
        for part, at, begin in in_batch(out, whole, start, key.share):
            fill(part, law, of_batch, at, begin)
        return out
    if out.is_complex():
        fill(torch.view_as_real(out), law, key, (*whole, 2), (*start, 0))
        return out
    if out.numel():
        target = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        _Part(target, law, key, whole, start).run()
        if target is not out:
            out.copy_(target)
    return out


def in_batch(
    out: Tensor, shape: Sequence[int], start: Sequence[int], share: RowShare
) -> Iterator[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]:
    """The pieces of a microbatch's part, each with the batch's shape and where it begins in it: with its rows taken apart."""
    dim, before, ranks, rows, number, of = share
    sizes = before, ranks, 1, rows // ranks, shape[dim] // (before * rows)
    batch = (*shape[:dim], before, ranks, of, *sizes[3:], *shape[dim + 1 :])
    done = 0
    for box in _boxes(start[dim], start[dim] + out.shape[dim], sizes):
        lengths = [length for _, length in box]
        part = out.narrow(dim, done, prod(lengths)).unflatten(dim, lengths)
        first, rank, _, *inner = [begin for begin, _ in box]
        yield part, batch, (*start[:dim], first, rank, number, *inner, *start[dim + 1 :])
        done += prod(lengths)


def _boxes(begin: int, end: int, sizes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Neighbours in a dim as boxes of the dims in which it is taken apart: for each, where it begins and how long it is."""
    rest = sizes[1:]
    inner = prod(rest)
    while begin < end:
        at, within = divmod(begin, inner)
        if not within and end - begin >= inner:
            yield [(at, (end - begin) // inner), *((0, n) for n in rest)]
            begin += (end - begin) // inner * inner
        else:
            stop = min(end, (at + 1) * inner)
            yield from ([(at, 1), *box] for box in _boxes(within, within + stop - begin, rest))
            begin = stop


class _Part:
    """A contiguous part as ``rows`` runs of ``length`` elements that are neighbours in the whole, too."""

    def __init__(self, out: Tensor, law: Law, key: Key, shape: tuple[int, ...], offset: tuple[int, ...]) -> None:
        self.flat, self.law, self.key = out.view(-1), law, key
        self.per = 4 // law.words
        self.wide = prod(shape) // self.per >= 2**32  # block numbers need a second counter word
        strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
        self.base = sum(o * s for o, s in zip(offset, strides, strict=True))
        cut = max([0, *[d for d in range(len(shape)) if out.shape[d] != shape[d]]])
        self.length = prod(out.shape[cut:])
        self.outer = [(n, s) for n, s in zip(out.shape[:cut], strides[:cut], strict=True) if n > 1]
        self.rows = prod([n for n, _ in self.outer])  # a list: torch.compile follows no generator here

    def run(self) -> None:
        """Fill it, chunk by chunk."""
        blocks = CHUNK.get(self.flat.device.type, CHUNK_ELSEWHERE)
        size = self.flat.numel() * 4 if tracing() else blocks * self.per
        if self.length * 2 > size or self.rows == 1:
            for row in range(self.rows):
                start = self.base + self._row_start(row)
                for begin, end in _cuts(start, start + self.length, size):
                    at = row * self.length + begin - start
                    self._run_of_blocks(begin, self.flat[at : at + end - begin])
            return
        step = max(1, size // (self.length + self.per))
        for row in range(0, self.rows, step):
            self._group_of_rows(row, min(row + step, self.rows))

    def _row_start(self, row: Word) -> Word:
        """Where runs begin in the whole, less ``base``: mixed-radix digits of their numbers times the strides."""
        start = 0
        for n, stride in reversed(self.outer):
            start = start + row % n * stride
            row = row // n
        return start

    def _run_of_blocks(self, begin: int, out: Tensor) -> None:
        first, skip = divmod(begin, self.per)
        last = -(-(begin + len(out)) // self.per)
        values = self._values(torch.arange(first, last, device=out.device))
        if self.per == 1:
            out.copy_(values[0])
        elif not skip and len(out) == (last - first) * self.per and values[0].dtype == out.dtype and not tracing():
            torch.stack(values, -1, out=out.view(-1, self.per))
        else:
            out.copy_(torch.stack(values, -1).view(-1)[skip : skip + len(out)])

    def _group_of_rows(self, first: int, end: int) -> None:
        device, per, length = self.flat.device, self.per, self.length
        starts = self._row_start(torch.arange(first, end, device=device)) + self.base
        alike = all(stride % per == 0 for _, stride in self.outer)
        most = self.base % per if alike else per - 1
        blocks = starts.div(per, rounding_mode="floor")[:, None] + torch.arange(
            -(-(most + length) // per), device=device
        )
        values = torch.stack(self._values(blocks.view(-1)), -1).view(end - first, -1)
        if alike:
            values = values[:, most : most + length]
        else:
            values = values.gather(1, (starts % per)[:, None] + torch.arange(length, device=device))
        self.flat[first * length : end * length].view(end - first, length).copy_(values)

    def _values(self, block: Tensor) -> list[Tensor]:
        counter = (block & MASK, block >> 32, 0, 0) if self.wide else (block, 0, 0, 0)
        return self.law.values(words_at(counter, self.key))


def words_at(counter: tuple[Word, Word, Word, Word], key: Key) -> Sequence[Tensor]:
    """Four words for each counter, of which the first at least is an int64 tensor."""
    words = key.low, key.high
    if counter[0].device.type != "cpu" or tracing():
        return philox(counter, words)
    # The same operations by NumPy, on the same memory: half the time of torch's, a third for few elements.
    arrays = [word.numpy() if isinstance(word, Tensor) else word for word in counter]
    return [torch.from_numpy(word) for word in philox((arrays[0], arrays[1], arrays[2], arrays[3]), words)]


def _cuts(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Pieces of a run that end at multiples of ``size``."""
    while begin < end:
        stop = min(end, (begin // size + 1) * size)
        yield begin, stop
        begin = stop
