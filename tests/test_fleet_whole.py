"""Optimizers that look at whole matrices, beside layers that are cut: one card's numbers, or an error by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fleet_programs import begin, close, part_of
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.errors import RecordingError
from onecard.testing import run_ranks
from onecard.train import judged

mp = fleet.meta_parallel


class Lamb(torch.optim.Optimizer):
    """A trust ratio for each tensor."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    seen = self.state[p].setdefault("seen", torch.zeros_like(p))
                    update = seen.mul_(0.9).add_(p.grad).sign() + p
                    p.sub_(update, alpha=group["lr"] * float(p.norm() / update.norm()))


class Joint(Lamb):
    """By the norm of all gradients together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        given = [p for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in given]).norm()
        for p in given:
            p.sub_(p.grad / norm, alpha=group["lr"])


class Hoarder(Lamb):
    """Keeps its parameters where nobody sees them exchanged."""

    def __init__(self, params: Any) -> None:
        params = [*params]
        super().__init__(params)
        self.kept = params


class Net(nn.Module):
    """Parts in one run, in several, of uneven lengths, and heads that ranks share."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        if parallel:
            self.up = mp.ColumnParallelLinear(6, 7, gather_output=False)
            self.down = mp.RowParallelLinear(7, 6, input_is_parallel=True, has_bias=False)
            self.merged = mp.MergedColumnParallelLinear(6, [4, 6])
            self.qkv = mp.QKVParallelLinear(6, 2, 4, 1)
        else:
            self.up, self.down = nn.Linear(6, 7, bias=False), nn.Linear(7, 6, bias=False)
            self.merged, self.qkv = nn.Linear(6, 10, bias=False), nn.Linear(6, 12, bias=False)
        self.last = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(torch.tanh(self.up(x))))

    def loss(self, x: Tensor) -> Tensor:
        # Of merged and shared parts the gradients are given, as if a loss had them: no layer joins such parts.
        return self(x).square().mean()


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02, weight_decay=0.1)


class Factored(Lamb):
    """By rows and columns, of what is wide."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                seen = p.grad.square() + 1e-30
                if p.dim() == 2 and min(p.shape) >= 128:
                    rows, columns = seen.mean(1, keepdim=True), seen.mean(0, keepdim=True)
                    seen = rows * columns / rows.mean()
                p.sub_(0.01 * p.grad / seen.sqrt())


class Late(Lamb):
    """By whole columns, from its 25th step on."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            p.sub_(0.01 * (p.grad / p.grad.norm(dim=0) if state["step"] >= 25 else p.grad))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "Muon": muon,
    "Lamb": Lamb,
    "Joint": Joint,
    "LBFGS": lambda params: torch.optim.LBFGS(params, 0.5, 4, line_search_fn="strong_wolfe"),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.05),
}


