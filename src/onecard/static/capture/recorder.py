"""The recorder: while a step runs, every local operator and every message below the distributed tensors becomes a node.

It runs on real tensors, in a real step. What is written down is what the kernels were called with, so that in-place writes,
views and aliases keep their meaning by construction, and a replay is the same calls once more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import TensorWeakRef

from onecard import recorded
from onecard._torch import names as _torch
from onecard._torch.names import tree_leaves
from onecard.comm.base import own, record
from onecard.comm.base.state import faked
from onecard.comm.issue import again, trace
from onecard.comm.issue.groups import line_of
from onecard.comm.issue.message import Message
from onecard.comm.world import world
from onecard.errors import RecordingError
from onecard.random import Key
from onecard.rules.call import tensors_in
from onecard.static.capture.randomness import GeneratorWatch
from onecard.static.capture.sketch import Sketch
from onecard.static.capture.value_reads import ValueReads
from onecard.static.guards import reads
from onecard.static.guards.numbers import Number, poisoned
from onecard.static.step import refusals
from onecard.static.step.facts import as_the_kernel_gives, facts, takes_gradients
from onecard.static.step.nodes import called, traits
from onecard.static.step.phases import Phases
from onecard.static.step.writes import changed_by, written_by
from onecard.tensor.deferred.calls import storage_of
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.rows.one_call import held_of, seen_as

aten = torch.ops.aten
Condition = tuple[
    Callable[..., bool], tuple[Any, ...], bool
]  # a comparison, what it compares (nodes, values), the outcome


_KEYS = (Key, recorded.Opaque)
_AS_THEY_ARE = frozenset((int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))


def _top() -> None:
    """Stands where the operators begin, until they are all there."""


class Recorder(ValueReads):
    """A graph that grows while a step runs.

    Attributes:
        graph: the nodes so far; inputs stand first, in the order in which they came up.
        outside: for each input node the tensor, number or generator that it stands for.
        conditions: what was asked of numbers; a replay is only right where the answers are the same.
        leaves: tensors that take gradients and were used.
        tags: the numbers in the call of torch that runs now.
        about_to_write: is told of tensors before the step writes to them.
        sketch: runs operators, where the step is written down and not done; None: it is done.
        guesses: what modules read of data is guessed: the recording is only looked at.
    """

    def __init__(self, before: Any, phases: Phases, ask: bool = False, rows: bool = False) -> None:
        self.rows = rows
        self.ask = ask  # values of data may be read: they become conditions
        self.graph, self.phases, self._before = fx.Graph(), phases, before
        self._start = self.graph.call_function(_top)
        self._nodes: dict[int, tuple[TensorWeakRef, fx.Node]] = {}
        self._keys: dict[Key | recorded.Opaque, fx.Node] = {}
        self.outside: dict[fx.Node, Any] = {}
        self._inputs: dict[int, fx.Node] = {}
        self.conditions: list[Condition] = []
        self.asked_at: dict[Condition, str] = {}
        self.leaves: dict[int, Tensor] = {}
        self.calls = 0  # of torch's functions, under way
        self.hooked = -1  # the run of autograd's engine in which Python has made one of these: a hook
        self.tags: list[Number] = []
        self.numbers: list[Number] = []  # all that were made
        self.known: set[float] = set()  # other floats in that call
        self.matched: set[int] = set()
        self.foreign = False  # it turned a float into another one
        self.reads: list[tuple[Any, fx.Node]] = []  # counters that the call has read
        self.refills: list[tuple[fx.Node, fx.Node]] = []  # memory that was given up, and what took its place
        self._holders: dict[int, fx.Node] = {}
        self.about_to_write: Callable[[list[Any]], None] | None = None
        self.sketch: Sketch | None = None
        self.guesses = False
        self.random = GeneratorWatch()
        self._of: Any = None  # the distributed operator that runs, and its arguments

    # -- what the lower layers call ------------------------------------------------------------------------------------

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Write down a call of a function of ours (``recorded.one_node``)."""
        if not self.listens:
            return function(*args, **kwargs)
        with self.paused():
            self.random.check()
            self._about_to_write(changed_by(function, args, kwargs))
            result = function(*args, **kwargs)
            self.random.note()
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        node = self._add(function, args, kwargs, result, given)
        node.meta["data"] = True
        if function not in recorded.pure:
            node.meta["rank"] = world.get_rank()  # what it sends, and to whom, is this rank's
        return result

    def message(self, what: Message, into: Tensor, given: Tensor) -> None:
        """Run a collective, and write it down."""
        if what.operation not in again.COLLECTIVES:
            raise trace.refuse(what.name)
        if self.sketch is None:
            with self.paused():
                self._about_to_write([into])
                what.send(into, given)
        args = into, given, what.operation, what.rest, again.Line(*line_of(what.group))
        self._add(again.message, args, {}, None, [into, given]).meta["rank"] = world.get_rank()

    # -- what is seen below autograd -----------------------------------------------------------------------------------

    def saw(self, func: Any, args: Any, kwargs: Any) -> None:
        """Distributed operands of an operator that is about to run."""
        self.phases.operators += 1
        self._of = func, self._word((args, tuple(kwargs.items())))
        for x in tensors_in((*args, *kwargs.values())):
            if isinstance(x, DistTensor):
                if takes_gradients(x):
                    self.leaves[id(x)] = x
                found = self._nodes.get(id(part := seen_as(x)))
                if found is not None and found[0]() is part:
                    found[1].meta["spec"] = x._spec

    def _word(self, x: Any) -> Any:
        """An argument by what is the same on all ranks: a tensor by its node's name, whatever it holds here."""
        if isinstance(x, Tensor):
            found = self._nodes.get(id(seen_as(x)))
            return found[1].name if found is not None else ""
        return tuple(map(self._word, x)) if isinstance(x, list | tuple) else x

    def operator(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a local operator, and write it down."""
        if func in reads.VALUES:
            return self._read(func, args, kwargs)
        if func.namespace == "c10d":
            return self.own(func, args, kwargs)
        if own.is_functional(func):
            return own.in_functional(self, func, args, kwargs)
        if func.namespace in ("profiler", "prim") or own.only_wraps(func):  # marks; the device of a tensor without data
            return func(*args, **kwargs)
        if reads.sized_by_values(func, args, kwargs):
            self._count(func, args)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        self.leaves |= {id(x): x for x in given if takes_gradients(x)}
        if draws := torch.Tag.nondeterministic_seeded in func.tags:
            self.random.check()
        if self.about_to_write is not None and (changed := changed_by(func, args, kwargs)):
            with self.paused():
                self.about_to_write(changed)
        result = self.run(func, args, kwargs)
        if self.guesses:
            with self.paused():
                reads.note(func, args, kwargs, result)
        for x in (*given, *tensors_in(result)):
            if x.layout is not torch.strided:
                raise refusals.not_strided(x)
        if draws:
            self.random.note()
        _torch.count_writes(func, args)
        if func is aten.lift_fresh.default:  # a tensor that Python has just made from values
            if not self.calls:
                raise refusals.made_outside(args[0])
            self._constant(args[0])
            func = aten.clone.default
            result = result.view_as(result) if result is args[0] else result
        if faked.here and isinstance(result, tuple):
            result = as_the_kernel_gives(args, result)
        self._add(func, args, kwargs, result, given)
        return result

    def own(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A message of the program's own."""
        tensors, message = own.tensors_of(args, kwargs), own.OwnMessage(func, args, kwargs)
        if self.sketch is not None:
            result = own.not_sent(func, args)
        else:
            with self.paused():
                self._about_to_write(tensors)
                result = func(*args, **kwargs)
                own.wait_for(result)
        self._add(own.send_own, (tensors, message), {}, None, tensors)
        return result

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any, given: list[Tensor]) -> fx.Node:
        node = self._put(func, self._given(args), self._given(kwargs))
        inputs = [*node.all_input_nodes]
        node.meta["data"] = any(n.meta.get("data") for n in inputs)
        node.meta["of"] = self._of
        for written in written_by(node):
            written.meta["data"] = written.meta["data"] or node.meta["data"]
        self._keep(node, result, {id(x) for x in given})
        if isinstance(result, Tensor) and func is not again.message:
            memory = storage_of(result)
            seen = given if self.sketch is None else map(self.sketch.seen, given)
            node.meta["own"] = all(storage_of(x) != memory for x in seen)
        return node

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs) if self.sketch is None else self.sketch.run(func, args, kwargs)

    def _about_to_write(self, tensors: list[Any]) -> None:
        if self.about_to_write is not None:
            self.about_to_write(tensors)

    def _keep(self, node: fx.Node, result: Any, given: set[int]) -> None:
        """Note which tensors a node has made."""
        if isinstance(result, _KEYS):
            self._keys[result] = node
            node.meta["key"] = True
        elif isinstance(result, Tensor):
            if id(result) not in given or traits(node).reshapes:  # from here on it has this node's shape
                self._name(result, node)
        elif isinstance(result, list | tuple):
            for i, part in enumerate(result):
                if (isinstance(part, Tensor) and id(part) not in given) or isinstance(part, recorded.Opaque):
                    got = self._put(operator.getitem, (node, i), {})
                    got.meta["data"] = node.meta["data"]
                    self._keep(got, part, given)

    def asked_gradient(self, leaf: Any) -> None:
        """What a step does may depend on whether there is one."""
        if self._before.had(leaf):
            self._before.asked(leaf)
            self.leaves[id(leaf)] = leaf

    def note_rows(self, gradients: Sequence[Tensor]) -> None:
        """These have a row for each row of the batch: each microbatch has its own, where parameters' are added up."""
        for x in gradients:
            self.note("of rows", x, True)

    def note(self, name: str, x: Tensor, value: Any) -> None:
        """Something that is known of a tensor, in its node's meta."""
        found = self._nodes.get(id(seen_as(x)))
        if found is not None:
            found[1].meta[name] = value

    def _name(self, x: Tensor, node: fx.Node) -> None:
        if isinstance(x, DistTensor):  # rows: others are known by their parts
            node.meta.update(key=True, bytes=held_of(x).nbytes)  # type: ignore[union-attr]
        else:
            node.meta["tensor"] = facts(x)
        self._nodes[id(x)] = (TensorWeakRef(x), node)

    def _put(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = called(self.graph, target, args, kwargs)
        node.meta.update(self.phases.here(), line=record.user_line())
        if self.moves:
            node.meta["moves"] = True
        if self.hooked == _torch.graph_task() != -1:
            node.meta["hooked"] = True
        return node

    # -- operands ------------------------------------------------------------------------------------------------------

    def _given(self, value: Any) -> Any:
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return value
        if isinstance(value, _KEYS):
            return self._keys[value]
        if isinstance(value, Tensor):
            return self.node_of(value)
        if kind is float:
            return self._float(value)
        if kind is list or kind is tuple:
            return kind(self._given(v) for v in value)
        if kind is dict:
            return {k: self._given(v) for k, v in value.items()}
        if isinstance(value, torch.Generator):
            return self.input(value)
        if isinstance(value, torch.UntypedStorage | torch.TypedStorage):
            raise RecordingError(
                f"an operator takes memory itself, not a tensor, at {record.user_line()}: not in a recording"
            )
        return value

    def _float(self, value: float) -> Any:
        """A float of an operator: the node of a number that the call was given, or a constant."""
        if poisoned(value):
            raise refusals.lost_number()
        found = [tag for tag in self.tags if tag.value == value]
        for tag in found[1:]:
            if tag.node is not found[0].node:
                self.condition(operator.eq, (found[0].node, tag.node), True)
        if found:
            self.matched |= {id(tag) for tag in found}
            return found[0].node
        self.foreign = self.foreign or (value not in (0.0, 1.0, -1.0) and value not in self.known)
        return value

    def node_of(self, x: Tensor) -> fx.Node:
        """The node of a tensor; an input if it was there before the step."""
        found = self._nodes.get(id(x))
        if found is not None and found[0]() is x:
            return found[1]
        if not self._before.had(x):
            raise refusals.made_outside(x)
        node = self.input(x)
        self._name(x, node)
        return node

    def knows(self, x: Tensor) -> bool:
        """Whether a tensor came up before."""
        found = self._nodes.get(id(x))
        return found is not None and found[0]() is x

    def renamed(self, x: Tensor, value: Tensor | None) -> None:
        """A tensor has the memory of another one from now on (``x.data = value``, by the library); None: what it was."""
        self._nodes.pop(id(x), None)
        if value is not None:
            self._name(x, self.node_of(value))

    def refilled(self, holder: Any, memory: Tensor) -> None:
        """What holds memory that is given up and filled again has this from now on. It lives as long as the program."""
        node = self.node_of(memory)
        if id(holder) in self._holders:
            self.refills.append((self._holders[id(holder)], node))
        self._holders[id(holder)] = node

    def _constant(self, x: Tensor) -> None:
        with self.paused(), _torch.no_fakes():  # it has data in a pretended world, too
            node = self.input(x.clone())  # the step may write to it
        node.meta["data"] = False
        self._name(x, node)

    def input(self, value: Any, argument: bool = False) -> fx.Node:
        """The input for a tensor, number or generator from outside."""
        if not isinstance(value, float) and (found := self._inputs.get(id(value))) is not None:
            return found
        with self.graph.inserting_before(self._start):
            node = self.graph.placeholder(f"in{len(self.outside)}")
        self.outside[node], self._inputs[id(value)] = value, node  # kept, so that its identity stays its own
        counts = not isinstance(value, Tensor) or (value.dim() == 0 and not argument)
        node.meta.update(self.phases.here(), line="", data=not counts)
        if isinstance(value, Tensor):
            self._name(value, node)
        return node

    # -- numbers -------------------------------------------------------------------------------------------------------

    def number(self, value: float, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The result of an operation on numbers."""
        if not self.listens or self is not recorded.recorder or not isinstance(value, float):
            return value
        node = self._put(function, args, {})
        node.meta["data"] = False
        self.numbers.append(made := Number(value, node, self))
        return made

    def condition(self, function: Callable[..., bool], args: tuple[Any, ...], outcome: bool) -> bool:
        """Note the answer to a question."""
        if self.listens and self is recorded.recorder:
            known = (function, args, outcome)
            if known not in self.conditions:
                self.conditions.append(known)
                self.asked_at[known] = record.user_line()
        return outcome

    def finish(self, results: Sequence[Any]) -> None:
        """Close the graph: ``results`` are nodes."""
        self.graph.output(tuple(results))
        self.graph.erase_node(self._start)
