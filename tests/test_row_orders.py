"""Rows that are sorted by numbers of their own, under microbatches: right where they are put back or added up, else refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from amounts import amount
from fuzz import micro
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError

EXPERTS, TOP, WIDE, HIDDEN, ROWS = 4, 2, 8, 16, 16
POSITIONS = (
    "rank = y.argsort().argsort(); loss = (e * rank.float()).mean()",
    "place = (y == 1).long().cumsum(0); loss = (e * place).sum() / 100",
    "place = (y == 1).long().cumsum(0); loss = (e * (place < 3)).mean()",
    "place = y.cumsum(0); loss = (e * place.float()).mean() * 0.01",
    "s = o[y.argsort()]; loss = (s[:-1] - s[1:]).square().mean()",
    "s = o[y.argsort()]; loss = (s * torch.arange(len(y)).float()[:, None]).mean()",
    "s, i = y.sort(); loss = F.cross_entropy(o, s)",
    "s, i = y.sort(); loss = (e[i] * (i > 2)).mean()",
    "s = torch.searchsorted(y.sort().values, y); loss = (e * s).mean() * 0.1",
    "a, b = e.sort().values, o.square().mean(1).sort().values; loss = (a - b).square().mean()",
    "i = y.argsort(); t = i // 1; loss = (e * t).mean() * 0.1",
    "i = y.argsort(); j = torch.empty_like(i); j[i] = torch.arange(len(y)); loss = (e * j).mean() * 0.1",
    "i = y.argsort(); s = e[i]; loss = (s * y).mean()",
    "i = y.argsort(); s = e.gather(0, i); loss = (s * y).mean()",
    "i = y.argsort(); loss = (e[i].gather(0, i) * y[i]).mean()",
    "i = y.argsort(); loss = (e[i][i] * y[i]).mean()",
    "i = o.argsort(0); loss = (o.gather(0, i) * y[:, None]).mean()",
    "i = y.argsort(); b = torch.zeros_like(e); b[:] = e[i]; loss = (b * y).mean()",
)
APART = (
    "s, i = y.sort(); loss = F.cross_entropy(o[i], s)",
    "loss = F.cross_entropy(o[y.argsort()], y.sort().values)",
    "s, i = y.sort(); loss = (e[i] * (s > 2)).mean()",
    "i = y.argsort(); loss = (e[i][i.argsort()] * y).mean()",
    "i = y.argsort(); b = torch.empty_like(e); b[i] = e[i] * 2; loss = (b * y).mean()",
    "i = y.argsort(); loss = (torch.zeros_like(e).scatter(0, i, e[i]) * y).mean()",
    "i = e.argsort(descending=True); loss = (torch.zeros_like(e).index_add(0, i // 1, e[i]) * y).mean()",
    "i = y.argsort(); loss = (o.gather(0, i[:, None].expand(-1, 2)) * y[i][:, None]).square().mean()",
    "loss = e.sort().values.square().mean()",
    "place = (o > 0).long().cumsum(1); loss = (o * place).mean()",
)


def text(line: str) -> str:
    return "e = F.cross_entropy(o, y, reduction='none')\n" + line.replace("; ", "\n")


@pytest.mark.share(1)
@pytest.mark.parametrize("line", POSITIONS)
def test_what_goes_by_a_position_is_refused(line: str) -> None:
    assert micro.judged(text(line), 4)[0] == "refused"


@pytest.mark.share(3)
@pytest.mark.parametrize("line", APART)
def test_what_goes_by_rows_is_right(line: str) -> None:
    assert micro.judged(text(line), 4)[0] == "right"


@pytest.mark.share(2)
@pytest.mark.parametrize("seed", range(micro.ORDERED, micro.ORDERED + amount(6, 300)))
def test_random_statements(seed: int) -> None:
    assert micro.judged(micro.drawn(seed), 4)[0] in ("right", "told", "refused", "void")


class Experts(nn.Module):
    """A mixture, whose tokens are sorted by experts and put back in one of many ways."""

    def __init__(self, back: str) -> None:
        super().__init__()
        self.back, self.gate = back, nn.Linear(WIDE, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDE, HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDE) * 0.2)
        self.bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(TOP, -1)
        ids, perm = chosen.reshape(-1).sort()
        counts = self.counts(ids)
        ends = counts.cumsum(0).int() if self.back == "gather" else counts.cumsum(0, dtype=torch.int32)
        if self.back == "token":
            token = torch.arange(len(x))[:, None].expand(-1, TOP).reshape(-1)[perm]
        else:
            token = perm // TOP
        wide = token[:, None].expand(-1, WIDE)
        sent = x.gather(0, wide) if self.back == "gather" else x[token]
        hidden = F.gelu(F.grouped_mm(sent, self.up, offs=ends) + self.bias[ids])
        made = F.grouped_mm(hidden, self.down, offs=ends)
        made = made * (weights[token, perm % TOP] if self.back == "choice" else weights.reshape(-1)[perm])[:, None]
        return (
            torch.zeros_like(x).scatter_add(0, wide, made)
            if self.back == "gather"
            else self.added(made, perm, token, x)
        )

    def counts(self, ids: Tensor) -> Tensor:
        if self.back in ("histc", "gather"):  # the latter as torchtitan
            return torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        return F.one_hot(ids, EXPERTS).sum(0)

    def added(self, made: Tensor, perm: Tensor, token: Tensor, x: Tensor) -> Tensor:
        """Each token's rows, summed."""
        if self.back in ("token", "index_add", "choice"):
            return torch.zeros_like(x).index_add(0, token, made)
        if self.back == "copy":
            made = torch.zeros_like(made).index_copy(0, perm, made)
        elif self.back == "put":
            (whole := torch.empty_like(made))[perm] = made
            made = whole
        elif self.back == "histc":
            (place := torch.empty_like(perm))[perm] = torch.arange(len(perm))
            made = made[place]
        elif self.back == "scatter":
            made = made[torch.empty_like(perm).scatter_(0, perm, torch.arange(len(perm)))]
        else:
            made = made[perm.argsort()]
        return made.view(len(x), TOP, WIDE).sum(1)


