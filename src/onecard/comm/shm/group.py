"""The process group that torch sees: c10d's calls, put in terms of the four patterns."""

# mypy: disable-error-code="override"

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from onecard.comm.base import own
from onecard.comm.shm import algorithms, tensors
from onecard.comm.shm.channel import Channel
from onecard.comm.shm.copies import Copies
from onecard.comm.shm.messages import Messages
from onecard.comm.shm.reductions import Reductions
from onecard.comm.shm.segment import FAILED
from onecard.comm.shm.work import Body, ShmWork

alive: weakref.WeakSet[ShmGroup] = weakref.WeakSet()
"""The groups of this process, to be left when it ends."""


@own.shown(Reductions, Copies)
class ShmGroup(Reductions, Copies):
    """A process group whose ranks share memory.

    The methods are those of torch.distributed.ProcessGroup; tensors on other devices go to their own backend.
    """

    scatters = True
    """It adds and divides in one step."""
    puts = True
    """It puts what comes where it belongs (``all_to_all_pieces``)."""

    def __init__(self, store: Any, channel: Channel, timeout: timedelta) -> None:
        super().__init__(store, channel, timeout)
        self._messages = Messages(channel)
        alive.add(self)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Waits until every rank has come."""
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            return self._elsewhere(torch.empty(0, device=device)).barrier(opts)
        return self._start(self._barrier("barrier"), [], opts if opts is not None else timeout)

    def _barrier(self, kind: str) -> Body:
        channel, signature = self._channel, self._sign(kind)
        return lambda deadline: algorithms.barrier(channel, signature, deadline)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names all ranks that did not come in time."""
        limit = self._limit(timeout)
        work = ShmWork(self._guarded(self._barrier("monitored_barrier")), [], limit, self._queue.finish)
        self._queue.run_now(work)
        work.wait()

    def send(self, given: list[Tensor], to: int, tag: int = 0) -> Any:
        """Sends a tensor to a rank of the group."""
        (tensor,) = given
        if not tensors.here(tensor):
            return self._elsewhere(tensor).send(given, to, tag)
        return self._messages.send(tensor, to, tag, self._timeout)

    def recv(self, given: list[Tensor], source: int, tag: int = 0) -> Any:
        """Fills a tensor with one that a rank of the group sent under the same tag."""
        (tensor,) = given
        if not tensors.here(tensor):
            return self._elsewhere(tensor).recv(given, source, tag)
        return self._messages.receive(tensor, source, tag, self._timeout)

    def recv_anysource(self, given: list[Tensor], tag: int = 0) -> Any:
        """Fills a tensor with one that any rank sent under this tag; the work's `source_rank` tells which."""
        return self._messages.receive(given[0], None, tag, self._timeout)

    def forget(self, is_old: Callable[[int], bool]) -> None:
        """Gives up messages that have come and that nobody has asked for, by their tags."""
        self._messages.forget(is_old)

    def set_timeout(self, timeout: timedelta) -> None:
        """The time-out of calls that name none."""
        self._timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leaves the group: what is queued is completed, and ranks that still wait for this one are told."""
        alive.discard(self)
        if self._channel.failure is None:
            self._queue.drain()
            self._messages.drain()
        self._channel.leave()
        self._messages.stop()
        self._queue.stop()
        super().shutdown()

    def abort(self) -> None:
        """Leaves the group at once; whatever is under way fails."""
        rank = self._channel.ranks[self._channel.rank]
        self._channel.leave(FAILED, f"rank {rank} aborted the group")
        self.shutdown()
