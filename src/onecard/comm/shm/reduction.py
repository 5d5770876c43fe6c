"""Reductions of numbers in shared memory: always in the order of the ranks, so that all get the same bits.

numpy does the arithmetic where it has the type (one thread, no allocation, the GIL released); torch does the narrow
floats, which are summed in float32 and rounded once.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from onecard.errors import CommunicationError

Array = np.ndarray[Any, Any]

_NUMPY: dict[torch.dtype, Any] = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32,
    torch.int16: np.int16, torch.int8: np.int8, torch.uint8: np.uint8, torch.bool: np.bool_,
    torch.uint16: np.uint16, torch.uint32: np.uint32, torch.uint64: np.uint64,
    torch.complex64: np.complex64, torch.complex128: np.complex128,
}  # fmt: skip
_NARROW = {torch.complex32: torch.complex64} | {
    dtype: torch.float32
    for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    if (dtype := getattr(torch, name, None)) is not None
}
_RAW = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_BLOCK = 16 * 1024  # elements summed at a time: stays in the first cache, and below what torch spreads over threads

_UFUNC: dict[str, Any] = {
    "sum": np.add, "avg": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum,
    "band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor,
}  # fmt: skip
_LOGICAL: dict[str, Any] = {
    "sum": np.logical_or, "max": np.logical_or, "bor": np.logical_or,
    "product": np.logical_and, "min": np.logical_and, "band": np.logical_and, "bxor": np.logical_xor,
}  # fmt: skip
_IN_PLACE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.Tensor.add_, "avg": torch.Tensor.add_, "product": torch.Tensor.mul_,
    "min": lambda a, b: torch.minimum(a, b, out=a), "max": lambda a, b: torch.maximum(a, b, out=a),
}  # fmt: skip


def element(dtype: torch.dtype) -> Any:
    """The numpy type through which `fold` sees a torch dtype: its own, or plain bits."""
    return _NUMPY.get(dtype) or _RAW[dtype.itemsize]


def view(address: int, count: int, kind: Any) -> Array:
    """`count` elements of memory at an address as an array, which does not keep the memory alive."""
    size = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), kind)


class Fold(Protocol):
    """A reduction in the order of the ranks: of all at once (a call), or of one after the other on a running total.

    Attributes:
        total: the (numpy) type of the running total.
    """

    total: Any

    def __call__(self, sources: Sequence[Array], out: Array) -> None:
        """Reduces arrays, first to last, into another one, which must not overlap them."""

    def begin(self, total: Array, source: Array) -> None:
        """The first rank's part."""

    def add(self, total: Array, source: Array) -> None:
        """The next rank's part."""

    def finish(self, total: Array, ranks: int) -> None:
        """Makes the result of a total of all ranks, from its first byte on."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is reduced: where it lies, how many, of which (numpy) kind and size, and how."""

    address: int
    count: int
    kind: Any
    itemsize: int
    fold: Fold


@functools.cache
def fold(dtype: torch.dtype, op: str) -> Fold:
    """The reduction `op` of a dtype. Raises CommunicationError for a type that the operator is not defined on."""
    if dtype in _NARROW and op in _IN_PLACE:
        return _Narrow(dtype, op)
    logical = dtype is torch.bool
    table = _LOGICAL if logical else _UFUNC
    bits = op.startswith("b") and (dtype.is_floating_point or dtype.is_complex)
    order = op in ("min", "max") and dtype.is_complex
    if op not in table or dtype not in _NUMPY or bits or order:
        name = str(dtype).removeprefix("torch.")
        raise CommunicationError(f"the reduction {op!r} is not defined on {name}; on it: {', '.join(_defined(dtype))}")
    return _Wide(_NUMPY[dtype], table[op], op == "avg")


def _defined(dtype: torch.dtype) -> list[str]:
    if dtype is torch.bool:
        return list(_LOGICAL)
    if dtype.is_complex:
        return ["sum", "avg", "product"]
    return list(_IN_PLACE) if dtype.is_floating_point else list(_UFUNC)


class _Wide:
    """Totals of the type itself, by numpy. Overflow is a result, here as everywhere in torch."""

    def __init__(self, kind: Any, combine: Any, average: bool) -> None:
        self.total, self._combine, self._average = kind, combine, average

    @np.errstate(all="ignore")
    def __call__(self, sources: Sequence[Array], out: Array) -> None:
        if len(sources) == 1:
            np.copyto(out, sources[0])
        else:
            self._combine(sources[0], sources[1], out=out)
            for source in sources[2:]:
                self._combine(out, source, out=out)
        self.finish(out, len(sources))

    def begin(self, total: Array, source: Array) -> None:
        np.copyto(total, source)

    @np.errstate(all="ignore")
    def add(self, total: Array, source: Array) -> None:
        self._combine(total, source, out=total)

    def finish(self, total: Array, ranks: int) -> None:
        if self._average:
            _divide(total, ranks)


def _divide(out: Array, by: int) -> None:
    if out.dtype.kind in "fc":
        np.divide(out, by, out=out)
    else:  # towards zero, as NCCL does
        count = out.dtype.type(by)
        np.subtract(out, np.fmod(out, count), out=out)
        np.floor_divide(out, count, out=out)


class _Narrow:
    """Totals in float32, rounded once, by torch; block by block."""

    def __init__(self, dtype: torch.dtype, op: str) -> None:
        self._dtype, self._average, self._combine = dtype, op == "avg", _IN_PLACE[op]
        self._wide = _NARROW[dtype]
        self.total = _NUMPY[self._wide]

    def __call__(self, sources: Sequence[Array], out: Array) -> None:
        total = np.empty(min(len(out), _BLOCK), self.total)
        for start in range(0, len(out), _BLOCK):
            size = min(_BLOCK, len(out) - start)
            self.begin(total[:size], sources[0][start : start + size])
            for source in sources[1:]:
                self.add(total[:size], source[start : start + size])
            self.finish(total[:size], len(sources))
            out[start : start + size] = total.view(out.dtype)[:size]

    def begin(self, total: Array, source: Array) -> None:
        for wide, narrow in self._blocks(total, source):
            wide.copy_(narrow)

    def add(self, total: Array, source: Array) -> None:
        for wide, narrow in self._blocks(total, source):
            self._combine(wide, narrow.to(self._wide))

    def finish(self, total: Array, ranks: int) -> None:
        # Forwards: what is rounded is narrower than what it is made of, and so never runs over what is still to come.
        result = total.view(_RAW[self._dtype.itemsize])[: len(total)]
        for wide, narrow in self._blocks(total, result):
            narrow.copy_((wide / ranks if self._average else wide).to(self._dtype))

    def _blocks(self, total: Array, narrow: Array) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        one, other = torch.from_numpy(total), torch.from_numpy(narrow).view(self._dtype)
        for start in range(0, len(one), _BLOCK):
            yield one[start : start + _BLOCK], other[start : start + _BLOCK]
