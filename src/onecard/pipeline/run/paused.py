"""Paused: a function that runs up to a point, waits there, and goes on when it is told to. No messages."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from onecard._torch.threads import of_this_thread
from onecard.comm.world import world


class _Abandoned(BaseException):
    """Raised where a function waits that nobody will let go on."""


class Paused:
    """A call in a thread of its own, of which one piece runs at a time: whoever resumes it waits for the piece's end.

    What torch keeps for each thread (gradients or not, autocast, modes, the device) is in it as where it was made.

    Example:
        >>> said = []
        >>> def call():
        ...     said.append("first")
        ...     paused.pause()
        ...     said.append("second")
        >>> paused = Paused(call)
        >>> paused.resume(), paused.resume(), said
        (False, True, ['first', 'second'])
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._fault: BaseException | None = None
        self._ended = self._dropped = False
        self._around: Callable[[], AbstractContextManager[Any]] | None = None
        self._entered = ExitStack()
        here = contextvars.copy_context()
        self._thread = threading.Thread(target=here.run, args=(self._run, of_this_thread(world.device())), daemon=True)

    def resume(self, around: Callable[[], AbstractContextManager[Any]] | None = None) -> bool:
        """Let it run to where it pauses, or to its end; whether it has ended. What it raises is raised here.

        Args:
            around: makes a context that is entered in its thread for this piece.
        """
        self._around = around
        if self._thread.ident is None:
            self._thread.start()
        self._go.release()
        self._stopped.acquire()
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault
        return self._ended

    def pause(self) -> None:
        """Within the function: wait for the next ``resume``."""
        self._entered.close()
        self._stopped.release()
        self._wait()

    def abandon(self) -> None:
        """End it where it waits."""
        self._dropped = True
        if self._thread.is_alive():
            self._go.release()
            self._stopped.acquire()

    def _wait(self) -> None:
        self._go.acquire()
        if self._dropped:
            raise _Abandoned
        if self._around is not None:
            self._entered.enter_context(self._around())

    def _run(self, enter: Callable[[ExitStack], None]) -> None:
        try:
            with ExitStack() as stack:
                enter(stack)
                self._wait()
                self._function()
        except _Abandoned:
            pass
        except BaseException as fault:  # raised where somebody waits for it
            self._fault = fault
        finally:
            self._entered.close()
            self._ended = True
            self._stopped.release()
