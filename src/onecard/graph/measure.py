"""Measure this machine: seconds of operators by family and size, of products by their shapes, of messages by kind and bytes.

Operators run as a replay runs them, below autograd, each with a result in memory of its own. A figure is the shortest of a
few rounds, of which each is long against the clock: what else the machine does only makes them longer.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from onecard import cost
from onecard._torch import OpOverload, below_autograd
from onecard.comm import again, collectives, groups, world
from onecard.comm.pretend import pretending
from onecard.cost import Curve, Machine
from onecard.graph import families
from onecard.graph.compiled import _last_uses as last_uses
from onecard.graph.compiled import called, compiled
from onecard.graph.recording import Recording
from onecard.graph.static import record
from onecard.mesh import ProcessMesh

aten = torch.ops.aten
ELEMENTS = tuple(2**k for k in (6, 10, 13, 16, 18, 20, 22))
PRODUCTS = tuple(2**k for k in (12, 16, 20, 24, 27))
SENT = tuple(2**k for k in (6, 10, 14, 17, 20, 22))
ROUNDS, ROUND = 5, 2e-3
Run = Callable[[], Any]


def measured(*recordings: Recording) -> Machine:
    """This machine; see ``Machine.measure``."""
    with torch.no_grad(), below_autograd(), torch.random.fork_rng(devices=[]):
        curves = {name: _curve(make, ELEMENTS) for name, make in _FAMILIES.items()}
        made = {f"{kind} {n}": _products(kind, n) for kind in families.THIN for n in families.SIZES}
        curves |= {name: curve for name, curve in made.items() if curve}
        curves["name"] = ((1.0, seconds(_name())),)
        curves["number"] = ((1.0, seconds(_number())),)
        curves["input"] = ((1.0, _input()),)
        half = {"bfloat16": _rate(torch.bfloat16)}
        sent = dict(_messages()) if world.get_world_size() > 1 and not pretending() else {}
        curves = _agreed(curves) | sent
        curves |= {key: ((1.0, t),) for recording in recordings for key, t in _operators(recording)}
    machine = Machine(
        name=_model(), dtypes=half, capacity=_capacity(), launch=curves["pointwise"][0][1], curves=curves, source="measured",
        flops=max(2 * size / t for name, curve in curves.items() if name[:4] in ("rows", "inne", "colu") for size, t in curve),
        memory=curves["pointwise"][-1][0] / curves["pointwise"][-1][1],
    )  # fmt: skip
    return _with_messages(machine, sent)


def _with_messages(made: Machine, sent: dict[str, Curve]) -> Machine:
    if not sent:
        return made
    curve = sent["all_reduce"]
    (_, first), (size, last) = curve[0], curve[-1]
    return replace(made, latency=first, bandwidth=size / max(last - first, 1e-9))


def seconds(run: Run) -> float:
    """Of one call: the shortest of a few rounds, each so long that the clock does not matter."""
    run()
    start = time.perf_counter()
    run()
    count = max(1, int(ROUND / max(time.perf_counter() - start, 1e-7)))
    found = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            run()
        found.append((time.perf_counter() - start) / count)
    return min(found)


# -- operators -------------------------------------------------------------------------------------------------------------


def _curve(make: Callable[[int], tuple[float, Run]], sizes: Sequence[int]) -> Curve:
    found = []
    for n in sizes:
        size, run = make(n)
        found.append((float(size), seconds(run)))
    return tuple(found)


def _rows(n: int) -> tuple[int, int]:
    """A matrix of about n elements whose rows are not long."""
    return max(1, n // 256), min(n, 256)


def _pair(call: Callable[[Tensor, Tensor], Any], tensors: int) -> Callable[[int], tuple[float, Run]]:
    """A family of operators of two tensors; ``tensors``: how many it touches."""

    def make(n: int) -> tuple[float, Run]:
        x, y = torch.rand(_rows(n)), torch.rand(_rows(n))
        return 4.0 * tensors * n, lambda: call(x, y)

    return make


def _norm_backward(n: int) -> tuple[float, Run]:
    x, (rows, width) = torch.rand(_rows(n)), _rows(n)
    weight, mean, root = torch.ones(width), torch.zeros(rows, 1), torch.ones(rows, 1)
    back = aten.native_layer_norm_backward.default
    return 12.0 * n, lambda: back(x, x, [width], mean, root, weight, weight, [True, True, True])


def _norm(n: int) -> tuple[float, Run]:
    x, weight = torch.rand(_rows(n)), torch.ones(_rows(n)[1])
    return 8.0 * n, lambda: torch.native_layer_norm(x, [weight.numel()], weight, weight, 1e-5)


def _adamw(n: int) -> tuple[float, Run]:
    given = [[torch.rand(n)] for _ in range(4)]
    options = {
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }
    return 16.0 * n, lambda: aten._fused_adamw_.default(*given, [], [torch.ones(())], **options)


def _embedding(n: int) -> tuple[float, Run]:
    weight, ids = torch.rand(4096, 64), torch.randint(4096, (max(1, n // 64),))
    return 8.0 * 64 * len(ids), lambda: torch.embedding(weight, ids)


def _embedding_backward(n: int) -> tuple[float, Run]:
    ids = torch.randint(256, (max(1, n // 64),))
    grad = torch.rand(len(ids), 64)
    return 4.0 * 64 * (len(ids) + 256), lambda: aten.embedding_dense_backward(grad, ids, 256, -1, False)


def _attention(back: bool) -> Callable[[int], tuple[float, Run]]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def make(n: int) -> tuple[float, Run]:
        time, heads = max(4, isqrt(n) // 2), 4
        q = torch.rand(1, heads, time, 32)
        out, sums = forward(q, q, q, 0.0, True)
        products = heads * time * time * 32
        if back:
            return 5.0 * products, lambda: backward(out, q, q, q, out, sums, 0.0, True)
        return 2.0 * products, lambda: forward(q, q, q, 0.0, True)

    return make


_FAMILIES: dict[str, Callable[[int], tuple[float, Run]]] = {
    "pointwise": _pair(torch.add, 3),
    "in place": _pair(lambda x, y: x.add_(y, alpha=1e-9), 2),
    "softmax": _pair(lambda x, y: aten._softmax(x, -1, False), 2),
    "softmax backward": _pair(lambda x, y: aten._softmax_backward_data(x, y, -1, torch.float32), 3),
    "norm": _norm,
    "norm backward": _norm_backward,
    "gelu": _pair(lambda x, y: F.gelu(x), 2),
    "gelu backward": _pair(lambda x, y: aten.gelu_backward(x, y), 3),
    "gelu tanh": _pair(lambda x, y: F.gelu(x, approximate="tanh"), 2),
    "gelu backward tanh": _pair(lambda x, y: aten.gelu_backward(x, y, approximate="tanh"), 3),
    "sum": _pair(lambda x, y: x.sum(), 1),
    "fill": _pair(lambda x, y: torch.zeros(x.shape), 1),
    "adamw": _adamw,
    "embedding": _embedding,
    "embedding backward": _embedding_backward,
    "attention": _attention(False),
    "attention backward": _attention(True),
}


def _name() -> Run:
    x = torch.rand(8, 8)
    return lambda: x.view(-1)


def _number() -> Run:
    """An operation on numbers, as a replay makes them for an optimizer's."""
    a, b = 0.9, 2.0
    return lambda: a * b


