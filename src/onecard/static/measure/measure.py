"""Measure this machine: seconds of operators by family and size, of products by their shapes, of messages by kind and bytes.

Operators run as a replay runs them, below autograd, each with a result in memory of its own, and in turn: one alone in a loop
finds its code and its operands where it left them, and is some 20 to 40 % faster than in a step. Each is called twice in its
turn, as in a step some operands were made just before, others long ago. Ranks measure the same at the same time, as they compute
the same in a step: what they share, the memory above all, is shared then. Messages: ``measure_messages.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import fx

from onecard._torch.names import OpOverload, below_autograd
from onecard.comm.issue import again
from onecard.comm.world import world
from onecard.errors import CostError
from onecard.machine import cost
from onecard.machine.cost import DIVIDED, Curve, Machine
from onecard.static.api import record
from onecard.static.code.compiled import called, compiled, last_uses
from onecard.static.measure import measure_messages, probes
from onecard.static.measure.host import divided_parameter
from onecard.static.measure.on_gpu import measured_gpu
from onecard.static.measure.probes import Sample
from onecard.static.measure.together import RankClock, Run, Turns, clock, mean, meet, together, typical
from onecard.static.price import convolutions, families
from onecard.static.recording import Recording

ELEMENTS = tuple(2**k for k in (6, 10, 13, 16, 18, 20, 21))
PRODUCTS = tuple(2**k for k in (12, 16, 20, 24, 27))
ROUNDS, LONG = 5, 0.02
"""Rounds at least, and seconds of all rounds of one size, if they are short."""
MOST = 200
SQUARE = 512
"""Of the products that say how many operations a second there are."""


def measured(*recordings: Recording) -> Machine:
    """This machine; see ``Machine.measure``."""
    if world.device().type == "cuda":
        if recordings:
            raise CostError("Machine.measure(recording) measures a CPU's operators; of a GPU: Machine.measure()")
        return measured_gpu()
    turns = Turns(clock())
    with torch.no_grad(), below_autograd(), torch.random.fork_rng(devices=[]):
        curves = _agreed(_operators(turns))
        flops, half = (
            2 * SQUARE**3 / t for t in mean(_seconds(turns, [_square(torch.float32), _square(torch.bfloat16)]))
        )
        sent = dict(measure_messages.curves()) if together() else {}
        beside = measure_messages.beside() if sent else 1.0
        curves |= sent | {key: ((1.0, t),) for recording in recordings for key, t in _own(recording, turns.clock)}
    (host,) = mean([turns.clock.crowd * divided_parameter()])
    curves |= {DIVIDED: ((1.0, host),)}
    machine = Machine(
        name=_model(), dtypes={"bfloat16": half}, capacity=_capacity(), launch=curves["pointwise"][0][1], curves=curves,
        source="measured", flops=flops, memory=curves["pointwise"][-1][0] / curves["pointwise"][-1][1], beside=beside,
        uneven=turns.uneven(),
    )  # fmt: skip
    return _with_messages(machine, sent)


def _with_messages(made: Machine, sent: Mapping[str, Curve]) -> Machine:
    if not sent:
        return made
    curve = sent["all_reduce"]
    (_, first), (size, last) = curve[0], curve[-1]
    return replace(made, latency=first, bandwidth=size / max(last - first, 1e-9))


# -- operators -------------------------------------------------------------------------------------------------------------


def _operators(turns: Turns) -> dict[str, Curve]:
    """Seconds by size of all families, of attentions and of products, those of one size in turn."""
    found = dict[str, list[tuple[float, float]]]()
    for i, n in enumerate(ELEMENTS):
        made = dict(_samples(n, PRODUCTS[i] if i < len(PRODUCTS) else 0))
        made |= {"name": probes.name(), "number": probes.number(), "input": _input()} if i == 0 else {}
        for (name, sample), taken in zip(made.items(), _seconds(turns, [s.run for s in made.values()]), strict=True):
            found.setdefault(name, []).append((sample.size, taken / sample.calls))
    return {name: tuple(curve) for name, curve in found.items()}


def _samples(n: int, total: int) -> Iterator[tuple[str, Sample]]:
    """A sample of each family with about n elements, and products of about so many multiply-adds."""
    yield from ((name, make(n)) for name, make in probes.FAMILIES.items())
    for width in families.WIDTHS:
        yield f"attention {width}", probes.attention(width, False)(n)
        yield f"attention backward {width}", probes.attention(width, True)(n)
    for channels, back in product(convolutions.CHANNELS, (False, True)):
        if (sample := probes.convolution(channels, back, total)) is not None:
            yield f"convolution {'backward ' if back else ''}{channels}", sample
    for kind, thin in product(families.THIN, families.SIZES):
        sample = probes.product(kind, thin, total)
        if sample is not None:
            yield f"{kind} {thin}", sample


def _seconds(turns: Turns, runs: Sequence[Run]) -> list[float]:
    """Of each of these calls, which are made in turn, again and again."""
    first = 2 * sum(turns.run(runs))
    (count,) = mean([min(MOST, max(ROUNDS, LONG / max(1e-9, first)))])
    return [typical(times) for times in zip(*(turns.run(runs) for _ in range(int(count))), strict=True)]


def _input() -> Sample:
    """What a replay does before it with its inputs: is each as it was, where is it now."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
    recording = record(lambda x: model(x))(torch.ones(1, 8, device="cpu"))
    return Sample(1.0, lambda: recording.bound.ready([_ONE]), len(recording.inputs))


