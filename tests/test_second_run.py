"""Forward that backward runs again: buffers are written once, as without it; whoever asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from steps import classifier_step
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.testing import run_ranks
from onecard.train.modules import second_run

CALLS = 4


class Block(nn.Module):
    """Statistics of a norm, and a count of its own."""

    calls: Tensor
    mean: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.ones(8))  # which nobody writes

    def forward(self, x: Tensor) -> Tensor:
        """Reads a mean that it moves, in place and by another tensor: as it is then, in both runs."""
        self.calls += 1
        with torch.no_grad():
            self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x + torch.tanh(self.norm(self.layer((x - self.mean) * self.table))) * self.calls


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = fleet.recompute(block, x)
        return self.head(x)


def trained(how: str) -> dict[str, Any]:
    torch.manual_seed(0)
    net = (Recomputed if how == "fleet" else Net)()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = torch.randn(8, 8), torch.randint(3, (8,))

    step = classifier_step(net, optimizer)
    plan = oc.Plan(dp=2, recompute="full")
    run: Any = oc.to_static(step, plan=plan) if how == "a planned step" else step
    if how in ("a plan", "a plan, recorded"):
        oc.parallelize(net, optimizer, plan=plan)
    if how == "a plan, recorded":
        run = oc.to_static(step)
    losses = [run(x, y).item() for _ in range(CALLS)]
    return {"losses": losses, **{name: b.tolist() for name, b in net.named_buffers()}}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(found[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-7) for name in wanted)


@pytest.mark.share(4)
@pytest.mark.parametrize("how", ["fleet", "a plan", "a planned step", "a plan, recorded"])
def test_buffers_are_written_once(how):
    wanted = trained("")
    assert wanted["blocks.0.calls"] == CALLS
    for found in run_ranks(trained, 1 if how == "fleet" else 2, how):
        assert same(found, wanted), (found, wanted)


@pytest.mark.parametrize("kind", ["BuffersApart", "FirstForward"])
def test_without_it_they_are_written_twice_or_read_too_late(monkeypatch, kind):
    monkeypatch.setattr(getattr(second_run, kind), "__enter__", lambda self: None)
    assert not same(trained("fleet"), trained(""))


def test_buffers_that_nobody_changes_are_kept_once():
    block, x = Block(), torch.randn(4, 8)
    kept = []
    for _ in range(3):
        first, _ = second_run.runs_of([block])
        with first:
            block(x)
        kept.append(sorted(name for _, name in first.copies))
    changed = ["calls", "mean", "num_batches_tracked", "running_mean", "running_var"]
    assert kept == [changed] * 3
    first, _ = second_run.runs_of([block])
    with first:
        assert sum(copy is None for *_, copy in first._before) == 1


def test_a_buffer_that_is_replaced():
    class Moved(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            return torch.tanh(self.layer(x * self.seen))

    torch.manual_seed(0)
    block, x = Moved(), torch.randn(3, 4)
    plainly = torch.autograd.grad(block(x).sum(), block.layer.weight)[0]
    block.seen = torch.zeros(4)
    again = torch.autograd.grad(fleet.recompute(block, x).sum(), block.layer.weight)[0]
    torch.testing.assert_close(again, plainly)
    assert block.seen.tolist() == [1, 1, 1, 1]


def test_several_backward_passes():
    torch.manual_seed(0)
    block, x = Block(), torch.randn(4, 8, requires_grad=True)
    out = fleet.recompute(block, x).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert block.calls == 1 and block._buffers["calls"] is block.calls
    found, fresh = x.grad, Block()
    fresh.load_state_dict(block.state_dict() | {"calls": torch.zeros(()), "mean": torch.zeros(8)})
    again = torch.autograd.grad(fresh(x.detach().requires_grad_()).sum(), fresh.norm.weight)
    assert found is not None and block.norm.weight.grad is not None
    torch.testing.assert_close(block.norm.weight.grad, 2 * again[0])
