"""Whether any (or all) of a deferred tensor's elements are true, without ever making it whole.

``torch.nn.init.trunc_normal_`` asks this after each round of draws. What leads to the question works on each element alone,
so it is run on one stretch of elements after another, until one of them decides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard import random
from onecard._torch.names import tree_leaves, tree_map
from onecard.comm.world import world
from onecard.random import Key
from onecard.rules.call import schema_of
from onecard.tensor.deferred.calls import DeferredCall, DeferredCalls, Slot
from onecard.tensor.random_operators.draw import arguments, factory_law, law_of

aten = torch.ops.aten
PIECE = 2**22  # elements at a time
_QUESTIONS = {aten.any.default: True, aten.all.default: False}  # and the answer of one element that ends the search
_MAKE = {"empty": 0, "empty_strided": 0, "zeros": 0, "ones": 1}
_ALIKE = (
    "alias",
    "clone",
    "copy_",
    "detach",
    "empty_like",
    "fill_",
    "zero_",
)  # on each element, though torch does not say so


def answer(record: DeferredCalls, slot: Slot) -> Tensor | None:
    """The value of ``any()`` or ``all()`` over many elements; None if a tensor is anything else, or not made by element."""
    question = record.nodes[record.writers[slot.storage][-1]]
    if question.func not in _QUESTIONS or question.results[0][0] is not slot:
        return None
    asked = question.args[0]
    nodes = record.needed(asked.storage)
    shapes = [shape for node in nodes for made, shape, _ in node.results if made is asked]
    if not shapes or not all(_by_element(node, shapes[0]) for node in nodes):
        return None
    decisive = _QUESTIONS[question.func]
    for begin in range(0, shapes[0].numel(), PIECE):
        values: dict[int, Tensor] = {}
        for node in nodes:
            _run(node, values, begin, min(PIECE, shapes[0].numel() - begin))
        if bool(question.func(values[asked.number])) is decisive:
            return torch.tensor(decisive, device="cpu")
    return torch.tensor(not decisive, device="cpu")


def _by_element(node: DeferredCall, shape: torch.Size) -> bool:
    name = schema_of(node.func).name
    if any(made_shape != shape for _, made_shape, _ in node.results):
        return False
    if not node.reads:
        return name in (*_MAKE, "full") or _draws(node)
    plain = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Tensor)]
    alike = torch.Tag.pointwise in node.func.tags or name in _ALIKE or _draws(node)
    return alike and all(t.dim() == 0 for t in plain) and (not _draws(node) or bool(schema_of(node.func).written))


def _draws(node: DeferredCall) -> bool:
    return isinstance(node.kwargs.get("generator"), Key) and schema_of(node.func).name != "randperm"


def _run(node: DeferredCall, values: dict[int, Tensor], begin: int, length: int) -> None:
    """One call, on ``length`` elements from ``begin`` in row-major order."""
    slot, shape, dtype = node.results[0]
    name = schema_of(node.func).name
    args, kwargs = tree_map(lambda v: values[v.number] if isinstance(v, Slot) else v, (node.args, node.kwargs))
    if node.reads and not _draws(node):
        values[slot.number] = node.func(*args, **{n: v for n, v in kwargs.items() if n != "memory_format"})
        return
    if node.reads:
        values[slot.number] = args[0]
        given = arguments(node.func, args, kwargs)
        drawn: Any = {n: v for n, v in given.items() if n not in ("self", "generator")}
        law = law_of(node.func, dtype, drawn)
    else:
        values[slot.number] = torch.empty(length, dtype=dtype, device=world.device())
        if not _draws(node):
            values[slot.number].fill_(args[1] if name == "full" else _MAKE[name])
            return
        law = factory_law(node.func, dtype, arguments(node.func, args, kwargs))
    random.fill(values[slot.number], law, node.kwargs["generator"], (shape.numel(),), (begin,))


__all__ = ["answer"]
