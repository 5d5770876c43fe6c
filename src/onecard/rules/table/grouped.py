"""Products of matrices in groups of rows, one matrix for each group: the experts of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard._torch.fakes import grouped_shape, is_fake
from onecard.recorded import values_of
from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form

aten = torch.ops.aten


def _bounds(offs: Tensor) -> Iterator[tuple[int, int]]:
    """Where each group begins and ends; ``offs`` are the ends."""
    ends = values_of(offs)
    return zip([0, *ends[:-1]][: len(ends)], ends, strict=True)


def _aligned(x: Tensor) -> bool:
    """What the kernel wants: rows (or columns) that begin at multiples of 16 bytes, and are not empty."""
    steps, size = sorted(x.stride()[-2:]), x.element_size()
    begin = (
        x.storage_offset() * size if is_fake(x) else x.data_ptr()
    )  # a tensor without data will have memory of its own
    return bool(x.numel() > 0 and steps[0] == 1 and steps[1] * size % 16 == 0 and begin % 16 == 0)


def _padded(x: Tensor, inner: bool = False) -> Tensor:
    """A copy as the kernel wants it, with zeros behind. A recording takes this way: the other one reads where groups end."""
    steps = max(16 // x.element_size(), 1)
    more = [-n % steps for n in x.shape[-2:]]
    return torch.constant_pad_nd(x.contiguous(), [0, more[1], 0, more[0] if inner else 0]).contiguous()


def grouped_rows(x: Tensor, weights: Tensor, offs: Tensor) -> Tensor:
    """``x[group] @ weights[group]`` for each group of rows; zeros for rows in none."""
    if _aligned(x) and _aligned(weights):
        return aten._grouped_mm(x, weights, offs).contiguous()  # its rows may be padded
    if recorded.recorder is not None and x.numel() and weights.numel():
        padded = aten._grouped_mm(_padded(x), _padded(weights, inner=True), offs)
        return padded[:, : weights.shape[-1]].contiguous()
    result = x.new_zeros(x.shape[0], weights.shape[-1])
    for (start, end), weight in zip(_bounds(offs), weights, strict=True):
        result[start:end] = x[start:end] @ weight
    return result


def _by_rows(x: Tensor) -> Tensor:
    """With rows in memory one after the other. By columns, a GPU's kernel ends in an assertion where a group does not begin at a
    multiple of 16 bytes: the process has lost its GPU then.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def grouped_sums(x: Tensor, y: Tensor, offs: Tensor) -> Tensor:
    """``x[:, group] @ y[group]`` for each group of what is summed over."""
    x, y = _by_rows(x.mT).mT, _by_rows(y)
    if _aligned(x) and _aligned(y):
        return aten._grouped_mm(x, y, offs).contiguous()
    if recorded.recorder is not None and x.numel() and y.numel():
        return aten._grouped_mm(_padded(x.mT).mT, _padded(y), offs)[:, : x.shape[0], : y.shape[1]].contiguous()
    if not len(offs):
        return x.new_zeros(0, x.shape[0], y.shape[1])
    return torch.stack([x[:, start:end] @ y[start:end] for start, end in _bounds(offs)])


def _grouped_local(c: Local) -> None:
    (start, length), rows = c.span("n"), c.call.values["mat2"].dim() == 3
    first, count = c.span("e")

    def run(x: Tensor, y: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
        if c.cut("n"):
            offs = (offs - start).clamp(0, length).to(offs.dtype)
        if not rows:
            return grouped_sums(x, y, offs)
        if not c.cut("e"):
            return grouped_rows(x, y, offs)
        if recorded.recorder is not None and count:
            return _among_zeros(x, y, offs, first, count)
        # This rank's experts: their rows lie side by side, all others are another rank's.
        result = x.new_zeros(x.shape[0], y.shape[-1])
        if count:
            begin, end = int(offs[first - 1]) if first else 0, int(offs[first + count - 1])
            result[begin:end] = grouped_rows(x[begin:end], y, (offs[first : first + count] - begin).to(offs.dtype))
        return result

    c.run = run


def _among_zeros(x: Tensor, y: Tensor, offs: Tensor, first: int, count: int) -> Tensor:
    """This rank's experts where no size may depend on data: the rows before and behind theirs meet zeros."""
    ends = [
        offs[first - 1 : first] if first else offs.new_zeros(1),
        offs[first : first + count],
        offs.new_full((1,), x.shape[0]),
    ]
    nothing = y.new_zeros(1, *y.shape[1:])
    return grouped_rows(x, torch.cat([nothing, y, nothing]), torch.cat(ends))


def _results(call: Call) -> list[Tensor]:
    """PyTorch's own meta function takes bfloat16 alone (2.13)."""
    x, y, offs = call.self, call.values["mat2"], call.values.get("offs")
    if offs is None or (x.dim(), y.dim()) not in ((2, 3), (2, 2)):
        return call.meta_results()
    return [x.new_empty(grouped_shape(x, y, offs), dtype=call.values.get("out_dtype"))]


def _macs(call: Call) -> int:
    """Each row meets one expert's matrix."""
    return int(call.self.numel() * call.values["mat2"].shape[-1])


@row("_grouped_mm", local=_grouped_local, results=_results, macs=_macs)
def _grouped_mm(call: Call) -> Form | None:
    """Rows ``x (n, k)`` by ``mat2 (e, k, m)``, or the gradient of ``mat2``: ``x (k, n)`` by ``y (n, m)``."""
    kinds = (call.self.dim(), call.values["mat2"].dim())
    narrows = call.values.get("out_dtype") not in (None, call.self.dtype)
    if (
        call.values.get("offs") is None
        or call.values.get("bias") is not None
        or narrows
        or kinds not in ((2, 3), (2, 2))
    ):
        return None
    text = "n k, e k m, _ -> n m" if kinds == (2, 3) else "k n, n m, _ -> _ k m"
    return Form(text, linear="self * mat2")
