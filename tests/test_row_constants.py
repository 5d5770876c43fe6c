"""Constants as long as the batch under microbatches: right where each row has the same, refused where it goes by rows."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
from amounts import PROOF
from torch import Tensor, nn
from torch.nn import functional as F

import onecard as oc
from onecard.errors import RecordingError
from onecard.static.passes import elements
from onecard.testing import run_ranks

N, PARTS = 5, [2, 4] if PROOF else [2]
ROW, TABLE = torch.arange(1.0, N + 1), torch.linspace(-1, 1, 40 * N).view(40, N)
NAMES = {"torch": torch, "F": F, "N": N}
FOLD = "ROW.expand(2, N)[None].mul(torch.tensor([[1.0], [3.0]])).expand(n, 2, N).reshape(-1, N)"
"""Rows and two heads in one dim: the same for each row, not for each head."""
EACH_ROWS_OWN = (
    "ROW[None].expand(n, N).cumsum(0)",
    "ROW.repeat(n, 1).cumsum(0)",
    "torch.ones(n).cumsum(0)[:, None]",
    "torch.full((n, N), 2.0).cumsum(0)",
    "torch.full((n, N), 0.9).cumprod(0)",
    "ROW[None].expand(n, N).softmax(0)",
    "torch.ones(n, N).softmax(0)",
    "ROW[None].expand(n, N).argsort(dim=0, stable=True)",
    "ROW[None].expand(n, N).triu()",
    "torch.ones(n, n).tril().sum(1, keepdim=True)",
    "F.pad(torch.ones(n - 1, N), (0, 0, 1, 0))",
    "F.pad(ROW[None].expand(n, N)[1:], (0, 0, 1, 0))",
    "F.conv1d(torch.ones(N, 1, n), torch.ones(1, 1, 3), padding=1)[:, 0].t()",
    "F.avg_pool1d(ROW[:, None].expand(N, n)[:, None], 3, 1, 1)[:, 0].t()",
    "torch.ones(n).nonzero()",
    "torch.fft.fft(torch.ones(n, N), dim=0).real",
    "torch.diff(ROW[None].expand(n, N), dim=0, prepend=torch.zeros(1, N))",
    "torch.where(torch.ones(n, N).cumsum(0) > 2, 1.0, 0.0)",
    "TABLE[:n]",
    "TABLE[: n // 2].repeat(2, 1)",
    "TABLE[:1].repeat(2, 1).repeat(n // 2, 1).cumsum(0)",
    "TABLE.split(n)[1]",
    "F.normalize(ROW[None].expand(n, N), dim=0)",
    "F.normalize(torch.ones(n, N), dim=0)",
    "torch.ones(n, N) / n + 1",
    "torch.ones(n, N) + n",
    "ROW.expand(n, N) / ROW.expand(n, N).sum(0, keepdim=True)",
    "ROW.expand(n, N) - ROW.expand(n, N).sum(0)",
)
ALIKE = (
    "ROW[None].expand(n, N)",
    "ROW.expand(n, N).cumsum(1)",
    "ROW.expand(n, N).softmax(1)",
    "ROW.expand(n, N).flip(0)",
    "ROW.expand(n, N).sort(descending=True).values",
    "ROW.expand(n, N).mean(0)",
    "F.pad(torch.ones(n, N - 1), (1, 0))",
    "torch.ones(2 * n, N)[n:]",
    "torch.cat([torch.ones(n, 2), torch.zeros(n, N - 2)], 1)",
    "torch.ones(n, N, N).tril()[:, 2]",
    "F.one_hot(torch.full((n,), 2), N)",
    "torch.zeros(n, N).scatter(1, torch.full((n, 1), 2), 1.0)",
    "F.conv1d(ROW.expand(n, 1, N), torch.ones(1, 1, 3), padding=1)[:, 0]",
    "(ROW.expand(n, 1, N) @ torch.eye(N).expand(n, N, N))[:, 0]",
)
FOLDED_OWN = (
    "ROW.expand(2, N)[:, None].mul(torch.tensor([1.0, 3.0])[:, None, None]).expand(2, n, N).reshape(-1, N)",
    "torch.ones(2 * n, N).cumsum(0)",
    "torch.ones(2 * n, 2 * n).tril().sum(1, keepdim=True)",
    "ROW[:2, None].expand(2, N).repeat(n, 1).cumsum(0)",
    f"{FOLD}.cumsum(0)",
    f"F.pad({FOLD}[1:], (0, 0, 1, 0))",
    f"{FOLD}[torch.arange(2 * n) // 2]",
)
TILED = "ROW[:2, None].expand(2, N).repeat(n, 1)"
FOLDED = (
    FOLD,
    TILED,
    f"{TILED} + 1",
    f"{FOLD} * 2 + 1",
    f"({FOLD} @ torch.eye(N)).cos()",
    f"{FOLD}.view(n, 2, N).flatten(0, 1)",
)


def _losses(constant: str, heads: int, k: int) -> list[float]:
    torch.manual_seed(0)
    model, made = nn.Linear(4, N), eval(f"lambda n, ROW, TABLE: {constant}", dict(NAMES))
    row, table = ROW.clone(), TABLE.clone()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(x: Tensor) -> Tensor:
        loss = (model(x).square().repeat_interleave(heads, 0) * made(len(x), row, table)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if k == 1 else oc.to_static(step, k_steps=k)
    generator = torch.Generator().manual_seed(1)
    return [float(run(torch.randn(8, 4, generator=generator))) for _ in range(3)]


@pytest.mark.parametrize("k", PARTS)
@pytest.mark.parametrize(
    ("constant", "heads"), [*((each, 1) for each in EACH_ROWS_OWN), *((each, 2) for each in FOLDED_OWN)]
)
def test_what_goes_by_rows_is_refused(constant: str, heads: int, k: int) -> None:
    with pytest.raises(RecordingError, match=r"own for each row|length of a microbatch"):
        _losses(constant, heads, k)


@pytest.mark.parametrize("k", PARTS)
@pytest.mark.parametrize(("constant", "heads"), [*((each, 1) for each in ALIKE), *((each, 2) for each in FOLDED)])
def test_what_is_alike_is_taken(constant: str, heads: int, k: int) -> None:
    assert _losses(constant, heads, k) == pytest.approx(_losses(constant, heads, 1), rel=1e-5)


def _recurrent(width: int, plan: dict[str, int] | None) -> list[float]:
    """A recurrent layer, whose products of torch's own go another way for one row than for four."""
    torch.manual_seed(0)
    model = nn.GRU(6, width, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x)[0], y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Any = step if plan is None else oc.to_static(step, plan=oc.Plan(**plan))
    x, y = torch.randn(8, 5, 6), torch.randn(8, 5, width)
    return [run(x, y).item() for _ in range(3)]


@pytest.mark.share(1)
@pytest.mark.parametrize(("width", "microbatches"), [(7, 4), (4, 2)])
def test_weights_do_not_follow_the_rows_of_a_rank(width: int, microbatches: int) -> None:
    """Nor are gates, side by side in one memory, each other's rows where a rank has as many as they are wide."""
    for found in run_ranks(_recurrent, 2, width, {"dp": 2, "microbatches": microbatches}):
        assert found == pytest.approx(_recurrent(width, None), rel=1e-5)


def test_parts_side_by_side_have_no_element_in_common() -> None:
    draw, base, apart = random.Random(0), torch.zeros(400), 0
    for _ in range(2000):
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 3))]
        strides = [draw.choice([1, 2, 3, 4, 6, 8, 12, 24]) for _ in shape]
        begins = [draw.randint(0, 60) for _ in range(2)]
        x, y = (base.as_strided(shape, strides, begin) for begin in begins)
        one, other = (
            {begin + sum(i * s for i, s in zip(at, strides, strict=True)) for at in product(*map(range, shape))}
            for begin in begins
        )
        if elements.are_apart(x, y):
            apart += 1
            assert not one & other, (shape, strides, begins)
    assert apart > 500
