"""What operators compute, asked once for calls that are alike: a model's blocks, and its recordings under other plans."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from onecard.rules.work import Work

KEPT = 32768
_known: dict[Any, Work] = {}


class _Unknown(Exception):
    """Something of a call that has no face."""


def once(work: Callable[[fx.Node], Work]) -> Callable[[fx.Node], Work]:
    """A node's work, by what the call is given and gives back: sizes, strides, dtypes, numbers, and which operands are one."""

    def asked(node: fx.Node) -> Work:
        try:
            face = _face(node)
            known = _known.get(face)
        except (_Unknown, TypeError):
            return work(node)
        if known is None:
            if len(_known) >= KEPT:
                _known.clear()
            known = _known[face] = work(node)
        return known

    return asked


def _face(node: fx.Node) -> Any:
    seen: dict[fx.Node, int] = {}
    given = _of(node.args, seen), _of(node.kwargs, seen)
    return node.target, given, _results(node), node.meta.get("own", True)


def _results(node: fx.Node) -> Any:
    if (facts := node.meta.get("tensor")) is not None:
        return facts
    return tuple((n.args[1], n.meta["tensor"]) for n in node.users if n.target is operator.getitem)


def _of(value: Any, seen: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        if "tensor" not in value.meta:
            raise _Unknown
        return seen.setdefault(value, len(seen)), value.meta["tensor"]
    if isinstance(value, tuple | list):
        return type(value), tuple([_of(item, seen) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _of(item, seen)) for key, item in value.items()])
    return type(value), value
