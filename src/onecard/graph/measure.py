"""Measure this machine: seconds of operators by family and size, of products by their shapes, of messages by kind and bytes.

Operators run as a replay runs them, below autograd, each with a result in memory of its own, and in turn: one alone in a loop
finds its code and its operands where it left them, and is some 20 to 40 % faster than in a step. Each is called twice in its
turn, as in a step some operands were made just before, others long ago. A figure is the median of some rounds. Ranks measure
the same at the same time, as they compute the same in a step: what they share, the memory above all, is shared then.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx

from onecard import cost
from onecard._torch import OpOverload, below_autograd
from onecard.comm import again, collectives, groups, world
from onecard.comm.pretend import pretending
from onecard.cost import Curve, Machine
from onecard.graph import families, probes
from onecard.graph.compiled import _last_uses as last_uses
from onecard.graph.compiled import called, compiled
from onecard.graph.probes import Run, Sample
from onecard.graph.recording import Recording
from onecard.graph.static import record
from onecard.mesh import ProcessMesh

ELEMENTS = tuple(2**k for k in (6, 10, 13, 16, 18, 20, 21))
PRODUCTS = tuple(2**k for k in (12, 16, 20, 24, 27))
SENT = tuple(2**k for k in (6, 10, 14, 17, 20, 22))
ROUNDS, LONG = 5, 0.02
"""Rounds at least, and seconds of all rounds of one size, if they are short."""
MOST = 200
SQUARE = 512
"""Of the products that say how many operations a second there are."""
AGAIN = 10
"""How often a message is sent."""
BESIDE = 2**22
"""Bytes of the message that is sent while this rank computes, to see how much of its time that takes."""


def measured(*recordings: Recording) -> Machine:
    """This machine; see ``Machine.measure``."""
    with torch.no_grad(), below_autograd(), torch.random.fork_rng(devices=[]):
        curves = _agreed(_operators())
        flops, half = (2 * SQUARE**3 / t for t in _mean(_seconds([_square(torch.float32), _square(torch.bfloat16)])))
        sent = dict(_messages()) if _together() else {}
        beside = _beside() if sent else 1.0
        curves |= sent | {key: ((1.0, t),) for recording in recordings for key, t in _own(recording)}
    machine = Machine(
        name=_model(), dtypes={"bfloat16": half}, capacity=_capacity(), launch=curves["pointwise"][0][1], curves=curves,
        source="measured", flops=flops, memory=curves["pointwise"][-1][0] / curves["pointwise"][-1][1], beside=beside,
    )  # fmt: skip
    return _with_messages(machine, sent)


def _together() -> bool:
    """Whether there are other ranks, which measure, too."""
    return world.get_world_size() > 1 and not pretending()


def _with_messages(made: Machine, sent: Mapping[str, Curve]) -> Machine:
    if not sent:
        return made
    curve = sent["all_reduce"]
    (_, first), (size, last) = curve[0], curve[-1]
    return replace(made, latency=first, bandwidth=size / max(last - first, 1e-9))


def _crowd() -> tuple[float, Callable[[], float]]:
    """Ranks that want each core, and the clock: where several do, a rank's own time, of which each has a share."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.get_world_size())) if _together() else 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if ranks <= cores or torch.get_num_threads() > 1:
        return 1.0, time.perf_counter
    return ranks / cores, time.thread_time


def _meet() -> None:
    """Wait for the other ranks, which measure the same."""
    if _together():
        collectives.barrier(_everywhere())


def _everywhere() -> groups.Group:
    return groups.group(ProcessMesh(range(world.get_world_size()), ["all"]), 0)


# -- operators -------------------------------------------------------------------------------------------------------------


def _operators() -> dict[str, Curve]:
    """Seconds by size of all families, of attentions and of products, those of one size in turn."""
    found = dict[str, list[tuple[float, float]]]()
    for i, n in enumerate(ELEMENTS):
        made = dict(_samples(n, PRODUCTS[i] if i < len(PRODUCTS) else 0))
        made |= {"name": probes.name(), "number": probes.number(), "input": _input()} if i == 0 else {}
        for (name, sample), taken in zip(made.items(), _seconds([s.run for s in made.values()]), strict=True):
            found.setdefault(name, []).append((sample.size, taken / sample.calls))
    return {name: tuple(curve) for name, curve in found.items()}


def _samples(n: int, total: int) -> Iterator[tuple[str, Sample]]:
    """A sample of each family with about n elements, and products of about so many multiply-adds."""
    yield from ((name, make(n)) for name, make in probes.FAMILIES.items())
    for width in families.WIDTHS:
        yield f"attention {width}", probes.attention(width, False)(n)
        yield f"attention backward {width}", probes.attention(width, True)(n)
    for kind, thin in product(families.THIN, families.SIZES):
        sample = probes.product(kind, thin, total)
        if sample is not None:
            yield f"{kind} {thin}", sample


def _seconds(runs: Sequence[Run]) -> list[float]:
    """Of each of these calls, which are made in turn, again and again: the medians."""
    crowd, clock = _crowd()
    found: list[list[float]] = [[] for _ in runs]
    _turn(runs, clock, found)
    count = _mean([min(MOST, max(ROUNDS, LONG / max(1e-9, 2 * sum(t for (t,) in found))))])[0]
    for times in found:
        times.clear()
    for _ in range(int(count)):
        _meet()
        _turn(runs, clock, found)
    return [crowd * statistics.median(times) for times in found]


def _turn(runs: Sequence[Run], clock: Callable[[], float], found: Sequence[list[float]]) -> None:
    for run, times in zip(runs, found, strict=True):
        start = clock()
        run()
        run()
        times.append((clock() - start) / 2)


