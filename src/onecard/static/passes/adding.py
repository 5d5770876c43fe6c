"""Nodes that a pass adds: with the facts of their results, and the place in the program of the node that they stand for."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from onecard.static.step.facts import facts
from onecard.static.step.nodes import called

_META = torch.device("meta")


def added(graph: fx.Graph, like: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A call at the end of a graph.

    Args:
        like: a node whose phase, module and line it takes.
        target: run on tensors without data, to learn the shape of its result.
    """
    node = called(graph, target, args, kwargs)
    node.meta.update({k: like.meta[k] for k in ("phase", "module", "line", "data") if k in like.meta})
    if target is operator.getitem:
        made: Any = args[0].meta["several"][args[1]]
    else:
        given, named = fx.map_arg((args, kwargs), rehearsed)
        with torch.no_grad():
            made = target(*given, **named) if hasattr(target, "_schema") else None
    if isinstance(made, Tensor):
        node.meta["tensor"] = (*facts(made)[:3], device_of(args, kwargs))
    elif isinstance(made, list | tuple):
        node.meta["several"] = made
        node.meta["device"] = device_of(args, kwargs)
    return node


def device_of(*values: Any) -> torch.device:
    """The device of the first tensor among a node's operands."""
    found: list[torch.device] = []
    fx.map_arg(
        values, lambda n: found.append(n.meta["tensor"][3] if "tensor" in n.meta else n.meta.get("device", _META))
    )
    return found[0] if found else torch.device("cpu")


def rehearsed(node: fx.Node) -> Any:
    """A tensor without data like a node's result; a number for a number."""
    if "tensor" not in node.meta:
        return 0.5
    shape, stride, dtype, _ = node.meta["tensor"]
    return torch.empty_strided(shape, stride, dtype=dtype, device=_META)


def nbytes(node: Any) -> int:
    """Bytes of a node's elements."""
    shape, _, dtype, _ = node.meta["tensor"]
    return int(torch.Size(shape).numel()) * int(dtype.itemsize)
