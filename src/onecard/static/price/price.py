"""What a recording takes on a machine, without running it: operations, bytes, messages by axis, seconds, memory and its peak."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from onecard._torch.names import OpOverload
from onecard.machine.cost import MACHINE, Machine, read
from onecard.machine.events import Event
from onecard.rules.call import Call
from onecard.rules.estimate import work_of_call
from onecard.rules.registry import find
from onecard.rules.work import Work
from onecard.static.price import by_kernels, families, on_rows
from onecard.static.price.live import Live, is_name, size_of
from onecard.static.price.messages import (
    OWN,
    axis_of,
    far_by,
    is_left,
    is_message,
    is_started,
    kind_of,
    own_call,
    seconds_of,
    sent_along,
    sent_by,
    waits_for,
)
from onecard.static.price.on_rows import is_on_rows, work_on_rows
from onecard.static.price.works import once
from onecard.static.step.nodes import kernel
from onecard.static.step.step import RecordedStep


@dataclass(frozen=True, slots=True)
class NodeCost:
    """One node of a recording.

    Attributes:
        name, phase, module, line: of the node; ``operator``: what it calls.
        products: multiply-adds; ``touched``: bytes that it reads and writes.
        sent: bytes that it sends, along ``axis``; ``far``: those of them that leave the host, where ``Machine.per_host`` tells.
        seconds: that it takes; ``start``: when it starts, from the beginning of the step; ``then``: when the program
            goes on, which does not wait for a message that was started.
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
    far: int
    axis: str
    seconds: float
    start: float
    then: float
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
        sent: bytes that this rank sends, by mesh axis, or "between meshes", or the name of a group of ranks, as in ``explain``.
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
    def between_hosts(self) -> int:
        """Bytes sent that leave the host, as in ``explain``; 0 where the machine does not tell hosts apart."""
        return sum(n.far for n in self.nodes)

    @property
    def touched(self) -> int:
        """Bytes that all nodes read and write."""
        return sum(n.touched for n in self.nodes)

    @property
    def memory(self) -> tuple[tuple[float, int], ...]:
        """Bytes alive over time: (seconds, bytes) after each node."""
        return tuple((n.start + n.seconds, n.alive) for n in self.nodes)

    def events(self, rank: int = 0) -> tuple[Event, ...]:
        """The nodes as events of a rank, in seconds: operators as one stream, the messages along each axis as another."""
        found = []
        for n in self.nodes:
            stream = f"messages along {n.axis!r}" if n.axis else "operators"
            told = {
                "node": n.name,
                "module": n.module,
                "line": n.line,
                "flops": n.flops,
                "bytes": n.touched,
                "sent": n.sent,
                "to other hosts": n.far,
            }
            told = {key: value for key, value in told.items() if value}
            found.append(Event(rank, stream, n.start, n.start + n.seconds, n.sent, n.operator, n.phase, told=told))
        return tuple(found)

    def seconds_by(self, what: str) -> dict[str, float]:
        """Seconds of nodes by "phase", "module", "operator", "line" or "axis" (of messages), the longest first."""
        found: dict[str, float] = {}
        for n in self.nodes:
            found[getattr(n, what)] = found.get(getattr(n, what), 0.0) + n.seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    def __str__(self) -> str:
        sent = ", ".join(f"{count:,} along {axis!r}" for axis, count in self.sent.items()) or "none"
        sent += f" ({self.between_hosts:,} of them to other hosts)" if self.between_hosts else ""
        beside = [f"{n.operator} at {Path(n.line).name}" for n in self.nodes if n.operator.startswith(OWN)]
        told = f"\nwithout messages that you send with torch.distributed: {', '.join(beside)}" if beside else ""
        return (
            f"{self.flops:,} floating-point operations, {self.seconds * 1e3:.3f} ms, bytes sent: {sent}; peak memory "
            f"{self.peak:,} bytes ({self.inputs:,} of them inputs) at {self.peak_at}{told}"
        )


