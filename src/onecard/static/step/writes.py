"""Which tensors an operator, a message or a function of ours writes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from onecard import recorded
from onecard._torch.names import OpOverload, tree_leaves
from onecard.comm.issue import again
from onecard.rules.traits import STATISTICS
from onecard.static.step.nodes import known_of, operator_of

_TRAINING = 5  # the place of ``training`` among the arguments of batch norms


def written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes whose memory a node writes to."""
    if node.op != "call_function":
        return []
    known = operator_of(node)
    if known is not None:
        if not known.written:
            return []
        values = arguments_written(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    elif node.target is again.message:
        values = [node.args[0]]
    elif node.target is again.wait:
        values = [node.args[1]]
    elif node.target not in recorded.writes:
        return []
    else:
        values = tree_leaves([node.args[i] for i in recorded.writes[node.target]])
    return [n for n in values if isinstance(n, fx.Node)]


def changed_by(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What a call of an operator, or of a function of ours, changes: what it writes to, and generators that it draws from."""
    if isinstance(func, OpOverload):
        found = arguments_written(func, args, kwargs)
    else:
        found = tree_leaves([args[i] for i in recorded.writes.get(func, ())])
    return [*found, *(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator))]


def arguments_written(func: OpOverload, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes to, lists of them taken apart."""
    known = known_of(func)
    if known is None or not known.written:
        return []
    if known.written == STATISTICS and not (args[_TRAINING] if len(args) > _TRAINING else kwargs.get("training", True)):
        return []  # a batch norm that takes them as they are
    found: list[Any] = []
    for name, place in known.written_at:
        value = args[place] if place < len(args) else kwargs.get(name, ())
        found += value if isinstance(value, list | tuple) else [value]
    return found
