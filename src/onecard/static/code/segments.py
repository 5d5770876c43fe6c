"""Runs of local operators between messages and writes, each given to a compiler as one function: ``backend="inductor"``.

A run takes what is pure: no message, no draw, no write, no number that may change between steps. The graph itself stays as it
is, so that it is priced, printed and checked as before; a run replaces its lines in the function that is made of the graph.
"""

from __future__ import annotations

import operator
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from onecard._torch import names as _torch
from onecard._torch.names import OpOverload
from onecard.errors import RecordingError
from onecard.static.step.memory import GraphMemory, effects
from onecard.static.step.nodes import traits
from onecard.static.step.order import name_of, only_names

BACKENDS = ("eager", "inductor")
LEAST = 3
"""Operators that compute, besides products, from which a run is worth a function of its own."""

_COMPILERS = ("g++", "clang++", "c++", "g++-12", "g++-13")


@dataclass(frozen=True)
class CodeSegment:
    """One run.

    Attributes:
        nodes: in their order; ``inputs``: what they read of others; ``outputs``: tensors of their own that others read.
        views: names of memory among the nodes that others read: they are made again after the run.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    views: tuple[fx.Node, ...]


def check_backend(backend: str) -> None:
    """Refuse what cannot compile here.

    Raises:
        RecordingError: there is no such backend, or no compiler for it.
    """
    if backend not in BACKENDS:
        raise RecordingError(f"backend={backend!r} is not one of {', '.join(map(repr, BACKENDS))}")
    if backend == "inductor" and _torch.inductor() is None:
        raise RecordingError('backend="inductor": this build of torch has no Inductor. Leave backend out')
    wanted = [given] if (given := os.environ.get("CXX")) else _COMPILERS
    if backend == "inductor" and not torch.cuda.is_available() and not any(map(shutil.which, wanted)):
        raise RecordingError(
            f'backend="inductor" needs a compiler of C++, and there is none of {", ".join(wanted)} on the PATH. Install one '
            "(Debian and Ubuntu: apt install g++), name it in CXX, or leave backend out: kernels are torch's own then"
        )


def segments(graph: fx.Graph, once: Any = ()) -> list[CodeSegment]:
    """The runs of a graph. ``once``: nodes that stand outside of it.

    Example:
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> segments(graph)
        []
    """
    memory = GraphMemory(graph, apart=True)
    output: Any = next(iter(reversed(graph.nodes)))
    results = output.args[0] if output.op == "output" else ()
    shown = frozenset[fx.Node]().union(*(memory.roots[n] for n in results if isinstance(n, fx.Node)))
    found, run = list[CodeSegment](), list[fx.Node]()
    for node in graph.nodes:
        if node in once:
            continue
        if _pure(node, memory, shown):
            run.append(node)
        else:
            found += _worth(run)
            run = []
    return found


def _pure(node: fx.Node, memory: GraphMemory, shown: frozenset[fx.Node]) -> bool:
    """Whether a node may stand in a run: what it makes is never written to, and not given back, so that it may share memory."""
    if node.op != "call_function" or effects(node) or node in memory.writes:
        return False
    if node.target is operator.getitem:
        maker: Any = node.args[0]
        return isinstance(maker.target, OpOverload) and _pure(maker, memory, shown)
    if not isinstance(node.target, OpOverload) or not all(_is_value(n) for n in node.all_input_nodes):
        return False
    made = [node] if "tensor" in node.meta else [*node.users]
    if only_names(node):
        return True
    return all(
        "tensor" in n.meta and not n.meta["tensor"][2].is_complex and memory.steady(n) and not memory.roots[n] & shown
        for n in made
    ) and all(len(memory.roots[n]) == 1 and next(iter(memory.roots[n])) in (n, node) for n in made)


def _is_value(node: fx.Node) -> bool:
    return "tensor" in node.meta


def _worth(run: list[fx.Node]) -> Iterator[CodeSegment]:
    """The run as a segment, if it is long enough; getitems that stand elsewhere cut it short."""
    inside = dict.fromkeys(run)
    for node in reversed(run):  # results of one operator are taken apart in its run, or it is left out
        several = "tensor" not in node.meta and node.target is not operator.getitem
        lost = node.target is operator.getitem and node.args[0] not in inside
        if lost or (several and any(u not in inside for u in node.users)):
            return
    if sum(not only_names(n) and not traits(n).product for n in run) < LEAST:
        return
    views = dict.fromkeys(n for n in reversed(run) if _names(n) and any(u not in inside for u in n.users))
    for n in run[::-1]:
        if n in views:
            views |= dict.fromkeys(m for m in n.all_input_nodes if m in inside and _names(m))
    outputs = [n for n in run if _is_value(n) and not _names(n) and any(u not in inside or u in views for u in n.users)]
    inputs = dict.fromkeys(m for n in run for m in n.all_input_nodes if m not in inside)
    if outputs and inputs:
        yield CodeSegment(tuple(run), tuple(inputs), tuple(outputs), tuple(n for n in run if n in views))


def _names(node: fx.Node) -> bool:
    return only_names(node) and node.target is not operator.getitem


def function_of(segment: CodeSegment) -> Callable[..., Any] | None:
    """The compiled run; None where it would give tensors that lie otherwise, or share memory.

    Raises:
        RecordingError: the compiler fails.
    """
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    for n in segment.inputs:
        names[n] = made.placeholder(n.name)
    for n in segment.nodes:
        names[n] = made.call_function(n.target, *fx.map_arg((n.args, dict(n.kwargs)), names.__getitem__))  # type: ignore[arg-type]
    made.output(tuple(names[n] for n in segment.outputs))
    given, compiler = [_example(n) for n in segment.inputs], cast(Callable[..., Any], _torch.inductor())
    try:
        with _torch.below_autograd():
            run = compiler(fx.GraphModule({}, made), given)
            results = run(*given)
    except Exception as fault:
        first = segment.nodes[0]
        raise RecordingError(
            f"Inductor cannot compile {len(segment.nodes)} operators from {name_of(first)} at {first.meta.get('line', '?')} on: "
            f"{type(fault).__name__}: {str(fault).strip()[:500]}. Leave backend out, and torch's own kernels run"
        ) from fault
    return run if _alike(segment, given, results) else None


def _example(node: fx.Node) -> Tensor:
    """Numbers of a node's form; integers are nought, which every index may be."""
    shape, stride, dtype, device = node.meta["tensor"]
    x = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return x.fill_(0.5) if dtype.is_floating_point else x.zero_()


def _alike(segment: CodeSegment, given: list[Tensor], results: Any) -> bool:
    blocks = {x.untyped_storage().data_ptr() for x in given if x.numel()}
    for node, x in zip(segment.outputs, results, strict=True):
        shape, stride, dtype, _ = node.meta["tensor"]
        block = x.untyped_storage().data_ptr()
        if (tuple(x.shape), tuple(x.stride()), x.dtype) != (shape, stride, dtype) or (x.numel() and block in blocks):
            return False
        blocks.add(block)
    return True
