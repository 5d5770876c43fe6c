"""What a recording takes on a machine, without running it: operations, bytes, messages by axis, seconds, memory and its peak."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from onecard._torch import OpOverload
from onecard.comm import again
from onecard.cost import MACHINE, Machine, read
from onecard.graph import convolutions, families
from onecard.graph.live import Live, is_name, size_of
from onecard.graph.recording import Recording

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One node of a recording.

    Attributes:
        name, phase, module, line: of the node; ``operator``: what it calls.
        products: multiply-adds; ``touched``: bytes that it reads and writes.
        sent: bytes that it sends, along ``axis``.
        seconds: that it takes; ``start``: when it starts, from the beginning of the step.
        alive: bytes that are alive after it, inputs included.
    """

    name: str
    operator: str
    phase: str
    module: str
    line: str
    products: int
    touched: int
    sent: int
    axis: str
    seconds: float
    start: float
    alive: int

    @property
    def flops(self) -> int:
        """Floating-point operations of products."""
        return 2 * self.products


@dataclass(frozen=True, slots=True)
class Cost:
    """What a recording takes on this rank.

    Attributes:
        nodes: one entry for each node, in order.
        sent: bytes that this rank sends, by mesh axis.
        seconds: of the step. Operators come one after the other, so do messages along one axis; a message that was started
            runs beside what comes until it is awaited.
        inputs: bytes of the inputs, which are there all the time.
        peak: most bytes alive at once, inputs included; ``peak_at`` the node; ``alive_at_peak`` what is alive then.
        machine: what it is priced for.
    """

    nodes: tuple[NodeCost, ...]
    sent: dict[str, int]
    seconds: float
    inputs: int
    peak: int
    peak_at: str
    alive_at_peak: tuple[tuple[str, int], ...]
    machine: Machine

    @property
    def products(self) -> int:
        """Multiply-adds of all nodes."""
        return sum(n.products for n in self.nodes)

    @property
    def flops(self) -> int:
        """Floating-point operations of all products: two for each multiply-add."""
        return 2 * self.products

    @property
    def touched(self) -> int:
        """Bytes that all nodes read and write."""
        return sum(n.touched for n in self.nodes)

    @property
    def memory(self) -> tuple[tuple[float, int], ...]:
        """Bytes alive over time: (seconds, bytes) after each node."""
        return tuple((n.start + n.seconds, n.alive) for n in self.nodes)

    def seconds_by(self, what: str) -> dict[str, float]:
        """Seconds of nodes by "phase", "module", "operator", "line" or "axis" (of messages), the longest first."""
        found: dict[str, float] = {}
        for n in self.nodes:
            found[getattr(n, what)] = found.get(getattr(n, what), 0.0) + n.seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def __str__(self) -> str:
        sent = ", ".join(f"{count:,} along {axis!r}" for axis, count in self.sent.items()) or "none"
        return (
            f"{self.flops:,} floating-point operations, {self.seconds * 1e3:.3f} ms, bytes sent: {sent}; peak memory "
            f"{self.peak:,} bytes ({self.inputs:,} of them inputs) at {self.peak_at}"
        )


def cost(recording: Recording, machine: Machine = MACHINE) -> Cost:
    """The price of a recording. Nothing runs; shapes are those that were recorded.

    Example:
        >>> import onecard, torch
        >>> recording = onecard.record(lambda x, w: (x @ w).relu().sum())(torch.ones(4, 8), torch.ones(8, 16))
        >>> found = recording.cost()
        >>> found.flops, found.inputs, found.peak
        (1024, 640, 1152)
    """
    live, clock = Live(recording.graph), _Clock(_before(recording, machine), machine)
    nodes = []
    for node in recording.nodes():
        sent, made, touched = (sent_by(node), 0, 0) if is_message(node) else (0, *work(node))
        taken = message_seconds(node, machine) if sent else operator_seconds(node, machine, made, touched)
        start, seconds = clock.run(node, taken)
        nodes.append(
            NodeCost(
                node.name, called(node), node.meta.get("phase", ""), node.meta.get("module", ""), node.meta.get("line", ""),
                made, touched, sent, axis_of(node), seconds, start, live.after[node],
            )
        )  # fmt: skip
    return Cost(
        tuple(nodes),
        sent_along(recording),
        clock.end,
        live.inputs,
        live.peak,
        live.peak_at,
        live.alive_at_peak,
        machine,
    )


def _before(recording: Recording, machine: Machine) -> float:
    """Seconds before the first node: a look at each input."""
    return len(recording.inputs) * read(machine.curves["input"], 1) if "input" in machine.curves else 0.0


class _Clock:
    """When each node runs: operators one after the other, messages along an axis one after the other, waits for messages.

    At a message the ranks meet: each waits until the last has computed what comes before it.
    """

    def __init__(self, now: float, machine: Machine) -> None:
        self._now = now
        self._machine = machine
        self._met = 0.0
        self._links: dict[str, float] = {}
        self._arrives: dict[fx.Node, float] = {}
        self._started: dict[fx.Node, float] = {}

    @property
    def end(self) -> float:
        """When all of it is done."""
        return max(self._now, *self._links.values()) if self._links else self._now

    def run(self, node: fx.Node, seconds: float) -> tuple[float, float]:
        """Start and seconds of a node; of one that waits, how long it waits."""
        if is_wait(node):
            return self._wait(node.args[0])  # type: ignore[arg-type]
        if is_message(node):
            return self._send(node, seconds)
        start = self._now
        self._now = start + seconds
        return start, seconds

    def _send(self, node: fx.Node, seconds: float) -> tuple[float, float]:
        axis, begun = axis_of(node), self._now
        start = max(begun, self._links.get(axis, 0.0))
        there = max(start, begun + (self._machine.uneven - 1) * (begun - self._met))
        self._links[axis] = self._arrives[node] = there + seconds
        if node.kwargs.get("later"):
            self._started[node] = begun
            self._now += (1 - self._machine.beside) * seconds
        else:
            self._now = self._met = there + seconds
        return start, there + seconds - start

    def _wait(self, message: fx.Node) -> tuple[float, float]:
        start, arrives = self._now, self._arrives.get(message, self._now)
        if arrives > start:
            self._now, self._met = arrives, max(self._met, self._started.get(message, arrives))
        return start, self._now - start


