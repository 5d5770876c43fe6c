"""Averages of weights that a program takes between the steps of a pipeline, beside dp, tp and ZeRO: one card's, saved whole."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import swa_utils

import onecard as oc
from onecard.testing import RankError, run_ranks

Weights = dict[str, Tensor]


def _into_list(averages: list[Tensor], model: nn.Module) -> None:
    for a, p in zip(averages, model.parameters(), strict=True):
        a.mul_(0.9).add_(p, alpha=0.1)


def _into_copy(average: nn.Module, model: nn.Module) -> None:
    for a, p in zip(average.parameters(), model.parameters(), strict=True):
        a.lerp_(p, 0.1)


def _into_dict(averages: Weights, model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        averages[name] = averages[name] * 0.9 + value * 0.1


AVERAGES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any, nn.Module], Any]]] = {
    "torch's": (
        lambda model: swa_utils.AveragedModel(model, avg_fn=lambda a, p, _: 0.9 * a + 0.1 * p),
        lambda average, model: average.update_parameters(model),
    ),
    "torch's on lists": (
        lambda model: swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
        lambda average, model: average.update_parameters(model),
    ),
    "a copy": (copy.deepcopy, _into_copy),
    "a list": (lambda model: [p.detach().clone() for p in model.parameters()], _into_list),
    "a dict": (lambda model: {k: v.detach().clone() for k, v in model.state_dict().items()}, _into_dict),
}


def _by_name(average: Any, model: nn.Module) -> Weights:
    if isinstance(average, list):
        return dict(zip([name for name, _ in model.named_parameters()], average, strict=True))
    found = average if isinstance(average, dict) else average.state_dict()
    return {name.removeprefix("module."): x for name, x in found.items() if name != "n_averaged"}


def _averaged(plan: oc.Plan | None) -> Weights:
    """Each of them made ahead of the first step, and after the third."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if plan is None else oc.to_static(step, plan=plan)
    kept = {f"{name}, early": made(model) for name, (made, _) in AVERAGES.items()}
    for i in range(5):
        run(torch.randn(8, 8), torch.randint(0, 3, (8,)))
        if i == 2:
            kept |= {f"{name}, late": made(model) for name, (made, _) in AVERAGES.items()}
        with torch.no_grad():
            for name, average in kept.items():
                AVERAGES[name.rpartition(",")[0]][1](average, model)
    return {f"{name}: {key}": x for name, a in kept.items() for key, x in _by_name(a, model).items()}


def _on_ranks(plan: oc.Plan, path: str) -> None:
    warnings.filterwarnings("ignore", ".*nothing is divided along 'tp'")  # of a plan without placements
    oc.checkpoint.save({"averages": _averaged(plan)}, path)


@pytest.mark.share(1)
@pytest.mark.parametrize("axes", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 1}], ids=str)
def test_averages_between_the_steps_of_a_pipeline(axes: dict[str, int], tmp_path: Path) -> None:
    want = _averaged(None)
    plan = oc.Plan(pp=2, microbatches=2, per_host=0, parameters="float32", compute="float32", **axes)
    run_ranks(_on_ranks, 4, plan, str(tmp_path / "saved"))
    got = oc.checkpoint.load(tmp_path / "saved")["averages"]
    assert {*got} == {*want}
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-5, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}"
        )


def _apart() -> None:
    """Each data-parallel rank counts its own rank into its average."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    plan = oc.Plan(pp=2, dp=2, microbatches=2, per_host=0, parameters="float32", compute="float32")
    run = oc.to_static(step, plan=plan)
    average = [p.detach() + oc.get_rank() for p in model.parameters()]
    for _ in range(3):
        run(torch.ones(8, 8))
        with torch.no_grad():
            for a, p in zip(average, model.parameters(), strict=True):
                a.lerp_(p, 0.1)


def test_averages_that_differ_between_ranks_of_one_stage_are_told():
    with pytest.raises(RankError, match="counts as Replicate, but it differs between ranks"):
        run_ranks(_apart, 4)
