"""All ranks of a step cut into stages, in one process: their graphs run side by side, and messages join them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from onecard.comm.issue import staged
from onecard.pipeline.cut.halved import halved
from onecard.pipeline.cut.parts import Parts
from onecard.pipeline.cut.stages import woven
from onecard.pipeline.schedule.action import Schedule
from onecard.static.guards.places import at
from onecard.static.passes.microbatches import Microbatches
from onecard.static.passes.once import Once

EVERYWHERE = ("argument", "constant", "number", "generator")


class Cut:
    """A recorded microbatch as the whole step, on one card and on all ranks.

    Args:
        recording: of the first microbatch, bound; batch: the whole arguments.
        starts: makes of the graph the first nodes of the later stages.
    """

    def __init__(self, recording: Any, batch: Sequence[Tensor], k: int, schedule: Schedule, starts: Any) -> None:
        graph = halved(recording.graph)
        cut = recording.with_graph(graph)
        self.batch, self.roots, merge = batch, recording.bound.roots, Microbatches(k, True)
        self.whole = merge.merged(recording, batch)
        parts = Parts(graph, starts(graph), Once(graph, training=False))
        self.made = merge.merged(cut, batch, late=parts.late)
        self.made, self.weave = woven(self.made, schedule, tuple(range(len(schedule.ranks))), "pp")

    def inputs(self) -> list[Any]:
        found = []
        for i, known in enumerate(self.made.inputs):
            if known.kind == "constant":
                found.append(self.made.constants[i])
            else:
                found.append(at(known.where, self.roots, self.batch))
        return [x.detach().clone() if isinstance(x, Tensor) else x for x in found]

    def differences(self) -> list[str]:
        """What is not as on one card: results, what is left in the program, and memory that a rank should not have read."""
        wanted, reference = self._alone(self.whole.graph)
        places, ranks = self.weave.places, len(self.weave.ranks)
        nodes = places.graph.find_nodes(op="placeholder")
        given = []
        for rank in range(ranks):
            mine = self.inputs()
            for known, node, x in zip(self.made.inputs, nodes, mine, strict=True):
                elsewhere = known.kind not in EVERYWHERE and places.holders(node) and rank not in places.holders(node)
                if elsewhere and isinstance(x, Tensor) and x.is_floating_point():
                    x.fill_(torch.nan)
            given.append(mine)
        found = together([self.weave.graph_of(rank) for rank in range(ranks)], given)
        said = []
        for i, value in enumerate(wanted):
            here = [(rank, out[i]) for rank, out in enumerate(found) if out[i] is not None or value is None]
            if not here:
                said.append(f"output {i} is on no rank")
            said += [f"output {i} on rank {rank}" for rank, other in here if not _close(value, other)]
        for i, (known, node) in enumerate(zip(self.made.inputs, nodes, strict=True)):
            holders = places.holders(node) if known.kind not in EVERYWHERE else range(ranks)
            for rank in holders or range(ranks):
                if not _close(reference[i], given[rank][i]):
                    said.append(f"{known.name} on rank {rank}")
        return said

    def _alone(self, graph: fx.Graph) -> tuple[Any, list[Any]]:
        given = self.inputs()
        return together([graph], [given])[0], given


def together(graphs: Sequence[fx.Graph], given: Sequence[Sequence[Any]]) -> list[Any]:
    """What each graph gives; they take turns, one goes on until a message is not there."""
    messages: dict[Any, deque[Tensor]] = defaultdict(deque)
    running = {rank: _run(rank, graph, given[rank], messages) for rank, graph in enumerate(graphs)}
    found: dict[int, Any] = {}
    while running:
        moved = False
        for rank, going in [*running.items()]:
            try:
                moved |= next(going)
            except StopIteration as end:
                found[rank] = end.value
                del running[rank]
                moved = True
        if not moved:
            raise AssertionError(f"ranks {sorted(running)} wait for each other")
    left = {key: len(queue) for key, queue in messages.items() if queue}
    if left:
        raise AssertionError(f"messages that nobody took: {left}")
    return [found[rank] for rank in range(len(graphs))]


def _run(rank: int, graph: fx.Graph, given: Sequence[Any], messages: Any) -> Iterator[bool]:
    """One rank; says at each turn whether it got further."""
    values: dict[fx.Node, Any] = {}
    inputs = iter(given)
    for node in graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "placeholder":
            values[node] = next(inputs)
        elif node.op == "output":
            return args[0]
        elif node.target is staged.send:
            x, place, tag, *_ = args
            messages[rank, place, tag].append(x.clone())
        elif node.target is staged.send_packed:
            tensors, place, tag, *_ = args
            messages[rank, place, tag].append(torch.cat([x.reshape(-1) for x in tensors]))
        elif node.target is staged.post:
            x, place, tag, *_ = args
            x.fill_(torch.nan) if x.is_floating_point() else x.zero_()
            values[node] = (place, rank, tag)
        elif node.target is staged.wait:
            key, x = args
            moved = True  # it has run what came before
            while not messages[key]:
                yield moved
                moved = False
            x.copy_(messages[key].popleft().view(x.shape))
        else:
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)
    return None


def _close(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return bool(torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=False))
