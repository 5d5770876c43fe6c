"""Run one step, and write it down: what goes in, what comes out, what it leaves in the program."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from onecard import recorded
from onecard._torch import names as _torch
from onecard._torch.names import tree_flatten
from onecard._torch.uncompiled import eagerly
from onecard.errors import RecordingError
from onecard.static.capture import hooks, randomness
from onecard.static.capture.above import Above
from onecard.static.capture.below import Below
from onecard.static.capture.handed import HandedOver
from onecard.static.capture.recorder import Recorder
from onecard.static.capture.refilled import renew
from onecard.static.capture.script import StepScript
from onecard.static.capture.sketch import Sketch
from onecard.static.capture.undo import Undo
from onecard.static.guards import self_test
from onecard.static.guards.arguments import modes
from onecard.static.guards.before import Before, numbers_of, options_of, still_before
from onecard.static.guards.believed import believed
from onecard.static.guards.conditions import asked
from onecard.static.guards.held import NOTHING, HeldValues
from onecard.static.guards.numbers import Number, followed_by_math, given_back, plain
from onecard.static.guards.places import Places, is_nameless
from onecard.static.guards.ran import NotWatched, Ran, watched
from onecard.static.guards.replaced import put_back
from onecard.static.guards.results import taken_apart
from onecard.static.guards.seen import Seen
from onecard.static.step import refusals
from onecard.static.step.facts import facts
from onecard.static.step.phases import Phases
from onecard.static.step.step import BESIDE, Effect, Input, Output, RecordedStep, Where
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.rows.one_call import seen_as
from onecard.tensor.rows.rows import settle_left
from onecard.tensor.spec import OWN
from onecard.tensor.staged import is_read, stages_of
from onecard.train.common_memory import shared
from onecard.train.modules.recordable import recordable

_KINDS = {"member": "parameter", "trained": "parameter", "object": "tensor", "group": "state"} | dict.fromkeys(
    BESIDE, "gradient"
)


class Capture:
    """One run of a step, written down."""

    def __init__(
        self,
        leaves: Sequence[Any],
        names: Sequence[str],
        roots: Sequence[tuple[str, Any]],
        ask: bool = False,
        replayed: bool = True,
        rows: bool = False,
    ) -> None:
        self.leaves, self.names, self.given_roots = leaves, names, roots
        self.before, self.phases = Before(watched) if replayed else Before(), Phases()
        self.recorder = Recorder(self.before, self.phases, ask, rows)
        self._replayed = replayed
        # Of what nobody replays nobody will say what it leaves.
        self.leaves_nothing = self.recorder.guesses = not replayed
        self.taken_back = False
        self.left: list[Any] = []  # keys under which the step has put tensors where there was nothing
        self.numbers: dict[fx.Node, tuple[Any, ...]] = {}  # the places of numbers, by their nodes
        self._tagged: dict[tuple[Any, ...], Any] = {}
        self._outer: list[tuple[dict[str, Any], str, Any, Any]] = []  # numbers of optimizers that the step reads itself
        self._aside: dict[int, list[tuple[dict[str, Any], str, Any, Any]]] = {}
        self._inputs: dict[fx.Node, tuple[int, Any]] = {}  # what stands behind an input: its identity and itself

    def undone(self, sketched: bool = False) -> Undo:
        """What takes the step back that will run; ``sketched``: it is written down without being done."""
        undo = Undo(self.before)
        self.taken_back, self.recorder.about_to_write = True, undo.note
        if sketched:
            self.recorder.sketch, self.recorder.computes = Sketch(self.before.had, undo.note), False
            self.recorder.about_to_write = self.recorder.sketch.writes
        return undo

    def run(self, fn: Any, tree: Any) -> Any:
        """Call the function; returns what it returns, with numbers as they are in the recording."""
        if recorded.recorder is not None:
            raise RecordingError("a step is being recorded already; call the function itself inside, not its recording")
        recorder = self.recorder
        self.handed = HandedOver([self._argument(i, x) for i, x in enumerate(self.leaves)], tree)
        self.ran: Ran | NotWatched = NotWatched(self.before.had, self._found)
        if self._replayed:
            self_test.check()
            made_before, self.before.others = self.before.others, []
            self.ran = Ran(fn, self.leaves, self.before.had, self._found, made_before)
        sketched = recorder.sketch is not None
        held = HeldValues([fn, *self.leaves, *(root for _, root in self.given_roots)]) if self.taken_back else None
        torch.clear_autocast_cache()  # of an autocast around the call: casts that the step has not made, or made of fakes
        recorded.recorder, ended = recorder, False
        try:
            for _, root in self.given_roots:
                self._found(root)
            with (
                eagerly(),
                followed_by_math(),
                Above(recorder),
                _torch.beneath(Below(recorder)),
                self.phases.watched(self._begin, self._end),
                randomness.seen(),
                recordable(),
                hooks.seen_by(recorder) if self.taken_back else nullcontext(),  # what is cut in microbatches asks
                self.ran.watching(),
            ):
                result = fn(*self.handed.found[0], **self.handed.found[1])
                settle_left((result, self.before.gradients_now()))
            recorder.random.end()
            ended = True
        finally:
            recorded.recorder = None
            self._restore()
            replaced = put_back(self.seen, self.phases.optimizers) if sketched else None
            lost = held.back() if held is not None and sketched else []
            if held is not None and (self.leaves_nothing or not ended):
                self.phases.put_buffers_back()
                held.all_back()
        if replaced is not None:
            raise refusals.replaces(replaced.name, replaced.line)
        read = {id(x) for x in recorder.outside.values()} if self._replayed else set()
        self.left = [key for key, was in lost if was is NOTHING]
        for key, was in lost:
            if id(was) in read:
                raise refusals.replaces(f"entry {key!r} of a dict, list or object")
        return result

    def _argument(self, i: int, x: Any) -> Any:
        recorder = self.recorder
        if isinstance(x, Tensor):
            self.recorder.input(x._local if isinstance(x, DistTensor) else x, argument=True)
        elif type(x) is float:
            node = recorder.input(x)
            self.numbers[node] = ("argument", i)
            recorder.numbers.append(made := Number(x, node, recorder))
            return made
        return x

    def left_behind(self) -> str:
        """What the step leaves in the program that a replay does not, in words."""
        keys = ", ".join(map(repr, self.left[:3]))
        said = (
            f"the step puts tensors into a dict, list or object of the program ({keys}), in Python, which a replay does not "
            "repeat: it finds there what was there before. Put a tensor there before the first step, and write into it: "
            "kept[key].copy_(new); or return what it makes"
        )
        states = {id(kept) for _, x in self.places.roots if isinstance(x, Optimizer) for kept in x.state.values()}
        return self.handed.filled() or self.seen.left_behind(states) or (said if self.left else "")

    # -- numbers of optimizers: inputs while they step --------------------------------------------------------------------

    def _begin(self, optimizer: Optimizer) -> None:
        if _torch.in_backward():
            raise refusals.steps_in_backward(type(optimizer).__name__)
        self._tag(optimizer, self._aside.setdefault(id(optimizer), []))

    def _found(self, x: Any) -> None:
        """The step looks at something of the program's: at numbers of an optimizer, which are followed from now on."""
        if isinstance(x, Optimizer) and all(id(x) != place[0] for place in self._tagged):
            self._tag(x, self._outer)

    def _tag(self, optimizer: Optimizer, aside: list[tuple[dict[str, Any], str, Any, Any]]) -> None:
        """Put followed numbers in place of an optimizer's; ``aside`` notes what they stand for."""
        for g, group in enumerate(optimizer.param_groups):
            for key, value in numbers_of(group).items():
                made = self._number(optimizer, g, key, value)
                aside.append((group, key, value, made))
                group[key] = made

    def _number(self, optimizer: Optimizer, g: int, key: str, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(self._one(optimizer, g, key, i, v) for i, v in enumerate(value))
        return self._one(optimizer, g, key, None, value)

    def _one(self, optimizer: Optimizer, g: int, key: str, i: int | None, value: float) -> Number:
        if isinstance(value, Number):
            return value
        place = (id(optimizer), g, key, i)
        if place not in self._tagged:

            def node() -> fx.Node:
                made = self.recorder.input(value)
                self.numbers[made] = ("group", optimizer, g, key, i)
                return made

            self._tagged[place] = Number(value, node, self.recorder)
            self.recorder.numbers.append(self._tagged[place])
        return self._tagged[place]

    def _end(self, optimizer: Optimizer) -> None:
        for group, key, value, made in self._aside.pop(id(optimizer), ()):
            if group[key] is not made:
                raise refusals.changed_group(key)
            group[key] = value

    def _restore(self) -> None:
        for entries in self._aside.values():
            for group, key, value, _ in entries:
                group[key] = value
        for group, key, value, made in self._outer:  # what the step has set itself stays, and is refused
            group[key] = plain(group[key]) if group.get(key) is not made else value

    def settle(self) -> None:
        """After it all: numbers that the program has kept become the floats that they are."""
        self._tagged, self._outer, self._aside = {}, [], {}
        given_back(self.recorder.numbers)
        if self.recorder.sketch is not None:
            self.recorder.sketch.end()

    # -- afterwards ------------------------------------------------------------------------------------------------------

    @property
    def seen(self) -> Seen:
        """What the step has looked up of the program's objects."""
        return self.ran.seen

    def step(self, name: str, result: Any) -> RecordedStep:
        """What was written down, with every input and effect at its place in the program."""
        recorder, before = self.recorder, self.before
        for value, node in recorder.reads:
            recorder.conditions.append((operator.eq, (node, value), True))
        self.places = places = Places(self._roots(), self.leaves, self.names)
        self.phases.say_roots(recorder.graph.nodes, places.roots)
        for leaf in () if self.taken_back else self.leaves:  # x.requires_grad_(): each call is given another x
            before.begins(leaf)
        places.gradients_of(before)
        places.states_of(before)
        for leaf in filter(before.had, recorder.leaves.values()):
            places(id(leaf), leaf)
        places.gradients_of(before)
        self._nodes: list[fx.Node] = []
        self.seen.whole(result, "a result", name)
        flat, tree = tree_flatten(taken_apart(result, name, self.seen.was_there, before.had))
        results = tuple(self._result(x) for x in flat)
        effects = (*self._groups(), *self._states(), *self._gradients(), *self._moved())
        recorder.finish(self._nodes)
        script = StepScript(recorder.graph, recorder.outside, recorder.rows)
        renew(recorder.graph, recorder.refills)
        inputs, constants = self._described()
        self.seen.scale_by(before.scalers_of(recorder.outside.values()))
        known = places.in_order(k for k in before.gradients if k in places._found)
        had = tuple((places(k, None), bool(before.gradients[k])) for k in known)
        named = [(name, root) for name, root in places.roots if not is_nameless(name)]
        made = RecordedStep(
            name, recorder.graph, inputs, results, tree, effects, *asked(recorder.graph, recorder.conditions, recorder.asked_at),
            tuple(n for n, _ in places.roots), had, constants, beliefs=believed(named, still_before(before, places.roots)),
            around=(torch.is_grad_enabled(), modes()), owners=places.owners(),
            unreduced=tuple((places(key, None), *words) for key in known for words in before.unreduced_now(key)),
        )  # fmt: skip
        self.script = script.of(made)
        return made

    def _roots(self) -> list[tuple[str, Any]]:
        roots = self.ran.seen.outermost(self.given_roots)
        for x in (*self.phases.roots, *self.phases.optimizers):
            if all(x is not known for _, known in roots):
                roots.append((f"{'optimizer' if isinstance(x, Optimizer) else 'module'}{len(roots)}", x))
        return roots

    def _output(self, x: Tensor | Number) -> Output:
        """A new output of the graph; a copy for a view stands for itself, as what it is a view of is not there after a replay."""
        node = x.node if isinstance(x, Number) else self.recorder.node_of(seen_as(x))
        self._nodes.append(node)
        grad = isinstance(x, Tensor) and x.requires_grad
        return Output(len(self._nodes) - 1, x._spec.with_alias(OWN) if isinstance(x, DistTensor) else None, grad)

    def _result(self, x: Any) -> Any:
        if isinstance(x, Number):
            return self._output(x)
        if not isinstance(x, Tensor):
            return x
        if self.before.had(x):
            return ("place", self.places(id(x), x))
        return self._output(x)

    def _groups(self) -> Iterator[Effect]:
        """Numbers that the step has put into an optimizer."""
        known = dict((id(o), groups) for o, groups in self.before.groups)
        for r, (_, root) in enumerate(self.places.roots):
            if not isinstance(root, Optimizer):
                continue
            for g, group in enumerate(root.param_groups):
                if self.taken_back and self._replayed and id(root) in known:
                    self._check_counts(root, g)
                for key, value in numbers_of(group).items():
                    if isinstance(value, Number):
                        yield Effect("group", ("group", r, g, key, None), self._output(value))
                        group[key] = value.value
                    elif id(root) in known and plain(known[id(root)][g].get(key)) != plain(value):
                        raise refusals.changed_group(key)

    def _check_counts(self, root: Optimizer, g: int) -> None:
        """A run that is taken back is not seen to count, and no replay would: as a group's int (``group["k"] += 1``) does."""
        now = options_of(root.param_groups[g])
        for key, was in self.before.still[id(root)][g].items():
            if key in now and plain(now[key]) != plain(was):
                raise refusals.counts_in_group(type(root).__name__, key)

    def _states(self) -> Iterator[Effect]:
        """States that an optimizer has replaced, or made for the first time."""
        for r, (_, root) in enumerate(self.places.roots):
            if isinstance(root, Optimizer):
                before = self.before.states.get(id(root), {})
                for g, group in enumerate(root.param_groups):
                    for i, param in enumerate(group["params"]):
                        had = before.get(id(param), {})
                        for key, value in root.state.get(param, {}).items():
                            if had.get(key) not in (None, plain(value)):
                                raise refusals.counts_in_python(type(root).__name__, key)
                            if isinstance(value, Tensor) and not self.before.had(value):
                                kind = "state" if key in had else "new state"
                                yield Effect(kind, ("state", r, g, i, key), self._output(value))

    def _gradients(self) -> Iterator[Effect]:
        gradients = self.before.gradients
        for key in self.places.in_order(gradients):
            leaf: Any = self.before.alive[key]()
            if leaf is None:
                continue
            now, grad = _torch.gradient(leaf), gradients[key]
            if key in self.before.begun or not self.before.still_is(now, grad or id(None)):
                where = self.places(key, leaf)
                yield Effect("gradient", where, None if now is None else self._output(now))
            for place, x in self.before.beside_now(key, leaf):
                yield Effect(place, (place, self.places(key, leaf)), None if x is None else self._output(x))

    def _moved(self) -> Iterator[Effect]:
        moved = {id(x): x for x in self.before.moved()}
        for key in self.places.in_order(moved):
            x = moved[key]
            if self.places.knows(x) or id(x) in self.before.owners:
                yield Effect("place", self.places(id(x), x), self._output(x))

    def _described(self) -> tuple[tuple[Input, ...], dict[int, Any]]:
        inputs, values = list[Input](), [*self.recorder.outside.values()]
        shares = shared(values)
        for i, (node, value) in enumerate(self.recorder.outside.items()):
            made = replace(self._describe(node, value), shares=shares.get(i, ()))
            if (found := stages_of(value)) or is_read(value):
                node.meta["stages"] = found  # of an earlier step; (): it reads this on every rank
            inputs.append(made)
            node.meta["input"] = made
        return tuple(inputs), {i: value for i, value in enumerate(values) if inputs[i].kind == "constant"}

    def _describe(self, node: fx.Node, value: Any) -> Input:
        if node in self.numbers:
            return self._number_input(self.numbers[node])
        if not isinstance(value, Tensor):
            return Input("generator", "generator", self.places(id(value), value))
        if not self.before.had(value):
            return Input("constant", "constant", ("constant",), None, facts(value))
        holder = self.places.holder_of(value, self.before)
        if holder is None or self.places._found.get(id(value), ("",))[0] == "argument":
            where, spec = self.places(id(value), value), None
        else:
            where, spec = self.places(holder, self.before.alive[holder]()), self.before.locals[holder][1]
        kind: Any = _KINDS.get(where[0], where[0])
        return Input(kind, self.places.name(where), where, spec, facts(value))

    def _number_input(self, place: tuple[Any, ...]) -> Input:
        where: Where = place
        if place[0] == "group":
            where = ("group", next(r for r, (_, x) in enumerate(self.places.roots) if x is place[1]), *place[2:])
        return Input("number", self.places.name(where), where)
