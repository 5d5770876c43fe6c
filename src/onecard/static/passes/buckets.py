"""Small messages of one kind, one after the other, that do not need each other -> one message: each costs the same start."""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from onecard.comm.issue import again
from onecard.static.passes.adding import added, nbytes
from onecard.static.passes.draft import editing, order_of, without
from onecard.static.step.order import Order

aten = torch.ops.aten
SMALL = 64 * 1024
"""Bytes below which a message is small: copying it costs less than a message of its own."""


@editing
def small_together(graph: fx.Graph, small: int = SMALL) -> bool:
    """All-reduces along one line, by one operation, of one dtype. What needs the first ones' results waits for the last."""
    if not _neighbours(graph, small):
        return False
    order = order_of(graph)
    runs = _runs(graph, order, small) if order.movable else []
    last = {run[-1]: run for run in runs}
    early = {m for run in runs for m in run[:-1]}
    held: list[fx.Node] = []  # what runs after the message that is yet to come
    waiting: set[fx.Node] = set()
    for node in [*graph.nodes] if runs else ():
        if node in early:
            waiting.add(node)
        elif node in last:
            with graph.inserting_before(node):
                _together(last[node], graph)
            for other in held:
                node.prepend(other)
            held, waiting = [], set()
        elif waiting and any(n in waiting for n in order.before(node)):
            waiting.add(node)
            held.append(node)
    return without({}, [message for run in runs for message in run])


def _neighbours(graph: fx.Graph, small: int) -> bool:
    """Whether two messages of one kind follow each other."""
    kinds = [_kind(n, small) for n in graph.find_nodes(op="call_function", target=again.message)]
    return any(a is not None and a == b for a, b in pairwise(kinds))


def _runs(graph: fx.Graph, order: Order, small: int) -> list[list[fx.Node]]:
    """Messages that can be one: neighbours of one kind, none of which needs what another one gives."""
    runs: list[list[fx.Node]] = []
    key: Any = None
    late: set[fx.Node] = set()  # what needs one of the run
    for node in graph.nodes:
        if node.target is again.message:
            now = _kind(node, small)
            fits = now is not None and now == key and runs and not any(n in late for n in order.needs[node])
            if fits:
                runs[-1].append(node)
            else:
                runs.append([node])
                late = set()
            key = now
            late.add(node)
        elif late and any(n in late for n in order.before(node)):
            late.add(node)
            if key is not None and node in order.after and _is_chained(node, order):
                key = None  # what may send itself ends a run
    return [run for run in runs if len(run) > 1]


def _is_chained(node: fx.Node, order: Order) -> bool:
    return any(n.target is again.message for n in order.after[node])


def _kind(node: fx.Node, small: int) -> Any:
    args: Any = node.args
    into, given, name, rest, line = args
    if name != "all_reduce" or into is not given or node.kwargs:
        return None
    _, _, dtype, device = given.meta["tensor"]
    if nbytes(given) > small or not again.one_by_one(line, rest[0], dtype):
        return None
    return (tuple(rest), line, dtype, device)


def _together(run: list[fx.Node], made: fx.Graph) -> None:
    tensors: list[Any] = [m.args[0] for m in run]
    flat = [added(made, m, aten.reshape.default, x, [-1]) for m, x in zip(run, tensors, strict=True)]
    whole = added(made, run[-1], aten.cat.default, flat)
    sent = made.call_function(again.message, (whole, whole, *run[-1].args[2:]))
    sent.meta.update(run[-1].meta)
    cut = added(made, run[-1], aten.split_with_sizes.default, whole, [f.meta["tensor"][0][0] for f in flat])
    for i, (message, x) in enumerate(zip(run, tensors, strict=True)):
        piece = added(made, message, operator.getitem, cut, i)
        back = added(made, message, aten.view.default, piece, list(x.meta["tensor"][0]))
        added(made, message, aten.copy_.default, x, back)
