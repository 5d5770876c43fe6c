"""Numbers made of a batch's length where a step works on its gradients (``p.grad /= len(x)``): there they are the whole batch's.

A step that is cut in microbatches is written down on the first of them. What needs its gradients, and what it writes into the
program ahead of the batch, runs once. What stands there is compared with what the step has there on the whole batch: a number
that differs is taken from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, fx

from onecard._torch.names import tree_flatten, tree_leaves, tree_unflatten
from onecard.static.passes.dependence import Doubt
from onecard.static.passes.kept_once import FOLLOWS
from onecard.static.passes.once import Once, phase_of, words

_COMPARED = (int, float, complex, str, tuple, torch.dtype)
_FEW = 64  # elements of a tensor that Python has made of values
_LONG = 2000  # calls, of those that are compared with each other


@dataclass(frozen=True)
class CallEntry:
    """A call of a step: what it calls, and the numbers and words that it is given (None: another argument)."""

    node: fx.Node
    target: Any
    given: tuple[Any, ...]


def listed(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> list[CallEntry]:
    """The calls of a step as it was written down. ``values``: what stands for inputs that Python has made of values.

    Not those that change layouts: a gradient may be pending in a microbatch, and whole in the batch.
    """
    return [_entry(n, values) for n in graph.nodes if n.op == "call_function" and "moves" not in n.meta]


def _entry(node: fx.Node, values: Mapping[fx.Node, Any]) -> CallEntry:
    found = []
    for x in tree_leaves((node.args, node.kwargs)):
        if isinstance(x, fx.Node):
            x = values.get(x)
            x = tuple(x.flatten().tolist()) if isinstance(x, Tensor) and x.numel() <= _FEW else None
        found.append(x if isinstance(x, _COMPARED) else None)
    return CallEntry(node, node.target, tuple(found))


def set_to_batch(
    graph: fx.Graph,
    mine: Sequence[CallEntry],
    whole: Sequence[CallEntry],
    again: Callable[[], Sequence[CallEntry]],
    training: bool,
) -> Iterator[Doubt]:
    """Take the whole batch's numbers, in place, where a step works on its gradients; tells what cannot be taken.

    Args:
        graph: of a microbatch, whose calls are ``mine``; ``whole``: the batch's, looked at without data; ``again``: those of the
            same microbatch, looked at so. What differs there is no length: the step counts its calls, or the like.
        training: see ``Once``.
    """
    pairs = _aligned(mine, whole)
    differ = [mine[i].node for i, j in pairs if mine[i].given != whole[j].given]
    for node in differ:
        node.meta[FOLLOWS] = True
    complete = len(pairs) == len(mine) == len(whole)
    if complete and not differ:
        return
    late = _late(graph, Once(graph, training=training))
    if complete and late.keys().isdisjoint(differ):  # sizes of the forward, most of all
        return
    part = again()
    alike = dict(_aligned(whole, part))
    there = {*alike.values()}
    apart = [e.node for i, e in enumerate(whole) if i not in alike]
    apart += [e.node for i, e in enumerate(part) if i not in there]
    if (at := next(filter(_follows_gradients, apart), None)) is not None:
        once_more = again()
        if len(_aligned(part, once_more)) == len(part) == len(once_more):
            yield _differs(f"{words(at)} is done for one of them only")
        return
    unlike = {j for j, i in alike.items() if whole[j].given != part[i].given}
    for i, j in pairs:
        if j in unlike:
            unlike.discard(j)
            if mine[i].node in late and mine[i].given == part[alike[j]].given:
                yield from _taken(mine[i], whole[j], late)
    for j in sorted(unlike):
        if _follows_gradients(whole[j].node):
            yield _differs(_numbers(words(whole[j].node), part[alike[j]].given, whole[j].given))


def _aligned(one: Sequence[CallEntry], other: Sequence[CallEntry]) -> list[tuple[int, int]]:
    """Which call of a run is which of another one: from the beginning, from the end, and what is alike between."""
    both = min(len(one), len(other))
    start = next((i for i in range(both) if one[i].target is not other[i].target), both)
    rest = both - start
    end = next((i for i in range(rest) if one[-1 - i].target is not other[-1 - i].target), rest)
    a, b = len(one) - end, len(other) - end
    found = [(i, i) for i in range(start)]
    if start < a and start < b and max(a, b) - start <= _LONG:
        between = SequenceMatcher(
            None, [id(e.target) for e in one[start:a]], [id(e.target) for e in other[start:b]], autojunk=False
        )
        found += [(start + m.a + i, start + m.b + i) for m in between.get_matching_blocks() for i in range(m.size)]
    return [*found, *((a + i, b + i) for i in range(end))]


def _late(graph: fx.Graph, once: Once) -> dict[fx.Node, bool]:
    """What runs once, and what is made for that without the batch; whether for nothing else."""
    found = dict.fromkeys((*once.tail, *once.head), True)
    wanted = set[fx.Node]()

    def read(node: fx.Node) -> None:
        for n in node.all_input_nodes:
            wanted.add(n)
            wanted.update(once.memory.writers_to(n))

    for node in found:
        read(node)
    for node in reversed(graph.nodes):
        if node not in wanted or node in found or node in once.own or phase_of(node) == "backward":
            continue
        written = bool(once.memory.writes.get(node))
        found[node] = not written and all(found.get(n, False) for n in node.users)
        read(node)
    return found


def _follows_gradients(node: fx.Node) -> bool:
    """Whether a node comes after the last backward pass of its graph."""
    if phase_of(node) == "optimizer":
        return True
    while node.op != "root":
        if phase_of(node) == "backward":
            return False
        node = node.next
    return True


def _taken(a: CallEntry, b: CallEntry, late: Mapping[fx.Node, bool]) -> Iterator[Doubt]:
    """Put the whole batch's numbers into a node; tells why not where that cannot be."""
    leaves, tree = tree_flatten((a.node.args, a.node.kwargs))
    lists = [x for x in (*a.node.args, *a.node.kwargs.values()) if isinstance(x, list | tuple)]
    for i, (mine, whole) in enumerate(zip(a.given, b.given, strict=True)):
        number = isinstance(mine, int | float) and isinstance(whole, int | float)
        if mine != whole and (not number or any(mine in x for x in lists) or not late[a.node]):
            yield _differs(_numbers(words(a.node), (mine,), (whole,)))
            return
        if mine != whole:
            leaves[i] = whole
    a.node.args, a.node.kwargs = tree_unflatten(leaves, tree)


def _numbers(where: str, mine: Sequence[Any], whole: Sequence[Any]) -> str:
    a, b = next((a, b) for a, b in zip(mine, whole, strict=True) if a != b)
    return f"{where} takes {_shown(a)} of a microbatch, and {_shown(b)} of the batch"


def _shown(x: Any) -> str:
    return f"{x[0]:g}" if isinstance(x, tuple) and len(x) == 1 else f"{x:g}" if isinstance(x, int | float) else str(x)


def _differs(what: str) -> Doubt:
    return Doubt(
        f"what the step does with its gradients, once for all microbatches, depends on how long one is: {what}. Put it into "
        "the loss, or give it as a number of its own, not as a tensor or a size",
        True,
    )
