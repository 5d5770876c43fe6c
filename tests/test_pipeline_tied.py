"""One parameter on two stages has its one-card name on both: what a program does to it by that name it does to both copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import close, seeded
from pipeline_programs import OneCard, begin
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.testing import RankError, run_ranks

NAME = "0.weight"


def shared() -> list[Any]:
    def head(table: nn.Embedding, x: Tensor) -> Tensor:
        return F.linear(x, table.weight)

    return [
        fleet.SharedLayerDesc("table", nn.Embedding, None, "weight", 11, 6),
        fleet.LayerDesc(nn.Linear, 6, 6),
        fleet.LayerDesc(nn.Linear, 6, 6),
        fleet.SharedLayerDesc("table", nn.Embedding, head, "weight", 11, 6),
    ]


def modules() -> list[Any]:
    """The same of modules that have a parameter in common."""
    table, head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
    head.weight = table.weight
    return [table, nn.Linear(6, 6), nn.Linear(6, 6), head]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels)


def of_name(net: nn.Module) -> list[Any]:
    return [p for name, p in net.named_parameters() if name == NAME]


def written(net: nn.Module, step: int) -> None:
    with torch.no_grad():
        for p in of_name(net):
            p.mul_(0.5)


def frozen(net: nn.Module, step: int) -> None:
    for p in of_name(net):
        p.requires_grad_(step % 2 == 0)


def dropped(net: nn.Module, step: int) -> None:
    for p in of_name(net):
        p.grad = None


def edited(net: nn.Module, step: int) -> None:
    for p in of_name(net):
        if p.grad is not None:
            p.grad[:4] = 0


def hooked(net: nn.Module, step: int) -> None:
    if step == 0:
        for p in of_name(net):
            p.register_hook(lambda grad: grad * 0.1)


BEFORE: tuple[Callable[[nn.Module, int], None], ...] = (written, frozen, hooked)
BEHIND: tuple[Callable[[nn.Module, int], None], ...] = (dropped, edited)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    rest = [p for name, p in net.named_parameters() if name != NAME]
    return [{"params": of_name(net), "lr": 0.02, "weight_decay": 0.0}, {"params": rest}]


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(net), lr=0.05, weight_decay=0.2)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    return torch.randint(11, (4,), generator=draws), torch.randint(11, (4,), generator=draws)


def trained(make: Any, habit: Any, single: bool) -> tuple[list[Tensor], list[Tensor]]:
    descs = seeded(make)
    torch.manual_seed(5)
    net: Any = OneCard(descs) if single else fleet.PipelineLayer(descs, loss_fn=loss)
    model: Any = net if single else fleet.distributed_model(net)
    optimizer: Any = optimizer_of(net) if single else fleet.distributed_optimizer(optimizer_of(net))
    losses = []
    for step in range(5):
        x, y = batch(step)
        if habit in BEFORE:
            habit(net, step)
        if single:
            each = loss(net(x), y)
            each.backward()
        else:
            each = model.forward_backward_pipeline([x, y])
        losses.append(each.detach())
        if habit in BEHIND:
            habit(net, step)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach() for p in of_name(net)]


def by_name(make: Any) -> None:
    begin("1F1B", 2, 2, pp=oc.get_world_size())
    for habit in (*BEFORE, *BEHIND, None):
        expected, mine = trained(make, habit, True), trained(make, habit, False)
        for a, b in zip([*mine[0], *mine[1]], [*expected[0], *expected[1]], strict=True):
            close(a, b, getattr(habit, "__name__", "groups"))


@pytest.mark.parametrize("make", [shared, modules])
def test_both_copies_have_the_name_of_one_card(make: Any) -> None:
    run_ranks(by_name, 2, make)


def test_copies_that_differ_are_told() -> None:
    with pytest.raises(RankError, match=f"the parameter {NAME} is one parameter on ranks"):
        run_ranks(written_apart, 2)


def written_apart() -> None:
    begin("1F1B", 2, 2, pp=2)
    net = fleet.PipelineLayer(seeded(shared), loss_fn=loss)
    model: Any = fleet.distributed_model(net)
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            net.get_submodule("3").get_parameter("weight").mul_(2)
    for step in range(3):
        model.forward_backward_pipeline([*batch(step)])
