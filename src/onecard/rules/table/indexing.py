"""Reading by position: select, slice, embedding, index_select, gather, advanced indexing; and their backward operators.

Where the indexed dim is cut, the rank that has an element gives it, the others give zero: the result is a pending sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import can_sum, names, signature
from onecard.rules.table._shift import shift

aten = torch.ops.aten


# ---- select, slice


def _select_local(c: Local) -> None:
    if not c.cut("v"):
        return
    dim = c.call.dim
    (offset, length), at = c.span("v"), c.call.values["index"] % c.size("v")
    shape = c.result_shape()
    c.copies = True

    def run(x: Tensor, *_: Any) -> Tensor:
        if not offset <= at < offset + length:
            return x.new_zeros(shape)
        # A copy here too: whether a pending value is alone in its memory, and in which order, must not differ by rank.
        return x.select(dim, at - offset).clone(memory_format=torch.contiguous_format)

    c.run = run


def _unless_summable(call: Call, factor: str) -> str:
    """What a rank lacks it gives as zero; where that cannot be summed up, the factor must be whole."""
    return "" if can_sum(call.self) else factor


@row("select.int select_copy", local=_select_local, positions="v", any_rows=True)
def _select(call: Call) -> Form:
    # Not ``moves``: where the dim is cut, another kind of pending value would not survive the sum.
    return Form("... dim:v -> ...", linear="self", whole=_unless_summable(call, "v"))


def _bounds(call: Call, size: int) -> tuple[int, int, int]:
    """start, stop, step as non-negative numbers within the dim."""
    return slice(call.start, call.end, call.step).indices(size)


def _slice_local(c: Local) -> None:
    dim = c.call.dim % c.call.self.dim()
    if not c.cut("v"):
        if _is_all(c.call, c.call.self.shape[dim]):
            c.set("start", 0)
            c.set("end", c.operand_shape()[dim])
        return
    start, _, step = _bounds(c.call, c.size("v"))
    offset, length = c.span("v")
    shape = c.result_shape()
    first = min(max(0, -(-(offset - start) // step)), shape[dim])
    count = max(0, min(-(-(offset + length - start) // step), shape[dim]) - first)
    c.copies = True

    def run(x: Tensor, *_: Any) -> Tensor:
        made = x.new_zeros(shape)
        if count:
            begin = start + first * step - offset
            mine = aten.slice(x, dim, begin, begin + (count - 1) * step + 1, step)
            made.narrow(dim, first, count).copy_(mine)
        return made

    c.run = run


def _is_all(call: Call, size: int) -> bool:
    return _bounds(call, size) == (0, size, 1)


@row("slice.Tensor slice_copy.Tensor", local=_slice_local, positions="v", any_rows=True)
def _slice(call: Call) -> Form:
    if _is_all(call, call.self.shape[call.dim]):
        return Form("... -> ...", linear="self", moves=True)
    return Form("... dim:v -> ... dim:_", linear="self", whole=_unless_summable(call, "v"))


def _sizes_local(c: Local) -> None:
    c.set("input_sizes", list(c.result_shape()))


row("select_backward", "... -> ... dim:_", linear="grad_output", local=_sizes_local, positions="")


@row("slice_backward", local=_sizes_local, positions="")
def _slice_backward(call: Call) -> Form:
    everything = _is_all(call, call.input_sizes[call.dim])
    return Form("... -> ..." if everything else "... dim:_ -> ... dim:_", linear="grad_output")


# ---- embedding


def _embedding_local(c: Local) -> None:
    if not c.cut("v"):
        return
    shape = c.result_shape()

    def run(weight: Tensor, indices: Tensor, *_: Any, **__: Any) -> Tensor:
        at, elsewhere = shift(c, "v", indices)
        if weight.shape[0] == 0:
            return weight.new_zeros(shape)
        return aten.embedding(weight, at).masked_fill_(elsewhere.unsqueeze(-1), 0)

    c.run = run


row("embedding", "v d, ... -> ... d", linear="weight", local=_embedding_local, positions="v", hint=("indices", "v"),
    picks="weight")  # fmt: skip


def _embedding_backward_local(c: Local) -> None:
    if not c.cut("v"):
        return
    offset, length = c.span("v")
    pad = c.call.padding_idx - offset if 0 <= c.call.padding_idx - offset < length else -1

    def run(grad: Tensor, indices: Tensor, _: int, __: int, scale: bool) -> Tensor:
        at, elsewhere = shift(c, "v", indices)
        at = torch.where(elsewhere, length, at)
        return aten.embedding_dense_backward(grad, at, length + 1, pad, scale)[:length]

    c.run = run


@row("embedding_dense_backward", local=_embedding_backward_local, positions="v", hint=("indices", "v"))
def _embedding_backward(call: Call) -> Form:
    # Scaling by frequency counts an index over the whole batch.
    whole = "..." if call.scale_grad_by_freq else ""
    return Form("... d, ... -> v d", linear="grad_output", whole=whole)


# ---- embedding_bag: only the width of the table may be cut

_MAX = 2  # of the modes sum, mean, max


def _bag_sizes(call: Call) -> list[list[str]]:
    """What the bags look like depends on the indices alone; with max the place of each element is told, too."""
    return [["_", "d"] if t.dim() == 2 else ["_"] * t.dim() for t in call.results[1:]]


def _bag_results(call: Call) -> list[Tensor]:
    """One size for each bag. The last result is of use for max only; the CPU's has the shape of the sizes else."""
    output, place, sizes, largest = call.meta_results()
    sizes = sizes.new_empty(output.shape[:1])
    return [output, place, sizes, largest if call.mode == _MAX else sizes.new_empty(sizes.shape)]


