"""Products of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._dims import names, signature, with_whole

row("mm", "m k, k n -> m n", linear="self * mat2")
row("bmm", "b m k, b k n -> b m n", linear="self * mat2")
row("mv", "m k, k -> m", linear="self * vec")
row("dot", "k, k -> ()", linear="self * tensor")
row("vdot", "k, k -> ()", linear="self * other")
row("_int_mm", "m k, k n -> m n", linear="self * mat2")

# The summand broadcasts to the result: it has the last of its dims.
row("addmm", "[m n], m k, k n -> m n", linear="self + mat1 * mat2")
row("baddbmm", "[b m n], b m k, b k n -> b m n", linear="self + batch1 * batch2")
row("addbmm", "[m n], b m k, b k n -> m n", linear="self + batch1 * batch2")
row("addr", "[m n], m, n -> m n", linear="self + vec1 * vec2")
# With a summand of one element the kernel gives one element, too, where there is no row or no column.
row("addmv", "[m], m k, k -> m", linear="self + mat * vec", nonempty="m k")
# The activation is not linear, so the product inside it must not be pending.
row("_addmm_activation", "[m n], m k, k n -> m n", whole="k")


# ---- Leading dims of any number, each a factor of its own (see ``tensor.composite``)


@row("linear")
def _linear(call: Call) -> Form | None:
    if call.values["weight"].dim() != 2 or call.input.dim() < 1:
        return None
    if call.bias is not None and call.bias.dim() != 1:
        return None
    return Form("... k, n k, n -> ... n", linear="input * weight + bias")


def _linear_gradients(call: Call) -> list[Tensor]:
    """PyTorch's own meta function (2.13) gives gradients that nobody asked for."""
    like = (call.self.shape, call.weight.shape, call.weight.shape[:1])
    return [call.grad_output.new_empty(s) for s, wanted in zip(like, call.output_mask, strict=True) if wanted]


def linear_backward(
    self: Tensor, grad_output: Tensor, weight: Tensor, output_mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of ``linear`` on plain tensors, by the products that torch makes."""
    grad = grad_output.flatten(0, -2)
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        of_input = torch.mm(grad, weight.conj()).view(self.shape)
    if output_mask[1]:
        of_weight = torch.mm(grad.t(), self.flatten(0, -2).conj())
    if output_mask[2]:
        of_bias = grad.sum(0)
    return of_input, of_weight, of_bias


# Each gradient depends on the output's and on one operand; over the leading dims those of weight and bias are sums.
row("linear_backward", "... k, ... n, n k -> ... k @1 2, n k @0 1, n @1", linear="self * grad_output * weight",
    results=_linear_gradients)  # fmt: skip


@row("matmul")
def _matmul(call: Call) -> Form | None:
    one, other = (min(t.dim(), 3) for t in call.operands)
    if not one or not other:
        return None
    left, right = ("", "k", "m k", "... m k")[one], ("", "k", "k n", "... k n")[other]
    result = " ".join(("..." * (max(one, other) > 2), "m" * (one > 1), "n" * (other > 1)))
    return Form(f"{left}, {right} -> {result.strip() or '()'}", linear="self * other")


def subscripts(equation: str) -> tuple[str, str, str] | None:
    """The terms of an ``einsum`` of two operands; None if one repeats an index, sums over one of its own, or has "...".

    Example:
        >>> subscripts("bik, bjk -> bij"), subscripts("ij,jk"), subscripts("ii,i->")
        (('bik', 'bjk', 'bij'), ('ij', 'jk', 'ik'), None)
    """
    left, arrow, result = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if len(operands) != 2 or "." in equation or any(len(set(term)) < len(term) for term in (*operands, result)):
        return None
    one, other = operands
    if not arrow:
        result = "".join(sorted(set(one) ^ set(other)))
    if set(one) - set(other) - set(result) or set(other) - set(one) - set(result):
        return None
    return one, other, result


def _einsum_local(c: Local) -> None:
    """In which order the result lies in memory depends on the sizes, which differ by rank; summands must lie alike."""
    c.run = lambda equation, tensors, **_: torch.einsum(equation, tensors).contiguous()


@row("einsum", local=_einsum_local, positions="")
def _einsum(call: Call) -> Form | None:
    """The equation is the rule."""
    terms = subscripts(call.equation)
    if terms is None:
        return None
    one, other, result = (" ".join(term) or "()" for term in terms)
    return Form(f"{one}, {other} -> {result}", linear="tensors")


@row("_trilinear")
def _trilinear(call: Call) -> Form | None:
    """Bilinear layers: three operands that broadcast along ``expand1..3``; the product is summed over ``sumdim``."""
    rank = call.i1.dim() + len(call.expand1)
    full = names(rank)
    operands = [[d for i, d in enumerate(full) if i not in set(e)] for e in (call.expand1, call.expand2, call.expand3)]
    result = [d for i, d in enumerate(full) if i not in set(call.sumdim)]
    return Form(signature(operands, [result]), linear="i1 * i2 * i3", whole=full[call.unroll_dim])


def _distances(call: Call) -> int:
    """Coordinates times pairs of points."""
    one, other = call.operands[-3 if "backward" in call.schema.name else 0 :][:2]
    return int(prod(one.shape) * other.shape[-2])


row("_cdist_forward", "... p k, ... r k -> ... p r", whole="k", macs=_distances)


# Given the distances, each coordinate has its own gradient; that of a point sums over the other set's points.
@row("_cdist_backward", macs=_distances)
def _cdist_backward(call: Call) -> Form:
    return Form("... p r, ... p k, ... r k, ... p r -> ... p k", linear=call.names[0])  # its name has changed in 2.15


@row("linalg_cross")
def _cross(call: Call) -> Form:
    rank = max(t.dim() for t in call.operands)
    full = with_whole(names(rank), [call.dim % rank])
    return Form(signature([full[rank - t.dim() :] for t in call.operands], [full]), linear="self * other")
