"""What long work says while it lasts: a line on the terminal, nothing where there is none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def waiting(text: str) -> Iterator[Callable[[str], None]]:
    """Shows what is being done, and for how long, on stderr, until the block ends; gives what says something else.

    Example:
        >>> with waiting("pricing") as say:  # stderr is no terminal here
        ...     say("drawing")
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(text, total=None)
        yield lambda said: shown.update(task, description=said)
