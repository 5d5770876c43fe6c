"""Graphs and nests of tensors, past torch's own slower ways: the same as by torch's."""

from __future__ import annotations

import gc
from collections import OrderedDict, defaultdict, deque, namedtuple

import torch
from torch import fx
from torch.utils import _pytree

import onecard as oc
from onecard._torch.graphs import emptied, node_put
from onecard._torch.nests import tree_leaves, tree_map
from onecard.static.passes import PASSES, StaticOptions, rewritten

OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 13)

Pair = namedtuple("Pair", "one other")
NESTS = [
    1, None, (), [], {}, (1, [2, (3, {"b": 4, "a": [5]})]), torch.Size([2, 3]), Pair(1, [Pair(2, 3)]), OrderedDict(b=1, a=[2]),
    [defaultdict(list, x=[1]), deque([2, (3,)])], {"x": (torch.Size([1]), None, "text")}, (Pair(None, {}), 4.0), slice(1, 2),
]  # fmt: skip


def test_nests_are_taken_apart_as_by_torch() -> None:
    for nest in NESTS:
        assert tree_leaves(nest) == _pytree.tree_leaves(nest), nest
        mapped, wanted = tree_map(repr, nest), _pytree.tree_map(repr, nest)
        assert mapped == wanted and type(mapped) is type(wanted), nest
    pairs = {"is_leaf": lambda x: isinstance(x, Pair)}
    assert (
        tree_map(repr, [Pair(1, 2)], **pairs)
        == _pytree.tree_map(repr, [Pair(1, 2)], **pairs)
        == ["Pair(one=1, other=2)"]
    )


def test_nodes_get_the_names_that_fx_gives() -> None:
    names = ["mm", "mm_3", "mm_3", "mm", "add_1", "sum_1", "x_y_2", "_2", "x_02"]
    mine, fxs = fx.Graph(), fx.Graph()
    for name in names:
        node_put(mine, "call_function", abs, (), {}, name)
        fxs.create_node("call_function", abs, (), {}, name)
        mine.call_function(torch.mm)  # by FX itself, after it
        fxs.call_function(torch.mm)
    if OLD:  # counts otherwise
        assert len({n.name for n in mine.nodes}) == len(mine.nodes)
    else:
        assert [n.name for n in mine.nodes] == [n.name for n in fxs.nodes]
    assert len(mine.nodes) == 2 * len(names) and len(mine.find_nodes(op="call_function", target=abs)) == len(names)
    mine.lint()


def nodes_alive() -> int:
    return sum(type(x) is fx.Node for x in gc.get_objects())


def test_an_emptied_graph_is_gone_at_once() -> None:
    def made() -> fx.Graph:
        graph = fx.Graph()
        last = graph.placeholder("x")
        for _ in range(3000):
            last = graph.call_function(torch.add, (last, last), {"alpha": 2})
        graph.output((last,))
        return graph

    gc.collect()
    gc.disable()
    try:
        before, left = nodes_alive(), made()
        del left
        assert nodes_alive() - before == 3003  # in circles, with its root
        graph = made()
        emptied(graph)
        del graph
        assert nodes_alive() - before <= 3004  # its root stays
    finally:
        gc.enable()


def test_graphs_between_passes_are_gone_at_once() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    recording = oc.record(lambda x: ((x @ weight).detach() + (x @ weight).detach()).relu())(torch.ones(4, 4))
    gc.collect()
    gc.disable()
    try:
        before = nodes_alive()
        made = rewritten(recording.graph, StaticOptions()).graph
        assert 0 < len(made.nodes) < len(recording.graph.nodes)
        assert nodes_alive() - before <= len(made.nodes) + 1 + len(PASSES)  # of each graph between its root
    finally:
        gc.enable()
