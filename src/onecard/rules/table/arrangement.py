"""Elements put in other places: triangles, diagonals, turns, repeats, pads, sorting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import last, names, signature, with_whole


def _along(call: Call, whole: Iterable[int], **traits: Any) -> Form:
    """Operand and result have the same dims, of which some must be whole."""
    rank = call.self.dim()
    dims = with_whole(names(rank), [d % rank for d in whole] if rank else [])
    return Form(signature([dims], [dims] * len(call.results)), **traits)


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


@row("diagonal diagonal_copy")
def _diagonal(call: Call) -> Form:
    rank = call.self.dim()
    taken = {call.dim1 % rank, call.dim2 % rank}
    dims = with_whole(names(rank), taken)
    return Form(signature([dims], [[d for i, d in enumerate(dims) if i not in taken] + ["_"]]), moves=True)


@row("diagonal_scatter")
def _diagonal_scatter(call: Call) -> Form:
    rank = call.self.dim()
    taken = {call.dim1 % rank, call.dim2 % rank}
    dims = with_whole(names(rank), taken)
    return Form(
        signature([dims, [d for i, d in enumerate(dims) if i not in taken] + ["_"]], [dims]), linear="self + src"
    )


@row("diag_embed")
def _diag_embed(call: Call) -> Form:
    rank = call.self.dim()
    made = {call.dim1 % (rank + 1), call.dim2 % (rank + 1)}
    old = names(rank)
    old[-1] = "_"
    rest = iter(old)
    return Form(signature([old], [["_" if d in made else next(rest) for d in range(rank + 1)]]), linear="self")


def _sizes_local(c: Local) -> None:
    c.set("input_sizes", list(c.result_shape()))


@row("diagonal_backward", local=_sizes_local, positions="")
def _diagonal_backward(call: Call) -> Form:
    rank = len(call.input_sizes)
    taken = {call.dim1 % rank, call.dim2 % rank}
    new = with_whole(names(rank), taken)
    old = [d for i, d in enumerate(new) if i not in taken] + ["_"]
    return Form(signature([old], [new]), linear="grad_output")


# ---- turns and repeats


@row("flip")
def _flip(call: Call) -> Form:
    return _along(call, call.values["dims"], moves=True)


@row("roll")
def _roll(call: Call) -> Form:
    return _along(call, call.values["dims"] or range(call.self.dim()), moves=True)


@row("rot90")
def _rot90(call: Call) -> Form:
    rank = call.self.dim()
    one, other = (d % rank for d in call.values["dims"])
    old = with_whole(names(rank), (one, other))
    return Form(signature([old], [old]), moves=True)


@row("repeat")
def _repeat(call: Call) -> Form:
    times = list(call.repeats)
    more = len(times) - call.self.dim()
    # The shards of a repeated dim come over and over, which no single cut describes.
    dims = [name if count == 1 else "_" for name, count in zip(names(call.self.dim()), times[more:], strict=True)]
    return Form(signature([dims], [["_"] * more + dims]), moves=True)


row("repeat_interleave.Tensor", "_ -> _")


@row("unfold unfold_copy")
def _unfold(call: Call) -> Form:
    dims = with_whole(names(call.self.dim()), [call.dimension % max(call.self.dim(), 1)])
    return Form(signature([dims], [[*dims, "_"]]), moves=True)


@row("unfold_backward", local=_sizes_local, positions="")
def _unfold_backward(call: Call) -> Form:
    rank = len(call.input_sizes)
    dims = with_whole(names(rank), [call.dim % rank] if rank else [])
    return Form(signature([[*dims, "_"]], [dims]), linear="grad_in")


# ---- pads


@row("constant_pad_nd", values=True)
def _constant_pad(call: Call) -> Form:
    grown = [-1 - i // 2 for i, count in enumerate(call.pad) if count]
    return _along(call, grown, linear="self" if call.value == 0 else "")


def _pad_local(c: Local) -> None:
    # Only the shape of the backward operator's input is read, and it must be the shard's.
    if len(c.call.operands) == 2:
        func, shape = c.call.func, c.operand_shape(1)
        c.run = lambda grad, x, padding: func(grad, x.new_empty(shape), padding)


def _pad_form(call: Call) -> Form:
    """Pads that mirror or repeat the border; the kernels refuse empty tensors."""
    rank = call.results[0].dim()
    dims = with_whole(names(rank), last(len(call.padding) // 2, rank))
    free = " ".join(d for d in dims if d != "_")
    text = signature([dims] * len(call.operands), [dims])
    return Form(text, linear=call.names[0], unread="self" if len(call.operands) == 2 else "", nonempty=free)


row(
    """reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward
    replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward""",
    local=_pad_local,
    positions="",
)(_pad_form)


# ---- order


@row("topk sort")
def _order(call: Call) -> Form:
    return _along(call, [call.dim])


@row("searchsorted")
def _searchsorted(call: Call) -> Form:
    """Each row of values looks into its own row of boundaries, or all into one."""
    line = call.sorted_sequence
    values = names(call.results[0].dim())
    places = ["_"] if line.dim() == 1 else [*values[:-1], "_"]
    operands = {"sorted_sequence": places, "sorter": places, "self": values}
    return Form(signature([operands[name] for name in call.names], [values]))
