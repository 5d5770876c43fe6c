"""Activation memory of a transformer layer, measured: what autograd keeps for backward, without devices or data.

python -m onecard.planning.activations                       # a layer of GPT-3 175B
python -m onecard.planning.activations --hidden 8192 --heads 64 --tensor-parallel 4
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from onecard import fleet
from onecard.comm.world.pretend import pretend
from onecard.fleet.layers.transformer import ParallelTransformerLayer

MIB = 2**20


@dataclass(frozen=True)
class LayerSizes:
    """A transformer layer and how it is divided."""

    heads: int = 96
    sequence: int = 2048
    hidden: int = 12288
    batch: int = 1
    tensor_parallel: int = 8
    dropout: float = 0.1
    dtype: str = "bfloat16"


def saved_bytes(run: Callable[[], Any], ignore: list[Tensor] | None = None) -> int:
    """Bytes that autograd keeps of a forward pass: saved tensors, each memory counted once.

    Args:
        run: the forward pass; its result is held while it is counted.
        ignore: tensors whose memory does not count, such as parameters.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> saved_bytes(lambda: x.exp().sin())  # exp keeps its result, which is what sin keeps
        16
    """
    apart = {t.untyped_storage()._cdata for t in ignore or []}
    found: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in apart:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
    total = sum(storage.nbytes() for storage in found.values())
    del kept
    return total


@dataclass(frozen=True)
class DivisionRow:
    """One way to divide a layer: bytes a rank keeps, and what the paper's formula says."""

    name: str
    measured: int
    formula: float


# name, whether tensor parallel, whether sequence parallel, what is computed again
_WAYS: tuple[tuple[str, bool, bool, Any], ...] = (
    ("no parallelism", False, False, "none"),
    ("tensor parallel", True, False, "none"),
    ("tensor + sequence parallel", True, True, "none"),
    ("tensor + sequence parallel, selective recompute", True, True, "selective"),
    ("full recompute", True, False, "full"),
)


def formula(sizes: LayerSizes, t: int, sequence_parallel: bool, again: str) -> float:
    """Bytes of a layer by Korthikanti et al. (2022), equations 1, 2, 4 and 6, for 2-byte numbers.

    Example:
        >>> round(formula(LayerSizes(), 8, True, "selective") / MIB)
        102
    """
    sbh = sizes.sequence * sizes.batch * sizes.hidden
    if again == "full":
        return 2.0 * sbh
    scores = 0.0 if again == "selective" else 5.0 * sizes.heads * sizes.sequence / sizes.hidden
    if sequence_parallel:
        return sbh * (34 + scores) / t
    return sbh * (10 + (24 + scores) / t)


def measure(sizes: LayerSizes) -> list[DivisionRow]:
    """What a rank keeps of the layer, under each way to divide it. No memory is used: the tensors are meta tensors."""
    rows = []
    for name, cut, sequence_parallel, again in _WAYS:
        t = sizes.tensor_parallel if cut else 1
        with pretend(t):
            strategy = fleet.DistributedStrategy()
            strategy.hybrid_configs = {"mp_degree": t}
            fleet.init(is_collective=True, strategy=strategy)
            rows.append(
                DivisionRow(
                    name, _of_layer(sizes, t, sequence_parallel, again), formula(sizes, t, sequence_parallel, again)
                )
            )
    return rows


def _of_layer(sizes: LayerSizes, t: int, sequence_parallel: bool, again: Any) -> int:
    where: dict[str, Any] = {"device": "meta", "dtype": getattr(torch, sizes.dtype)}
    layer: nn.Module = ParallelTransformerLayer(
        sizes.hidden,
        sizes.heads,
        attention_dropout=sizes.dropout,
        hidden_dropout=sizes.dropout,
        sequence_parallel=sequence_parallel,
        recompute=again,
        **where,
    )
    time = sizes.sequence // t if sequence_parallel else sizes.sequence
    x = torch.empty((time, sizes.batch, sizes.hidden), requires_grad=True, **where)
    return saved_bytes(lambda: layer(x), list(layer.parameters()))


def table(rows: list[DivisionRow], layers: int = 96) -> Table:
    """MiB of a layer, measured and by the formula."""
    made = Table(title="activation memory of a transformer layer, on one rank", title_justify="left")
    for column in ("", "measured MiB", "formula MiB", "measured / formula", f"GiB of {layers} layers"):
        made.add_column(column, justify="right" if column else "left")
    for row in rows:
        made.add_row(
            row.name,
            f"{row.measured / MIB:.1f}",
            f"{row.formula / MIB:.1f}",
            f"{row.measured / row.formula:.4f}",
            f"{layers * row.measured / 2**30:.2f}",
        )
    return made


def main(sizes: LayerSizes) -> None:
    """Print the table."""
    Console().print(table(measure(sizes)))


if __name__ == "__main__":
    main(tyro.cli(LayerSizes))
