"""A step over time: as it is priced, and as one replay took it, as a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import fx

from onecard._torch import OpOverload, tree_flatten
from onecard.cost import Machine
from onecard.errors import RecordingError
from onecard.graph.bound import Bound
from onecard.graph.compiled import _last_uses as last_uses
from onecard.graph.compiled import called
from onecard.graph.price import Cost, NodeCost
from onecard.graph.recording import MISS, Recording


class Span(NamedTuple):
    """One node of a measured replay: when it started, from the replay's beginning, and how long it took, in seconds."""

    name: str
    start: float
    seconds: float


def timed(recording: Recording, args: Any, kwargs: Any) -> tuple[Span, ...]:
    """Replay a step once, node by node; see ``Recording.timed``."""
    leaves, tree = tree_flatten((args, kwargs))
    bound = recording.bound
    if bound is None or tree != recording.call:
        raise RecordingError(
            f"{recording.name}: timed() replays it, so it needs what a call needs: bind(...), and arguments as recorded"
        )
    spans: list[Span] = []
    made = recording.with_graph(recording.graph)
    made._run = lambda *inputs: _run(recording.graph, inputs, spans)
    again = Bound(made, bound.roots, bound.kinds, bound._facts)
    if again.replay(args, kwargs) is MISS:
        raise RecordingError(
            f"the recording of {recording.name} does not fit: {again.difference(leaves, [n for n, _ in recording.arguments])}"
        )
    return tuple(spans)


def _run(graph: fx.Graph, inputs: Sequence[Any], spans: list[Span]) -> tuple[Any, ...]:
    last, values, given = last_uses(graph), dict[fx.Node, Any](), iter(inputs)
    begin = time.perf_counter()
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            return tuple(values[n] for n in node.args[0])
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            function: Any = called(node) if isinstance(node.target, OpOverload) else node.target
            start = time.perf_counter()
            values[node] = function(*args, **kwargs)
            spans.append(Span(node.name, start - begin, time.perf_counter() - start))
            del args, kwargs
        for gone in last.get(node, ()):
            values.pop(gone, None)
    return ()


def trace(recording: Recording, path: Any, machine: Machine, measured: Sequence[Span]) -> None:
    """Write the trace; see ``Recording.trace``."""
    price = recording.cost(machine)
    events = [*_priced(price)]
    if measured:
        events += _measured(price, measured)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")


def _priced(price: Cost) -> Iterator[dict[str, Any]]:
    threads = _numbers(price)
    yield _called(0, f"priced: {price.machine.name or 'a machine'}")
    yield from _threads(0, threads)
    for node in price.nodes:
        if node.seconds:
            yield _event(0, threads, node, node.start, node.seconds)
        yield {
            "ph": "C",
            "name": "bytes alive",
            "pid": 0,
            "ts": (node.start + node.seconds) * 1e6,
            "args": {"bytes": node.alive},
        }


def _measured(price: Cost, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    nodes = {node.name: node for node in price.nodes}
    if unknown := [span.name for span in spans if span.name not in nodes]:
        raise RecordingError(f"trace: what was measured is of another recording: it has no node {unknown[0]!r}")
    threads = _numbers(price)
    yield _called(1, "measured")
    yield from _threads(1, threads)
    for span in spans:
        yield _event(1, threads, nodes[span.name], span.start, span.seconds)


def _event(process: int, threads: dict[str, int], node: NodeCost, start: float, seconds: float) -> dict[str, Any]:
    told = {
        "node": node.name,
        "module": node.module,
        "line": node.line,
        "flops": node.flops,
        "bytes": node.touched,
        "sent": node.sent,
    }
    return {
        "ph": "X", "name": node.operator, "cat": node.phase, "pid": process, "tid": threads[_thread(node)], "ts": start * 1e6,
        "dur": seconds * 1e6, "args": {k: v for k, v in told.items() if v},
    }  # fmt: skip


def _thread(node: NodeCost) -> str:
    return f"messages along {node.axis!r}" if node.axis else "operators"


def _called(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def _numbers(price: Cost) -> dict[str, int]:
    """A number for each thread: operators first, then the messages of each axis."""
    return {name: i for i, name in enumerate(dict.fromkeys(["operators", *map(_thread, price.nodes)]))}


def _threads(process: int, threads: dict[str, int]) -> Iterator[dict[str, Any]]:
    for name, number in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}}