def _bag_local(c: Local) -> None:
    shape, mode = c.result_shape(3), c.call.mode

    def run(*args: Any, **kwargs: Any) -> list[Tensor]:
        made = list(aten._embedding_bag(*args, **kwargs))
        if mode != _MAX and made[3].shape != shape:
            made[3] = made[2].new_empty(shape)
        return made

    c.run = run


@row("_embedding_bag", local=_bag_local, positions="", results=_bag_results)
def _embedding_bag(call: Call) -> Form:
    operands = [["_", "d"], *[["_"]] * (len(call.operands) - 1)]
    bags = [f"{' '.join(dims)} @1 2" if "d" not in dims else "_ d" for dims in _bag_sizes(call)]
    text = f"{signature(operands, [['_', 'd']])}, {', '.join(bags)}"
    return Form(text, linear="" if call.mode == _MAX else "weight", nonempty="d")


def _bag_gradient(call: Call) -> list[Tensor]:
    return [call.grad.new_empty([call.num_weights, call.grad.shape[1]])]


@row("_embedding_bag_backward", results=_bag_gradient)
def _embedding_bag_backward(call: Call) -> Form | None:
    if call.values.get("sparse"):
        return None
    operands = [["_", "d"] if t.dim() == 2 else ["_"] * t.dim() for t in call.operands]
    return Form(signature(operands, [["_", "d"]]), linear="grad", nonempty="d")


def _bag_weights_gradient(call: Call) -> list[Tensor]:
    return [call.grad.new_empty(call.values["indices"].shape)]


row("_embedding_bag_per_sample_weights_backward", "_ d, _ d, _, _, _ -> _", linear="grad * weight", nonempty="d",
    results=_bag_weights_gradient, macs=lambda call: call.values["indices"].numel() * call.grad.shape[1])  # fmt: skip


# ---- index_select, gather, take


def _index_select_local(c: Local) -> None:
    if not c.cut("v"):
        return
    shape, dim = c.result_shape(), c.call.dim

    def run(x: Tensor, _: int, index: Tensor) -> Tensor:
        at, elsewhere = shift(c, "v", index)
        if x.shape[dim] == 0:
            return x.new_zeros(shape)
        across = [1] * x.dim()
        across[dim] = -1
        return aten.index_select(x, dim, at).masked_fill_(elsewhere.view(across), 0)

    c.run = run


