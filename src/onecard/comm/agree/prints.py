"""Digests of tensors that ranks compare without seeing each other's values: of all bits, the norm, and a few values."""

from __future__ import annotations

import math
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FIELD = "\x1f"


def fingerprint(x: Tensor) -> str:
    """A digest of a tensor in a few dozen bytes: of all its bits, its norm, and some of its values.

    Example:
        >>> fingerprint(torch.tensor([3.0, 4.0])) == fingerprint(torch.tensor([4.0, 3.0]))
        False
        >>> norm_and_values(fingerprint(torch.tensor([3.0, 4.0])))
        (5.0, [3.0, 4.0])
    """
    x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if x.is_cuda:
        return _on_device(x.contiguous().reshape(-1))
    if x.dtype not in _NUMPY:  # numpy does not know it: its bits, and its values as wider ones
        wide = torch.view_as_real(x) if x.is_complex() else x.float()
        return _print(_bits(x.reshape(-1).contiguous().view(torch.uint8).numpy()), wide.numpy().reshape(-1))
    array = np.ascontiguousarray(np.from_dlpack(x)).reshape(-1)  # x.numpy() would forbid its memory ever to be given up
    return _print(_bits(array), array)


def _print(bits: int, array: Any) -> str:
    with np.errstate(all="ignore"):  # a mask may hold the lowest number that there is
        norm = math.sqrt(np.dot(array, array)) if array.dtype.kind == "f" else math.nan
    return f"{bits:x}{_FIELD}{norm!r}{_FIELD}{array[:: max(1, -(-array.size // 8))].astype(np.float64).tobytes().hex()}"


def _bits(array: Any) -> int:
    """A hash of memory: of few bytes all, of many their sum as words, and a hash of some."""
    if array.nbytes <= _FEW:
        return zlib.crc32(array.data)
    data = array.view(np.uint8)
    words = data[: data.size // 8 * 8].view(np.int64)
    some = zlib.crc32(words[:: 8 * words.size // _FEW].tobytes(), zlib.crc32(data[words.size * 8 :].data))
    return (int(words.sum()) & 0xFFFFFFFFFFFFFFFF) << 32 | some


def _on_device(flat: Tensor) -> str:
    """The same on a GPU: sums there, and a few values brought here."""
    data = flat.view(torch.uint8)
    whole = data[: data.numel() // 8 * 8]
    words = (whole.clone() if whole.data_ptr() % 8 else whole).view(torch.int64)
    real = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    some = real[:: max(1, -(-real.numel() // 8))].double().cpu().numpy()
    norm = float(torch.linalg.vector_norm(real)) if real.is_floating_point() else math.nan
    few = words[:: max(1, 8 * words.numel() // _FEW)].contiguous()  # torch tells apart bytes of neighbours only
    sample = torch.cat([few.view(torch.uint8), data[whole.numel() :]])
    bits = (int(words.sum()) & 0xFFFFFFFFFFFFFFFF) << 32 | zlib.crc32(sample.cpu().numpy().data)
    return f"{bits:x}{_FIELD}{norm!r}{_FIELD}{some.tobytes().hex()}"


def norm_and_values(said: str) -> tuple[float, list[float]]:
    """What a fingerprint says for people; the norm is NaN for what is not of floating point."""
    _, norm, values = said.split(_FIELD)
    return float(norm), np.frombuffer(bytes.fromhex(values)).tolist()


_FEW = 1 << 12  # bytes that are hashed one by one
_NUMPY = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool})


def rounding(mine: tuple[float, list[float]], theirs: tuple[float, list[float]]) -> bool:
    """Whether two prints differ by no more than the order of a sum makes. Not where there are no norms, or not of numbers."""
    near = abs(mine[0] - theirs[0]) <= 1e-4 * max(mine[0], theirs[0])
    pairs = list(zip(mine[1], theirs[1], strict=False))
    scale = max(abs(v) for pair in pairs for v in pair)
    return near and all(abs(a - b) <= 1e-3 * scale for a, b in pairs)
