"""Calls on rows in two halves: their message is sent, something else runs, and the call is made when its result is wanted.

The first half makes the call up to its message, which it leaves under way, and stops there. The second half makes the call
again, and takes what has come at the place of the message. So a call may send one message alone, and do nothing ahead of it that
does harm when it is done twice: who knows that of a function marks it (``one_call.in_one``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from onecard.comm.base.state import Kept
from onecard.comm.issue.handle import Handle
from onecard.recorded import Opaque


class Half(Opaque):
    """A call of which the message is under way.

    Attributes:
        made: what the call gave, where it had no message to leave under way: then it was made whole.
    """

    __slots__ = ("_handle", "_sending", "made")

    def __init__(self) -> None:
        self._handle: Handle | None = None
        self._sending = True
        self.made: Any = None

    def start(self, call: Callable[[], Any]) -> None:
        """The first half."""
        with _as(self):
            try:
                self.made = call()
            except _Left:
                self._sending = False

    def finish(self, call: Callable[[], Any]) -> Any:
        """The second half: what the call gives."""
        if self._sending:
            return self.made
        with _as(self):
            return call()

    def exchanged(self, send: Callable[[bool], Handle]) -> Tensor:
        """What a message brings. In the first half it does not come back; ``send`` takes whether to leave it under way."""
        if self._sending:
            self._handle = send(True)
            raise _Left
        found, self._handle = self._handle, None
        return send(False).wait() if found is None else found.wait()


class _Left(Exception):
    """The first half of a call ends here."""


half: Kept[Half | None] = Kept(lambda: None)
"""The call that is made in two halves; None: it is made at once."""


@contextmanager
def _as(now: Half | None) -> Iterator[None]:
    before, half.here = half.here, now
    try:
        yield
    finally:
        half.here = before


def at_once() -> Any:
    """Inside, what a call sends is awaited where it is sent: messages of which there are several."""
    return _as(None)
