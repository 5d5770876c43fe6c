"""Collectives under way: handles that torch waits for, and the queue that runs them in order.

A group's collectives run one after the other, in the order in which they were called, on whichever thread is there:
the caller's when it waits for the result at once, the group's own when the caller goes on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from onecard._torch.names import Work, no_dispatch
from onecard.errors import CommunicationError

LAG = 1e-4
"""Seconds before a group's thread takes up work: who waits for it at once runs it itself by then, undisturbed."""

Body = Callable[[float], Any]


class ShmWork(Work):
    """The handle of one collective: `wait`, `is_completed`, `get_future`, `result`, as torch has them."""

    def __init__(self, body: Body | None, tensors: list[Tensor], timeout: float, finish: Callable[..., None]) -> None:
        super().__init__()
        self.source = -1  # the rank that a message from anybody came from
        self.limit = timeout
        self._body = body
        self._tensors = tensors
        self._finish = finish
        self._lock = threading.Lock()
        self._done = False
        self._error: BaseException | None = None
        self._event: threading.Event | None = None
        self._base: Future[None] | None = None
        self._future: Future[Any] | None = None

    # -- what torch calls ----------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the result is there; raises what went wrong, and CommunicationError after `timeout`."""
        if not self._done:
            self._finish(self, timeout.total_seconds())
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self._done and self._error is None

    def exception(self) -> BaseException | None:
        """What went wrong, if anything."""
        return self._error

    def synchronize(self) -> None:
        """Waits."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that it fills."""
        return self._tensors

    def source_rank(self) -> int:
        """The rank that a message received from anybody came from."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A future of the tensors."""
        with self._lock:
            if self._future is None:
                # Through `then`, because only an error raised in a callback is an error for C++ too.
                self._base = Future()
                self._future = self._base.then(self._value)
                ended = self._done
            else:
                ended = False
        if ended:
            self._base.set_result(None)  # type: ignore[union-attr]
        return self._future

    def _value(self, _: Future[None]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    # -- what the queue calls ------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs the collective on this thread, up to its deadline."""
        body, self._body = self._body, None
        try:
            if body is not None:
                with no_dispatch():  # what a message does inside is no work of the program's, for who looks on
                    body(time.monotonic() + self.limit)
            body = None  # who is told that it has ended may give up the tensors, and count on their memory
        except CommunicationError as error:
            self.end(error)
        except Exception as error:
            self.end(error)
        except BaseException as error:  # Ctrl-C: this thread's to see, and no result for anybody else
            self.end(CommunicationError(f"interrupted by {type(error).__name__}"))
            raise
        else:
            self.end(None)

    def end(self, error: BaseException | None) -> None:
        """Notes how it ended and wakes those who wait."""
        with self._lock:
            self._error, self._done = error, True
            event, base = self._event, self._base
        if event is not None:
            event.set()
        if base is not None:
            base.set_result(None)

    def block(self, seconds: float | None) -> bool:
        """Sleeps until another thread has ended it."""
        with self._lock:
            if self._done:
                return True
            self._event = self._event or threading.Event()
        return self._event.wait(seconds)


class WorkQueue:
    """Runs the collectives of one group in order."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pending: deque[ShmWork] = deque()
        self._running = threading.Lock()
        self._signal: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run_now(self, work: ShmWork) -> None:
        """Runs this work, after those called before it, on this thread."""
        with self._running:
            while self._pending:
                self._pending.popleft().run()
            work.run()

    def submit(self, work: ShmWork) -> None:
        """Has this work run in the background, or by whoever waits for it first."""
        self._pending.append(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._signal.put(True)

    def finish(self, work: ShmWork, seconds: float) -> None:
        """Returns when this work has ended: runs it here, if nobody does yet."""
        if seconds > 0:
            work.limit = min(work.limit, seconds)
        limit = seconds if seconds > 0 else None
        if self._running.acquire(blocking=False):
            try:
                while self._pending and not work.is_completed():
                    self._pending.popleft().run()
            finally:
                self._running.release()
        if not work.block(limit):
            raise CommunicationError(f"timed out: the collective did not end within {seconds:.3g} s")

    def drain(self) -> None:
        """Runs what is left."""
        with self._running:
            while self._pending:
                self._pending.popleft().run()

    def stop(self, seconds: float = 1.0) -> None:
        """Ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._signal.put(False)
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _serve(self) -> None:
        torch.set_num_threads(1)  # of this thread: the ranks share the cores already
        while take(self._signal):
            self.drain()


def take(signals: SimpleQueue[bool]) -> bool:
    """Sleeps until there are signals, and a little longer, and takes them all; False if one says that this is the end."""
    go_on = signals.get()
    time.sleep(LAG)
    while not signals.empty():
        go_on &= signals.get()
    return go_on
