"""What a recording of a step (``onecard.static``) keeps whole: calls that become one node, and what it must not see.

The layers below the recorder ask here; nothing is recorded unless somebody records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

recorder: Any = None
"""Who records now; None: nobody."""

watcher: Any = None
"""Who looks on as a program runs, recorded or not (``onecard.prove``); None: nobody."""


class Opaque:
    """A value that only functions of ours take and give: a node of a graph, though it is no tensor."""

    __slots__ = ()


class Listener:
    """Who is told of what runs while a step is recorded or compared, unless it is paused."""

    listens = True
    """Whether what runs now is looked at."""
    follows = False
    """Whether it only looks on as the step runs as it is: values are what they would be without it."""
    computes = True
    """Whether what runs is done; else memory for it is not needed."""
    looks = False
    """Whether this is a further look at a step, of which each rank has as many as it needs: nothing may be asked of others."""
    rows = False
    """Whether tensors may lie row by row where data says (``tensor/rows``), and calls on them are nodes."""

    _pauses = 0
    moves = 0
    """Whether what runs only changes layouts (``moves``): how many such calls are under way."""

    def asked_gradient(self, leaf: Any) -> None:
        """The program looks at a tensor's gradient, or at whether there is one."""

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Inside, layouts are changed."""
        self.moves += 1
        try:
            yield
        finally:
            self.moves -= 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is looked at."""
        self._pauses, self.listens = self._pauses + 1, False
        try:
            yield
        finally:
            self._pauses -= 1
            self.listens = not self._pauses


def asked_gradient(leaf: Any) -> None:
    """The program looks at a tensor's gradient."""
    if recorder is not None and recorder.listens:
        recorder.asked_gradient(leaf)


def moves(function: Function) -> Function:
    """A function that only changes layouts: what it does is this package's choice, which may be another one for another batch."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with recorder.moving() if recorder is not None else nullcontext():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


functions: dict[str, Callable[..., Any]] = {}
"""What a graph may call besides torch's operators, by name: filled as modules are imported."""

writes: dict[Callable[..., Any], tuple[int, ...]] = {}
"""Which of their arguments these functions write to."""


pure: set[Callable[..., Any]] = set()
"""Those that give the same for the same, and neither send nor draw: who needs their result twice may have one."""


def one_node(*written: int, is_pure: bool = False, in_files: bool = True) -> Callable[[Function], Function]:
    """A function that a recording keeps as one node: what it does with values (random keys, messages) is no part of the graph.

    Args:
        written: positions of the tensors, or lists of tensors, that it writes to.
        is_pure: it gives the same for the same, and sends nothing.
        in_files: a saved recording may call it.

    Example:
        >>> @one_node()
        ... def double(x):
        ...     return 2 * x
        >>> double(3)
        6
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if recorder is None:
                return function(*args, **kwargs)
            return recorder.call(function, args, kwargs)

        register(function, *written)
        if not in_files:
            del functions[name_of(function)]
        if is_pure:
            pure.add(function)
        return run  # type: ignore[return-value]

    return decorate


def register(function: Callable[..., Any], *written: int) -> None:
    """A function that a graph may call."""
    functions[name_of(function)] = function
    writes[function] = written


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called in a saved recording."""
    return f"{function.__module__}:{function.__qualname__}"


@contextmanager
def unrecorded() -> Iterator[None]:
    """Inside, nothing is a part of the program: decisions, trials, checks. Nobody records it, and nobody looks on."""
    with (
        nullcontext() if recorder is None else recorder.paused(),
        nullcontext() if watcher is None else watcher.paused(),
    ):
        yield


def is_sketching() -> bool:
    """Whether a step is written down without being done: its tensors have no values that ranks could compare."""
    return getattr(recorder, "sketch", None) is not None


def is_followed() -> bool:
    """Whether a step runs as it is while somebody holds it against its recording, by one mode of torch's."""
    return recorder is not None and recorder.follows


def source_of(x: Any) -> Any:
    """For who looks on: what has made a tensor, ahead of a message that brings it to other ranks."""
    return None if watcher is None else watcher.source_of(x)


def laid(part: Any, spec: Any, source: Any = None) -> None:
    """Says to who looks on that a plain tensor is a rank's part under a spec, of the value that a tensor was (``source_of``).

    So what comes of a message is compared where it arrives, also as a stretch of a bucket.
    """
    if watcher is not None:
        watcher.laid(part, spec, source)


def alike(x: Any, ranks: Any) -> None:
    """Says to who looks on that some ranks have the same plain tensor now: what only ranks together have is told at once."""
    if watcher is not None:
        watcher.alike(x, ranks)


def values_of(x: Any) -> list[Any]:
    """The elements of a tensor that decide what is computed; a step that needs them cannot be recorded."""
    if recorder is not None:
        recorder.needs_values()
    return x.tolist()
