"""A message under way: what ``wait`` gives, and whom it names if that does not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor

from onecard.comm.base import flight
from onecard.comm.world import gone, world
from onecard.errors import CommunicationError


class Handle:
    """A message under way.

    Example:
        >>> import torch
        >>> Handle.complete(torch.ones(2)).wait()
        tensor([1., 1.])
    """

    __slots__ = ("_finish", "_held", "_peer", "_result", "_what", "_work")

    def __init__(self, what: str, peer: str, work: Any, finish: Callable[[], Tensor], held: Any = None) -> None:
        self._what, self._peer, self._work, self._finish, self._held = what, peer, work, finish, held
        self._result: Tensor | None = None

    @classmethod
    def complete(cls, result: Tensor) -> Handle:
        """One that has ended."""
        made = object.__new__(cls)
        made._work, made._result = None, result
        return made

    @property
    def under_way(self) -> bool:
        """Whether something is still to be awaited; what could not be left under way was complete at once."""
        return self._work is not None

    def then(self, act: Callable[[Tensor], Tensor]) -> Handle:
        """The same message with what ``act`` makes of its result, when it is awaited."""
        if self._work is None:
            return Handle.complete(act(self.wait()))
        return Handle(self._what, self._peer, self._work, lambda: act(self._finish()), self)

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self, timeout: float | None = None) -> Tensor:
        """The result. A second call gives it again.

        Args:
            timeout: seconds; that of the process group (``ONECARD_TIMEOUT``) if left out.

        Raises:
            CommunicationError: it did not end in time, or cannot any more; names the rank.
        """
        if self._work is not None:
            self._await(timeout)
            self._work = self._held = None
        if self._result is None:
            self._result = self._finish()
        return self._result

    def _await(self, timeout: float | None) -> None:
        board = flight.board.here
        watched = board is not None and not board.inside
        if board is not None and watched:
            board.enter(f"wait for {self._what}", (world.get_rank(),), 0)
        begin = time.monotonic()
        try:
            ended = self._work.wait(timedelta(seconds=timeout)) if timeout else self._work.wait()
        except (CommunicationError, RuntimeError) as fault:
            raise self._failed(fault, begin) from fault
        finally:
            if board is not None and watched:
                board.leave()
        if ended is False:
            raise self._failed(RuntimeError("it did not end"), begin)

    def _failed(self, fault: Exception, begin: float) -> CommunicationError:
        return CommunicationError(
            f"rank {world.get_rank()} waited {time.monotonic() - begin:.1f} s for {self._what} {self._peer}: {fault}"
            f"{'' if isinstance(fault, CommunicationError) else gone.words(range(world.get_world_size()))}"
        )