_ONE = torch.ones(1, 8, device="cpu")


def _square(dtype: torch.dtype) -> Run:
    x = torch.rand(SQUARE, SQUARE, device="cpu").to(dtype)
    return lambda: torch.mm(x, x)


def _own(recording: Recording, clock: RankClock) -> Iterator[tuple[str, float]]:
    """Seconds of each node that computes, in its place: the graph is run on tensors like its own, but for what it sends.

    One by one the nodes take longer than in a replay, by what it costs to look at the clock: together they take what it takes.
    """
    graph, found = _silent(recording.graph), dict[str, list[float]]()
    inputs = [_like(n) for n in graph.nodes if n.op == "placeholder"]
    run = compiled(graph)
    try:
        whole = []
        for _ in range(ROUNDS):
            whole.append(clock.once(partial(run, *inputs)))
            meet()
            for node, taken in _run_through(graph, inputs, clock.now):
                found.setdefault(f"={families.signature(node)}", []).append(taken)
    except (RuntimeError, TypeError, IndexError, ValueError, ArithmeticError):  # it needs values that nobody has here
        return
    alone = {key: typical(times) for key, times in found.items()}
    share = typical(whole) / sum(alone[key] * len(times) / ROUNDS for key, times in found.items())
    yield from ((key, taken * share) for key, taken in alone.items())


def _silent(graph: fx.Graph) -> fx.Graph:
    """A graph without its messages, whose results nobody looks at."""
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.target is not again.message and node.target is not again.wait:
            names[node] = made.node_copy(node, names.__getitem__)
    return made


def _run_through(graph: fx.Graph, inputs: Sequence[Any], clock: Callable[[], float]) -> Iterator[tuple[fx.Node, float]]:
    """Run a graph node by node; each with its seconds."""
    last, values, given = last_uses(graph), dict[fx.Node, Any](), iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            function: Any = called(node) if isinstance(node.target, OpOverload) else node.target
            start = clock()
            values[node] = function(*args, **kwargs)
            yield node, clock() - start
            del args, kwargs
        for gone in last.get(node, ()):
            values.pop(gone, None)


def _like(node: fx.Node) -> Any:
    if "tensor" not in node.meta:
        return 0.5
    shape, stride, dtype, device = node.meta["tensor"]
    made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return made.fill_(0.5) if dtype.is_floating_point else made.zero_()


# -- this machine -----------------------------------------------------------------------------------------------------------


def _agreed(curves: dict[str, Curve]) -> dict[str, Curve]:
    """The curves of all ranks, averaged, so that all have the same."""
    agreed = mean([t for curve in curves.values() for _, t in curve])
    return {name: tuple((size, agreed.pop(0)) for size, _ in curve) for name, curve in curves.items()}


def _model() -> str:
    """The processor, by its own word."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as text:
            return next(
                (line.partition(":")[2].strip() for line in text if line.startswith("model name")), "this machine"
            )
    except OSError:
        return "this machine"


def _capacity() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


cost.measurer = measured