def _input() -> Sample:
    """What a replay does before it with its inputs: is each as it was, where is it now."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
    recording = record(lambda x: model(x))(torch.ones(1, 8))
    return Sample(1.0, lambda: recording.bound.ready([_ONE]), len(recording.inputs))


_ONE = torch.ones(1, 8)


def _square(dtype: torch.dtype) -> Run:
    x = torch.rand(SQUARE, SQUARE).to(dtype)
    return lambda: torch.mm(x, x)


def _own(recording: Recording) -> Iterator[tuple[str, float]]:
    """Seconds of each node that computes, in its place: the graph is run on tensors like its own, but for what it sends.

    One by one the nodes take longer than in a replay, by what it costs to look at the clock: together they take what it takes.
    """
    graph, found, (crowd, clock) = _silent(recording.graph), dict[str, list[float]](), _crowd()
    inputs = [_like(n) for n in graph.nodes if n.op == "placeholder"]
    try:
        for _ in range(ROUNDS):
            _meet()
            for node, taken in _run_through(graph, inputs, clock):
                found.setdefault(f"={families.signature(node)}", []).append(taken)
        run = compiled(graph)
        whole = crowd * statistics.median(_once(lambda: run(*inputs), clock) for _ in range(ROUNDS))
    except (RuntimeError, TypeError, IndexError, ValueError, ArithmeticError):  # it needs values that nobody has here
        return
    alone = {key: statistics.median(times) for key, times in found.items()}
    share = whole / sum(alone[key] * len(times) / ROUNDS for key, times in found.items())
    yield from ((key, taken * share) for key, taken in alone.items())


def _silent(graph: fx.Graph) -> fx.Graph:
    """A graph without its messages, whose results nobody looks at."""
    made, names = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        if node.target is not again.message and node.target is not getattr(again, "wait", again):
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


# -- messages --------------------------------------------------------------------------------------------------------------


def _messages() -> Iterator[tuple[str, Curve]]:
    """Seconds of each kind of message by the bytes that one sends, the same on all ranks: among all of them, and along lines
    of fewer, all lines at once, as along an axis of a mesh."""
    ranks = world.get_world_size()
    for count in (n for n in range(2, ranks + 1) if ranks % n == 0):
        axes = [[*range(n, n + count)] for n in range(0, ranks, count)]
        line = again.Line(ProcessMesh(axes, ["lines", "line"]), 1)
        for kind, made in _KINDS.items():
            found = []
            for sent in SENT:
                size, run = made(line, count, sent)
                found.append((size, _awaited(run)))
            curve = tuple(zip((size for size, _ in found), _mean([t for _, t in found]), strict=True))
            yield families.sent(kind, count), curve
            if count == ranks:
                yield kind, curve


def _awaited(run: Run) -> float:
    """Seconds of a message that all send at the same time."""
    rounds = []
    for _ in range(AGAIN + 2):
        rounds.append(_once(run))
    return statistics.median(rounds[2:])


def _sends(kind: str, line: again.Line, rest: tuple[Any, ...], given: int, into: int) -> Run:
    return partial(again.sender(kind, rest, line), torch.ones(max(into, 1)), torch.ones(given))


def _all_reduce(line: again.Line, count: int, sent: int) -> tuple[float, Run]:
    n = max(1, sent * count // (8 * (count - 1)))
    return 8.0 * n * (count - 1) / count, _sends("all_reduce", line, ("sum",), n, n)


def _all_gather(line: again.Line, count: int, sent: int) -> tuple[float, Run]:
    n = max(1, sent // (4 * (count - 1)))
    return 4.0 * n * (count - 1), _sends("all_gather_into_tensor", line, (count,), n, count * n)


def _reduce_scatter(line: again.Line, count: int, sent: int) -> tuple[float, Run]:
    n = max(1, sent // (4 * (count - 1)))
    return 4.0 * n * (count - 1), _sends("reduce_scatter_tensor", line, ("sum", count), count * n, n)


def _all_to_all(line: again.Line, count: int, sent: int) -> tuple[float, Run]:
    n = max(1, sent // (4 * (count - 1)))
    sizes = [n] * count
    return 4.0 * n * (count - 1), _sends("all_to_all_single", line, (sizes, sizes), count * n, count * n)


_KINDS: dict[str, Callable[[again.Line, int, int], tuple[float, Run]]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
}


def _beside() -> float:
    """The share of a started message's time in which this rank computes: where the copying needs its core, there is none."""
    line = again.Line(ProcessMesh(range(world.get_world_size()), ["all"]), 0)
    x, y = torch.ones(BESIDE // 4), torch.rand(512, 512)
    begin, send = again.sender("all_reduce", ("sum",), line, True), again.sender("all_reduce", ("sum",), line)

    def compute() -> None:
        for _ in range(4):
            torch.mm(y, y)

    def both() -> None:
        handle = begin(x, x)
        compute()
        again.wait(handle, x, x)

    alone, message, together = (_awaited(run) for run in (compute, partial(send, x, x), both))
    return _mean([min(1.0, max(0.0, (alone + message - together) / message))])[0]


def _once(run: Run, clock: Callable[[], float] = time.perf_counter) -> float:
    _meet()
    start = clock()
    run()
    return clock() - start


def _agreed(curves: dict[str, Curve]) -> dict[str, Curve]:
    """The curves of all ranks, averaged, so that all have the same."""
    mean = _mean([t for curve in curves.values() for _, t in curve])
    return {name: tuple((size, mean.pop(0)) for size, _ in curve) for name, curve in curves.items()}


def _mean(mine: list[float]) -> list[float]:
    """Of all ranks' numbers."""
    if not _together():
        return mine
    total: Tensor = collectives.all_reduce(torch.tensor(mine, dtype=torch.float64), _everywhere())
    return (total / world.get_world_size()).tolist()


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