# -- messages --------------------------------------------------------------------------------------------------------------


def is_message(node: fx.Node) -> bool:
    """Whether a node sends."""
    return node.target is again.message


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a message that was started before."""
    return node.op == "call_function" and node.target is getattr(again, "wait", again)


def axis_of(node: fx.Node) -> str:
    """The mesh axis of a message; "" of what is none."""
    return str(node.args[4]) if is_message(node) else ""


def sent_along(recording: Recording) -> dict[str, int]:
    """Bytes that this rank sends, by mesh axis."""
    sent: Counter[str] = Counter()
    for node in filter(is_message, recording.nodes()):
        sent[axis_of(node)] += sent_by(node)
    return dict(sent)


def sent_by(node: fx.Node) -> int:
    """Bytes that a message sends from this rank, as ``explain`` counts them."""
    _, given, kind, rest, line = node.args
    count = line.mesh.shape[line.axis]  # type: ignore[union-attr]
    size = size_of(given)  # type: ignore[arg-type]
    if kind == "all_reduce":
        return 2 * size * (count - 1) // count
    if kind == "all_gather_into_tensor":
        return size * (count - 1)
    if kind == "all_to_all_single":
        element = size // max(1, sum(rest[1]))  # type: ignore[arg-type, index]
        return size - element * max(rest[1], default=0)  # type: ignore[index, arg-type]
    return size * (count - 1) // count if kind == "reduce_scatter_tensor" else size


def message_seconds(node: fx.Node, machine: Machine) -> float:
    """Seconds of a message: latency and bandwidth of what it goes over, or what was measured."""
    _, _, kind, _, line = node.args
    own = families.sent(str(kind), line.mesh.shape[line.axis])  # type: ignore[union-attr]
    kind = own if own in machine.curves else str(kind)
    return machine.message(sent_by(node), link=machine.link(line.mesh, line.axis), kind=kind)  # type: ignore[union-attr]


# -- operators -------------------------------------------------------------------------------------------------------------


def called(node: fx.Node) -> str:
    """The name of what a node calls."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    return str(node.args[2]) if is_message(node) else target.__name__


def work(node: fx.Node) -> tuple[int, int]:
    """Multiply-adds of an operator, and bytes that it reads and writes; none of what only names memory."""
    if not isinstance(node.target, OpOverload) or is_name(node):
        return 0, 0
    results = [*_results(node)]
    if families.family(node) == "embedding":  # of what it picks from, it reads as much as it gives
        return 0, 2 * sum(map(size_of, results)) + sum(map(size_of, node.all_input_nodes[1:]))
    return products(node), sum(map(size_of, {*node.all_input_nodes, *results}))


def _results(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of what an operator makes anew."""
    if node.meta.get("tensor") is not None:
        if node.meta.get("own", True):
            yield node
        return
    yield from (n for n in node.users if n.target is operator.getitem)


def operator_seconds(node: fx.Node, machine: Machine, made: int, touched: int) -> float:
    """Seconds of an operator: measured, if the machine has a curve for its family; else by the roofline."""
    measured = families.seconds(node, machine.curves, made, touched) if machine.curves else None
    if measured is not None:
        return measured
    if is_name(node) or not isinstance(node.target, OpOverload):
        return 0.0
    return max(machine.launch, machine.compute(touched, made, families.dtype_of(node)))


def products(node: fx.Node) -> int:
    """Multiply-adds of an operator, by torch's own counter of floating-point operations, which counts two for each."""
    target: Any = node.target
    if target is aten.linear.default:
        return math.prod(_shape(node)) * _shape(node.args[0])[-1]
    if target is aten.linear_backward.default:
        wanted = node.args[3]
        once = math.prod(_shape(node.args[1])) * _shape(node.args[2])[-1]
        return once * (bool(wanted[0]) + bool(wanted[1]))  # type: ignore[index]
    if target.overloadpacket in (aten.matmul, aten.dot):
        return math.prod(_shape(node)) * _shape(node.args[0])[-1]
    if (convolution := convolutions.call_of(node)) is not None:
        return convolutions.products(convolution)
    attention = families.attention_products(node)
    if attention:
        return attention
    count = flop_registry.get(target.overloadpacket)
    if count is None or "tensor" not in node.meta:
        return 0
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), _rehearsed)
    return int(count(*args, **kwargs, out_val=_rehearsed(node))) // 2


def _shape(node: Any) -> tuple[int, ...]:
    return node.meta["tensor"][0]


def _rehearsed(node: fx.Node) -> Any:
    if "tensor" not in node.meta:
        return 1.0
    shape, stride, dtype, _ = node.meta["tensor"]
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
