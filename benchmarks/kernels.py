"""Kernels of this GPU beside what ``Kernels`` says of them: of the preset of its kind, and as ``Machine.measure()`` finds them.

``python benchmarks/kernels.py [--out FILE]``, on a machine with a GPU and nothing else to do: some 40 seconds. Nothing here is
fitted: products, attentions and sizes are others than those that ``Machine.measure()`` looks at.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import onecard as oc
from onecard.machine.cost import PRESETS
from onecard.static.measure.on_gpu import aten, seconds

PRODUCTS = [
    (m, k, n)
    for m in (256, 1024, 2048, 8192, 16384)
    for k, n in ((1024, 4096), (4096, 1024), (5120, 5120), (4096, 14336), (14336, 4096), (12288, 1536), (2048, 6144))
] + [(8192, 8192, 8192), (300, 777, 1234), (512, 512, 512), (64, 4096, 4096), (16, 4096, 4096)]
ATTENTION = [(w, t, causal) for w in (64, 96, 128, 256) for t in (512, 2048, 4096, 16384) for causal in (False, True)]
SIZES = [1 << k for k in (16, 20, 22, 24, 27)]


def full(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def products() -> Any:
    for m, k, n in PRODUCTS:
        touched = 2.0 * (m * k + k * n + m * n)
        taken = seconds(lambda m=m, k=k, n=n: (full(m, k), full(n, k)), lambda x, w: torch.mm(x, w.t()), touched)
        yield (
            "product",
            f"{m} x {k} x {n}",
            taken,
            lambda c, m=m, k=k, n=n: c.kernels.product(c.flops, c.memory, m, k, n),
        )


def attentions() -> Any:
    forward = aten._scaled_dot_product_flash_attention
    for width, length, causal in ATTENTION:
        heads, batch = max(1, 2048 // width), max(1, 16384 // length)
        shape = batch, length, heads, width
        taken = seconds(
            lambda s=shape: tuple(full(*s).transpose(1, 2) for _ in range(3)),
            lambda q, k, v, causal=causal: forward(q, k, v, 0.0, causal),
            8.0 * math.prod(shape),
        )
        macs = 2.0 * batch * heads * length**2 * width / (2 if causal else 1)
        what = f"heads of {width}, {length:,} tokens{', causal' if causal else ''}"
        yield (
            "attention", what, taken,
            lambda c, macs=macs, w=width, t=length, causal=causal: c.kernels.attend(c.flops, macs, w, t, causal),
        )  # fmt: skip


def others() -> Any:
    table = {
        "pointwise": (2, 3, torch.mul),
        "gelu": (1, 2, torch.nn.functional.silu),
        "softmax": (1, 2, lambda x: aten._softmax(x.view(-1, 2048), -1, False)),
        "norm": (1, 2, lambda x: aten.native_layer_norm(x.view(-1, 2048), [2048], None, None, 1e-5)),
        "sum": (1, 1, torch.sum),
        "copy": (1, 2, lambda x: x.view(-1, 64, 16, 64).transpose(1, 2).contiguous()),
    }
    for family, (tensors, times, run) in table.items():
        for n in SIZES:
            touched = 2.0 * times * n
            taken = seconds(lambda t=tensors, n=n: tuple(full(n) for _ in range(t)), run, touched)
            yield family, f"{n:,} elements", taken, lambda c, b=touched, f=family: c.kernels.touch(c.memory, b, f)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    here = oc.Machine.measure()
    like = oc.Machine.preset(next((name for name in PRESETS if name in here.name), "H100"))
    found = [
        (kind, what, taken, law(like), law(here))
        for make in (products, attentions, others)
        for kind, what, taken, law in make()
    ]
    table = Table(title=f"{here.name}, torch {torch.__version__}: times by the law over measured ones")
    for column in ("", "kernels", "preset: mean off", "worst", "measured: mean off", "worst"):
        table.add_column(column, justify="left" if not column else "right")
    for kind in dict.fromkeys(k for k, *_ in found):
        rows = [(law / taken, own / taken) for k, _, taken, law, own in found if k == kind]
        off = [[abs(r[i] - 1) for r in rows] for i in (0, 1)]
        cells = [x for each in off for x in (sum(each) / len(each), max(each))]
        table.add_row(kind, str(len(rows)), *(f"{100 * x:.1f} %" for x in cells))
    Console(width=120).print(table)
    if out is not None:
        rows_out = [{"kind": k, "what": w, "seconds": t, "preset": p, "measured": m} for k, w, t, p, m in found]
        kernels = here.kernels
        made = {"device": here.name, "torch": torch.__version__, "cuda": torch.version.cuda, "rows": rows_out}
        names = ("processors", "start", "products", "memory", "attention", "attention_backward")
        made["measured"] = {name: getattr(kernels, name) for name in names}
        out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
