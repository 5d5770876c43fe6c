"""Calls on rows as nodes: at once, or in two halves, of which the first sends (see ``tensor/rows/halves.py``)."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

from torch import fx

from onecard.tensor.rows import one_call
from onecard.tensor.rows.one_call import RowsCall

RUN: Any = unwrap(one_call.run)
START: Any = unwrap(one_call.start)
CALLS = frozenset(map(id, (RUN, START)))
"""By identity: an operator of torch's is hashed and compared in Python."""


def is_on_rows(node: fx.Node) -> bool:
    """Whether a node is a call on rows, or its first half."""
    return node.target is RUN or node.target is START


def call_on_rows(node: fx.Node) -> RowsCall:
    """What such a node calls."""
    return node.args[0]  # type: ignore[return-value]


def first_half(node: fx.Node) -> fx.Node | None:
    """The node that has sent what a call waits for."""
    return node.args[2] if node.target is RUN and len(node.args) > 2 else None  # type: ignore[return-value]


def only_moves_rows(node: fx.Node) -> bool:
    """Whether a node is a call, or half of one, that sends its rows once and draws nothing."""
    return is_on_rows(node) and call_on_rows(node).halves
