"""One card's values that only several values of the ranks are together: all of them, each piece in its place, or none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import onecard as oc
from onecard.proof.rows import LastRows

ROWS = 12
MADE = ("mm in forward", "tanh in forward", "pow in forward", "tanh_backward", "mm in backward")


def _given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(ROWS, 6), torch.randn(6, 4).requires_grad_()


def _summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def _part(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).square()  # the line that both programs run


def one_card() -> Tensor:
    """The gradient of a mean over all rows."""
    x, w = _given()
    _part(x, w).sum(1).mean().backward()
    return w.grad


def microbatches(which: tuple[int, ...] = (0, 1, 2)) -> Tensor:
    """The same in three microbatches, of which each rank has half; ``which`` the second microbatch and those after it are."""
    x, w = _given()
    mine = x.chunk(dist.get_world_size())[dist.get_rank()].chunk(3)
    for i in which:
        (_part(mine[i], w).sum(1).mean() / 3).backward()
    return _summed(w.grad) / dist.get_world_size()


def routed(twice: bool = False) -> Tensor:
    """Rows go to ranks by their signs, in another order."""
    x, w = _given()
    goes = (x[:, 0] > 0) == (dist.get_rank() == 0)
    rows = goes.nonzero().flatten().flip(0)
    if twice:
        rows = torch.cat([rows[:1], rows[:-1]])
    (_part(x[rows], w).sum(1).sum() / ROWS).backward()
    return _summed(w.grad)


def _missing(proof: oc.Proof) -> str:
    return " ".join(proof.alone)


@pytest.mark.parametrize("program", [microbatches, routed])
def test_pieces_that_leave_nothing_out_are_a_value(program) -> None:
    proof = oc.prove(program, world=2, against=one_card, rounding=False)
    assert proof and not any(word in _missing(proof) for word in MADE), proof.alone


@pytest.mark.share(1)
@pytest.mark.parametrize(("program", "given"), [(microbatches, (0, 1, 1)), (microbatches, (0, 1)), (routed, True)])
def test_pieces_that_leave_something_out_are_none(program, given) -> None:
    """A microbatch that came twice, one that never came, a row in place of another."""
    proof = oc.prove(program, given, world=2, against=lambda _: one_card(), rounding=False)
    assert not proof
    assert all(word in _missing(proof) for word in MADE), proof.alone


def _order(x: Tensor) -> Tensor:
    return x[:, 0].argsort()


def _picked(x: Tensor, at: Tensor) -> Tensor:
    return torch.tanh(x[at])


def sorted_rows(wrong: bool) -> Tensor:
    """Rows in the order of a column, which each rank finds of its own rows."""
    x, _ = _given()
    x = x.chunk(dist.get_world_size())[dist.get_rank()]
    at = _order(x)
    return _summed(_picked(x, at.roll(1).clamp(1) if wrong else at).sum())


def all_sorted(wrong: bool) -> Tensor:
    x, _ = _given()
    return _picked(x, _order(x)).sum()


def test_indices_that_each_rank_counts_are_said_as_such() -> None:
    proof = oc.prove(sorted_rows, False, world=2, against=all_sorted, rounding=False)
    assert proof and not any("sort" in line for line in proof.alone), proof.alone
    assert any("sort" in line for line in proof.numbered) and "each rank counts in its own way" in str(proof)
    proof = oc.prove(sorted_rows, True, world=2, against=all_sorted, rounding=False)  # what it picks is wrong
    assert not proof and any("sort" in line for line in proof.alone), proof.numbered


def test_rows_are_taken_once() -> None:
    value = torch.randn(6, 3, dtype=torch.float64)
    rows = LastRows(value, 1e-9)
    assert rows.take(value[[4, 1]]) and not rows.take(value[[1]]) and not rows.take(value[[0]] + 1e-6)
    assert not rows.all_taken and rows.take(value[[5, 0, 3, 2]]) and rows.all_taken
