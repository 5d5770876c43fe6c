"""What a stage hands on and gets back is as on one card: no gradient where there is none, no memory that is written to later."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import close
from pipeline_programs import OneCard, begin, compare
from torch import Tensor, nn

import onecard as oc
from onecard import fleet, pipeline
from onecard.errors import ScheduleError
from onecard.fleet.layers import tied_layers
from onecard.testing import run_ranks

Desc = fleet.LayerDesc


class Two(nn.Module):
    """Hands on the results of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"a": self.a(x), "b": self.b(x)}


class Ignores(nn.Module):
    """Takes no gradient of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return self.linear(given["a"]) + given["b"].detach()


class Sometimes(Ignores):
    """Uses the second in some microbatches only."""

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        made = self.linear(given["a"])
        return made + given["b"] if given["a"].shape[0] == 1 else made


class Detaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.detach())


class Reuses(nn.Module):
    """Hands on memory of its own, which it writes to in each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("kept", torch.zeros(16, 6), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.kept[: len(x)] = x.detach().abs()
        return self.linear(x), self.kept[: len(x)]


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(given[0]) * given[1]


class Inner(nn.Module):
    """Its weight is a property."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Again(Inner):
    """Recomputes in torch's older form, which takes no part of a backward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)


def tied(layer: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight)  # type: ignore[arg-type]


def shared(function: Any = None) -> Any:
    return fleet.SharedLayerDesc("tied", nn.Linear, function, "weight", 6, 6)


def by_property(function: Any = None) -> Any:
    return fleet.SharedLayerDesc("inner", Inner, function)


LAYERS: dict[str, list[Any]] = {
    "an output is ignored": [Desc(Two), Desc(Ignores)],
    "an output is used in one microbatch of four": [Desc(Two), Desc(Sometimes)],
    "a stage begins with detach": [Desc(nn.Linear, 6, 6), Desc(Detaches)],
    "tied, and the first use has no gradient": [shared(), Desc(Detaches), shared(tied)],
    "tied by a property": [by_property(), by_property(tied)],
    "recomputed in the reentrant form": [
        Desc(nn.Linear, 6, 6),
        Desc(nn.Linear, 6, 6),
        Desc(Again),
        Desc(nn.Linear, 6, 6),
    ],
    "a buffer that is written to again": [Desc(Reuses), Desc(Takes)],
}


def trained(name: str, mode: str) -> None:
    """Three steps of AdamW, whose weight decay moves what has a gradient of zero, and leaves alone what has none."""
    descs = [*LAYERS[name], *(Desc(nn.Linear, 6, 6) for _ in range(4 - len(LAYERS[name]) if mode == "ZBV" else 0))]
    begin(mode, 4, 2, pp=2)
    torch.manual_seed(3)
    single = OneCard(descs)
    torch.manual_seed(3)
    mine = fleet.PipelineLayer(descs, loss_fn=nn.MSELoss())
    model = fleet.distributed_model(mine)
    ours = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5))
    theirs = torch.optim.AdamW(single.parameters(), lr=0.05, weight_decay=0.5)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        x, y = (torch.randn(7, 6, generator=generator) for _ in range(2))
        for part, label in zip(x.split(2), y.split(2), strict=True):
            (F.mse_loss(single(part), label) * (len(part) / 7)).backward()
        model.forward_backward_pipeline([x, y])
        fleet.sync(model.parameters())
        twins = dict(single.named_parameters(remove_duplicate=False))
        for path, p in mine.named_parameters():
            assert (p.grad is None) == (twins[path].grad is None), f"{name}, {mode}: {path} has {p.grad}"
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        compare(mine, single, f"{name}, {mode}, step {step}")


def all_trained() -> None:
    for mode in ("1F1B", "F-then-B", "ZBH1", "ZBV"):
        for name in LAYERS:
            trained(name, mode)


@pytest.mark.proof
def test_what_has_no_gradient_on_one_card_has_none_in_a_pipeline() -> None:
    run_ranks(all_trained, 2)


def test_over_gloo_too() -> None:
    run_ranks(trained, 2, "an output is ignored", "1F1B", backend="gloo")


@pytest.mark.parametrize("loss", ["a tuple", "none"])
def test_a_loss_that_is_no_number(loss: str) -> None:
    made = {"a tuple": lambda out, y: (F.mse_loss(out, y), {"log": 1}), "none": lambda out, y: None}[loss]
    runner = pipeline.Runner({0: nn.Linear(6, 6)}, made)
    x = torch.ones(4, 6)
    with pytest.raises(ScheduleError) as caught:
        runner.step(pipeline.gpipe(1, 2), x, x)
    assert ("returned a tuple; want one" in str(caught.value)) == (loss == "a tuple"), caught.value
    assert ("your_loss(out, labels)[0]" in str(caught.value)) == (loss == "a tuple"), caught.value


def test_the_state_of_a_scaler_that_was_off() -> None:
    fleet.init()
    off = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    scaler = fleet.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(fleet.FleetError, match="holds no scale to go on with: leave out load_state_dict"):
        scaler.load_state_dict(off)
    fleet.GradScaler("cpu", enabled=False).load_state_dict(off)
    scaler.load_state_dict(fleet.GradScaler("cpu", init_scale=4.0).state_dict())
    assert scaler.get_scale() == 4.0


def test_results_that_the_last_stage_writes_to_again() -> None:
    """One rank: outputs are put together, and losses added up, when all microbatches are through."""
    kept, total = torch.zeros(2, 3), torch.zeros(())

    def forward(x: Tensor) -> Tensor:
        return kept.copy_(x).mul_(2)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        return total.copy_((out - y).square().mean())

    runner = pipeline.Runner({0: forward}, loss)
    x = torch.arange(18.0).view(6, 3)
    schedule = pipeline.gpipe(1, 3)
    close(runner.evaluate(schedule, x, loss=False), 2 * x)
    close(runner.evaluate(schedule, x, x), x.square().mean())
    assert oc.get_world_size() == 1


def tied_copies() -> list[float]:
    """A layer that stands in two places, drawn otherwise on each rank."""
    begin("1F1B", 2, 1, pp=2)
    torch.manual_seed(oc.get_rank())
    layer = nn.Linear(3, 3, bias=False)
    tied_layers.tie([layer, layer], [0, 1], fleet.get_hybrid_communicate_group().group("pp"))
    return layer.weight.detach().flatten().tolist()


def test_tied_copies_begin_with_the_first_ones_values() -> None:
    first, second = run_ranks(tied_copies, 2)
    torch.manual_seed(0)
    assert first == second == nn.Linear(3, 3, bias=False).weight.detach().flatten().tolist()
