"""Messages that a layer starts and awaits where their result is used, for prices: nothing else changes its place.

A recording has them at once, as it is written down; on GPUs fleet's layers leave them under way beside a product.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from onecard.comm.issue import again
from onecard.static.price.live import Block, blocks_in, is_name
from onecard.static.step.nodes import called, copied_to
from onecard.static.step.writes import written_by


def awaited(graph: fx.Graph) -> fx.Graph:
    """The same graph; each message is awaited before the first node that uses what it fills, or writes to what it sends."""
    blocks = blocks_in(graph)
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    under_way: dict[fx.Node, tuple[frozenset[Block], frozenset[Block]]] = {}

    def wait(message: fx.Node) -> None:
        del under_way[message]
        start = names[message]
        if next(iter(reversed(made.nodes))) is start:  # nothing runs beside it
            start.kwargs = {key: value for key, value in start.kwargs.items() if key != "later"}
            return
        into, given = (names[n] for n in message.args[:2])  # type: ignore[index]
        end = called(made, again.wait, (start, into, given))
        end.meta.update({key: value for key, value in message.meta.items() if key not in ("tensor", "spec")})

    for node in graph.nodes:
        if not is_name(node):
            reads = frozenset[Block]().union(*(blocks[n] for n in node.all_input_nodes))
            writes = frozenset[Block]().union(*(blocks[n] for n in written_by(node)))
            for message, (into, given) in [*under_way.items()]:
                if node.op == "output" or into & reads or given & writes:
                    wait(message)
        names[node] = copied_to(made, node, names.__getitem__)
        if node.target is again.message and not node.kwargs.get("later"):
            args: Any = node.args
            names[node].kwargs = {**node.kwargs, "later": True}
            under_way[node] = blocks[args[0]], blocks[args[1]]
    return made