@row("index_select", local=_index_select_local, positions="v", picks="self")
def _index_select(call: Call) -> Form:
    return Form("... dim:v, [i] -> ... dim:i", linear="self", whole=_unless_summable(call, "v"))


def _gather_local(c: Local) -> None:
    if not c.cut("v"):
        return
    shape, dim = c.result_shape(), c.call.dim

    def run(x: Tensor, _: int, index: Tensor, **__: Any) -> Tensor:
        at, elsewhere = shift(c, "v", index)
        return aten.gather(x, dim, at).masked_fill_(elsewhere, 0) if x.shape[dim] else x.new_zeros(shape)

    c.run = run


@row("gather", local=_gather_local, positions="v", picks="self")
def _gather(call: Call) -> Form:
    x, index = call.self, call.values["index"]
    if x.dim() != index.dim() or x.dim() == 0:
        return Form(signature([["_"] * t.dim() for t in call.operands], [["_"] * index.dim()]), linear="self")
    # Position p of the index reads at position p of the other dims: these are alike only if they are as long.
    new = [d if a == b else "_" for d, a, b in zip(names(x.dim()), x.shape, index.shape, strict=True)]
    old = list(new)
    old[call.dim], new[call.dim] = "v" if can_sum(x) else "_", "i"
    return Form(signature([old, new], [new]), linear="self")


@row("take", picks="self")
def _take(call: Call) -> Form:
    index = names(call.values["index"].dim(), "i")
    return Form(signature([["_"] * call.self.dim(), index], [index]), linear="self")


# ---- x[i, :, j]


class Indexed:
    """How ``x[i, :, j]`` pairs dims: of ``x``, of each index tensor, and of what comes out."""

    def __init__(self, x: Tensor, indices: list[Tensor | None]) -> None:
        self.places = [p for p, index in enumerate(indices) if index is not None]
        given = [index for index in indices if index is not None]
        self.plain = all(index.dtype not in (torch.bool, torch.uint8) for index in given)
        rank = max((index.dim() for index in given), default=0)
        joint = names(rank, "i")
        self.indices = [joint[rank - index.dim() :] for index in given]
        self.x = [f"v{d}" if d in self.places else f"d{d}" for d in range(x.dim())]
        kept = [d for d in self.x if d[0] == "d"]
        adjacent = self.places == list(range(self.places[0], self.places[-1] + 1)) if self.places else True
        # Index tensors that are not side by side put their dims first.
        self.at = self.places[0] if adjacent and self.places else 0
        self.result = [*kept[: self.at], *joint, *kept[self.at :]]
        self.after = len(kept) - self.at


INDEXED = " ".join(f"v{dim}" for dim in range(16))  # the dims that indices may look up


def _index_local(c: Local) -> None:
    indexed = Indexed(c.call.self, c.call.indices)
    cut = [p for p in indexed.places if c.cut(f"v{p}")]
    if not cut:
        return
    shape = c.result_shape()

    def run(x: Tensor, indices: list[Tensor | None]) -> Tensor:
        local, elsewhere = list(indices), torch.zeros((), dtype=torch.bool, device=x.device)
        for p in cut:
            local[p], missing = shift(c, f"v{p}", indices[p], negative=True)  # type: ignore[arg-type]
            elsewhere = elsewhere | missing
        if any(x.shape[p] == 0 for p in cut):
            return x.new_zeros(shape)
        return aten.index(x, local).masked_fill_(elsewhere[(..., *(None,) * indexed.after)], 0)

    c.run = run


@row("index.Tensor _unsafe_index", local=_index_local, positions=INDEXED, picks="self")
def _index(call: Call) -> Form | None:
    indexed = Indexed(call.self, call.indices)
    if not indexed.plain:
        return None
    whole = "" if can_sum(call.self) else " ".join(f"v{p}" for p in indexed.places)
    return Form(signature([indexed.x, *indexed.indices], [indexed.result]), linear="self", whole=whole)
