"""Goes along with a step that runs, and holds each of its calls against the one that was recorded at its place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onecard import recorded
from onecard._torch import names as _torch
from onecard._torch.modes import DispatchMode
from onecard._torch.names import OpOverload, tree_flatten
from onecard._torch.uncompiled import eagerly
from onecard.comm.base import own, record
from onecard.comm.issue import again
from onecard.comm.issue.groups import line_of
from onecard.comm.issue.message import Message
from onecard.random import Key
from onecard.rules.call import schema_of
from onecard.static.capture import randomness
from onecard.static.capture.script import Ref, ScriptEntry, StepScript
from onecard.static.guards.hooked import own_gradient
from onecard.static.guards.places import at
from onecard.static.guards.results import apart_as
from onecard.static.run.difference import Difference, same
from onecard.static.step.step import Output
from onecard.static.step.writes import changed_by
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.rows.one_call import seen_as
from onecard.tensor.rows.rows import settle_left
from onecard.tensor.spec import OWN
from onecard.train.modules.recordable import recordable

aten = torch.ops.aten
_ABSENT = object()
_FROM_VALUES = aten.lift_fresh.default
_DETACH, _ROOM, _COPY = aten.detach.default, aten.new_empty_strided.default, aten.copy_.default


class Follower(recorded.Listener):
    """Goes along with a step that runs, in the recorder's place.

    Args:
        script: what was recorded.
        given: what the graph's inputs are at this call.
        roots, leaves: what places are told by.
        note: is told of tensors before the step writes to them.

    Attributes:
        found: the first difference; None so far.
    """

    def __init__(
        self, script: StepScript, given: Sequence[Any], roots: Sequence[Any], leaves: Sequence[Any], note: Any = None
    ) -> None:
        self.note, self.rows, self.follows = note, script.rows, True
        self.script, self.roots, self.leaves = script, roots, leaves
        self.found: Difference | None = None
        self._entries, self._next = script.entries, 0
        self._values: dict[int, Any] = {}
        self._names: dict[Any, int] = {}  # of tensors by their identity, and of keys
        self._copies = 0  # a copy that autograd has begun to make of a gradient, by its identity
        self._twice: dict[int, int] = {}  # inputs that are the tensor of another one at this call
        for i, value in zip(script.inputs, given, strict=True):
            if isinstance(value, Tensor):
                if self._names.setdefault(id(value), i) != i:
                    self._twice[i] = self._names[id(value)]
            else:
                self._values[i] = value
        self._given, self._kept = dict(self._names), list(given)
        self._grads = [own_gradient(at(where, roots, leaves)) for where, _ in script.gradients]
        self.mode = _Mode(self)

    # -- a run --------------------------------------------------------------------------------------------------------

    def run(self, call: Callable[[], Any]) -> Any:
        """Run the step as it is, once; what it returns."""
        try:
            return self._followed(call)
        finally:  # it and its mode name each other: what they hold is not for Python's collector to come by
            for held in (self._values, self._given, self._kept, self._grads, self._names):
                held.clear()

    def _followed(self, call: Callable[[], Any]) -> Any:
        recorded.recorder = self
        try:
            with eagerly(), _torch.beneath(self.mode), randomness.seen(), recordable():
                result = call()
                settle_left((result, self._gradients()))
        finally:
            recorded.recorder = None
        if self.found is None:
            self._end()
        if self.found is None:
            self._results(result)
        if self.found is None:
            self._effects()
        return result

    def _gradients(self) -> list[Any]:
        return [_torch.gradient(at(where, self.roots, self.leaves)) for where, _ in self.script.gradients]

    # -- what the lower layers call, as of a recorder ------------------------------------------------------------------

    def needs_values(self) -> None:
        """An operator's rule looks at values: a recording would have been refused."""

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A function of ours runs."""
        if not self.listens:
            return function(*args, **kwargs)
        with self.paused():
            if self.note is not None:
                self.note(changed_by(function, args, kwargs))
            result = function(*args, **kwargs)
        self.saw(function, tuple(args), kwargs, result)
        return result

    def message(self, what: Message, into: Tensor, given: Tensor) -> None:
        """A collective runs."""
        with self.paused():
            if self.note is not None:
                self.note([into])
            what.send(into, given)
        if what.operation in again.COLLECTIVES:
            self.saw(
                again.message, (into, given, what.operation, what.rest, again.Line(*line_of(what.group))), {}, None
            )
        else:
            self._differs(Difference("sends", what.name, None))

    def own(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A message of the program's own runs."""
        tensors, message = own.tensors_of(args, kwargs), own.OwnMessage(func, args, kwargs)
        with self.paused():
            if self.note is not None:
                self.note(tensors)
            result = func(*args, **kwargs)
            own.wait_for(result)
        self.saw(own.send_own, (tensors, message), {}, None)
        return result

    def knows(self, x: Tensor) -> bool:
        """Whether a tensor came up before."""
        return id(x) in self._names

    def renamed(self, x: Tensor, value: Tensor | None) -> None:
        """A tensor has the memory of another one from now on; None: what it was."""
        known = self._given.get(id(x)) if value is None else self._names.get(id(value))
        if known is None:
            self._names.pop(id(x), None)
        else:
            self._names[id(x)] = known

    def refilled(self, holder: Any, memory: Tensor) -> None:
        """What holds memory that is given up and filled again: the recording's own affair."""

    # -- the comparison ------------------------------------------------------------------------------------------------

    def saw(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """One call that has run: is it the next one of the recording?"""
        if self.found is not None:
            return
        entry = self._upcoming()
        if entry is None:
            self._differs(Difference("more", target, None))
            return
        if target is not entry.target:
            if self._kept_gradient(target, entry, args, result):
                return
            if target is not _FROM_VALUES or not self._from_values(entry, args[0]):
                self._differs(Difference("other", target, entry))
                return
        else:
            was: Sequence[Any] = entry.args
            if len(args) != len(was):
                args, was = _as_long(target, args, was), _as_long(target, was, args)
            for i, (value, expected) in enumerate(zip(args, was, strict=True)):
                if value is not expected and not self._is(value, expected):
                    self._argument(entry, i, value, expected)
                    return
            if (kwargs or entry.kwargs) and not self._options(entry, kwargs or {}):
                return
        if entry.named:
            self._names[_identity(result)] = entry.number
        elif entry.parts:
            for i, number in entry.parts:
                self._names[_identity(result[i])] = number
        elif entry.gives_value:
            self._values[entry.number] = result

    def _upcoming(self) -> ScriptEntry | None:
        """The next entry that is a call; numbers that stand before it are computed as a replay computes them."""
        entries, i = self._entries, self._next
        while i < len(entries) and entries[i].computes:
            entry = entries[i]
            self._values[entry.number] = entry.target(*(self._value(x) for x in entry.args))
            i += 1
        self._next = i + 1
        return entries[i] if i < len(entries) else None

    def _value(self, expected: Any) -> Any:
        return self._values.get(expected.number) if type(expected) is Ref else expected

    def _is(self, value: Any, expected: Any) -> bool:
        """Whether an operand is the one of the recording."""
        if type(expected) is Ref:
            if isinstance(value, Tensor):
                number = self._names.get(id(value))
                return number == expected.number or number == self._twice.get(expected.number, -1)
            if isinstance(value, Key | recorded.Opaque):
                return self._names.get(value) == expected.number
            return expected.number in self._values and same(value, self._values[expected.number])
        if isinstance(expected, list | tuple) and isinstance(value, list | tuple):
            return len(value) == len(expected) and all(
                v is e or self._is(v, e) for v, e in zip(value, expected, strict=True)
            )
        return not isinstance(value, Tensor) and same(value, expected)

    def _options(self, entry: ScriptEntry, kwargs: dict[str, Any]) -> bool:
        defaults = schema_of(entry.target).defaults if isinstance(entry.target, OpOverload) else {}
        for key in {**entry.kwargs, **kwargs}:  # one that is left out and one that is its default are the same
            now, was = kwargs.get(key, defaults.get(key, _ABSENT)), entry.kwargs.get(key, defaults.get(key, _ABSENT))
            if not self._is(now, was):
                self._argument(entry, key, kwargs.get(key), entry.kwargs.get(key))
                return False
        return True

    def _kept_gradient(self, target: Any, entry: ScriptEntry, args: tuple[Any, ...], result: Any) -> bool:
        """Whether this is a gradient that autograd has kept where it copied the recorded one, or the other way.

        It does as it finds how many hold the gradient, which may depend on who looks on. The values are the same.
        """
        if target is _DETACH and entry.target is _ROOM:
            copy = self._upcoming()
            fits = copy is not None and copy.target is _COPY and self._is(args[0], copy.args[1])
            self._next -= not fits
            self._names[id(result)] = entry.number
        elif target is _ROOM and entry.target is _DETACH:
            fits = self._is(args[0], entry.args[0])
            self._next -= 1  # the copy is to come, and stands for the entry
            self._copies = id(result)
        elif target is _COPY and entry.target is _DETACH and id(args[0]) == self._copies:
            fits = self._is(args[1], entry.args[0])
            self._names[id(args[0])] = entry.number
        else:
            return False
        return fits

    def _from_values(self, entry: ScriptEntry, x: Tensor) -> bool:
        """A tensor that Python has made of values: of the same values, or of a number that is followed."""
        with self.paused():
            if entry.constant is not None:
                return x.dtype is entry.constant.dtype and torch.equal(x, entry.constant)
            return entry.target is aten.full.default and same(x.item(), _as(self._value(entry.args[1]), x.dtype))

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if (entry := self._upcoming()) is not None:
            self._differs(Difference("fewer", None, entry))

    def _number_of(self, x: Any) -> Any:
        return self._names.get(id(seen_as(x)))

    def _made(self, x: Any, output: Output) -> bool:
        """Whether a tensor or a number is what the recording gives there."""
        number = self.script.outputs[output.position]
        if isinstance(x, Tensor):
            spec = x._spec.with_alias(OWN) if isinstance(x, DistTensor) else None
            return self._number_of(x) == number and spec is output.spec
        return number in self._values and same(x, self._values[number])

    def _results(self, result: Any) -> None:
        flat, tree = tree_flatten(apart_as(result, self.script.tree))
        if tree != self.script.tree:
            self._differs(Difference("returns", result, None))
            return
        for i, (x, known) in enumerate(zip(flat, self.script.results, strict=True)):
            if isinstance(known, Output):
                number = self.script.outputs[known.position]
                fits, was = self._made(x, known), self._values.get(number, "another tensor")
            elif isinstance(known, tuple) and known[:1] == ("place",):
                fits, was = x is at(known[1], self.roots, self.leaves), "a tensor of the program"
            else:
                fits, was = x is known or same(x, known), known
            if not fits:
                self._differs(Difference("result", (i, x, was), None))
                return

    def _effects(self) -> None:
        script, changed = self.script, set[Any]()
        for effect in script.effects:
            if effect.kind == "gradient":
                changed.add(effect.where)
                now = own_gradient(at(effect.where, self.roots, self.leaves))
            else:
                now = at(effect.where, self.roots, self.leaves)
            if not (now is None if effect.output is None else now is not None and self._made(now, effect.output)):
                self._differs(Difference("leaves", effect, None))
                return
        for (where, _), grad in zip(script.gradients, self._grads, strict=True):
            if where not in changed and own_gradient(at(where, self.roots, self.leaves)) is not grad:
                self._differs(Difference("gradient", where, None))
                return

    def _argument(self, entry: ScriptEntry, name: Any, value: Any, expected: Any) -> None:
        made = isinstance(value, Tensor) or (type(expected) is Ref and expected.number not in self._values)
        was = self.script.name_of(expected) if made else self._value(expected)
        self._differs(Difference("argument", (name, value, was), entry))

    def _differs(self, found: Difference) -> None:
        if self.found is None:
            found.line = record.user_line()
            self.found = found


def _identity(result: Any) -> Any:
    return result if isinstance(result, Key | recorded.Opaque) else id(result)


def _as_long(target: Any, args: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments with the defaults of those that are given elsewhere: autograd gives some, another onlooker leaves them out."""
    left_out = range(len(args), len(other))
    if not isinstance(target, OpOverload):
        return (*args, *(_ABSENT for _ in left_out))
    schema = schema_of(target)
    return (*args, *(schema.defaults.get(schema.arguments[i], _ABSENT) for i in left_out))


class _Mode(DispatchMode):
    """Sees every operator below autograd; those of distributed tensors go on, to what they are made of."""

    keeps_values = True

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self.follower = follower

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if issubclass(kind, DistTensor) or (kind is not Tensor and own.is_under_way(kind)):
                return NotImplemented
        follower = self.follower
        if follower.note is not None and follower.listens:
            with follower.paused():
                follower.note(changed_by(func, args, kwargs or {}))
        if follower.listens and func.namespace == "c10d":
            return follower.own(func, args, kwargs or {})
        if follower.listens and own.is_functional(func):
            return own.in_functional(follower, func, args, kwargs or {})
        result = func(*args, **kwargs) if kwargs else func(*args)
        if not follower.listens or follower.found is not None:
            return result
        kind = _kind(func)
        if kind == "a message":
            follower.saw(
                own.send_own, (own.tensors_of(args, kwargs or {}), own.OwnMessage(func, args, kwargs or {})), {}, None
            )
            return result
        if kind == "of lists":
            _torch.count_writes(func, args)
        if kind != "a mark":
            follower.saw(func, args, kwargs, result)
        return result


@functools.lru_cache(maxsize=8192)
def _kind(func: OpOverload) -> str:
    """Whether an operator takes lists, or is a mark for torch's profiler."""
    marks = func.namespace in ("profiler", "prim") or own.only_wraps(func)
    return "a mark" if marks else "of lists" if func._schema.name.startswith("aten::_foreach") else ""


def _as(value: Any, dtype: torch.dtype) -> Any:
    return torch.full((), value, dtype=dtype, device="cpu").item()
