"""Tokens to rows and back: values, gradients and second ones are those of plain indexing, also where choices are dropped."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from onecard.fleet.experts.choices import Choices, to_rows, to_tokens


def plain(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The same in three operators of torch's."""
    k = weights.shape[1]
    rows = x[order // k].square() * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // k, rows)


def ours(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    choices = Choices(order, *weights.shape)
    return to_tokens(to_rows(x, choices).square(), weights, choices)


def orders() -> list[Tensor]:
    whole = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    return [whole, whole[4:], whole[whole >= 6], whole[:0]]  # none, some, all choices of two tokens, all dropped


@pytest.mark.parametrize("order", orders(), ids=lambda order: str(len(order)))
def test_sums_of_rows_are_those_of_plain_indexing(order: Tensor) -> None:
    x, weights = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, 3, dtype=torch.float64)
    torch.testing.assert_close(ours(x, weights, order), plain(x, weights, order))
    x.requires_grad_(), weights.requires_grad_()
    torch.autograd.gradcheck(lambda x, w: ours(x, w, order), (x, weights))
    torch.autograd.gradgradcheck(lambda x, w: ours(x, w, order), (x, weights))


@pytest.mark.parametrize("frozen", ["rows", "weights"])
def test_one_of_two_needs_no_gradient(frozen: str) -> None:
    order = orders()[1]
    x, weights = torch.randn(5, 4), torch.rand(5, 3)
    (weights if frozen == "rows" else x).requires_grad_()
    got = torch.autograd.grad(ours(x, weights, order).square().sum(), weights if frozen == "rows" else x)
    wanted = torch.autograd.grad(plain(x, weights, order).square().sum(), weights if frozen == "rows" else x)
    torch.testing.assert_close(got, wanted)


def test_the_wrong_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "sums", lambda self, rows, weights=None: rows[: self.tokens] * 1.0)
    order, x, weights = orders()[0], torch.randn(5, 4), torch.rand(5, 3)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours(x, weights, order), plain(x, weights, order))
