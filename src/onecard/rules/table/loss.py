"""Losses. A mean is one over the whole batch, so what a kernel divides by must not be this rank's count."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.rules.call import Call
from onecard.rules.local import Local
from onecard.rules.registry import row
from onecard.rules.rule import Form
from onecard.rules.table._share import scaled, share, share_of_factors

aten = torch.ops.aten
NONE, MEAN, SUM = 0, 1, 2


# ---- Losses of each element


def _mean_of_part(c: Local) -> None:
    if c.call.reduction == MEAN:
        scaled(c, share_of_factors(c))


@row(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits",
    local=_mean_of_part,
    positions="",
)
def _elementwise(call: Call) -> str:
    return "...* -> ..." if call.reduction == NONE else "...* -> ()"


def _gradient_of_part(c: Local) -> None:
    """These kernels divide by the number of elements of the input they are given."""
    if c.call.reduction == MEAN:
        part = share(c, c.call.index("self"))
        scaled(c, part or 1.0)


_BACKWARD = """
    mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward"""


@row(_BACKWARD, local=_gradient_of_part, positions="")
def _backward(call: Call) -> Form:
    return Form("...* -> ..." if call.reduction == NONE else "(), ...* -> ...", linear="grad_output")


# ---- Negative log likelihood. Where the classes are cut, a rank knows the targets that fall into its part.


def _classes(call: Call) -> tuple[str, str]:
    """The dims of the log-probabilities and of the target: classes are dim 1, or 0 without a batch."""
    return ("n c ...", "n ...") if call.self.dim() > 1 else ("c", "()")


def _total_weight(losses: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    loss, total = losses
    return loss / total, total


def _mean_of_sums(self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
    """The mean over a cut batch: the sums of losses and of weights travel, and are divided then."""
    return _total_weight(aten.nll_loss_forward(self, target, weight, SUM, ignore_index))


def _mean_of_sums_2d(self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
    return _total_weight(aten.nll_loss2d_forward(self, target, weight, SUM, ignore_index))


def _nll_form(call: Call) -> Form:
    x, batch = _classes(call)
    result = batch if call.reduction == NONE else "()"
    return Form(f"{x}, {batch}, c -> {result}, ()", whole="n c ..." if call.reduction == MEAN else "")


def _here(c: Local, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """The target as an index into this rank's classes, and where it is one."""
    offset, length = c.span("c")
    index = target - offset
    # "&" of Python has no rule, nor has "to": by those of these operators microbatches know that it is a count of rows.
    valid = (target != ignore_index).logical_and(index >= 0).logical_and(index < length)
    return index.clamp(0, max(length - 1, 0)), valid


def _nll_of_part(c: Local) -> None:
    if not c.cut("c"):
        return
    at, reduction = (1 if c.call.self.dim() > 1 else 0), c.call.reduction

    def run(x: Tensor, target: Tensor, weight: Tensor | None, _: int, ignore_index: int) -> tuple[Tensor, Tensor]:
        if not x.shape[at]:
            return x.new_zeros(target.shape if reduction == NONE else ()), x.new_zeros(())
        index, valid = _here(c, target, ignore_index)
        weights = aten._to_copy(valid, dtype=x.dtype) if weight is None else weight[index] * valid
        loss = torch.where(valid, -x.gather(at, index.unsqueeze(at)).squeeze(at) * weights, x.new_zeros(()))
        # Of a batch without a reduction the kernels give no total weight, but zero.
        return (loss, x.new_zeros(())) if reduction == NONE and at else (loss.sum(), weights.sum())

    c.run = run


row("nll_loss_forward", local=_nll_of_part, positions="c", picks="self", instead=_mean_of_sums)(_nll_form)
row("nll_loss2d_forward", local=_nll_of_part, positions="c", picks="self", instead=_mean_of_sums_2d)(_nll_form)


def _nll_gradient_of_part(c: Local) -> None:
    if not c.cut("c"):
        return
    at, reduction = (1 if c.call.self.dim() > 1 else 0), c.call.reduction

    def run(
        grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, _: int, ignore_index: int, total: Tensor
    ) -> Tensor:
        result = torch.zeros_like(x, memory_format=torch.contiguous_format)
        if not x.shape[at]:
            return result
        index, valid = _here(c, target, ignore_index)
        each = -grad / total if reduction == MEAN else -grad
        each = each if weight is None else each * weight[index]
        each = torch.where(valid, each, x.new_zeros(())).to(x.dtype)
        return result.scatter_(at, index.unsqueeze(at), each.unsqueeze(at))

    c.run = run


@row("nll_loss_backward nll_loss2d_backward", local=_nll_gradient_of_part, positions="c")
def _nll_backward(call: Call) -> Form:
    x, batch = _classes(call)
    grad = batch if call.reduction == NONE else "()"
    return Form(f"{grad}, {x}, {batch}, c, () -> {x}", linear="grad_output")


# ---- Margin losses of many classes: the classes stay whole. PyTorch has no meta functions of their backward operators.


def _batch(call: Call) -> str:
    return "n _" if call.self.dim() > 1 else "_"


def _mean_of_batch(c: Local) -> None:
    if c.call.reduction == MEAN and c.cut("n"):
        scaled(c, c.length("n") / c.size("n"))


def _margin_result(call: Call) -> str:
    return "n" if call.reduction == NONE and call.self.dim() > 1 else "()"


def _target(call: Call) -> str:
    """The class of each; without a batch a number, in one dim or in none."""
    return "n" if call.self.dim() > 1 else "[_]"


@row("multi_margin_loss", local=_mean_of_batch, positions="")
def _multi_margin(call: Call) -> str:
    return f"{_batch(call)}, {_target(call)}, _ -> {_margin_result(call)}"


def _mean_of_multilabel(c: Local) -> None:
    """Only the loss is a mean; the second result says which classes are targets."""
    part = c.length("n") / max(c.size("n"), 1)
    if c.call.reduction != MEAN or not c.cut("n"):
        return

    def run(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
        if not part:
            return x.new_zeros(()), x.new_zeros(target.shape)
        loss, is_target = aten.multilabel_margin_loss_forward(x, target, reduction)
        return loss * part, is_target

    c.run = run


@row("multilabel_margin_loss_forward", local=_mean_of_multilabel, positions="")
def _multilabel(call: Call) -> str:
    return f"{_batch(call)}, {_batch(call)} -> {_margin_result(call)}, {_batch(call)}"


def _like_input(call: Call) -> list[Tensor]:
    return [call.self.new_empty(call.self.shape)]


@row("multi_margin_loss_backward", local=_mean_of_batch, positions="", results=_like_input)
def _multi_margin_backward(call: Call) -> Form:
    text = f"{_margin_result(call)}, {_batch(call)}, {_target(call)}, _ -> {_batch(call)}"
    return Form(text, linear="grad_output", nonempty="n")


@row("multilabel_margin_loss_backward", local=_mean_of_batch, positions="", results=_like_input)
def _multilabel_backward(call: Call) -> Form:
    each = _batch(call)
    return Form(f"{_margin_result(call)}, {each}, {each}, {each} -> {each}", linear="grad_output", nonempty="n")
