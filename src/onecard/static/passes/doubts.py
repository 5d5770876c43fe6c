"""Gradient merge: what makes a merged step another one than that of the whole batch, as warnings."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from onecard._torch.names import OpOverload
from onecard.comm.base.state import faked
from onecard.comm.issue import again
from onecard.rules.call import schema_of
from onecard.static.passes.once import Once, cut, phase_of, words
from onecard.static.step.memory import effects
from onecard.tensor.dist_tensor import DistTensor

aten = torch.ops.aten
_MEAN = 1  # torch's number for reduction="mean"
_NLL = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_DIVISIONS = (aten.div.Tensor, aten.div_.Tensor)


def doubts(graph: fx.Graph, k: int, leaves: Sequence[Any], once: Once) -> list[str]:
    """What to tell the user, from the graph of one microbatch and the arguments of the whole step; without data, what that tells.

    A loss that is divided by a count of its microbatch is a mean of means, unless the counts are equal: they are computed from
    the batch that is recorded, on this rank. One that depends on parameters is taken to differ.
    """
    counts = _Counts(graph, once, k, leaves)
    said = [_of_division(words(n), why) for n, why in _divided(graph, once, counts)]
    said += [
        f"{words(n)} writes into the program between the forward and the backward pass, the same for each microbatch, {k} times "
        "a call: put it at the beginning of the step, or behind the optimizer's step"
        for n in once.repeated()
    ]
    said += [
        f"{words(n)}, in a hook, is not linear in the gradient, and what it is given there is a microbatch's: change p.grad "
        "behind backward() instead, where it is the batch's"
        for n in _bent(graph, once)
    ]
    return list(dict.fromkeys(said))


def _of_division(where: str, why: str) -> str:
    return (
        f"{where} divides by {why}, of which each microbatch has its own: gradients and loss are means of the microbatches' "
        "means, not the mean over the batch. Pass the batch's own count as a tensor without dims (it is not cut), divide a sum "
        "by it, and give avg=False"
    )


def _divided(graph: fx.Graph, once: Once, counts: _Counts) -> Iterator[tuple[fx.Node, str]]:
    for node in graph.nodes:
        if phase_of(node) != "forward" or node in once.tail or node not in once.own:
            continue
        if node.target in _NLL and node.args[3] == _MEAN:
            labels, weights, ignored = node.args[1], node.args[2], node.args[4]
            if weights is not None:
                yield node, "the weights of its labels"
            elif counts.differ(labels, lambda x, ignored=ignored: (x != ignored).sum()):
                yield node, "how many of its labels are not ignored"
        elif node.target in _DIVISIONS and isinstance(node.args[1], fx.Node):
            by: Any = node.args[1]
            if by in once.own and not by.meta.get("tensor", ((0,),))[0] and counts.differ(by, lambda x: x):
                yield node, "a value"


def _bent(graph: fx.Graph, once: Once) -> Iterator[fx.Node]:
    """What takes gradients of a microbatch in a way that autograd itself never does: hooks."""
    passes, now = dict[fx.Node, int](), 0  # gradients, by the backward pass that they are of
    for node in graph.nodes:
        if node.target in _BEGINS and node.users and all(phase_of(user) == "backward" for user in node.users):
            passes[node] = now = now + 1
        given = [passes[n] for n in node.all_input_nodes if n in passes]
        if phase_of(node) != "backward" or node in once.tail or not given or not isinstance(node.target, OpOverload):
            continue
        name = schema_of(node.target).functional
        operands = [passes.get(n) for n in node.args if isinstance(n, fx.Node)]
        if max(given) == now and (name in _BENT or (name in _PRODUCTS and operands.count(now) > 1)):
            yield node
        else:
            passes[node] = max(given)  # those of an earlier pass are values to a later one


_BEGINS = (aten.ones_like.default, aten.full.default, aten.full_like.default)
_PRODUCTS = ("mul", "div", "mm", "bmm", "dot")
_BENT = frozenset((
    "abs", "amax", "amin", "ceil", "clamp", "clamp_max", "clamp_min", "exp", "floor", "hardtanh", "linalg_vector_norm", "log",
    "max", "maximum", "min", "minimum", "norm", "pow", "reciprocal", "relu", "round", "rsqrt", "sgn", "sigmoid", "sign", "sort",
    "sqrt", "std", "tanh", "topk", "trunc", "var",
))  # fmt: skip


class _Counts:
    """Computes a few nodes once more, for each microbatch. Messages give what this rank has."""

    def __init__(self, graph: fx.Graph, once: Once, k: int, leaves: Sequence[Any]) -> None:
        self.nodes, self.memory, self.k, self.leaves = list(graph.nodes), once.memory, k, leaves

    def differ(self, node: Any, of: Any) -> bool:
        """Whether a microbatch has another one than the first; also if that cannot be told. The step with data tells it anew."""
        if faked.here:
            return False
        needed = self._needed(node)
        try:
            first, *others = (of(self._value(node, needed, i)) for i in range(self.k))
        except _Unknown:
            return True
        return any(not torch.equal(first, x) for x in others)

    def _needed(self, node: fx.Node) -> list[fx.Node]:
        """What a node depends on, through memory too, in order."""
        before = self.nodes[: self.nodes.index(node) + 1]
        found, wanted = set[fx.Node](), [node]
        while wanted:
            if (one := wanted.pop()) not in found:
                found.add(one)
                wanted += [_labels(one)[0]] if _labels(one) else one.all_input_nodes
                wanted += [n for n in before if self.memory.writes.get(n, frozenset()) & self.memory.roots[one]]
        return [n for n in before if n in found]

    def _value(self, node: fx.Node, needed: list[fx.Node], i: int) -> Tensor:
        values: dict[fx.Node, Any] = {}
        with torch.no_grad():
            for n in needed:
                if cut(n):
                    values[n] = self._part(self.leaves[n.meta["input"].where[1]], i)
                elif labels := _labels(n):
                    values[n] = (values[labels[0]] != labels[1]).sum()
                elif n.target is again.message:
                    names: Any = n.args
                    into, given = values[names[0]], values[names[1]]
                    if into.shape != given.shape:
                        raise _Unknown
                    into.copy_(given)
                elif n.op != "call_function" or effects(n):
                    raise _Unknown
                else:
                    target: Any = n.target
                    values[n] = target(*fx.map_arg(n.args, values.get), **fx.map_arg(n.kwargs, values.get))
        return values[node]

    def _part(self, x: Any, i: int) -> Tensor:
        local: Tensor = x._local if isinstance(x, DistTensor) else x
        if local.is_meta:
            raise _Unknown
        rows = local.shape[0] // self.k
        return local.narrow(0, i * rows, rows).clone()


def _labels(node: fx.Node) -> tuple[Any, ...]:
    """Labels and the ignored one, of a node that says how many torch's loss has counted."""
    loss: Any = node.args[0] if node.target is operator.getitem else None
    counts = loss is not None and loss.target in _NLL and node.args[1] == 1 and loss.args[2] is None
    return (loss.args[1], loss.args[4]) if counts else ()


class _Unknown(Exception):
    """A value that depends on more than the batch."""
