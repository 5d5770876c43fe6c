"""Recording: one step as a graph of local operators and messages, with what goes in, what comes out and what it changes.

It holds no tensors and no objects of the program: those are bound to it (``bound.py``), by their places in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from onecard._torch import tree_flatten
from onecard.cost import MACHINE, Machine
from onecard.errors import OnecardError, RecordingError
from onecard.graph.compiled import compiled
from onecard.tensor.spec import Spec

if TYPE_CHECKING:
    from onecard.graph.price import Cost

MISS = object()
"""What a replay gives that was not done: the recording does not fit."""
Where = tuple[Any, ...]
"""A place in the program: ("argument", i), ("parameter" or "buffer", root, path), ("member", root, group, i) of an optimizer,
("gradient", where), ("state", root, group, i, key), ("group", root, group, key, i or None), ("object", root)."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the graph.

    Attributes:
        kind: argument, parameter, buffer, gradient, state, tensor, number, generator or constant.
        name: for people.
        where: its place in the program.
        spec: of the distributed tensor whose local part it is; None of a plain one.
        facts: shape, strides, dtype, device of the local tensor; () of what is no tensor.
        within: the number of the input in whose memory it lies; None: it has its own.
    """

    kind: str
    name: str
    where: Where
    spec: Spec | None = None
    facts: tuple[Any, ...] = ()
    within: int | None = None


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
    optimizer had none), "group".
    """

    kind: str
    where: Where
    output: Output | None = None


@dataclass(slots=True, repr=False)
class Recording:
    """One step of a program, recorded on this rank.

    Attributes:
        name: of the function.
        graph: an FX graph. Its operators are torch's, on local tensors; messages are nodes of ``comm.again.message``.
            Each node's meta has ``phase`` (forward, backward, optimizer), ``line`` (the user's), ``module``, ``tensor`` (shape,
            strides, dtype, device of the result) and ``spec`` (of the distributed tensor whose part it is).
        inputs: of the graph, in order.
        results: what the function returns: ``Output``s, ("input", i), or constants, in the form ``tree``.
        effects: what it changes in the program besides tensors written in place, which are inputs.
        questions: a graph of the same inputs: comparisons of numbers, which must come out as ``answers``.
        roots: names of the modules, optimizers and tensors that places are told by.
        gradients: leaves, with whether they had a gradient before the step.
        constants: tensors made of Python values.
        arguments: for each leaf of the arguments, its name and what of it the recording depends on; ``call``: their form.
        backend: who computes between the messages: "eager", torch's kernels one by one, or "inductor".
        beliefs: what modules and optimizers were, as data: ``bind`` asks for it.
        around: whether gradients were enabled, and torch's modes; ``file``: which it was read from.

    Example:
        >>> import onecard, torch
        >>> recording = onecard.record(lambda x, rate: x * rate)(torch.ones(2), 3.0)
        >>> recording(torch.ones(2), 5.0)
        tensor([5., 5.])
        >>> [known.name for known in recording.inputs]
        ['x', 'rate']
    """

    name: str
    graph: fx.Graph
    inputs: tuple[Input, ...]
    results: tuple[Any, ...]
    tree: Any
    effects: tuple[Effect, ...]
    questions: fx.Graph | None
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
    bound: Any = field(default=None, compare=False)
    _run: Callable[..., Any] | None = field(default=None, compare=False)

    @property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """The graph as a function of its inputs (local tensors, numbers, generators), in order; it writes to them."""
        if self._run is None:
            self._run = compiled(self.graph, self.backend)
        return self._run

    def nodes(self, phase: str = "") -> Iterator[fx.Node]:
        """The nodes that do something, of one phase or all."""
        for node in self.graph.nodes:
            if node.op == "call_function" and phase in ("", node.meta.get("phase")):
                yield node

    @property
    def makes_states(self) -> bool:
        """Whether an optimizer made states in this step: a replay would begin with new ones each time, so there is none."""
        return any(effect.kind == "new state" for effect in self.effects)

    def with_graph(self, graph: fx.Graph) -> Recording:
        """The same step by another graph with the same inputs and outputs."""
        return Recording(
            self.name, graph, self.inputs, self.results, self.tree, self.effects, self.questions, self.answers, self.roots,
            self.gradients, self.constants, self.arguments, self.call, self.backend,
            self.beliefs, self.around, self.file,
        )  # fmt: skip

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
        if result is not MISS:
            return result
        why = (
            self.bound.difference(leaves, [name for name, _ in self.arguments]) if tree == self.call else "another call"
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
        from onecard.graph.believed import believed, difference
        from onecard.graph.bound import Bound

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
            made.bound = Bound(made, held, [kind for _, kind in self.arguments], facts)
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
        """What it takes on a machine, without running it: see ``onecard.graph.price``."""
        from onecard.graph.price import cost

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
        from onecard.graph.draw import draw

        return draw(self, path, depth)

    def timed(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Replay it once, as a call does, and tell of each node its name, when it started, and the seconds that it took.

        Between the nodes a look at the clock takes time, so that it takes longer than a call. On several ranks all call it.
        """
        from onecard.graph.timeline import timed

        return timed(self, args, kwargs)

    def trace(self, path: Any, machine: Machine = MACHINE, measured: Sequence[Any] = ()) -> None:
        """Write the priced step as a trace for chrome://tracing or ui.perfetto.dev: operators, messages by axis, bytes alive.

        Args:
            path: the JSON file.
            machine: what it is priced for.
            measured: what ``timed`` gave, to see it beside.
        """
        from onecard.graph.timeline import trace

        trace(self, path, machine, measured)

    def save(self, path: Any) -> None:
        """Write it to a file, without pickle: ``onecard.load_recording(path).bind(...)`` reads it."""
        from onecard.graph.saved import save

        save(self, path)

    def name_of(self, where: Where) -> str:
        """A place in words."""
        kind, *rest = where
        if kind == "gradient":
            return f"{self.name_of(rest[0])}.grad"
        if kind == "argument":
            return self.arguments[rest[0]][0]
        return next(
            (i.name for i in self.inputs if i.where == where), ".".join(map(str, (self.roots[rest[0]], *rest[1:])))
        )

    def __str__(self) -> str:
        from onecard.graph.show import text

        return text(self)

    def __repr__(self) -> str:
        from onecard.graph.show import head

        return f"<{head(self)}>"
