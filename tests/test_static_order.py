"""The order that a graph needs, by brute force: every order that ``Order`` allows gives what the first one gave."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from onecard.static.step.order import Order

aten = torch.ops.aten
READS = (aten.mul.Tensor, aten.sub.Tensor)
WRITES = (aten.add_.Tensor, aten.mul_.Tensor, aten.copy_.default)


def drawn(seed: int) -> fx.Graph:
    """A graph of five operators on two inputs: reads, writes, and names of parts."""
    draw, graph = random.Random(seed), fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(2)]
    for node in nodes:
        node.meta["tensor"] = ((4,), (1,), torch.float64, torch.device("cpu"))
    for _ in range(5):
        kind, whole = draw.random(), [n for n in nodes if n.meta["tensor"][0] == (4,)]
        if kind < 0.4:
            made = graph.call_function(draw.choice(READS), (draw.choice(whole), draw.choice(whole)))
        elif kind < 0.8:
            target, given = draw.choice(WRITES), draw.sample(whole, 2)
            made = graph.call_function(target, tuple(given))
        else:
            made = graph.call_function(aten.view.default, (draw.choice(whole), [4]))
        made.meta["tensor"] = nodes[0].meta["tensor"]
        nodes.append(made)
    graph.output(tuple(nodes))
    return graph


def results(sequence: Any, nodes: Any) -> list[Tensor] | None:
    """What all nodes hold at the end; None if one is not there when it is wanted."""
    values: dict[fx.Node, Any] = {}
    for node in sequence:
        if node.op == "placeholder":
            values[node] = torch.arange(1.0, 5.0, dtype=torch.float64) * (1 + len(values))
        elif node.op == "call_function":
            if any(n not in values for n in node.all_input_nodes):
                return None
            values[node] = node.target(*fx.map_arg(node.args, values.__getitem__))
    return [values[n] for n in nodes]


def wrong(made: Callable[[fx.Graph], Order], seeds: range) -> tuple[int, int]:
    """Of how many graphs an order is allowed that gives something else; how many other orders are allowed at all."""
    found = allowed = 0
    for seed in seeds:
        graph = drawn(seed)
        inputs, calls = ([n for n in graph.nodes if n.op == op] for op in ("placeholder", "call_function"))
        order, nodes = made(graph), [*inputs, *calls]
        expected = results(nodes, nodes)
        assert expected is not None
        for sequence in itertools.permutations(calls):
            if order.keeps([*inputs, *sequence]):
                allowed += 1
                now = results([*inputs, *sequence], nodes)
                if now is None or not all(torch.equal(a, b) for a, b in zip(now, expected, strict=True)):
                    found += 1
                    break
    return found, allowed


def test_allowed_orders_give_the_same() -> None:
    found, allowed = wrong(Order, range(150))
    assert not found and allowed > 300  # there are orders to choose from


def forgetting(what: str) -> type[Order]:
    """An order that forgets one kind of need."""

    class Forgets(Order):
        def __init__(self, graph: fx.Graph) -> None:
            super().__init__(graph)
            for node, needs in self.needs.items():
                writes = node in self.memory.writes
                self.needs[node] = [n for n in needs if n in node.all_input_nodes or not self._is(what, n, writes)]

        def _is(self, what: str, earlier: fx.Node, writes: bool) -> bool:
            wrote = earlier in self.memory.writes
            return {"write after read": writes and not wrote, "read after write": wrote and not writes}.get(
                what, writes and wrote
            )

    return Forgets


@pytest.mark.parametrize("what", ["write after read", "read after write", "write after write"])
def test_a_need_that_is_forgotten_is_seen(what: str) -> None:
    found, _ = wrong(forgetting(what), range(150))
    assert found, what