def cost(recording: RecordedStep, machine: Machine = MACHINE, live: Live | None = None) -> Cost:
    """The price of a recording. Nothing runs; shapes are those that were recorded.

    Args:
        live: what is alive in it, where that is known.

    Example:
        >>> import onecard, torch
        >>> recording = onecard.record(lambda x, w: (x @ w).relu().sum())(torch.ones(4, 8), torch.ones(8, 16))
        >>> found = recording.cost()
        >>> found.flops, found.inputs, found.peak
        (1024, 640, 1152)
    """
    live, clock = live or Live(recording.graph), _Clock(_before(recording, machine), machine)
    nodes = []
    for node in recording.nodes():
        message = is_message(node)
        sent, done = sent_by(node) if message else 0, work(node)
        far = far_by(node, machine) if sent else 0
        taken = seconds_of(node, machine) if message else 0.0
        if done.macs or done.accessed or not message:
            taken += operator_seconds(node, machine, done)
        start, seconds = clock.run(node, taken)
        nodes.append(
            NodeCost(
                node.name, called(node), node.meta.get("phase", ""), node.meta.get("module", ""), node.meta.get("line", ""),
                int(done.macs), int(done.accessed), sent, far, axis_of(node), seconds, start, clock.now, live.after[node],
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


def _before(recording: RecordedStep, machine: Machine) -> float:
    """Seconds before the first node: a look at each input."""
    return len(recording.inputs) * read(machine.curves["input"], 1) if "input" in machine.curves else 0.0


class _Clock:
    """When each node runs: operators one after the other, messages along an axis one after the other, waits for messages.

    At a message the ranks meet: each waits until the last has computed what comes before it.
    """

    def __init__(self, now: float, machine: Machine) -> None:
        self.now = now
        self._machine = machine
        self._met = 0.0
        self._links: dict[str, float] = {}
        self._arrives: dict[fx.Node, float] = {}
        self._started: dict[fx.Node, float] = {}

    @property
    def end(self) -> float:
        """When all of it is done."""
        return max(self.now, *self._links.values()) if self._links else self.now

    def run(self, node: fx.Node, seconds: float) -> tuple[float, float]:
        """Start and seconds of a node; of one that waits, how long it waits."""
        message = waits_for(node)
        if message is not None:
            start, waited = self._wait(message)
            self.now += seconds  # what a call on rows does with what has come
            return start, waited + seconds
        if is_message(node) and seconds:
            return self._send(node, seconds)
        start = self.now
        self.now = start + seconds
        return start, seconds

    def _send(self, node: fx.Node, seconds: float) -> tuple[float, float]:
        axis, begun = axis_of(node), self.now
        start = max(begun, self._links.get(axis, 0.0))
        alone = is_left(node)
        there = start if alone else max(start, begun + (self._machine.uneven - 1) * (begun - self._met))
        self._links[axis] = self._arrives[node] = there + seconds
        if alone:
            self.now += (1 - self._machine.beside) * seconds
        elif is_started(node):
            self._started[node] = begun
            self.now += (1 - self._machine.beside) * seconds
        else:
            self.now = self._met = there + seconds
        return start, there + seconds - start

    def _wait(self, message: fx.Node) -> tuple[float, float]:
        start, arrives = self.now, self._arrives.get(message, self.now)
        if arrives > start:
            self.now, self._met = arrives, max(self._met, self._started.get(message, arrives))
        return start, self.now - start


# -- operators -------------------------------------------------------------------------------------------------------------


def called(node: fx.Node) -> str:
    """The name of what a node calls."""
    target: Any = node.target
    if isinstance(target, OpOverload):
        return str(target).removesuffix(".default")
    if call := own_call(node):
        return f"{OWN}{call}"
    if is_on_rows(node):
        return repr(node.args[0])
    return kind_of(node) if is_message(node) else target.__name__


def work(node: fx.Node) -> Work:
    """What an operator computes, and bytes that it reads and writes; nothing of what only names memory."""
    if node.target is kernel:
        return Work(0, node.meta["touched"])
    if is_on_rows(node):
        return work_on_rows(node)
    if not isinstance(node.target, OpOverload) or is_name(node):
        return Work(0, 0)
    return _worked(node)


@once
def _worked(node: fx.Node) -> Work:
    call, given = call_of(node)
    operands = [size_of(n) if n not in given[:i] else 0 for i, n in enumerate(given)]
    return work_of_call(call, operands, [size_of(n) for n in _results(node)])


def call_of(node: fx.Node) -> tuple[Call, list[fx.Node]]:
    """The call of an operator on tensors without data, with its results, and the nodes of its operands."""
    nodes: dict[int, fx.Node] = {}

    def rehearsed(n: fx.Node) -> Any:
        made = _rehearsed(n)
        nodes[id(made)] = n
        return made

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), rehearsed)
    call = Call(node.target, args, kwargs)  # type: ignore[arg-type]
    call.results = [_rehearsed(n) for n in _given_back(node)]
    row = find(node.target)
    if row is not None and len(call.results) < len(node.target._schema.returns):  # type: ignore[union-attr]
        with suppress(NotImplementedError, RuntimeError):
            call.results = row.results_of(call)
    return call, [nodes[id(x)] for x in call.operands]


def _given_back(node: fx.Node) -> list[fx.Node]:
    """The nodes of an operator's results, in order; those that nobody takes are not there."""
    if node.meta.get("tensor") is not None:
        return [node]
    taken = {n.args[1]: n for n in node.users if n.target is operator.getitem}
    return [taken[i] for i in sorted(taken)]  # type: ignore[type-var]


def _results(node: fx.Node) -> list[fx.Node]:
    """Those of them that an operator makes anew."""
    return [n for n in _given_back(node) if n is not node or node.meta.get("own", True)]


def operator_seconds(node: fx.Node, machine: Machine, done: Work) -> float:
    """Seconds of an operator: measured, if the machine has a curve for its family; else by what its kernels reach; else by the
    roofline."""
    if is_on_rows(node):
        return done.seconds(machine, on_rows.dtype_of(node))
    measured = families.seconds(node, machine.curves, int(done.macs), int(done.accessed)) if machine.curves else None
    if measured is not None:
        return measured
    if machine.kernels is not None:
        return by_kernels.seconds(node, machine, machine.kernels, done)
    return done.seconds(machine, families.dtype_of(node))


def _rehearsed(node: fx.Node) -> Any:
    if "tensor" not in node.meta:
        return 1.0
    shape, stride, dtype, _ = node.meta["tensor"]
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
