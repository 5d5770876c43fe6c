"""A recording bound to a program: a function that takes its inputs from their places, replays, and puts back what it made.

Before anything runs it is asked whether the recording fits: the same shapes and layouts, the same modules in the same mode,
the same answers to what was asked of numbers. All of that is one Python function made for this recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, Self

from onecard._torch.names import tree_flatten
from onecard.static.code.compiled import note_line
from onecard.static.code.source import Code
from onecard.static.guards.arguments import ADVICE, in_words, is_same, kind_of, kinds_of
from onecard.static.guards.fits import Fits, TakenIn
from onecard.static.guards.lines import checks
from onecard.static.guards.seen import Seen
from onecard.static.run.agreed import ReplayTurn
from onecard.static.run.elsewhere import absent
from onecard.static.run.rechecked import NEVER, Checks
from onecard.static.step.step import ANEW, BESIDE, AnyStep, Effect, Output, Where


class BoundRecording(Generic[AnyStep]):
    """A recording and the objects of a program that it belongs to.

    Attributes:
        seen: what the function reaches by name, if that is to be as it was, too.
        checks: when it is compared with the step itself, and what with.
        turn: asked before a replay sends anything, where ranks do the step together.
    """

    def __init__(
        self,
        recording: AnyStep,
        roots: Sequence[Any],
        kinds: Sequence[Any],
        facts: Any = None,
        turn: ReplayTurn | None = None,
    ) -> None:
        self.recording, self.roots, self.kinds = recording, list(roots), tuple(kinds)
        self._facts: dict[Any, Any] = {} if facts is None else facts
        self.seen: Seen | None = None
        self.checks: Checks = NEVER
        self.turn = turn
        self._writer = _ReplayCode(recording, self.roots, self.kinds, self._facts)
        self._writer.turn = turn

    def ended(self, fault: Exception) -> None:
        """A replay has ended in its midst: the error is told its line, and a pipeline begins no other."""
        note_line(fault, self.recording._run)
        if self.turn is not None:
            self.turn.stopped(fault)

    @cached_property
    def replay(self) -> Callable[[Any, Any], Any]:
        """From a call's arguments what the function returns; MISS if the recording does not fit them, or the program's state."""
        return self._writer.replay(self.seen)

    @cached_property
    def ready(self) -> Callable[[Sequence[Any]], Any]:
        """From the leaves of the arguments the graph's inputs, or MISS."""
        return self._writer.ready()

    def reading(self, seen: Seen) -> Self:
        """The same, which fits only if what the function reaches by name is as it was."""
        self.seen, self.replay = seen, self._writer.replay(seen)
        return self

    @cached_property
    def updates(self) -> bool:
        """Whether the step ends in an update of parameters."""
        return any(True for _ in self.recording.nodes("optimizer"))

    def kinds_fit(self, leaves: Sequence[Any]) -> bool:
        """Whether the arguments are of the kinds that were recorded."""
        now = kinds_of(leaves)
        return len(now) == len(self.kinds) and all(map(is_same, now, self.kinds))

    def seen_differs(self) -> str:
        """What of that is not as it was, in words; "" if all is."""
        return self.seen.difference() if self.seen is not None else ""

    def difference(self, leaves: Sequence[Any], names: Sequence[str]) -> str:
        """Which argument does not fit, in words; "" if all do."""
        for i, (leaf, kind) in enumerate(zip(leaves, self.kinds, strict=False)):
            now = kind_of(leaf)
            if not is_same(now, kind[:-1]):
                return f"argument {names[i]!r} was {in_words(kind, now)} and is {in_words(now, kind)}{ADVICE.get(now[0], '')}"
        try:
            said = self._writer.why()(leaves)
        except (KeyError, AttributeError, IndexError) as fault:
            said = f"{fault} is gone"
        return f"what differs: {said if isinstance(said, str) else _FORM}"

    def again(self) -> BoundRecording[AnyStep] | None:
        """Bound anew, to the tensors that are now in the places: states that were loaded. All else must be as it was."""
        try:
            made = BoundRecording(self.recording, self.roots, self.kinds, self._facts, self.turn)
        except (KeyError, AttributeError, IndexError):
            return None
        made.checks = self.checks
        return made if self.seen is None else made.reading(self.seen)


def bind(
    recording: AnyStep, roots: Any, kinds: Any, still: Any, turn: ReplayTurn | None, seen: Seen
) -> BoundRecording[AnyStep] | None:
    """A step that was just recorded, bound to what it ran with; None where it has taken parameters in."""
    try:
        return BoundRecording(recording, roots, kinds, still, turn).reading(seen)
    except TakenIn:
        if turn is not None:
            raise
        return None


