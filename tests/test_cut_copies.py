"""Momentum encoders that a pipeline's step updates: one stage's memory, made of all stages' weights. As on one card."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import swa_utils

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

Update = Callable[[Iterable[Tensor], Iterable[Tensor]], None]


def _added(key: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
    for a, p in zip(key, weights, strict=True):
        a.mul_(0.9).add_(p, alpha=0.1)


def _of_views(key: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
    for a, p in zip(key, weights, strict=True):
        a.view(-1).lerp_(p.detach().view(-1), 0.1)


def _of_data(key: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
    for a, p in zip(key, weights, strict=True):
        a.data.copy_(a.data * 0.9 + p.data * 0.1)


def _on_lists(key: Iterable[Tensor], weights: Iterable[Tensor]) -> None:
    torch._foreach_lerp_([*key], [*weights], 0.1)


UPDATES: dict[str, Update] = {"added": _added, "views": _of_views, "data": _of_data, "lists": _on_lists}


def _losses(update: Update | str, ahead: bool, plan: oc.Plan | None) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 6))
    key: nn.Module = copy.deepcopy(model)
    if isinstance(update, str):
        multi = swa_utils.get_ema_multi_avg_fn(0.9) if update == "torch's on lists" else None
        key = swa_utils.AveragedModel(
            model, avg_fn=None if multi else lambda a, p, _: 0.9 * a + 0.1 * p, multi_avg_fn=multi
        )
    for p in key.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    @torch.no_grad()
    def follow() -> None:
        if isinstance(key, swa_utils.AveragedModel):
            key.update_parameters(model)
        elif callable(update):
            update(key.parameters(), model.parameters())

    def step(x: Tensor, seen: Tensor) -> Tensor:
        if ahead:
            follow()
        with torch.no_grad():
            wanted = F.normalize(key(seen), dim=-1)
        loss = F.mse_loss(F.normalize(model(x), dim=-1), wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not ahead:
            follow()
        return loss.detach()

    run = step if plan is None else oc.to_static(step, plan=plan)
    generator = torch.Generator().manual_seed(1)
    return [float(run(*torch.randn(2, 8, 8, generator=generator))) for _ in range(6)]


def _each(plan: oc.Plan, names: list[str]) -> None:
    for name in names:
        for ahead in (False, True):
            update = UPDATES.get(name, name)
            assert _losses(update, ahead, plan) == pytest.approx(_losses(update, ahead, None), rel=1e-5), (name, ahead)


@pytest.mark.share(1)
@pytest.mark.parametrize("name", [*UPDATES, "torch's", "torch's on lists"])
def test_a_momentum_encoder_on_the_last_stage(name: str) -> None:
    run_ranks(_each, 2, oc.Plan(pp=2, microbatches=2), [name])


@pytest.mark.proof
@pytest.mark.parametrize("degrees", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 1}], ids=str)
def test_beside_other_axes(degrees: dict[str, int]) -> None:
    run_ranks(_each, 4, oc.Plan(pp=2, microbatches=2, **degrees), [*UPDATES, "torch's on lists"])


# -- weights that several stages read ----------------------------------------------------------------------------------------


def _preferred(plan: oc.Plan | None, sizes: list[tuple[int, int]], reference: bool) -> list[float]:
    """Losses and evaluations of two passes of one model in a step, the second beside a frozen copy of it."""
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))).double()
    frozen = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9)

    def step(a: Tensor, b: Tensor) -> Tensor:
        margin = model(a).sum((-2, -1)) - model(b).sum((-2, -1))
        if reference:
            with torch.no_grad():
                before = frozen(a).sum((-2, -1)) - frozen(b).sum((-2, -1))
            margin = margin - before
        loss = -F.logsigmoid(margin).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def evaluate(a: Tensor) -> Tensor:
        return model(a).sum((-2, -1)).mean()

    run, seen = (f if plan is None else oc.to_static(f, plan=plan) for f in (step, evaluate))
    generator, found = torch.Generator().manual_seed(1), list[float]()
    for i in range(5):
        first, second = sizes[i % len(sizes)]
        a, b = (torch.randn(4, n, 8, generator=generator).double() for n in (first, second))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is recorded anew")
            found.append(float(run(a, b)))
            with torch.no_grad():
                found.append(float(seen(a)))
    if plan is not None:  # what several ranks keep is the same on all
        oc.checkpoint.save({"model": model}, "saved")
    return found


@pytest.mark.parametrize(("sizes", "reference"), [([(1, 1)], True), ([(2, 50), (50, 2)], False)], ids=["dpo", "two"])
def test_weights_that_two_stages_read(sizes, reference, tmp_path, monkeypatch) -> None:
    """Also where a step that is recorded anew reads them in one stage only: all that have them update them."""
    monkeypatch.chdir(tmp_path)
    wanted = _preferred(None, sizes, reference)
    for found in run_ranks(_preferred, 2, oc.Plan(pp=2, microbatches=2), sizes, reference):
        assert found == pytest.approx(wanted, rel=1e-6)


class Counted(nn.Module):
    """Whoever has only read the buffer would read its old value in the next step, unless all ranks write it at its end."""

    def __init__(self, largest: bool = False) -> None:
        super().__init__()
        self.largest = largest
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x) * self.seen.clone())
        with torch.no_grad():
            self.seen.add_(made.detach().max() if self.largest else made.detach().mean())
        return made


def _counted(largest: bool = False, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model = Counted(largest)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run, draw = oc.to_static(step, **options) if options else step, torch.Generator().manual_seed(1)
    return [float(run(torch.randn(8, 4, generator=draw))) for _ in range(4)]


def _counts() -> list[list[float]]:
    with pytest.raises(RecordingError, match=r"model\.seen is used by several stages and changed by add_"):
        _counted(True, stages=oc.Stages(1, at=["second"]))
    return [_counted(stages=oc.Stages(k, at=["second"])) for k in (1, 4)]


def test_a_buffer_that_one_stage_reads_and_another_one_writes() -> None:
    for each in run_ranks(_counts, 2):
        assert all(found == pytest.approx(_counted(), rel=1e-5) for found in each)
