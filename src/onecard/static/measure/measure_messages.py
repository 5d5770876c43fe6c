"""Seconds of messages by kind and bytes, as a step sends them, and of what computes beside them.

In a step what is sent was just computed, in memory of its own, by code that took the caches: a message that is sent again and
again from the same memory takes two thirds of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onecard.comm.issue import again
from onecard.comm.world import world
from onecard.machine import cost
from onecard.machine.cost import Curve
from onecard.place.mesh import ProcessMesh
from onecard.static.measure.together import Run, clock, mean, typical
from onecard.static.price import families

SENT = tuple(2**k for k in (6, 10, 14, 17, 20, 22))
AGAIN = 10
"""How often a message is sent."""
BESIDE = 2**22
"""Bytes of the message that is sent while this rank computes, to see how much of its time that takes."""


class _Sending(NamedTuple):
    """Bytes that one rank sends, how, and elements of what is filled and of what is given."""

    sent: float
    send: Callable[[Tensor, Tensor], Any]
    into: int
    given: int


def curves() -> Iterator[tuple[str, Curve]]:
    """Seconds of each kind of message by the bytes that one sends, the same on all ranks: among all of them, and along lines
    of fewer, all lines at once, as along an axis of a mesh."""
    ranks, between = world.get_world_size(), _between()
    for count in (n for n in range(2, ranks + 1) if ranks % n == 0):
        axes = [[*range(n, n + count)] for n in range(0, ranks, count)]
        line = again.Line(ProcessMesh(axes, ["lines", "line"]), 1)
        for kind, made in _KINDS.items():
            found = [made(line, count, sent) for sent in SENT]
            seconds = mean([_seconds(partial(_send, one), partial(_made, one), between) for one in found])
            curve = tuple(zip((one.sent for one in found), seconds, strict=True))
            yield families.sent(kind, count), curve
            if count == ranks:
                yield kind, curve


def beside() -> float:
    """The share of a started message's time in which this rank computes: where the copying needs its core, there is none."""
    line = again.Line(ProcessMesh(range(world.get_world_size()), ["all"]), 0)
    size, between = BESIDE // 4, _between()
    begin, send = again.sender("all_reduce", ("sum",), line, True), again.sender("all_reduce", ("sum",), line)
    one, y = _Sending(0.0, send, size, size), torch.rand(512, 512, device="cpu")

    def compute(_: Any) -> None:
        for _ in range(4):
            torch.mm(y, y)

    def both(tensors: tuple[Tensor, Tensor]) -> None:
        handle = begin(*tensors)
        compute(None)
        again.wait(handle, *tensors)

    alone, message, together = (
        _seconds(run, partial(_made, one), between) for run in (compute, partial(_send, one), both)
    )
    return mean([min(1.0, max(0.0, (alone + message - together) / message))])[0]


def _seconds(run: Callable[[Any], Any], made: Callable[[], Any], between: Run) -> float:
    """Of a call that all make at the same time, with what was made for it, each time after something else."""
    found, watch = [], clock()
    for _ in range(AGAIN + 2):
        between()
        found.append(watch.once(partial(run, made())))
    return typical(found[2:])


def _between() -> Run:
    """What a step does between two messages, with memory and code of its own."""
    x, y = torch.rand(384, 384, device="cpu"), torch.ones(2**20, device="cpu")

    def run() -> None:
        torch.mm(x, x)
        y.add_(1.0)

    return run


def _made(one: _Sending) -> tuple[Tensor, Tensor]:
    return torch.empty(max(one.into, 1), device="cpu"), torch.ones(one.given, device="cpu")


def _send(one: _Sending, tensors: tuple[Tensor, Tensor]) -> None:
    one.send(*tensors)


def _all_reduce(line: again.Line, count: int, sent: int) -> _Sending:
    n = max(1, sent * count // (8 * (count - 1)))
    return _Sending(cost.sent("all_reduce", 4 * n, count), again.sender("all_reduce", ("sum",), line), n, n)


def _all_gather(line: again.Line, count: int, sent: int) -> _Sending:
    n = max(1, sent // (4 * (count - 1)))
    return _Sending(
        cost.sent("all_gather", 4 * n, count), again.sender("all_gather_into_tensor", (count,), line), count * n, n
    )


def _reduce_scatter(line: again.Line, count: int, sent: int) -> _Sending:
    n = max(1, sent // (4 * (count - 1)))
    return _Sending(
        cost.sent("reduce_scatter", 4 * n * count, count),
        again.sender("reduce_scatter_tensor", ("sum", count), line),
        n,
        count * n,
    )


def _all_to_all(line: again.Line, count: int, sent: int) -> _Sending:
    n = max(1, sent // (4 * (count - 1)))
    sizes = [n] * count
    return _Sending(
        cost.sent("all_to_all", 4 * n * count, count),
        again.sender("all_to_all_single", (sizes, sizes), line),
        count * n,
        count * n,
    )


_KINDS: dict[str, Callable[[again.Line, int, int], _Sending]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}
