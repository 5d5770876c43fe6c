"""Seconds of an operator by what its kernels reach of a device's peaks (``machine/kernels.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from onecard._torch.names import OpOverload
from onecard.machine.cost import Machine
from onecard.machine.kernels import Kernels
from onecard.rules.work import Work
from onecard.static.price import convolutions, families
from onecard.static.price.live import is_name
from onecard.static.price.messages import is_message, kind_of
from onecard.static.step.nodes import kernel, traits


def seconds(node: fx.Node, machine: Machine, kernels: Kernels, done: Work) -> float:
    """Seconds of an operator; none of what only names memory, or makes room."""
    if node.target is kernel:
        return kernels.touch(machine.memory, done.accessed, _draws(node.meta["operators"]))
    if not isinstance(node.target, OpOverload) or is_name(node) or traits(node).room:
        return 0.0
    dtype = families.dtype_of(node)
    flops = machine.dtypes.get(dtype, machine.flops)
    if not done.macs:
        return kernels.touch(machine.memory, done.accessed, _draws([_name(node)]) or families.family(node))
    if "attention" in str(node.target):
        return _attention(node, kernels, flops, done)
    parts = families.sizes(node) if convolutions.call_of(node) is None else []
    if not parts:
        rate = flops * kernels.products.get(dtype, kernels.products[""])
        return kernels.start + max(2 * done.macs / rate, kernels.moved(machine.memory, done.accessed))
    found = sum(kernels.product(flops, machine.memory, *sizes, dtype=dtype) for sizes in parts)
    return found + _rounding(node, machine, kernels)


def compute_in(graph: fx.Graph, dtype: str) -> None:
    """Price the products of linear layers in another dtype, such as "float8_e4m3fn": each operand is rounded to it first.

    What ranks of a layer gather for its products is rounded before it is sent, as in torchao's float8 layers.
    """
    for node in graph.nodes:
        if is_message(node) and kind_of(node).startswith("all_gather"):
            node.meta["rounded"] = getattr(torch, dtype).itemsize
        if isinstance(node.target, OpOverload) and _name(node) in ("mm", "addmm", "linear"):
            node.meta["computes"] = dtype


def _rounding(node: fx.Node, machine: Machine, kernels: Kernels) -> float:
    """Seconds to find the largest number of each operand, and to write it rounded."""
    if "computes" not in node.meta:
        return 0.0
    given = [n.meta["tensor"] for n in node.all_input_nodes if len(n.meta.get("tensor", ((),))[0]) > 1]
    touched = sum(prod(shape) * (2 * dtype.itemsize + 1) for shape, _, dtype, _ in given)
    return kernels.touch(machine.memory, touched)


def _name(node: fx.Node) -> str:
    return str(node.target._schema.name).removeprefix("aten::")  # type: ignore[union-attr]


def _draws(names: Sequence[str]) -> str:
    """The family of kernels that draw random numbers; "" of others."""
    return (
        "dropout" if "native_dropout" in names or any(name.endswith("_") and "rand" in name for name in names) else ""
    )


def _attention(node: fx.Node, kernels: Kernels, flops: float, done: Work) -> float:
    """Under a causal mask half of the products are left out."""
    name = _name(node)
    backward = "backward" in name
    given: list[Any] = [a for a in node.args if isinstance(a, fx.Node)]
    shape = given[int(backward)].meta["tensor"][0]
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index("is_causal") if "is_causal" in names else len(node.args)
    causal = bool(node.args[place]) if len(node.args) > place else bool(node.kwargs.get("is_causal"))
    products = done.macs / 2 if causal else done.macs
    return kernels.attend(flops, products, shape[-1], shape[-2], causal, backward)
