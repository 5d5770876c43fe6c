"""Recordings of all ranks interpreted together, node by node, on one card's values; messages carry what ranks send."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard._torch.names import tree_unflatten
from onecard.comm.agree import sparse_check
from onecard.comm.joined.hub import Arrived, Told
from onecard.comm.joined.worlds import together
from onecard.errors import ProofError
from onecard.proof.given import Values, of_rank
from onecard.proof.interpreted import NodeWatch, fitting
from onecard.proof.running import failed
from onecard.proof.seen import Held, Value, Watched
from onecard.proof.wide import copied, float64
from onecard.static.code.compiled import below, compiled
from onecard.static.step.step import Output, RecordedStep, Where
from onecard.tensor.spec import Spec


@dataclass(frozen=True)
class Recorded:
    """Recordings that are proved.

    Attributes:
        steps: one of each rank; one: of one card; values: of its inputs, by name.
        count: how many times the step is done, each on what the one before has left.
    """

    steps: tuple[RecordedStep, ...]
    one: RecordedStep
    values: Values
    count: int = 1

    @property
    def world(self) -> int:
        """How many ranks."""
        return len(self.steps)

    def both(self, in_float64: bool, keep: bool = True) -> tuple[Watched, list[Watched]]:
        """One card's values, and each rank's.

        Raises:
            ProofError: ranks bring different messages, an operator fails, or numbers that the step asks about are others.
        """
        return self._played((self.one,), in_float64, keep)[0], self._played(self.steps, in_float64, keep)

    def _played(self, steps: Sequence[RecordedStep], in_float64: bool, keep: bool) -> list[Watched]:
        players = []
        for rank, step in enumerate(steps):
            names, inputs = of_rank(rank, step, self.values)
            players.append(Player(step, names, copied(inputs, in_float64), self.count, keep, in_float64))

        def call(number: int) -> None:
            sparse_check.on.here = False
            recorded.watcher = players[number]
            players[number].play()

        def listener(number: int, told: Told, tensors: Sequence[Tensor]) -> Arrived | None:
            return players[number].told(told, tensors)

        try:
            with float64() if in_float64 else nullcontext(), torch.random.fork_rng(devices=[]):
                together(len(steps), call, listener)
        except Exception as fault:
            raise failed(fault, "one card" if steps[0] is self.one else f"{len(steps)} ranks") from fault
        return [player.seen for player in players]


class Player(NodeWatch):
    """Interprets one rank's recording, and notes what each node gives.

    Args:
        step: the recording; inputs: of its graph, which it writes to; names: of these on one card.
        count: how often; keep: whether values of nodes are kept; in_float64: dtypes that nodes ask for are wide ones.
    """

    def __init__(
        self, step: RecordedStep, names: Sequence[str], inputs: Sequence[Any], count: int, keep: bool, in_float64: bool
    ) -> None:
        super().__init__(keep)
        self.step, self.inputs, self.in_float64 = step, list(inputs), in_float64
        self.names = list(names)
        self._names = {known.where: name for known, name in zip(step.inputs, names, strict=True)}
        self._elsewhere = {known.where for known in step.elsewhere if not known.here}
        self.times = count
        self.gradients: dict[Where, tuple[Any, Spec | None]] = {}
        self.made: dict[Where, tuple[Any, Spec | None]] = {}

    def play(self) -> None:
        """Do the step as often as is asked, each time on what the time before has left."""
        self._held("initial", ("parameter", "state"))
        returned = []
        for number in range(self.times):
            self._ask()
            with below():
                out = self.interpret(self.step.graph, self.inputs)
            self._settle(out)
            self._gradients()
            self.seen.steps = number + 1
            returned.append(self._returned(out))
        self.seen.returned = returned[0] if self.times == 1 else returned
        self._held("final", ("parameter", "state"))
        self._held("buffer", ("buffer",))
        for where, (x, spec) in self.made.items():
            if where[0] == "state" and where not in self._names:
                self._hold_as(where, "final", x, spec)

    # -- the graph ---------------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        if self.step.conditions is None:
            return
        found = tuple(compiled(self.step.conditions)(*self.inputs))
        if found != tuple(self.step.answers):
            raise ProofError(
                f"{self.step.name}: numbers that it asks about (in an if, an int()) are others with these values, so that the "
                "recording is not the program's step: record it on values like args="
            )

    # -- what it leaves ----------------------------------------------------------------------------------------------------

    def _settle(self, out: Sequence[Any]) -> None:
        """Put what the step has made into its places, where the next one finds it."""
        for effect in self.step.effects:
            output = effect.output
            value = (None, None) if output is None else (out[output.position], output.spec)
            if effect.kind == "gradient":
                self.gradients[effect.where] = value
            else:
                self.made[effect.where] = value
        for i, known in enumerate(self.step.inputs):
            if known.where in self.made:
                self.inputs[i] = self.made[known.where][0]
            elif known.where[0] == "gradient":
                if known.where[1] in self.gradients:
                    self.inputs[i] = self.gradients[known.where[1]][0]
                else:
                    self.gradients[known.where[1]] = self.inputs[i], known.spec

    def _gradients(self) -> None:
        for where, (x, spec) in self.gradients.items():
            if isinstance(x, Tensor):
                self._hold_as(where, "gradient", x, spec)

    def _held(self, kind: str, kinds: Sequence[str]) -> None:
        for known, x in zip(self.step.inputs, self.inputs, strict=True):
            if known.kind in kinds and isinstance(x, Tensor) and known.where not in self._elsewhere:
                self._hold_as(known.where, kind, x, self.made.get(known.where, (x, known.spec))[1])

    def _hold_as(self, where: Where, kind: str, x: Tensor, spec: Spec | None) -> None:
        name = self._names.get(where) or self.step.name_of(where)
        with self.paused():
            self.seen.held.append(Held(name, kind, self.seen.steps, self._laid(x, spec), sure=True))

    def _laid(self, x: Tensor, spec: Spec | None) -> Value:
        found = self.value(x)
        return Value(found.local, fitting(found.local, spec), found.made)

    def _returned(self, out: Sequence[Any]) -> Any:
        def shown(result: Any) -> Any:
            if isinstance(result, Output):
                x = out[result.position]
                return self._laid(x, result.spec) if isinstance(x, Tensor) else self.left(x)
            if isinstance(result, tuple) and result[:1] == ("place",):
                i = next((i for i, known in enumerate(self.step.inputs) if known.where == result[1]), None)
                return None if i is None else self._laid(self.inputs[i], self.step.inputs[i].spec)
            return result

        with self.paused():
            return tree_unflatten([shown(result) for result in self.step.results], self.step.tree)
