"""Nodes put into a graph. FX itself looks through all arguments for symbolic numbers, which takes longer than the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from onecard._torch.graphs import node_copied, node_made
from onecard._torch.names import OpOverload
from onecard.rules.traits import NONE, Traits, traits_of


def called(graph: fx.Graph, target: Callable[..., Any], args: Any = (), kwargs: Any = None) -> fx.Node:
    """``graph.call_function`` of arguments without symbolic numbers.

    Example:
        >>> graph = fx.Graph()
        >>> called(graph, abs, (called(graph, abs, (-1,)),)).args
        (abs_1,)
    """
    return node_made(graph, target, tuple(args), kwargs or {})


def copied_to(graph: fx.Graph, node: fx.Node, at: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """``graph.node_copy`` of such a node; ``at`` gives its operands in that graph. An input keeps its name."""
    made = node_copied(graph, node, at)
    if node.op == "placeholder" and made.name != node.name:
        made.name = node.name
    return made


_known: dict[int, tuple[Any, Traits | None]] = {}  # by identity: torch hashes an operator in Python, at each look


def operator_of(node: fx.Node) -> Traits | None:
    """The traits of the operator that a node calls; None of what calls none."""
    return known_of(node.target) if node.op == "call_function" else None


def known_of(target: Any) -> Traits | None:
    """The traits of an operator; None of another function."""
    try:
        return _known[id(target)][1]
    except KeyError:
        found = traits_of(target) if isinstance(target, OpOverload) else None
    if found is not None or "<" not in getattr(target, "__qualname__", "<"):  # there are only so many of these
        _known[id(target)] = target, found  # it is kept, so that its identity stays its own
    return found


def traits(node: fx.Node) -> Traits:
    """The traits of the operator that a node calls; none of anything else."""
    return (known_of(node.target) if node.op == "call_function" else None) or NONE


def kernel(*given: Any) -> Any:
    """What stands for several operators that are compiled into one (``passes/fused.py``): it is priced, and never runs."""
    raise NotImplementedError("a kernel of a graph that was made to be priced: it has no code")


def draws_by(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of torch's draws random numbers.

    Attention and recurrent layers without dropout draw none, though torch marks them as if they did.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            return bool((argument.default_value if given is None else given) != 0)
    return True
