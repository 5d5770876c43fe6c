"""Recording: a step with what can be done with it: replayed, bound, priced, drawn, saved.

Nothing below imports it: lower modules read a ``Step``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from onecard._torch.names import tree_flatten
from onecard.errors import OnecardError, RecordingError
from onecard.machine.cost import MACHINE, Machine
from onecard.static.code.compiled import step_function
from onecard.static.file import saved
from onecard.static.guards.believed import believed, difference
from onecard.static.price.price import Cost, cost
from onecard.static.run.bound import BoundRecording
from onecard.static.show import timeline
from onecard.static.show.draw import draw
from onecard.static.show.show import head, text
from onecard.static.step.step import ANEW, MISS, Input, Output, RecordedStep


@dataclass(slots=True, repr=False)
class Recording(RecordedStep):
    """One step of a program, recorded on this rank.

    Its data is a ``Step``'s: ``graph``, an FX graph of torch's operators on local tensors and of messages; ``inputs``,
    ``results`` and ``effects``; ``arguments``, ``roots`` and ``beliefs``: what it was recorded on.

    Example:
        >>> import onecard, torch
        >>> recording = onecard.record(lambda x, rate: x * rate)(torch.ones(2), 3.0)
        >>> recording(torch.ones(2), 5.0)
        tensor([5., 5.])
        >>> [known.name for known in recording.inputs]
        ['x', 'rate']
    """

    @classmethod
    def of(cls, step: RecordedStep) -> Recording:
        """A step that was captured, or read from a file."""
        return cls(**{known.name: getattr(step, known.name) for known in fields(RecordedStep)})

    @property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """The graph as a function of its inputs (local tensors, numbers, generators), in order; it writes to them."""
        return step_function(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay it on the objects that it is bound to.

        Raises:
            RecordingError: it does not fit the arguments or the state of the program; says which.
        """
        leaves, tree = tree_flatten((args, kwargs))
        self._check_replays()
        if self.bound is None:
            raise RecordingError(
                f"{self.name}: bind it first: recording.bind({', '.join(f'{r}={r}' for r in self.roots if r)})"
            )
        try:
            result = self.bound.replay(args, kwargs)
            if result is MISS and tree == self.call and (made := self.bound.again()) is not None:
                result = made.replay(args, kwargs)
                self.bound = self.bound if result is MISS else made
        except (
            RuntimeError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            MemoryError,
        ) as fault:
            if not self.file or isinstance(fault, OnecardError):
                raise
            said = str(fault).strip()[:300]
            raise RecordingError(
                f"{self.name}: {self.file} calls what cannot be: {said}. Record the step again"
            ) from fault
        if result is ANEW:
            raise RecordingError(f"the recording of {self.name} fits here, and not on another rank of its step")
        if result is not MISS:
            return result
        names = [name for name, _ in self.arguments]
        why = (
            (self.bound.seen_differs() or self.bound.difference(leaves, names)) if tree == self.call else "another call"
        )
        raise RecordingError(
            f"the recording of {self.name} does not fit: {why}. Record it anew, or use onecard.to_static"
        )

    def bind(self, **roots: Any) -> Recording:
        """The same recording on these objects: modules, optimizers and tensors by their names in ``roots``.

        Raises:
            RecordingError: one is missing, has not what the recording reads, or is not what it was (another mode, other dropout,
                another activation, other options of an optimizer).
        """
        self._check_replays()
        if missing := [name for name in self.roots if name and name not in roots]:
            raise RecordingError(
                f"{self.name}: bind is not given {', '.join(missing)}; it needs {', '.join(filter(None, self.roots))}"
            )
        made = self.with_graph(self.graph)
        try:
            held = [roots.get(name) for name in self.roots]
            named = [(name, root) for name, root in zip(self.roots, held, strict=True) if name]
            if said := difference(self.beliefs, believed(named)):
                raise RecordingError(
                    f"{self.name}: what it is bound to is another program than the one that was recorded: {said}. Make it as it "
                    "was, or record the step anew"
                )
            facts = {} if self.around is None else dict(zip(("grad", "modes"), self.around, strict=True))
            made.bound = BoundRecording(made, held, [kind for _, kind in self.arguments], facts)
        except (KeyError, AttributeError, IndexError) as fault:
            raise RecordingError(
                f"{self.name}: what it is bound to has no {fault}. Optimizers have their states after a first step, or when a "
                "state dict is loaded"
            ) from None
        return made

    def _check_replays(self) -> None:
        if self.makes_states:
            raise RecordingError(
                f"{self.name}: an optimizer made its states in the step that was recorded, so that a replay would make them anew "
                "each time. Run the step once, then record it; onecard.to_static does so"
            )

    def cost(self, machine: Machine = MACHINE) -> Cost:
        """What it takes on a machine, without running it: see ``onecard.static.price.price``."""
        return cost(self, machine)

    def draw(self, path: Any = None, depth: int | None = None) -> str:
        """A picture: forward, backward and optimizer side by side, folded by modules, with layouts and messages.

        Args:
            path: the file to write: ".svg", or ".txt" for the same as text; by default none.
            depth: how many parts of a module's path tell boxes apart ("blocks.0.mlp" has 3); by default as many as fit.

        Returns:
            What was written; without a path, the text.

        Raises:
            RecordingError: a path that ends in something else.
        """
        return draw(self, path, depth)

    def timed(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Replay it once, as a call does, and tell of each node its name, when it started, and the seconds that it took.

        Between the nodes a look at the clock takes time, so that it takes longer than a call. On several ranks all call it.
        """
        return timeline.timed(self, args, kwargs)

    def trace(self, path: Any, machine: Machine = MACHINE, measured: Sequence[Any] = ()) -> None:
        """Write the priced step as a trace for chrome://tracing or ui.perfetto.dev: operators, messages by axis, bytes alive.

        Args:
            path: the JSON file.
            machine: what it is priced for.
            measured: what ``timed`` gave, to see it beside.
        """
        timeline.trace(self, path, machine, measured)

    def save(self, path: Any) -> None:
        """Write it to a file, without pickle: ``onecard.load_recording(path).bind(...)`` reads it."""
        saved.save(self, path)

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        return f"<{head(self)}>"


def load_recording(path: str | Path, trust: Collection[str | type] = ()) -> Recording:
    """Read a recording from a file. ``bind`` gives it the modules, optimizers and tensors that it runs on.

    Nothing in a file is run: it names operators of torch (``aten``, ``prims``), which are called, and places in modules and
    optimizers, which are read and written.

    Args:
        path: a file of ``Recording.save``.
        trust: what else it may name: namespaces of operators that you have registered ("mylib"), and classes that its step
            returns (of a library that told torch how to take them apart).

    Raises:
        RecordingError: the file is none of a recording, of another format, damaged, or names what a file may not.
    """
    return Recording.of(saved.load(path, trust))


__all__ = ["Input", "Output", "Recording", "load_recording"]
