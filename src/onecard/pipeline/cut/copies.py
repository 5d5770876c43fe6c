"""What a rank reads of memory that others alone write to: a copy of it, which is sent there. Pure."""

from __future__ import annotations

from collections import ChainMap

import torch
from torch import fx

from onecard.pipeline.cut.parts import part_of
from onecard.pipeline.cut.places import NodeRanks, Ranks
from onecard.static.passes.adding import added
from onecard.static.step.nodes import copied_to


def with_copies(graph: fx.Graph, places: NodeRanks) -> fx.Graph:
    """The graph with a copy ahead of what reads, outside of stages, a parameter that is another rank's.

    An average of weights that the loss reads (a momentum encoder) may be on another rank than the weights. There they are used
    by their program's name, though nobody on that rank updates them.
    """
    wanted = _read_elsewhere(places)
    if not wanted:
        return graph
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies = {x: added(made, node, torch.ops.aten.clone.default, names[x]) for x in wanted.get(node, ())}
        names[node] = copied_to(made, node, ChainMap(copies, names).__getitem__)
    return made


def _read_elsewhere(places: NodeRanks) -> dict[fx.Node, list[fx.Node]]:
    """For each reader the names under which it reads what is written on other ranks alone."""
    written: dict[fx.Node, Ranks] = {}
    for root, writers in places.writers.items():
        once = [places.at[node] for node in writers if part_of(node) is None]
        if once and root.op == "placeholder":
            written[root] = frozenset.intersection(*once)
    memory, found = places.order.memory, dict[fx.Node, list[fx.Node]]()
    for node in places.nodes if written else ():
        if node.op != "call_function" or part_of(node) is not None:
            continue
        for name in node.all_input_nodes:
            roots = memory.roots[name] & written.keys()
            if roots.isdisjoint(memory.roots[node]) and any(not places.at[node] <= written[r] for r in roots):
                found.setdefault(node, []).append(name)
    return found