def trained(net: nn.Module, calls: int = 4, **options: int) -> Tensor:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = oc.to_static(step, **options) if options else step
    losses = [run(torch.randn(ROWS, WIDE), torch.randint(WIDE, (ROWS,))) for _ in range(calls)]
    return torch.cat([torch.stack(losses), *[p.detach().flatten() for p in net.parameters()]])


def twice(run: Callable[..., Any], *args: Tensor) -> None:
    """The first call runs as it is."""
    for _ in range(2):
        run(*args)


class Tokens(nn.Module):
    """Several tokens of each row, as language models have them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x.reshape(-1, WIDE))
        return made.view(len(x), -1, WIDE).square().mean(1)


def mixture(back: str, tokens: int = 1) -> nn.Module:
    torch.manual_seed(0)
    experts = Experts(back)
    return nn.Sequential(nn.Linear(WIDE, WIDE * tokens), experts if tokens == 1 else Tokens(experts))


@pytest.mark.share(8)
@pytest.mark.parametrize(
    "back", ["argsort", "token", "choice", "index_add", "copy", "put", "histc", "scatter", "gather"]
)
@pytest.mark.parametrize("tokens", [1, 3])
def test_experts(back: str, tokens: int) -> None:
    if tokens > 1 and back == "token":
        pytest.skip("numbers of tokens that are counted up are none of the rows'")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(mixture(back, tokens), k_steps=4)
    torch.testing.assert_close(found, trained(mixture(back, tokens)), rtol=1e-5, atol=1e-6)


def test_a_result_that_is_sorted_is_told() -> None:
    net = nn.Linear(WIDE, WIDE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        each = net(x).square().mean(1)
        each.mean().backward()
        optimizer.step()
        return each.detach().sort().values

    with pytest.warns(UserWarning, match="its rows are sorted, each microbatch's by itself"):
        twice(oc.to_static(step, k_steps=4), torch.randn(ROWS, WIDE))


def test_a_sum_that_is_rounded_is_the_batchs() -> None:
    """Counts of ``histc`` are whole numbers as they are; of other sums each microbatch would round off its own."""
    net, x = nn.Linear(WIDE, WIDE), torch.randn(ROWS, WIDE)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        net.zero_grad()
        each = net(x).square().mean(1)
        each.mean().backward()
        return each.detach().mean(), (each.detach().sum() * 0.7).int()

    run = oc.to_static(step, k_steps=4)
    assert [int(run(x)[1]) for _ in range(3)] == [int(step(x)[1])] * 3


def test_groups_that_no_order_says_are_refused() -> None:
    weight = nn.Parameter(torch.randn(EXPERTS, WIDE, WIDE))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        ends = F.one_hot(y, EXPERTS).sum(0).cumsum(0, dtype=torch.int32)
        loss = F.grouped_mm(x, weight, offs=ends).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with pytest.raises(RecordingError, match=r"_grouped_mm at .* puts what all rows give into each row"):
        twice(oc.to_static(step, k_steps=4), torch.randn(ROWS, WIDE), torch.randint(EXPERTS, (ROWS,)))
