"""Operators that stand for their families when this machine is measured: each at a size, alone in a graph, as replays run it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from onecard._torch.names import tree_map
from onecard.static.code.compiled import compiled
from onecard.static.measure.together import Run
from onecard.static.price import convolutions, families

aten = torch.ops.aten


class Sample(NamedTuple):
    """A call, the size by which its seconds are looked up, and how often it does what is of that size."""

    size: float
    run: Run
    calls: int = 1


Probe = Callable[[int], Sample]
"""The sample of about so many elements."""
MANY = 8
"""Tensors in the lists of an operator for lists, up to ``SMALL`` elements each; else one."""
SMALL = 2**16


def replayed(func: Any, *args: Any, times: int = 1, **kwargs: Any) -> Run:
    """Calls of one operator as a replay makes them."""
    graph, given = fx.Graph(), list[Tensor]()

    def named(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        given.append(value)
        node = graph.placeholder(f"x{len(given)}")
        node.meta["tensor"] = (tuple(value.shape), value.stride(), value.dtype, value.device)
        return node

    args, kwargs = tree_map(named, (args, kwargs))
    for _ in range(times):
        graph.call_function(func, args, kwargs)
    graph.output(())
    return partial(compiled(graph), *given)


def _rows(n: int) -> tuple[int, int]:
    """A matrix of about n elements whose rows are not long."""
    return max(1, n // 256), min(n, 256)


def _of(func: Any, matrices: int, touched: int, *rest: Any, **named: Any) -> Probe:
    """An operator of so many matrices that touches so many."""

    def make(n: int) -> Sample:
        given = (torch.rand(_rows(n), device="cpu") for _ in range(matrices))
        return Sample(4.0 * touched * n, replayed(func, *given, *rest, **named))

    return make


def _copy(n: int) -> Sample:
    """What lies otherwise, as the heads of an attention do, made contiguous."""
    rows, width = _rows(n)
    x = torch.rand(rows, 4, max(1, width // 4), device="cpu").transpose(0, 1)
    return Sample(8.0 * x.numel(), replayed(aten.clone.default, x, memory_format=torch.contiguous_format))


def _norm(n: int) -> Sample:
    x, weight = torch.rand(_rows(n), device="cpu"), torch.ones(_rows(n)[1], device="cpu")
    return Sample(8.0 * n, replayed(aten.native_layer_norm.default, x, [weight.numel()], weight, weight, 1e-5))


def _norm_backward(n: int) -> Sample:
    x, (rows, width) = torch.rand(_rows(n), device="cpu"), _rows(n)
    weight, mean, root = (
        torch.ones(width, device="cpu"),
        torch.zeros(rows, 1, device="cpu"),
        torch.ones(rows, 1, device="cpu"),
    )
    back, wanted = aten.native_layer_norm_backward.default, [True, True, True]
    return Sample(12.0 * n, replayed(back, x, x, [width], mean, root, weight, weight, wanted))


def _lists(n: int, count: int) -> list[list[Tensor]]:
    return [[torch.rand(n, device="cpu") for _ in range(MANY if n <= SMALL else 1)] for _ in range(count)]


def _for_each(n: int) -> Sample:
    x, y = _lists(n, 2)
    return Sample(12.0 * n, replayed(aten._foreach_add_.List, x, y, alpha=1e-9), len(x))


def _adamw(n: int) -> Sample:
    given = _lists(n, 4)
    options: dict[str, Any] = {
        "lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False,
    }  # fmt: skip
    steps = [torch.ones((), device="cpu") for _ in given[0]]
    return Sample(16.0 * n, replayed(aten._fused_adamw_.default, *given, [], steps, **options), len(steps))


def _embedding(n: int) -> Sample:
    weight, ids = torch.rand(4096, 64, device="cpu"), torch.randint(4096, (max(1, n // 64),), device="cpu")
    return Sample(8.0 * 64 * len(ids), replayed(aten.embedding.default, weight, ids))


def _embedding_backward(n: int) -> Sample:
    ids = torch.randint(256, (max(1, n // 64),), device="cpu")
    run = replayed(aten.embedding_dense_backward.default, torch.rand(len(ids), 64, device="cpu"), ids, 256, -1, False)
    return Sample(4.0 * 64 * (len(ids) + 256), run)


FAMILIES: dict[str, Probe] = {
    "pointwise": _of(aten.add.Tensor, 2, 3),
    "in place": _of(aten.add_.Tensor, 2, 2, alpha=1e-9),
    "copy": _copy,
    "for each": _for_each,
    "softmax": _of(aten._softmax.default, 1, 2, -1, False),
    "softmax backward": _of(aten._softmax_backward_data.default, 2, 3, -1, torch.float32),
    "log softmax": _of(aten._log_softmax.default, 1, 2, -1, False),
    "log softmax backward": _of(aten._log_softmax_backward_data.default, 2, 3, -1, torch.float32),
    "norm": _norm,
    "norm backward": _norm_backward,
    "gelu": _of(aten.gelu.default, 1, 2),
    "gelu backward": _of(aten.gelu_backward.default, 2, 3),
    "gelu tanh": _of(aten.gelu.default, 1, 2, approximate="tanh"),
    "gelu backward tanh": _of(aten.gelu_backward.default, 2, 3, approximate="tanh"),
    "sum": _of(aten.sum.default, 1, 1),
    "sum of rows": _of(aten.sum.dim_IntList, 1, 1, [0]),
    "fill": _of(aten.fill_.Scalar, 1, 1, 0.0),
    "adamw": _adamw,
    "embedding": _embedding,
    "embedding backward": _embedding_backward,
}


def attention(width: int, back: bool) -> Probe:
    """Some heads of a width, of which each is of a size; that counts multiply-adds."""
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def make(n: int) -> Sample:
        time = max(4, isqrt(n) // 2)
        heads = MANY if time > 128 else 4 * MANY
        q = torch.rand(1, time, heads, width, device="cpu").transpose(1, 2)
        products = time * time * width
        if back:
            out, sums = forward(q, q, q, 0.0, True)
            return Sample(5.0 * products, replayed(backward, out, q, q, q, out, sums, 0.0, True), heads)
        return Sample(2.0 * products, replayed(forward, q, q, q, 0.0, True), heads)

    return make


def product(kind: str, thin: int, total: int) -> Sample | None:
    """A product of which one size is thin and the others are equal, of about ``total`` multiply-adds; None if it is not thin."""
    side = isqrt(total // thin)
    if not thin <= side <= 4096:
        return None
    size = float(side * side * thin)
    if kind == families.THIN[0]:
        return Sample(
            size,
            replayed(aten.mm.default, torch.rand(thin, side, device="cpu"), torch.rand(side, side, device="cpu").t()),
        )
    if kind == families.THIN[1]:
        return Sample(
            size,
            replayed(aten.mm.default, torch.rand(thin, side, device="cpu").t(), torch.rand(thin, side, device="cpu")),
        )
    return Sample(
        size, replayed(aten.mm.default, torch.rand(side, side, device="cpu"), torch.rand(side, thin, device="cpu"))
    )


def convolution(channels: int, back: bool, total: int) -> Sample | None:
    """Images of 16 x 16 under weights of 3 x 3, of about ``total`` multiply-adds, at least two of them; each channel alone, if it
    is one. None if so few do not make two."""
    groups = _ALONE if channels == 1 else 1
    width = channels * groups
    images = total // (256 * 9 * width * channels)
    if not 2 <= images <= 512:
        return None
    x, weight = torch.rand(images, width, 16, 16, device="cpu"), torch.rand(width, channels, 3, 3, device="cpu")
    rest = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    products = float(x.numel() * channels * 9)
    if back:
        given = (convolutions.BACKWARD, x, x, weight, [width], *rest, [True, True, True])
        return Sample(2 * products, replayed(*given))
    return Sample(products, replayed(convolutions.FORWARD, x, weight, None, *rest))


_ALONE = 32


def name() -> Sample:
    """Another name for memory."""
    return Sample(1.0, replayed(aten.view.default, torch.rand(8, 8, device="cpu"), [64], times=MANY), MANY)


def number() -> Sample:
    """An operation on numbers, as a replay makes them for an optimizer's."""
    return Sample(1.0, replayed(operator.pow, 0.9, 2.0, times=MANY), MANY)