def _input() -> float:
    """Seconds before a replay for each of its inputs: is it as it was, where is it now."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
    recording = record(lambda x: model(x))(torch.ones(1, 8))
    return seconds(lambda: recording.bound.ready([_ONE])) / len(recording.inputs)


_ONE = torch.ones(1, 8)


def _products(kind: str, thin: int) -> Curve:
    """Products of which one size is thin, by multiply-adds; the other two are equal."""
    found = []
    for total in PRODUCTS:
        side = isqrt(total // thin)
        if not thin <= side <= 8192:
            continue
        wide, narrow, turned = torch.rand(side, side), torch.rand(side, thin), torch.rand(thin, side)
        runs: dict[str, Run] = {
            "rows": partial(F.linear, turned, wide),
            "inner": partial(torch.mm, turned.t(), turned),
            "columns": partial(torch.mm, wide, narrow),
        }
        found.append((float(side * side * thin), seconds(runs[kind])))
    return tuple(found)


def _rate(dtype: torch.dtype) -> float:
    x = torch.rand(512, 512).to(dtype)
    return 2 * 512**3 / seconds(lambda: torch.mm(x, x))


def _operators(recording: Recording) -> Iterator[tuple[str, float]]:
    """Seconds of each node that computes, in its place: the graph is run on tensors like its own, but for what it sends.

    One by one the nodes take longer than in a replay, by what it costs to look at the clock: together they take what it takes.
    """
    graph, found = _silent(recording.graph), dict[str, list[float]]()
    inputs = [_like(n) for n in graph.nodes if n.op == "placeholder"]
    try:
        for _ in range(ROUNDS):
            for node, taken in _run_through(graph, inputs):
                found.setdefault(f"={families.signature(node)}", []).append(taken)
        run = compiled(graph)
        whole = min(_once(lambda: run(*inputs)) for _ in range(2 * ROUNDS))
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


def _run_through(graph: fx.Graph, inputs: Sequence[Any]) -> Iterator[tuple[fx.Node, float]]:
    """Run a graph node by node; each with its seconds."""
    last, values, given = last_uses(graph), dict[fx.Node, Any](), iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            function: Any = called(node) if isinstance(node.target, OpOverload) else node.target
            start = time.perf_counter()
            values[node] = function(*args, **kwargs)
            yield node, time.perf_counter() - start
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
    """Seconds of each kind of message among all ranks, by the bytes that one sends; the same on all ranks: the mean."""
    count = world.get_world_size()
    line = again.Line(ProcessMesh(range(count), ["all"]), 0)
    for kind, rest, given, into, share in (
        ("all_reduce", ("sum",), 1, 0, 2 * (count - 1) / count),
        ("all_gather_into_tensor", (count,), 1, count, count - 1),
        ("all_to_all_single", None, count, count, (count - 1) / count),
    ):
        found = []
        for sent in SENT:
            n = max(1, int(sent / share / 4 / given)) if given == 1 else max(1, int(sent / share / 4 / count))
            x, y = torch.ones(n * given), torch.ones(n * max(into, 1))
            send = again.sender(kind, rest or ([n] * count, [n] * count), line)
            rounds = [_once(partial(send, y if into else x, x)) for _ in range(12)][2:]
            found.append((share * 4 * n * given, statistics.median(rounds)))
        mine = torch.tensor([t for _, t in found], dtype=torch.float64)
        mean = collectives.all_reduce(mine, groups.group(line.mesh, 0)) / count
        yield kind, tuple((size, t) for (size, _), t in zip(found, mean.tolist(), strict=True))


def _once(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _agreed(curves: dict[str, Curve]) -> dict[str, Curve]:
    """The curves of all ranks, averaged, so that all have the same."""
    count = world.get_world_size()
    if count == 1 or pretending():
        return curves
    mine = torch.tensor([t for curve in curves.values() for _, t in curve], dtype=torch.float64)
    mean = (collectives.all_reduce(mine, groups.group(ProcessMesh(range(count), ["all"]), 0)) / count).tolist()
    return {name: tuple((size, mean.pop(0)) for size, _ in curve) for name, curve in curves.items()}


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
