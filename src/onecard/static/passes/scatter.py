"""An all-reduce of which each rank keeps its own part only -> a reduce-scatter: half the bytes.

Bit for bit the same where a reduction adds element by element in the order of the ranks, whichever collective it is: on shared
memory, and along lines of two ranks. Elsewhere (Gloo, NCCL and three ranks or more) the two collectives add in different orders:
there the all-reduce stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onecard.comm.issue import again
from onecard.comm.issue.groups import group
from onecard.static.passes.adding import added
from onecard.static.passes.draft import editing, memory_of, without
from onecard.static.step.memory import GraphMemory

aten = torch.ops.aten


@editing
def scattered(graph: fx.Graph) -> bool:
    """``all_reduce``, ``narrow`` to this rank's part, ``clone`` -> ``reduce_scatter``."""
    sums = [n for n in graph.find_nodes(op="call_function", target=again.message) if _is_sum(n)]
    memory = memory_of(graph, apart=True) if sums else None
    found = {m: both for m in sums if memory is not None and (both := _cut(m, memory)) is not None}
    for message, (cut, clone) in found.items():
        with graph.inserting_before(message):
            clone.replace_all_uses_with(_scatter(message, cut, clone, graph))
        without({}, [message, cut, clone])
    return bool(found)


def _is_sum(message: fx.Node) -> bool:
    """Whether a message is an all-reduce in place of what is cut later."""
    if message.target is not again.message or message.args[2] != "all_reduce" or message.args[0] is not message.args[1]:
        return False
    whole: Any = message.args[0]
    return any(_is_cut(u, whole, message.args[4]) for u in whole.users)


def _cut(message: fx.Node, memory: GraphMemory) -> tuple[fx.Node, fx.Node] | None:
    """The ``narrow`` and the ``clone`` that take this rank's part of what a message has summed, if nobody uses the rest."""
    if not _is_sum(message):
        return None
    whole: Any = message.args[0]
    rest: Any = message.args[3]
    line: Any = message.args[4]
    roots = memory.roots[whole]
    ours = next(iter(roots))
    if len(roots) != 1 or ours.op != "call_function":
        return None
    sharing = [n for n, r in memory.roots.items() if r & roots]
    later = [u for u in whole.users if u is not message and u > message]
    if len(later) != 1 or not _is_cut(later[0], whole, line):
        return None
    late = [u for n in sharing for u in n.users if u > message and u is not later[0]]
    clones = list(later[0].users)
    if len(clones) != 1 or late != clones or clones[0].target is not aten.clone.default:
        return None
    if not _is_everybodys(clones[0], later[0].args[1], line):
        return None
    return (later[0], clones[0]) if again.one_by_one(line, rest[0], whole.meta["tensor"][2]) else None


def _is_cut(node: fx.Node, whole: fx.Node, line: Any) -> bool:
    """Whether a node takes the part of an even cut that is this rank's along a line."""
    if node.target not in (aten.narrow.default, aten.slice.Tensor) or node.args[0] is not whole or len(node.args) != 4:
        return False
    args: Any = node.args
    dim, start, length = args[1:]
    if node.target is aten.slice.Tensor:
        length = length - start
    found = group(*line)
    return found.order is None and whole.meta["tensor"][0][dim] == length * found.size and start == found.index * length


def _is_everybodys(clone: fx.Node, dim: Any, line: Any) -> bool:
    """Whether the others along a line take their parts as well: a layout says so, the numbers of one rank do not."""
    spec = clone.meta.get("spec")
    return spec is not None and spec.layout.mesh is line[0] and spec.layout.dims[dim][-1:] == (line[1],)


def _scatter(message: fx.Node, cut: fx.Node, clone: fx.Node, made: fx.Graph) -> fx.Node:
    args: Any = message.args
    send, _, _, rest, line = args
    dim: Any = cut.args[1]
    if dim:
        turned = added(made, message, aten.movedim.int, send, dim, 0)
        send = added(made, message, aten.clone.default, turned, memory_format=torch.contiguous_format)
    shape = list(send.meta["tensor"][0])
    size = group(*line).size
    into = added(made, message, aten.new_empty.default, send, [shape[0] // size, *shape[1:]])
    sent = made.call_function(again.message, (into, send, "reduce_scatter_tensor", (rest[0], size), line))
    sent.meta.update(message.meta)
    if not dim:
        return into
    back = added(made, clone, aten.movedim.int, into, 0, dim)
    return added(made, clone, aten.clone.default, back, memory_format=torch.contiguous_format)
