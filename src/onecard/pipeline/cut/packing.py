"""Small values that leave for the same rank at the same time are one message. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import fx

from onecard.pipeline.cut.messages import Crossing

SMALL = 4096
"""Bytes of a value, up to which a message costs more than to copy it."""
Packet = tuple[Crossing, ...]
"""What travels in one message: of one dtype, all there at the same time."""


def packed(found: Sequence[Crossing]) -> list[Packet]:
    """What one rank sends another, in the order in which it does: each large value alone, small ones together.

    Clipping sends the norm of each parameter's gradient: one message of all of them.
    """
    made: list[Packet] = []
    for _, group in groupby(found, key=lambda c: c.sent):
        together: dict[object, list[Crossing]] = {}
        for i, crossing in enumerate(group):
            together.setdefault(_kind(crossing.value) or i, []).append(crossing)
        made += map(tuple, together.values())
    return made


def numel(node: fx.Node) -> int:
    """How many elements a node's result has."""
    return int(torch.Size(node.meta["tensor"][0]).numel())


def _kind(node: fx.Node) -> tuple[object, ...]:
    """What the values of a message have in common; nothing of one that travels alone."""
    shape, stride, dtype, device = node.meta["tensor"]
    step = 1
    for size, by in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and by != step:
            return ()
        step *= size
    return (dtype, device) if 0 < numel(node) * dtype.itemsize <= SMALL else ()


__all__ = ["SMALL", "Packet", "numel", "packed"]