def trained(name: str) -> None:
    begin(mp=2)
    alone, net = Net(False), Net(True)
    with torch.no_grad():
        for path, p in net.named_parameters():
            p.copy_(part_of(p, alone.get_parameter(path).detach()))
    fleet.distributed_model(net)
    given = [net.merged.weight, net.qkv.weight] if name != "LBFGS" else []
    for each in (alone, net):
        optimizer = OPTIMIZERS[name](each.parameters())
        for step in range(4):

            def closure(each: Any = each, step: int = step, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = each.loss(torch.randn(5, 6, generator=torch.Generator().manual_seed(step)))
                loss.backward()
                return loss.detach()

            if name == "LBFGS":
                optimizer.step(closure)
                continue
            closure()
            for path in ("merged.weight", "qkv.weight"):
                whole = torch.randn(
                    alone.get_parameter(path).shape, generator=torch.Generator().manual_seed(step + len(path))
                )
                p = each.get_parameter(path)
                if each is net and path == "qkv.weight":  # a head that both ranks hold: each has a summand
                    mine = part_of(p, whole)
                    mine[-4:] *= oc.get_rank() + 1.0
                    p.grad = mine
                else:
                    if each is alone and path == "qkv.weight":
                        whole[-4:] *= 3.0
                    p.grad = whole if each is alone else part_of(p, whole)
            optimizer.step()
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        assert [p for g in optimizer.param_groups for p in g["params"]] == [*each.parameters()]
    for path, p in net.named_parameters():
        if not (given == [] and path.startswith(("merged", "qkv"))):
            close(p.detach(), part_of(p, alone.get_parameter(path).detach()), f"{name}: {path}", 5e-5)


def all_trained() -> None:
    for name in OPTIMIZERS:
        trained(name)


@pytest.mark.proof
def test_optimizers_that_look_at_whole_matrices() -> None:
    run_ranks(all_trained, 2)


def refused() -> None:
    begin(dp=1, mp=2, sharding=2)
    for make, words in (
        (muon, "Muon looks at whole parameters, .* and sharding_degree divides"),
        (Hoarder, "Hoarder looks"),
    ):
        net = mp.ColumnParallelLinear(4, 6, gather_output=False)
        model = fleet.distributed_model(net)
        optimizer = make(net.parameters())
        if make is muon:
            fleet.distributed_optimizer(optimizer)
        model(torch.randn(3, 4)).square().sum().backward()
        before = net.weight.detach().clone()
        with pytest.raises(fleet.FleetError, match=words):
            optimizer.step()
        assert torch.equal(before, net.weight)
    net = mp.ColumnParallelLinear(4, 6, gather_output=False)
    model, optimizer, _ = fleet.group_sharded_parallel(net, Lamb(net.parameters()), "os")
    model(torch.randn(3, 4)).square().sum().backward()
    with pytest.raises(
        fleet.FleetError, match=r"Lamb looks at whole parameters, .* and group_sharded_parallel divides"
    ):
        optimizer.step()


def not_recorded() -> None:
    begin(mp=2)
    net = mp.ColumnParallelLinear(4, 6, gather_output=False)
    optimizer = muon(net.parameters())

    def step(x: Tensor) -> None:
        net(x).square().sum().backward()
        optimizer.step()

    with pytest.raises(RecordingError, match="Muon looks at whole parameters, which are joined"):
        static = oc.to_static(step)
        for _ in range(3):
            static(torch.randn(3, 4))


@pytest.mark.proof
def test_a_recording_holds_no_whole_ones() -> None:
    run_ranks(not_recorded, 2)


@pytest.mark.proof
def test_what_cannot_be_given_is_refused() -> None:
    run_ranks(refused, 4)


def staged() -> None:
    begin(pp=2)
    layers = [fleet.LayerDesc(nn.Linear, 4, 4, bias=False) for _ in range(2)]
    model: Any = fleet.distributed_model(fleet.PipelineLayer(layers, loss_fn=nn.MSELoss()))
    batch = [torch.randn(1, 4), torch.randn(1, 4)]
    model.train_batch(batch, muon(model.parameters()))
    with pytest.raises(fleet.FleetError, match="Joint looks at all parameters together, and each stage"):
        model.train_batch(batch, Joint(model.parameters()))


@pytest.mark.proof
def test_what_looks_at_all_parameters_is_refused_in_stages() -> None:
    run_ranks(staged, 2)


def test_what_looks_at_wide_matrices_or_later_is_seen() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    for make in (Factored, Late):
        optimizer = make([weight])
        assert judged.judge(optimizer, optimizer.param_groups[0], {2}) is judged.Looks.PARAMETERS, make


def test_what_torch_knows_treats_each_number_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = judged._EACH
    monkeypatch.setattr(judged, "_EACH", frozenset())
    for make in kinds:
        optimizer = make([nn.Parameter(torch.ones(4, 4))], lr=0.01)
        assert judged.judge(optimizer, optimizer.param_groups[0], {1, 2}) is judged.Looks.NUMBERS, make


@pytest.mark.proof
def test_a_trial_leaves_everything_alone() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    for name, make in OPTIMIZERS.items():
        optimizer = make([p])
        optimizer.step_count = [3]  # type: ignore[attr-defined]
        state = torch.get_rng_state()
        judged.judge(optimizer, optimizer.param_groups[0], {2})
        assert not optimizer.state and optimizer.param_groups[0]["params"] == [p] and p.grad is None, name
        assert torch.equal(p.detach(), torch.ones(3, 2)) and torch.equal(state, torch.get_rng_state())
