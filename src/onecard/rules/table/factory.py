"""New tensors made in the image of another: only its shape and layout are read."""

from __future__ import annotations

from collections.abc import Sequence

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import names, signature

row("zeros_like ones_like empty_like full_like", "... -> ...", unread="self")


def dense_stride(shape: Sequence[int], like: Sequence[int]) -> list[int]:
    """Strides of a dense tensor whose dims lie in memory in the same order as under other strides.

    Example:
        >>> dense_stride([2, 3, 4], like=[1, 80, 10])
        [1, 8, 2]
    """
    stride, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return stride


def _resize(c: Local) -> None:
    shape = list(c.result_shape())
    if shape != list(c.call.size):
        c.set("size", shape)
        if "stride" in c.call.values:
            c.set("stride", dense_stride(shape, c.call.stride))


@row("new_empty new_zeros new_ones new_full new_empty_strided", local=_resize, positions="")
def _new(call: Call) -> Form:
    """A tensor of as many dims keeps the cuts of those of equal size: it is most often filled from the old one."""
    old = names(call.self.dim())
    if len(call.size) != len(old):
        return Form(signature([["_"] * len(old)], [["_"] * len(call.size)]), unread="self")
    new = [n if a == b else "_" for n, a, b in zip(old, call.self.shape, call.size, strict=True)]
    return Form(signature([new], [new]), unread="self")
