"""What fit shows, and whom it tells."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onecard.comm.world import world
from onecard.errors import EngineError


class Callbacks:
    """Calls, of each callback, the method of an event, if it has it; a function is called after each step of training."""

    def __init__(self, given: Any, engine: Any) -> None:
        listed = [*given] if isinstance(given, Sequence) else [given]
        self.objects = [each for each in listed if not _is_function(each)]
        self.functions: list[Callable[..., Any]] = [each for each in listed if _is_function(each)]
        self.batches = bool(self.functions) or any(hasattr(each, "on_train_batch_end") for each in self.objects)
        for each in self.objects:
            if not any(name.startswith("on_") for name in dir(each)):
                raise EngineError(
                    f"fit: callbacks: {each!r} has no method such as on_epoch_end(epoch, logs), and is no function of a step "
                    "and its logs"
                )
            if callable(set_model := getattr(each, "set_model", None)):
                set_model(engine)

    def __call__(self, event: str, *args: Any) -> None:
        for each in self.objects:
            if callable(method := getattr(each, event, None)):
                method(*args)
        if event == "on_train_batch_end":
            for function in self.functions:
                function(*args)


def _is_function(given: Any) -> bool:
    return callable(given) and not any(name.startswith("on_") for name in dir(given))


class Shown:
    """A bar on a terminal, lines elsewhere; rank 0's alone.

    Args:
        verbose: 0 nothing, 1 a bar where there is a terminal, 2 lines.
        every: steps between two lines.
        length: steps of an epoch, if that is known.
    """

    def __init__(self, verbose: int, every: int, length: int | None, epochs: int) -> None:
        self.every, self.length, self.epochs = every, length, epochs
        self.lines = verbose > 0
        self.bar: Any = None
        if verbose == 1 and world.get_rank() == 0 and sys.stdout.isatty():
            from rich.progress import Progress

            self.bar = Progress(transient=False)
            self.task = self.bar.add_task("", total=None if length is None else length * epochs)

    def __enter__(self) -> Shown:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *args: Any) -> None:
        if self.bar is not None:
            self.bar.stop()

    def due(self, step: int) -> bool:
        """Whether values are shown after this step of an epoch."""
        return (self.lines and step % self.every == 0) or self.bar is not None

    def step(self, epoch: int, step: int, logs: Mapping[str, Any]) -> None:
        """After a step, counted from 1 in its epoch."""
        if self.bar is not None:
            done = None if self.length is None else epoch * self.length + step
            self.bar.update(self.task, completed=done, description=f"epoch {epoch + 1}: {self.words(logs)}")
        elif self.lines and step % self.every == 0:
            of = "" if self.length is None else f"/{self.length}"
            self.say(f"epoch {epoch + 1}/{self.epochs} step {step}{of}: {self.words(logs)}")

    def epoch(self, done: int, logs: Mapping[str, Any]) -> None:
        """After an epoch."""
        if self.lines:
            line = f"epoch {done}/{self.epochs}: {self.words(logs)}"
            self.bar.console.print(line) if self.bar is not None else self.say(line)

    @staticmethod
    def words(logs: Mapping[str, Any]) -> str:
        """Values by name."""
        said = (
            f"{name} {value:.5f}" if isinstance(value, float) else f"{name} {value}" for name, value in logs.items()
        )
        return ", ".join(said)

    @staticmethod
    def say(line: str) -> None:
        """A line of rank 0."""
        if world.get_rank() == 0:
            print(line, flush=True)
