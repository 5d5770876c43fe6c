"""Step: one step of a program as data: a graph of local operators and messages, what goes in, what comes out, what it changes.

It holds no tensors and no objects of the program: those are bound to it (``run/bound.py``), by their places in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from torch import fx

from onecard.tensor.spec import Spec
from onecard.train.unreduced import Words

MISS = object()
"""What a replay gives that was not done: the recording does not fit."""
ANEW = object()
"""The same, where it fits here and not on another rank that does the step with this one: all of them record it anew."""
Where = tuple[Any, ...]
"""A place in the program: ("argument", i), ("parameter" or "buffer", root, path), ("trained", where) of the distributed parameter
for which a plain one stands, ("member", root, group, i) of an optimizer, ("gradient", where), ("kept" or "wide", where) beside it
(``train/unreduced.py``), ("state", root, group, i, key), ("group", root, group, key, i or None), ("object", root)."""

BESIDE = ("gradient", "kept", "wide")
"""Kinds of places beside a parameter."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the graph.

    Attributes:
        kind: argument, parameter, buffer, gradient, state, tensor, number, generator or constant.
        name: for people.
        where: its place in the program.
        spec: of the distributed tensor whose local part it is; None of a plain one.
        facts: shape, strides, dtype, device of the local tensor; () of what is no tensor.
        shares: the numbers of inputs that lie in its memory.
    """

    kind: str
    name: str
    where: Where
    spec: Spec | None = None
    facts: tuple[Any, ...] = ()
    shares: tuple[int, ...] = ()


def holders(inputs: Sequence[Input]) -> list[int]:
    """For each input the number of that in whose memory it lies: the largest, or itself."""
    found = list(range(len(inputs)))
    for i in sorted(range(len(inputs)), key=lambda i: (len(inputs[i].shares), -i)):
        for held in inputs[i].shares:
            found[held] = i
    return found


@dataclass(frozen=True, slots=True)
class Output:
    """One output of the graph, as it is given back: a plain tensor or number, or (with ``spec``) a distributed tensor."""

    position: int
    spec: Spec | None = None
    grad: bool = False  # in the program it had a graph of autograd behind it


@dataclass(frozen=True, slots=True)
class Effect:
    """What the step leaves in the program: a gradient, a new state, another local part, a number of an optimizer.

    ``kind``: "gradient" (of ``where``; no ``output``: set to None), "place" (of a distributed tensor), "state", "new state" (the
    optimizer had none), "group", "kept" or "wide" (beside a gradient). ``absent``: only other ranks of a pipeline
    have the gradient.
    """

    kind: str
    where: Where
    output: Output | None = None
    absent: Elsewhere | None = None


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A tensor of the program of which a pipeline's ranks have different ones.

    Attributes:
        here: whether this rank has it; ``stages``: which of them read it; ``name``: what errors call it;
            ``new``: whether this step makes it.
        facts: shape, strides, dtype, device of the local tensor; ``spec``: of the distributed one.
    """

    where: Where
    facts: tuple[Any, ...]
    spec: Spec | None
    here: bool
    stages: tuple[int, ...]
    name: str = ""
    new: bool = False


@dataclass(slots=True, repr=False)
class RecordedStep:
    """One step of a program on this rank, as it was recorded. What can be done with it: ``Recording``.

    Attributes:
        name: of the function.
        graph: an FX graph. Its operators are torch's, on local tensors; messages are nodes of ``comm.again.message``.
            Each node's meta has ``phase`` (forward, backward, optimizer), ``line`` (the user's), ``module``, ``tensor`` (shape,
            strides, dtype, device of the result) and ``spec`` (of the distributed tensor whose part it is).
        inputs: of the graph, in order.
        results: what the function returns: ``Output``s, ("input", i), or constants, in the form ``tree``.
        effects: what it changes in the program besides tensors written in place, which are inputs.
        conditions: a graph of the same inputs: comparisons of numbers, which must come out as ``answers``.
        roots: names of the modules, optimizers and tensors that places are told by.
        gradients: leaves, with whether they had a gradient before the step.
        unreduced: of those of which ranks have summands: what was known of it before the step and is behind it, and whether
            a backward of the step has reached their model.
        constants: tensors made of Python values.
        arguments: for each leaf of the arguments, its name and what of it the recording depends on; ``call``: their form.
        backend: who computes between the messages: "eager", torch's kernels one by one, or "inductor".
        beliefs: what modules and optimizers were, as data: ``bind`` asks for it.
        elsewhere: what of the program other ranks of a pipeline have.
        counts: by what microbatches divide that was the same for all when the step was recorded (``passes.counted.Count``).
        owners: by optimizer, group and number, where in the program the parameter is whose states have these in their place.
        around: whether gradients were enabled, and torch's modes; ``file``: which it was read from.
    """

    name: str
    graph: fx.Graph
    inputs: tuple[Input, ...]
    results: tuple[Any, ...]
    tree: Any
    effects: tuple[Effect, ...]
    conditions: fx.Graph | None
    answers: tuple[bool, ...]
    roots: tuple[str, ...]
    gradients: tuple[tuple[Where, bool], ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)
    arguments: tuple[tuple[str, Any], ...] = ()
    call: Any = None
    backend: str = "eager"
    beliefs: tuple[tuple[str, Any], ...] = ()
    around: tuple[bool, Any] | None = None
    file: str = ""
    elsewhere: tuple[Elsewhere, ...] = ()
    counts: tuple[Any, ...] = field(default=(), compare=False)
    owners: dict[Where, Where] = field(default_factory=dict, compare=False)
    unreduced: tuple[tuple[Where, Words, Words, bool], ...] = ()
    bound: Any = field(default=None, compare=False)
    _run: Callable[..., Any] | None = field(default=None, compare=False)

    def nodes(self, phase: str = "") -> Iterator[fx.Node]:
        """The nodes that do something, of one phase or all."""
        for node in self.graph.nodes:
            if node.op == "call_function" and phase in ("", node.meta.get("phase")):
                yield node

    @property
    def makes_states(self) -> bool:
        """Whether an optimizer made states in this step: a replay would begin with new ones each time, so there is none."""
        made = any(effect.kind == "new state" for effect in self.effects)
        return made or any(known.new for known in self.elsewhere)  # also on a rank of a pipeline that has none of them

    @property
    def leaves_gradients(self) -> bool:
        """Whether it leaves gradients where there were none, as the first step of a loop that begins with ``zero_grad()``."""
        none = {where for where, there in self.gradients if not there}
        return any(effect.kind == "gradient" and effect.where in none for effect in self.effects)

    def with_graph(self, graph: fx.Graph) -> Self:
        """The same step by another graph with the same inputs and outputs, bound to nothing."""
        return replace(self, graph=graph, bound=None, _run=None)

    def name_of(self, where: Where) -> str:
        """A place in words."""
        kind, *rest = where
        if kind == "trained":
            return self.name_of(rest[0])
        if kind in BESIDE:
            return f"{self.name_of(rest[0])}.grad"
        if kind == "argument":
            return self.arguments[rest[0]][0]
        return next(
            (i.name for i in self.inputs if i.where == where), ".".join(map(str, (self.roots[rest[0]], *rest[1:])))
        )


AnyStep = TypeVar("AnyStep", bound=RecordedStep)
