"""What a recording takes on a machine, without running it: products, bytes, messages by axis, seconds, memory and its peak."""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from onecard._torch import OpOverload
from onecard.comm import again
from onecard.cost import MACHINE, Machine
from onecard.graph.memory import Memory
from onecard.graph.recording import Recording

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One node: multiply-adds, bytes that it reads and writes, bytes that it sends, seconds, bytes alive after it."""

    name: str
    phase: str
    line: str
    products: int
    touched: int
    sent: int
    seconds: float
    alive: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What a recording takes on this rank.

    Attributes:
        nodes: one entry for each node, in order; messages wait for nothing else and nothing else waits for them.
        sent: bytes that this rank sends, by mesh axis.
        inputs: bytes of the inputs, which are there all the time.
        peak: most bytes alive at once, inputs included; ``peak_at`` the node; ``alive_at_peak`` what is alive then.
    """

    nodes: tuple[NodeCost, ...]
    sent: dict[str, int]
    inputs: int
    peak: int
    peak_at: str
    alive_at_peak: tuple[tuple[str, int], ...]

    @property
    def products(self) -> int:
        """Multiply-adds of all nodes."""
        return sum(n.products for n in self.nodes)

    @property
    def seconds(self) -> float:
        """Of all nodes one after the other: a roofline for operators, latency and bandwidth for messages."""
        return sum(n.seconds for n in self.nodes)

    def __str__(self) -> str:
        sent = ", ".join(f"{count:,} along {axis!r}" for axis, count in self.sent.items()) or "none"
        return (
            f"{self.products:,} multiply-adds, {self.seconds * 1e3:.3f} ms, bytes sent: {sent}; peak memory {self.peak:,} bytes "
            f"({self.inputs:,} of them inputs) at {self.peak_at}"
        )


def cost(recording: Recording, machine: Machine = MACHINE) -> Cost:
    """The price of a recording. Nothing runs; shapes are those that were recorded.

    Example:
        >>> import onecard, torch
        >>> recording = onecard.record(lambda x, w: (x @ w).relu().sum())(torch.ones(4, 8), torch.ones(8, 16))
        >>> found = recording.cost()
        >>> found.products, found.inputs, found.peak
        (512, 640, 1152)
    """
    live = _Live(recording.graph)
    nodes = tuple(_node(n, machine, live.after[n]) for n in recording.graph.nodes if n.op == "call_function")
    sent: Counter[str] = Counter()
    for n in recording.nodes():
        if n.target is again.message:
            sent[str(n.args[4])] += sent_by(n)
    inputs = sum(size_of(n) for n in recording.graph.nodes if n.op == "placeholder")
    return Cost(nodes, dict(sent), inputs, live.peak, live.peak_at, live.alive_at_peak)


def size_of(node: fx.Node) -> int:
    """Bytes of the memory that a node's result needs: what is expanded counts once."""
    facts = node.meta.get("tensor")
    if facts is None:  # several results
        return 0 if is_name(node) else sum(size_of(n) for n in node.users if n.target is operator.getitem)
    shape, stride, dtype, _ = facts
    if 0 in shape:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * dtype.itemsize


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


def _node(node: fx.Node, machine: Machine, alive: int) -> NodeCost:
    where = (node.name, node.meta.get("phase", ""), node.meta.get("line", ""))
    if node.target is again.message:
        sent = sent_by(node)
        return NodeCost(*where, 0, 0, sent, machine.message(sent), alive)
    if not isinstance(node.target, OpOverload) or is_name(node):
        return NodeCost(*where, 0, 0, 0, 0.0, alive)
    results = [n for n in node.users if n.target is operator.getitem] or [node]
    touched = sum(map(size_of, {*node.all_input_nodes, *results}))
    made = products(node)
    return NodeCost(*where, made, touched, 0, machine.compute(touched, made), alive)


def is_name(node: fx.Node) -> bool:
    """Whether a node only names memory."""
    return isinstance(node.target, OpOverload) and node.target.is_view


def products(node: fx.Node) -> int:
    """Multiply-adds of an operator, by torch's own counter of floating-point operations, which counts two for each."""
    target: Any = node.target
    if target is aten.linear.default:
        return math.prod(_shape(node)) * _shape(node.args[0])[-1]
    if target is aten.linear_backward.default:
        wanted = node.args[3]
        once = math.prod(_shape(node.args[1])) * _shape(node.args[2])[-1]
        return once * (bool(wanted[0]) + bool(wanted[1]))  # type: ignore[index]
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


class _Live:
    """Which memory is alive after each node: from the node that makes it to the last that uses any of its names."""

    def __init__(self, graph: fx.Graph) -> None:
        memory = Memory(graph)
        order = {n: i for i, n in enumerate(graph.nodes)}
        last: dict[fx.Node, int] = {}
        for node in graph.nodes:
            for n in (node, *node.all_input_nodes):
                for root in memory.roots[n]:
                    last[root] = max(last.get(root, 0), order[node])
        alive: dict[fx.Node, int] = {n: size_of(n) for n in graph.nodes if n.op == "placeholder"}
        held, now = {*alive}, sum(alive.values())
        self.after: dict[fx.Node, int] = {}
        self.peak, self.peak_at, self.alive_at_peak = now, "inputs", _largest(alive)
        ends: dict[int, list[fx.Node]] = {}
        for root, at in last.items():
            ends.setdefault(at, []).append(root)
        for node in graph.nodes:
            for root in memory.roots[node]:
                if root is node and node not in held and node.op == "call_function":
                    alive[node] = size_of(node)
                    now += alive[node]
            if now > self.peak:
                self.peak, self.peak_at, self.alive_at_peak = now, node.name, _largest(alive)
            for root in ends.get(order[node], ()):
                if root not in held:
                    now -= alive.pop(root, 0)
            self.after[node] = now


def _largest(alive: dict[fx.Node, int]) -> tuple[tuple[str, int], ...]:
    found = sorted(((n.name, size) for n, size in alive.items() if size), key=lambda pair: -pair[1])
    return tuple(found[:32])
