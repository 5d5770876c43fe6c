"""What all collectives of a group share: numbers, deadlines, the queue, and what to do when one breaks off."""

# mypy: disable-error-code="override"
# The stubs of torch list overloads of calls that c10d makes in one way.

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecard.comm.shm.channel import Channel
from onecard.comm.shm.other_devices import OtherDevices
from onecard.comm.shm.segment import FAILED
from onecard.comm.shm.signature import CollectiveSignature
from onecard.comm.shm.work import Body, ShmWork, WorkQueue
from onecard.errors import CommunicationError

_OPS: dict[Any, str] = {
    getattr(dist.ReduceOp, name.upper()): name
    for name in ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
}
SUM = dist.ReduceOp(dist.ReduceOp.SUM)


def name_of(op: Any) -> str:
    """The name of a reduction. Raises CommunicationError for one that only other backends have."""
    kind = getattr(op, "op", op)
    if kind not in _OPS:
        raise CommunicationError(f"the shm backend has no reduction {kind}; it has {', '.join(_OPS.values())}")
    return _OPS[kind]


def in_turn(bodies: list[Callable[[float], Any]]) -> Body:
    """Several bodies as one."""

    def body(deadline: float) -> None:
        for part in bodies:
            part(deadline)

    return body


class Collectives(OtherDevices):
    """The base of the calls: a channel, and a queue that runs what they start."""

    def __init__(self, store: Any, channel: Channel, timeout: timedelta) -> None:
        super().__init__(store, channel.rank, channel.size)
        self._channel = channel
        self._timeout = timeout.total_seconds()
        self._queue = WorkQueue(f"shm-{channel.rank}")
        self._seq = 0
        # What the caller's next message is for, as a number: ranks that give different ones are out of step.
        self.stamp = 0

    def _start(self, body: Body, filled: list[Tensor], options: Any) -> ShmWork:
        work = ShmWork(self._guarded(body), filled, self._limit(options), self._queue.finish)
        if options is not None and getattr(options, "asyncOp", True) is False:
            self._queue.run_now(work)
        else:
            self._queue.submit(work)
        return work

    def _guarded(self, body: Body) -> Body:
        channel = self._channel

        def run(deadline: float) -> None:
            channel.check()
            try:
                body(deadline)
            except CommunicationError:
                raise
            except BaseException as error:  # this rank will never come to the end: the others must not wait for it
                rank = channel.ranks[channel.rank]
                channel.leave(FAILED, f"rank {rank} was stopped by {error!r} in {channel.what()}")
                raise

        return run

    def _limit(self, options: Any) -> float:
        given = options if isinstance(options, timedelta) else getattr(options, "timeout", None)
        seconds = given.total_seconds() if given is not None else 0.0
        return seconds if seconds > 0 else self._timeout

    def _sign(
        self, kind: str, count: int = 0, like: Tensor | None = None, op: str = "", root: int = -1
    ) -> CollectiveSignature:
        self._seq += 1
        return CollectiveSignature(
            self._seq, kind, count, torch.uint8 if like is None else like.dtype, op, root, stamp=self.stamp
        )
