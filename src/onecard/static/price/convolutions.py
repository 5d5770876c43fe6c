"""What convolutions take: how many channels meet, and the memory that their kernels take for themselves while they run."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import fx

aten = torch.ops.aten
FORWARD, BACKWARD = aten.convolution.default, aten.convolution_backward.default
CHANNELS = (1, 4, 16, 64)
"""Of each group: those for which a measured machine has curves."""


class ConvolutionCall(NamedTuple):
    """One call of a convolution, or of its backward pass, by the shapes of its tensors.

    Attributes:
        given: the nodes of what it convolves, of its weight, and of its result or that one's gradient.
        wanted: of a backward pass, whether it gives gradients of what was convolved, of the weight, of the bias.
    """

    x: fx.Node
    weight: fx.Node
    y: fx.Node
    stride: Any
    transposed: bool
    groups: int
    wanted: tuple[bool, ...]


def call_of(node: fx.Node) -> ConvolutionCall | None:
    """A node's convolution; None of any other."""
    a: Any = node.args
    if node.target is FORWARD and len(a) == 9:
        return ConvolutionCall(a[0], a[1], node, a[3], a[6], a[8], ())
    if node.target is BACKWARD and len(a) == 11:
        return ConvolutionCall(a[1], a[2], a[0], a[4], a[7], a[9], tuple(a[10]))
    return None


def channels(call: ConvolutionCall) -> int:
    """How many channels of a group meet how many: the smaller count tells more of the time than the larger one."""
    weight = _shape(call.weight)
    few, many = sorted((weight[1], max(1, weight[0] // call.groups)))
    return max(1, round((few * few * many) ** (1 / 3)))


def workspace(node: fx.Node) -> int:
    """Bytes that a kernel takes besides its results: on a CPU oneDNN copies what it is given into its own order of channels.

    It does not where a product does: one weight for each pair of channels, no stride, no groups. Few channels are not copied.
    """
    call = call_of(node)
    if call is None or call.x.meta["tensor"][3].type != "cpu":
        return 0
    x, w, y = map(_bytes, call[:3])
    spread = 0 if not call.wanted or _is_dense(call.y) else y  # a gradient of a sum is one element, seen often
    if not _by_onednn(call):
        return spread
    few = _shape(call.x)[1] <= _FEW
    if not call.wanted:
        return 2 * y if call.transposed else max((0 if few else x) + w, y)
    blocked = x * -(-_shape(call.x)[1] // _BLOCK) * _BLOCK // _shape(call.x)[1]
    into_x, made_x = (y + w + blocked, x) if call.wanted[0] else (0, 0)
    into_w = made_x + (0 if few else x) + y + w if call.wanted[1] else 0
    return spread + max(0, max(into_x, into_w) - made_x - (w if call.wanted[1] else 0))


_BLOCK = 16  # channels that lie beside each other
_FEW = 4


def _by_onednn(call: ConvolutionCall) -> bool:
    plain = prod(_shape(call.weight)[2:]) == 1 and call.groups == 1 and all(s == 1 for s in call.stride)
    fits = call.x.meta["tensor"][2] is torch.float32 and _is_dense(call.x) and torch.backends.mkldnn.is_available()
    return bool(fits and not plain)


def _is_dense(node: fx.Node) -> bool:
    shape, stride, _, _ = node.meta["tensor"]
    return all(n == 1 or s == prod(shape[i + 1 :]) for i, (n, s) in enumerate(zip(shape, stride, strict=True)))


def _bytes(node: fx.Node) -> int:
    return int(prod(_shape(node)) * node.meta["tensor"][2].itemsize)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return node.meta["tensor"][0]
