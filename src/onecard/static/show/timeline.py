"""A step over time: as it is priced, and as one replay took it, as a trace for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from onecard._torch.names import OpOverload, tree_flatten
from onecard.comm.world import world
from onecard.errors import RecordingError
from onecard.machine.cost import Machine
from onecard.machine.events import Event, Panel, write_trace
from onecard.static.code.compiled import called, last_uses
from onecard.static.price.price import Cost, cost
from onecard.static.run.bound import BoundRecording
from onecard.static.step.step import MISS, RecordedStep


def timed(recording: RecordedStep, args: Any, kwargs: Any) -> tuple[Event, ...]:
    """Replay a step once, node by node; see ``Recording.timed``."""
    leaves, tree = tree_flatten((args, kwargs))
    bound = recording.bound
    if bound is None or tree != recording.call:
        raise RecordingError(
            f"{recording.name}: timed() replays it, so it needs what a call needs: bind(...), and arguments as recorded"
        )
    spans: list[Event] = []
    made = recording.with_graph(recording.graph)
    made._run = lambda *inputs: _run(recording.graph, inputs, spans)
    again = BoundRecording(made, bound.roots, bound.kinds, bound._facts)
    if again.replay(args, kwargs) is MISS:
        raise RecordingError(
            f"the recording of {recording.name} does not fit: {again.difference(leaves, [n for n, _ in recording.arguments])}"
        )
    return tuple(spans)


def _run(graph: fx.Graph, inputs: Sequence[Any], spans: list[Event]) -> tuple[Any, ...]:
    last, values, given = last_uses(graph), dict[fx.Node, Any](), iter(inputs)
    begin, rank = time.perf_counter(), world.get_rank()
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
            spans.append(Event(rank, "operators", start - begin, time.perf_counter() - begin, name=node.name))
            del args, kwargs
        for gone in last.get(node, ()):
            values.pop(gone, None)
    return ()


def trace(recording: RecordedStep, path: Any, machine: Machine, measured: Sequence[Event]) -> None:
    """Write the trace; see ``Recording.trace``."""
    price = cost(recording, machine)
    alive = tuple((node.start + node.seconds, float(node.alive)) for node in price.nodes)
    priced = tuple(event for event in price.events(world.get_rank()) if event.seconds)
    panels = [Panel(f"priced: {machine.name or 'a machine'}", priced, (("bytes alive", alive),))]
    if measured:
        panels.append(Panel("measured", _named(price, measured)))
    write_trace(path, panels)


def _named(price: Cost, measured: Sequence[Event]) -> tuple[Event, ...]:
    """What was measured, with what the price knows of each node."""
    nodes = {event.told["node"]: event for event in price.events(world.get_rank())}
    if unknown := [event.name for event in measured if event.name not in nodes]:
        raise RecordingError(f"trace: what was measured is of another recording: it has no node {unknown[0]!r}")
    return tuple(replace(nodes[event.name], begin=event.begin, end=event.end) for event in measured)
