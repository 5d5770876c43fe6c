"""Measure this GPU: the shares of its peaks that kernels reach, by which ``Kernels`` tells the time of any.

Kernels are queued behind a kernel that sleeps, so that the host, which starts them, is not what is measured; before, the GPU is
kept at work until its clocks are those of a training, not of a start. Operands are more than its cache holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onecard._torch.threads import gpu_sleeps
from onecard.machine.cost import PRESETS, Machine
from onecard.machine.kernels import RAMP, Kernels

aten = torch.ops.aten
Run = Callable[..., Any]
WARM = 1.5
"""Seconds of products before anything is measured."""
BYTES = 2e8
"""Of all operands of a probe together: more than a cache."""
_CLOCK = 2e9  # cycles a second, at most: how long a sleep lasts


class KernelProbe(NamedTuple):
    """One call, the bytes that it reads and writes or its operations, and what its operands are made by."""

    work: float
    make: Callable[[], tuple[Any, ...]]
    run: Run


def seconds(make: Callable[[], tuple[Any, ...]], run: Run, touched: float = BYTES, least: float = 0.004) -> float:
    """Of one call on the present GPU: the median of three rounds of some ``least`` seconds each."""
    sets = [make() for _ in range(max(1, min(32, ceil(BYTES / max(touched, 1.0)))))]
    for given in sets[:2]:
        run(*given)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run(*sets[0])
    started = time.perf_counter() - begin
    torch.cuda.synchronize()
    count = max(5, min(300, int(least / max(time.perf_counter() - begin, 1e-5))))
    found = []
    for _ in range(3):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        gpu_sleeps(int(2 * _CLOCK * (started * count + 1e-3)))
        first.record()
        for i in range(count):
            run(*sets[i % len(sets)])
        last.record()
        torch.cuda.synchronize()
        found.append(first.elapsed_time(last) / 1e3 / count)
    return sorted(found)[1]


def measured_gpu() -> Machine:
    """The present GPU; links are those of the data sheet of its kind, as nothing of them can be seen from one."""
    properties = torch.cuda.get_device_properties(0)
    like = next((name for name in PRESETS if name in properties.name), "H100")
    sheet, known = Machine.preset(like), Kernels.of("a100" if like == "A100" else "h100")
    with torch.no_grad(), torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        _warm()
        start = max(1e-6, seconds(lambda: (_full(256),), lambda x: x.add_(1), 1024))
        shares = {name: _share(probe, sheet.memory, start) for name, probe in _touching().items()}
        made = replace(
            known, processors=properties.multi_processor_count, start=start, memory={"": shares["pointwise"], **shares}
        )
        products = {name: _product(sheet, made, size, name) for name, size in _PRODUCTS.items()}
        attention, backward = (
            {str(w): _attention(w, back) / sheet.dtypes["bfloat16"] for w in _WIDTHS} for back in (False, True)
        )
    kernels = replace(
        made, products={"": products["bfloat16"], **products}, attention=attention, attention_backward=backward,
        source="measured",
        made={"*": f"Machine.measure() on {properties.name}, torch {torch.__version__}; tiles and messages as of {like}"},
    )  # fmt: skip
    return replace(
        sheet, name=properties.name, capacity=properties.total_memory, launch=start, kernels=kernels, source="measured"
    )


_PRODUCTS = {"bfloat16": 4096, "float16": 4096, "float32": 2048, "float64": 2048}
_WIDTHS = (32, 64, 128, 256)
_N = 1 << 26
"""Elements of what reads and writes."""


def _full(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def _warm() -> None:
    x, begin = _full(8192, 8192), time.perf_counter()
    while time.perf_counter() - begin < WARM:
        torch.mm(x, x)
        torch.cuda.synchronize()


def _product(sheet: Machine, kernels: Kernels, side: int, name: str) -> float:
    """The share of the peak at which the law of tiles and waves tells the time of a square product that was measured."""
    dtype, flops = getattr(torch, name), sheet.dtypes.get(name, sheet.flops)
    taken = seconds(lambda: (_full(side, side, dtype=dtype), _full(side, side, dtype=dtype)), torch.mm, 0.0)
    share = 2 * side**3 / taken / flops
    for _ in range(4):
        guess = replace(kernels, products={"": share})
        share *= guess.product(flops, sheet.memory, side, side, side, 1, name) / taken
    return share


def _attention(width: int, back: bool) -> float:
    """Operations a second of heads of a width over a long time."""
    count, length = max(1, 2048 // width), 8192
    forward, backward = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward

    def make() -> tuple[Any, ...]:
        q, k, v = (_full(1, length, count, width).transpose(1, 2) for _ in range(3))
        if not back:
            return q, k, v
        out, sums, cum_q, cum_k, max_q, max_k, seed, offset, _ = forward(q, k, v, 0.0, False)
        return out, q, k, v, out, sums, cum_q, cum_k, max_q, max_k, 0.0, False, seed, offset

    taken = seconds(make, backward if back else lambda q, k, v: forward(q, k, v, 0.0, False))
    lost = RAMP * (2 if back else 1) / length  # of the tiles at the ends, which the law counts by itself
    return (10 if back else 4) * count * length**2 * width * (1 + lost) / taken


def _share(probe: KernelProbe, bandwidth: float, start: float) -> float:
    taken = seconds(probe.make, probe.run, probe.work)
    return probe.work / max(taken - start, taken / 2) / bandwidth


def _of(tensors: int, run: Run, count: int, *rest: Tensor) -> KernelProbe:
    """An operator in bfloat16 on rows of 4,096, which touches so many tensors of them."""
    return KernelProbe(2.0 * count * _N, lambda: (*(_full(_N // WIDTH, WIDTH) for _ in range(tensors)), *rest), run)


WIDTH = 4096
"""Elements of a row."""


def _touching() -> dict[str, KernelProbe]:
    """An operator for each family that makes no products."""
    weight, ids = _full(WIDTH), torch.randint(32000, (_N // WIDTH,), device="cuda")
    norm, norm_back = aten.native_layer_norm, aten.native_layer_norm_backward
    dense = aten.embedding_dense_backward

    def normed() -> tuple[Any, ...]:
        x = _full(_N // WIDTH, WIDTH)
        _, mean, root = norm(x, [WIDTH], weight, weight, 1e-5)
        return x, mean, root

    return {
        "pointwise": _of(2, torch.add, 3),
        "in place": _of(2, lambda x, y: x.add_(y, alpha=1e-9), 3),
        "copy": _of(1, lambda x: x.view(-1, 32, 128, 32).transpose(1, 2).contiguous(), 2),
        "softmax": _of(1, lambda x: aten._softmax(x, -1, False), 2),
        "softmax backward": _of(2, lambda x, y: aten._softmax_backward_data(x, y, -1, x.dtype), 3),
        "log softmax": _of(1, lambda x: aten._log_softmax(x, -1, False), 2),
        "log softmax backward": _of(2, lambda x, y: aten._log_softmax_backward_data(x, y, -1, x.dtype), 3),
        "norm": _of(1, lambda x: norm(x, [WIDTH], weight, weight, 1e-5), 2),
        "norm backward": KernelProbe(
            6.0 * _N, normed, lambda x, m, r: norm_back(x, x, [WIDTH], m, r, weight, weight, [True] * 3)
        ),
        "gelu": _of(1, aten.gelu, 2),
        "gelu backward": _of(2, aten.gelu_backward, 3),
        "sum": _of(1, torch.sum, 1),
        "sum of rows": _of(1, lambda x: x.sum(0), 1),
        "fill": _of(1, lambda x: x.fill_(0.0), 1),
        "dropout": _of(1, lambda x: aten.native_dropout(x, 0.1, True), 2)._replace(work=5.0 * _N),
        "embedding": _of(1, lambda x, at: aten.embedding(x, at), 2, ids % (_N // WIDTH)),
        "embedding backward": _of(1, lambda x: dense(x, ids, 32000, -1, False), 1)._replace(
            work=2.0 * (_N + 32000 * WIDTH)
        ),
        **_of_lists(),
    }


def _of_lists() -> dict[str, KernelProbe]:
    """What optimizers do with all parameters at once, in float32."""
    options = {
        "lr": 1e-9,
        "beta1": 0.9,
        "beta2": 0.99,
        "weight_decay": 0.1,
        "eps": 1e-8,
        "amsgrad": False,
        "maximize": False,
    }

    def lists() -> tuple[Any, ...]:
        each = [[torch.rand(1 << 22, device="cuda") for _ in range(4)] for _ in range(4)]
        return (*each, [torch.ones((), device="cuda") for _ in range(4)])

    return {
        "for each": KernelProbe(
            12.0 * (1 << 24), lambda: lists()[:2], lambda x, y: aten._foreach_add_.List(x, y, alpha=1e-9)
        ),
        "adamw": KernelProbe(
            28.0 * (1 << 24), lists, lambda p, g, m, v, s: aten._fused_adamw_(p, g, m, v, [], s, **options)
        ),
    }
