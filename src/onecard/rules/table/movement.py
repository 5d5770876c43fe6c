"""Views: another shape or order of dims for the same elements. They stay views of the local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import names, signature

aten = torch.ops.aten


# ---- view: dims split and joined


def _dim(factors: list[str]) -> str:
    return f"({' '.join(factors)})" if len(factors) > 1 else (*factors, "_")[0]


class _Pairing:
    """Walks two shapes of equal element counts side by side and finds the factors that both are made of."""

    def __init__(self, old: Sequence[int], new: Sequence[int]) -> None:
        self.shapes = (tuple(old), tuple(new))
        self.dims: tuple[list[list[str]], list[list[str]]] = ([[] for _ in old], [[] for _ in new])
        self.sizes: dict[str, int] = {}
        self.whole: list[str] = []

    def form(self) -> Form:
        if 0 in self.shapes[0]:
            self._leading()
        else:
            self._walk()
        old, new = ([_dim(factors) for factors in dims] for dims in self.dims)
        return Form(signature([old], [new]), whole=" ".join(self.whole), moves=True, sizes=self.sizes)

    def _new(self, size: int, *places: tuple[int, int], whole: bool = False) -> None:
        name = f"f{len(self.sizes)}"
        self.sizes[name] = size
        for side, dim in places:
            self.dims[side][dim].append(name)
        if whole:
            self.whole.append(name)

    def _leading(self) -> None:
        """Nothing to pair among no elements, except the dims that stay where they are."""
        for d, (a, b) in enumerate(zip(*self.shapes, strict=False)):
            if a != b:
                return
            self._new(a, (0, d), (1, d))

    def _walk(self) -> None:
        """Take the largest factor that both have on their outside; what is left then stays whole until they meet."""
        queues = [[[d, size] for d, size in enumerate(shape) if size != 1] for shape in self.shapes]
        a, b = queues
        while a and b:
            (i, left), (j, right) = a[0], b[0]
            common = gcd(left, right)
            if common in (left, right):
                self._new(common, (0, i), (1, j))
                a[0][1], b[0][1] = left // common, right // common
            else:
                if common > 1:
                    self._new(common, (0, i), (1, j))
                    a[0][1], b[0][1] = left // common, right // common
                self._meet(a, b)
            for queue in queues:
                if queue and queue[0][1] == 1:
                    queue.pop(0)

    def _meet(self, a: list[list[int]], b: list[list[int]]) -> None:
        """Dims that cut across each other: whole, up to the next place where both shapes have a boundary."""
        done = [0, 0]
        product = [1, 1]
        while product[0] != product[1] or not done[0]:
            side = 0 if product[0] <= product[1] else 1
            dim, size = (a, b)[side][done[side]]
            self._new(size, (side, dim), whole=True)
            product[side] *= size
            done[side] += 1
        for queue, count in ((a, done[0]), (b, done[1])):
            del queue[:count]


def _local_view(x: Tensor, size: Sequence[int], *_: Any) -> Tensor:
    try:
        return x.view(size)
    except (RuntimeError, ValueError):  # a kernel, and torch without data
        # A kernel may leave other strides than its meta function says, which decided that this view is possible: as it
        # is, once the local tensor is in new memory with those strides.
        return x.set_(x.contiguous()).view(size)  # type: ignore[call-overload]


def _resize(c: Local) -> None:
    c.set("size", list(c.result_shape()))
    c.run = _local_view


@row("view _unsafe_view _reshape_alias view_copy", local=_resize, positions="")
def _view(call: Call) -> Form:
    return _Pairing(call.self.shape, call.results[0].shape).form()


@row("view.dtype view_copy.dtype")
def _reinterpret(call: Call) -> Form:
    # Elements of another size change the last dim's length.
    dims = names(call.self.dim())
    if call.self.element_size() != call.dtype.itemsize:
        dims[-1] = "_"
    return Form(signature([dims], [dims]))


# ---- dims that change places, come and go


@row("t")
def _t(call: Call) -> Form:
    dims = names(call.self.dim())
    return Form(signature([dims], [dims[::-1]]), moves=True)


@row("transpose.int transpose_copy.int")
def _transpose(call: Call) -> Form:
    old = names(call.self.dim())
    new = list(old)
    if new:
        new[call.dim0], new[call.dim1] = old[call.dim1], old[call.dim0]
    return Form(signature([old], [new]), moves=True)


@row("permute permute_copy")
def _permute(call: Call) -> Form:
    dims = names(call.self.dim())
    return Form(signature([dims], [[dims[d] for d in call.values["dims"]]]), moves=True)


def _expand_local(c: Local) -> None:
    c.set("size", list(c.result_shape()))


@row("expand expand_copy", local=_expand_local, positions="")
def _expand(call: Call) -> Form:
    old, shape = names(call.self.dim()), call.results[0].shape
    new = ["_"] * (len(shape) - len(old)) + old
    grown = [d for d, size in enumerate(call.self.shape) if size != shape[len(shape) - len(old) + d]]
    for d in grown:
        old[d] = new[len(shape) - len(old) + d] = "_"
    return Form(signature([old], [new]), moves=True)


def _squeezed(call: Call) -> list[int]:
    """The dims that fall away: those of size one on one card, whatever their size on this rank."""
    given = call.values.get("dim")
    asked = () if given == [] else call.dims(given)
    return [d for d in asked if call.self.shape[d] == 1]


def _squeeze_local(c: Local) -> None:
    gone = _squeezed(c.call)
    c.run = lambda x, *_: aten.squeeze.dims(x, gone)


@row("squeeze squeeze_copy", local=_squeeze_local, positions="", any_rows=True)
def _squeeze(call: Call) -> Form:
    gone = _squeezed(call)
    old = names(call.self.dim())
    return Form(signature([old], [[d for i, d in enumerate(old) if i not in gone]]), moves=True)


row("unsqueeze unsqueeze_copy", "... -> ... dim:_", moves=True)
row("view_as_real view_as_real_copy", "... -> ... _", linear="self")
row("view_as_complex view_as_complex_copy", "... _ -> ...", linear="self")


# ---- one tensor into several along a dim, which must be whole; several into one

row("split.Tensor split_with_sizes unsafe_split unsafe_split_with_sizes split_with_sizes_copy split_copy",
    "... dim:_ -> ... dim:_ *", moves=True)  # fmt: skip
row("unbind unbind_copy", "... dim:_ -> ...*", moves=True)
row("stack", "...* -> ... dim:_", moves=True)


@row("cat")
def _cat(call: Call) -> Form:
    rank = call.results[0].dim()
    dims = names(rank)
    dims[call.dim] = "_"
    # torch.cat passes over empty one-dim tensors, whatever the others are.
    return Form(signature([dims if t.dim() == rank else ["_"] for t in call.operands], [dims]), moves=True)
