"""Nodes put into a graph. FX itself looks through all arguments for symbolic numbers, which takes longer than the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from onecard._torch.graphs import node_put
from onecard._torch.names import OpOverload
from onecard.rules.traits import NONE, Traits, traits_of

# Not by assignment: FX then looks a node up in its table of targets, out and in again, which arguments have no part in.
_give_args: Any = fx.Node.args.fset  # type: ignore[attr-defined]
_give_kwargs: Any = fx.Node.kwargs.fset  # type: ignore[attr-defined]


def called(graph: fx.Graph, target: Callable[..., Any], args: Any = (), kwargs: Any = None) -> fx.Node:
    """``graph.call_function`` of arguments without symbolic numbers.

    Example:
        >>> graph = fx.Graph()
        >>> called(graph, abs, (called(graph, abs, (-1,)),)).args
        (abs_1,)
    """
    node = graph.create_node("call_function", target)
    _give_args(node, tuple(args))
    if kwargs:
        _give_kwargs(node, dict(kwargs))
    return node


def copied_to(graph: fx.Graph, node: fx.Node, at: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """``graph.node_copy`` of such a node; ``at`` gives its operands in that graph. An input keeps its name."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), at)
    made = node_put(graph, node.op, node.target, args, kwargs, node.name, node.type)
    made.meta.update(node.meta)
    if node.op == "placeholder" and made.name != node.name:
        made.name = node.name
    return made


def traits(node: fx.Node) -> Traits:
    """The traits of the operator that a node calls; none of anything else."""
    return traits_of(node.target) if isinstance(node.target, OpOverload) else NONE


def kernel(*given: Any) -> Any:
    """What stands for several operators that are compiled into one (``passes/fused.py``): it is priced, and never runs."""
    raise NotImplementedError("a kernel of a graph that was made to be priced: it has no code")