_FORM = "how the arguments are put together: other keys or another order in a dict, another list or tuple"


class _ReplayCode(Fits):
    """The functions of a bound recording."""

    turn: ReplayTurn | None = None

    def why(self) -> Any:
        """A function that says of leaves why the recording does not fit; None if it does."""
        return self.function(self.code("leaves"), [words for _, words in self.lines])

    def ready(self) -> Any:
        """A function from leaves to the graph's inputs, or MISS."""
        given = self.joined("", (self.code("{}, ", g) for g in self.given))
        lines = [*(line for line, _ in self.lines), self.code("return ({})", given)]
        return self.function(self.code("leaves"), lines)

    def replay(self, seen: Seen | None) -> Any:
        """The function that does it all. What a call's arguments look like, in which form, is a part of the checks."""
        tree = self.recording.call
        if tree_flatten((tuple(range(len(self.kinds))), {}))[1] == tree:  # each is a leaf: told by their types
            lines = [self.code("if kwargs: return MISS"), self.code("leaves = args")]
        else:
            lines = [self.code("leaves, tree = flatten((args, kwargs))")]
            lines.append(self.code("if tree != {}: return MISS", self.slot(tree)))
        lines += checks(seen, self) if seen is not None else ()
        lines += [line for line, _ in self.lines]
        body = [self.code("try:"), *(self.code("    {}", line) for line in lines)]
        # What it is bound to is no longer there.
        body.append(self.code("except (KeyError, AttributeError, IndexError, ValueError): return MISS"))
        if self.turn is not None:
            inputs = zip(self.recording.inputs, self.given, strict=True)
            numbers = self.joined(", ", (given for known, given in inputs if known.kind == "number"))
            asked = self.code("if not {}({}): return {}", self.slot(self.turn.replays), numbers, self.slot(ANEW))
            body.append(asked)
        return self.function(self.code("args, kwargs"), [*body, *self._run()])

    def _run(self) -> list[Code]:
        recording = self.recording
        read = {i.where for i in recording.inputs}
        lines = [
            self._leave(e.where, self.code("None"))  # memory that the program gives back before the forward pass
            for e in recording.effects
            if e.kind == "gradient" and ("gradient", e.where) not in read
        ]
        lines += [self.code("with below(): out = run({})", self.joined(", ", self.given))]
        for effect in recording.effects:
            lines += self._effect(effect)
        if recording.unreduced:
            where, _, words, reached = zip(*recording.unreduced, strict=True)
            known = map(self.slot, ([self.watched[w] for w in where], words, reached))
            lines.append(self.code("replayed({})", self.joined(", ", known)))
        shown = [self._result(r) for r in recording.results]
        if recording.tree.is_leaf():
            lines.append(self.code("return {}", shown[0]))
        else:
            form = self.slot(recording.tree)
            lines.append(self.code("return tree_unflatten([{}], {})", self.joined(", ", shown), form))
        return lines

    def _value(self, output: Output) -> Code:
        return self.code("out[{}]", self.slot(output.position))

    def _output(self, output: Output) -> Code:
        value = self._value(output)
        return value if output.spec is None else self.code("wrap({}, {})", value, self.slot(output.spec))

    def _result(self, result: Any) -> Code:
        if isinstance(result, Output):
            value = self._output(result)
            return self.code("spent({})", value) if result.grad else value
        if isinstance(result, tuple) and result[:1] == ("place",):
            return self.place(result[1])
        return self.slot(result)

    def _flag(self, where: Where, place: Code) -> list[Code]:
        """An argument that came without ``requires_grad`` and has a gradient: the step has switched it on."""
        on = where[0] != "argument" or self.kinds[where[1]][-2]
        return [] if on else [self.code("{}.requires_grad_()", place)]

    def _leave(self, where: Where, value: Code) -> Code:
        """A gradient in its place; a watched one as backward leaves it, which is no assignment of the program's."""
        return self.code("write({}, {})" if where in self.watched else "{}.grad = {}", self.place(where), value)

    def _effect(self, effect: Effect) -> list[Code]:
        place, output = self.place(effect.where), effect.output
        if effect.kind == "gradient":
            none = None if effect.absent is None else absent(effect.absent)
            left = self._leave(effect.where, self.slot(none) if output is None else self._output(output))
            return [*self._flag(effect.where, place), left]
        if effect.kind in BESIDE:
            return [self.code("{} = {}", place, self.code("None") if output is None else self._output(output))]
        assert output is not None
        if effect.kind == "place":
            spec = self.slot(output.spec)
            words = "t = {}; t._local = {}; t._spec = {}; t._memory = None"
            return [self.code(words, place, self._value(output), spec)]
        return [self.code("{} = {}", place, self._output(output))]
