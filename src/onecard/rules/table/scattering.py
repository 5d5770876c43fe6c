"""Writing by position: scatter, index_add, index_put and their like, masked_fill.

Where the indexed dim is cut, each rank writes what falls on its part; the rest goes to a spare slot, thrown away.
Where the *index* is cut, each rank adds its entries: only sums come out right, as a pending sum.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import names, signature
from onecard.rules.table._shift import shift, with_spare
from onecard.rules.table.indexing import INDEXED, Indexed


def _finish(c: Local, x: Tensor, made: Tensor) -> Tensor:
    """The result without its spare slot; written back for an in-place operator."""
    return x.copy_(made) if c.call.schema.written else made.contiguous()


def _write_local(c: Local) -> None:
    """For operators that take (self, dim, index, ...)."""
    if not c.cut("v"):
        return
    func, dim, (_, length) = c.call.func, c.call.dim, c.span("v")

    def run(x: Tensor, _: int, index: Tensor, *rest: Any, **more: Any) -> Tensor:
        at, elsewhere = shift(c, "v", index)
        made = func(with_spare(x, dim), dim, torch.where(elsewhere, length, at), *rest, **more)
        return _finish(c, x, made.narrow(dim, 0, length))

    c.run = run


def _all_whole(call: Call) -> Form:
    return Form(signature([["_"] * t.dim() for t in call.operands], [["_"] * t.dim() for t in call.results]))


def _scatter_form(call: Call, adds: bool) -> Form:
    rank = call.self.dim()
    written = [t for t in call.operands[1:] if t.dim() == rank]  # index, and src unless it is a number
    if rank == 0 or len(written) != len(call.operands) - 1:
        return _all_whole(call)
    dim = call.dim % rank
    same = [all(t.shape[d] == call.self.shape[d] for t in written) for d in range(rank)]
    base = [d if alike else "_" for d, alike in zip(names(rank), same, strict=True)]
    x, index = list(base), list(base)
    x[dim] = "v"
    index[dim] = "i" if adds and written[0].shape[dim] == written[-1].shape[dim] else "_"
    linear = "self + src" if adds or (len(written) == 2 and "reduce" not in call.values) else ""
    return Form(signature([x] + [index] * len(written), [x]), linear=linear)


@row("scatter.src scatter.value scatter.reduce scatter.value_reduce", local=_write_local, positions="v")
def _scatter(call: Call) -> Form:
    return _scatter_form(call, adds=False)


@row("scatter_add", local=_write_local, positions="v")
def _scatter_add(call: Call) -> Form:
    return _scatter_form(call, adds=True)


@row("scatter_reduce", local=_write_local, positions="v")
def _scatter_reduce(call: Call) -> Form:
    return _scatter_form(call, adds=call.reduce == "sum" and call.include_self)


_PLACING = ("index_copy", "index_fill")  # what they write they take as it is


def _index_form(call: Call, adds: bool) -> Form:
    """For operators whose index is one-dim and whose source has the shape of self, but for that dim."""
    x = names(call.self.dim())
    if not x or call.values["index"].dim() != 1:
        return _all_whole(call)
    source = list(x)
    x[call.dim], source[call.dim] = "v", "i" if adds else "_"
    sources = [source if t.dim() else [] for t in call.operands[2:]]
    linear = "self + source + value" if adds or (call.schema.name.startswith(_PLACING) and sources) else ""
    return Form(signature([x, [source[call.dim]], *sources], [x]), linear=linear)


@row("index_add", local=_write_local, positions="v")
def _index_add(call: Call) -> Form:
    return _index_form(call, adds=True)


@row("index_copy index_fill index_reduce", local=_write_local, positions="v")
def _index_copy(call: Call) -> Form:
    return _index_form(call, adds=False)


def _index_put_local(c: Local) -> None:
    if _is_mask(c.call.indices):
        return
    indexed = Indexed(c.call.self, c.call.indices)
    cut = [p for p in indexed.places if c.cut(f"v{p}")]
    if not cut:
        return
    func, first = c.call.func, cut[0]
    length = c.span(f"v{first}")[1]

    def run(x: Tensor, indices: list[Tensor | None], values: Tensor, *rest: Any, **more: Any) -> Tensor:
        local, elsewhere = list(indices), torch.zeros((), dtype=torch.bool, device=x.device)
        for p in cut:
            local[p], missing = shift(c, f"v{p}", indices[p], negative=True)  # type: ignore[arg-type]
            elsewhere = elsewhere | missing
        local[first] = torch.where(elsewhere, length, local[first])  # type: ignore[arg-type]
        wide = with_spare(x, first)
        if any(wide.shape[p] == 0 for p in cut):
            return x if c.call.schema.written else x.clone()
        return _finish(c, x, func(wide, local, values, *rest, **more).narrow(first, 0, length))

    c.run = run


@row("index_put _index_put_impl _unsafe_index_put", local=_index_put_local, positions=INDEXED)
def _index_put(call: Call) -> Form | None:
    given = call.values["values"]
    if _is_mask(call.indices) and given.numel() == 1:
        return _masked(call, given)
    indexed = Indexed(call.self, call.indices)
    if not indexed.plain:
        return None
    values = indexed.result[len(indexed.result) - given.dim() :]
    text = signature([indexed.x, *indexed.indices, values], [indexed.x])
    joint = {d for d in indexed.result if d[0] == "i"}
    if not call.accumulate:
        # Of two values for one element the last one wins, and only whole indices know which is the last.
        return Form(text, linear="self + values", whole=" ".join(joint))
    # A value that is broadcast over the index is added once for each entry, so it is no summand of its own.
    own = {d for d, size in zip(values, given.shape, strict=True) if size != 1}
    return Form(text, linear="self + values", whole=" ".join(joint - own))


def _is_mask(indices: list[Tensor | None]) -> bool:
    given = [index for index in indices if index is not None]
    return len(given) == 1 and given[0].dtype is torch.bool


def _masked(call: Call, value: Tensor) -> Form:
    """``x[mask] = number``: every element by itself."""
    place, mask = next((p, index) for p, index in enumerate(call.indices) if index is not None)
    dims = names(call.self.dim())
    text = signature([dims, dims[place : place + mask.dim()], ["_"] * value.dim()], [dims])
    return Form(text, linear="self + values")


@row("put")
def _put(call: Call) -> Form:
    """Positions are those of the flattened tensor, so it is whole."""
    index, x = call.values["index"], ["_"] * call.self.dim()
    if not call.accumulate or index.shape != call.source.shape:
        return _all_whole(call)
    entries = names(index.dim(), "i")
    return Form(signature([x, entries, entries], [x]), linear="self + source")


# ---- masks


@row("masked_fill.Scalar", values=True)
def _masked_fill(call: Call) -> Form:
    return Form("..., ... -> ...", linear="self" if call.value == 0 else "")


row("masked_fill.Tensor", "..., ..., () -> ...", linear="self + value")


@row("masked_scatter masked_scatter_backward")
def _masked_scatter(call: Call) -> Form:
    """Which element of the source goes where depends on the whole mask."""
    return replace(_all_whole(call), linear="self + source + grad_output")
