"""Elements put in other places: triangles, diagonals, turns, repeats, pads, sorting."""

from __future__ import annotations

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import names, signature, with_whole

# ---- triangles and diagonals


def _triangle_local(c: Local) -> None:
    (row_start, _), (column_start, _) = c.span("a"), c.span("b")
    if c.cut("a") or c.cut("b"):
        c.set("diagonal", c.call.diagonal + row_start - column_start)


row("tril triu", "... a b -> ... a b", linear="self", local=_triangle_local, positions="a b")


def _trace_local(c: Local) -> None:
    offset = c.span("a")[0]
    if c.cut("a"):
        c.run = lambda x: x.diagonal(offset).sum()


row("trace", "a _ -> ()", linear="self", local=_trace_local, positions="a")


row("diagonal diagonal_copy", "... dim1:_ dim2:_ -> ... _", moves=True)
row("diagonal_scatter", "... dim1:_ dim2:_, ... _ -> ... dim1:_ dim2:_", linear="self + src")
row("diag_embed", "... _ -> ... dim1:_ dim2:_", linear="self")


def _sizes_local(c: Local) -> None:
    c.set("input_sizes", list(c.result_shape()))


row("diagonal_backward", "... _ -> ... dim1:_ dim2:_", linear="grad_output", local=_sizes_local, positions="")


# ---- turns and repeats

row("flip rot90", "... dims:_ -> ... dims:_", moves=True)


@row("roll")
def _roll(call: Call) -> Form:
    """Without dims it rolls the flattened tensor."""
    if not call.values["dims"]:
        return Form("... -> ...", whole="...", moves=True)
    return Form("... dims:_ -> ... dims:_", moves=True)


@row("repeat")
def _repeat(call: Call) -> Form:
    times = list(call.repeats)
    more = len(times) - call.self.dim()
    # The shards of a repeated dim come over and over, which no single cut describes.
    dims = [name if count == 1 else "_" for name, count in zip(names(call.self.dim()), times[more:], strict=True)]
    return Form(signature([dims], [["_"] * more + dims]), moves=True)


row("repeat_interleave.Tensor", "_ -> _")


row("unfold unfold_copy", "... dimension:_ -> ... dimension:_ _", moves=True)
row("unfold_backward", "... dim:_ _ -> ... dim:_", linear="grad_in", local=_sizes_local, positions="")


# ---- pads


@row("constant_pad_nd", values=True)
def _constant_pad(call: Call) -> Form:
    rank = call.self.dim()
    dims = with_whole(names(rank), [rank - 1 - i // 2 for i, count in enumerate(call.pad) if count])
    return Form(signature([dims], [dims]), linear="self" if call.value == 0 else "")


def _pad_local(c: Local) -> None:
    # Only the shape of the backward operator's input is read, and it must be the shard's.
    func, shape = c.call.func, c.operand_shape(1)
    c.run = lambda grad, x, padding: func(grad, x.new_empty(shape), padding)


# Pads that mirror or repeat the border; the kernels refuse empty tensors.
for _names, _dims in (("{}_pad1d", "... _"), ("{}_pad2d", "... _ _"), ("{}_pad3d", "... _ _ _")):
    for _name in (_names.format("reflection"), _names.format("replication")):
        row(_name, f"{_dims} -> {_dims}", linear="self", nonempty="...")
        row(f"{_name}_backward", f"{_dims}, {_dims} -> {_dims}", linear="grad_output", unread="self", nonempty="...",
            local=_pad_local, positions="")  # fmt: skip


# ---- order

row("topk sort", "... dim:_ -> ... dim:_, ... dim:_")


@row("searchsorted")
def _searchsorted(call: Call) -> Form:
    """Each row of values looks into its own row of boundaries, or all into one."""
    line = call.sorted_sequence
    values = names(call.results[0].dim())
    places = ["_"] if line.dim() == 1 else [*values[:-1], "_"]
    operands = {"sorted_sequence": places, "sorter": places, "self": values}
    return Form(signature([operands[name] for name in call.names], [values]))
