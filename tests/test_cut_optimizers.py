"""Optimizers in pipelines that are cut out of recordings: states that are read before any gradient is, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard.tensor.staged import is_elsewhere
from onecard.testing import run_ranks


def losses(name: str, foreach: bool, plan: oc.Plan | None = None) -> list[float]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.5, foreach=foreach)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if plan is None else oc.to_static(step, plan=plan)
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    return [run(x, y).item() for _ in range(3)]


def _planned() -> list[list[float]]:
    return [losses("Adadelta", each, oc.Plan(pp=2, microbatches=2)) for each in (False, True)]


@pytest.mark.proof
def test_states_read_before_gradients() -> None:
    """Adadelta reads its ``acc_delta`` before it meets a gradient: it is where the result goes, not on all ranks."""
    card = losses("Adadelta", False)
    for found in run_ranks(_planned, 2):
        assert found == [pytest.approx(card, rel=1e-5)] * 2


class Kept(torch.optim.Optimizer):
    """Keeps the last gradient, and a mean of squares, and divides by it."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                last = state.get("last")
                state["last"] = p.grad.clone()
                if "squares" not in state:
                    state["squares"] = torch.zeros_like(p)
                state["squares"].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
                p.sub_((p.grad if last is None else p.grad + 0.5 * last) / (state["squares"].sqrt() + 1.0), alpha=0.1)


class Placed(nn.Module):
    """A table of one row is added where the first stage ends: of one row its gradient is the one that comes from the second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.table = nn.Linear(6, 8), nn.Parameter(torch.randn(1, 3, 8))
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embed(x) + self.table)).mean(1))


def _table(name: str, plan: oc.Stages | None = None) -> tuple[list[float], bool, bool]:
    """Losses; whether this rank has the table, and whether it has its gradient."""
    torch.manual_seed(0)
    net = Placed()
    kind = Kept if name == "Kept" else getattr(torch.optim, name)
    optimizer = kind(net.parameters())

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    run = step if plan is None else oc.to_static(step, stages=plan)
    x, y = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(1)), torch.arange(4)
    losses = [run(x, y).item() for _ in range(4)]
    return losses, not is_elsewhere(net.table), net.table.grad is not None and not is_elsewhere(net.table.grad)


def _tables() -> list[tuple[list[float], bool, bool]]:
    return [_table(name, oc.Stages(4, at=["layer"])) for name in TABLES]


TABLES = ("AdamW", "RMSprop", "Kept")


@pytest.mark.proof
def test_gradients_and_states_are_where_their_parameter_is() -> None:
    """Also where another stage has computed the gradient: it is sent, once."""
    cards = [_table(name)[0] for name in TABLES]
    for rank, found in enumerate(run_ranks(_tables, 2, timeout=100.0)):
        assert [losses for losses, _, _ in found] == [pytest.approx(card, rel=1e-5) for card in cards]
        assert [(has, grad) for _, has, grad in found] == [(rank == 0, rank == 0)] * 3


def _with_momentum(plan: oc.Stages | None = None) -> list[float]:
    """Losses of a net whose last layer looks at how the first layer moves."""
    torch.manual_seed(0)
    first, last = nn.Linear(6, 6), nn.Linear(6, 3)
    model = nn.Sequential(first, nn.Tanh(), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(first(x))
        moved = optimizer.state[first.weight]["momentum_buffer"]
        loss = cross_entropy(last(hidden + hidden @ moved), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    run = step if plan is None else oc.to_static(step, stages=plan)
    return [run(x, y).item() for _ in range(4)]


def _read_by_the_last() -> list[float]:
    return _with_momentum(oc.Stages(2, at=["last"]))


def test_states_that_another_stage_reads() -> None:
    """They stay with the stage that reads them, as a parameter would that two stages use."""
    card = _with_momentum()
    assert run_ranks(_read_by_the_last, 2) == [pytest.approx(card, rel=1e-5)] * 2


def _momenta(folder: str) -> dict[str, Tensor]:
    """Of SGD on the first layers and on the last, under the names of one card; saved."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    own = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model[:3], model[4:])]

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    run = oc.to_static(step, stages=oc.Stages(2, at=["2"])) if oc.get_world_size() > 1 else step
    for i in range(3):
        made = torch.Generator().manual_seed(i)
        run(torch.randn(8, 4, generator=made), torch.randn(8, 1, generator=made))
    oc.save_state_dict({"model": model, "first": own[0], "last": own[1]}, folder)
    saved = oc.checkpoint.load(folder)
    return {
        f"{which}.{name}": state["momentum_buffer"]
        for which in ("first", "last")
        for name, state in saved[which]["state"].items()
    }


@pytest.mark.proof
def test_states_that_ranks_have_made_in_other_orders_are_saved(tmp_path):
    expected = _momenta(f"{tmp_path}/one")
    for found in run_ranks(_momenta, 2, f"{tmp_path}/stages"):
        assert [*found] == [*expected]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)
