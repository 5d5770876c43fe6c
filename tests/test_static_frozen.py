"""``gc.freeze`` before training, a habit of those who fork workers: recordings see what it hides from the collector."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecard as oc
from onecard.static.guards import before, frozen


@pytest.fixture
def thawed() -> Iterator[None]:
    """What is frozen already (by the fork server of ranks, which this process may be from) stays so."""
    before = frozen._Settled.mark, frozen._Settled.known
    yield
    gc.unfreeze()
    frozen._Settled.mark, frozen._Settled.known = before


def losses(static: bool, freeze: bool) -> tuple[list[float], list[Any]]:
    torch.manual_seed(0)
    model, scale = nn.Linear(3, 3), torch.full((3,), 0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    seen: list[Any] = [0.0]
    if freeze:
        gc.freeze()

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) * scale).pow(2).mean()
        loss.backward()
        optimizer.step()
        seen[0] = optimizer.param_groups[0]["lr"]
        return loss.detach()

    run: Any = oc.to_static(step) if static else step
    found = []
    for i in range(2):
        found.append(run(torch.ones(2, 3) * (i + 1)).item())
        schedule.step()
    kept = type(seen[0])
    found.append(run(torch.ones(2, 3)).item())
    assert not static or len(run.recordings) == 1
    return found, [kept, model.weight.tolist()]


@pytest.mark.proof
def test_a_model_that_is_frozen_is_there_before_the_step(thawed: None) -> None:
    with warnings.catch_warnings(action="ignore"):  # what the step keeps in Python is told
        assert losses(True, True) == losses(False, False)


@pytest.mark.proof
def test_frozen_objects_are_found_only_where_a_program_has_some(thawed: None) -> None:
    hidden: list[Tensor] = [torch.ones(1)]
    gc.freeze()
    assert frozen.is_any(gc.get_objects()) and any(x is hidden[0] for x in frozen.objects(gc.get_objects()))
    frozen.settle()
    assert not frozen.is_any(gc.get_objects())
    gc.freeze()
    assert frozen.is_any(gc.get_objects())


@pytest.mark.proof
def test_what_is_frozen_is_looked_for_once_and_anew_where_more_is_frozen(
    thawed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    look = frozen.objects
    monkeypatch.setattr(frozen, "objects", lambda listed: looks.append(1) or look(listed))

    def tensors() -> list[Tensor]:
        return frozen.those(gc.get_objects(), [TENSORS])[0]

    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    gc.freeze()
    assert all(any(x is p for x in tensors()) for p in first.parameters()) and len(looks) == 1
    later = nn.Linear(2, 2)
    assert not any(x is later.weight for x in tensors()) and len(looks) == 1
    gc.freeze()
    assert any(x is later.weight for x in tensors()) and len(looks) == 2
    gone = weakref.ref(second.weight)
    del second
    assert gone() is None and any(x is first.weight for x in tensors()) and len(looks) == 2


TENSORS = frozen.kinds_of(Tensor)


def test_what_is_thawed_is_there_once(thawed: None) -> None:
    kept = nn.Linear(2, 2)
    gc.freeze()
    assert sum(x is kept.weight for x in before.alive(TENSORS)[0]) == 1
    gc.unfreeze()
    assert sum(x is kept.weight for x in before.alive(TENSORS)[0]) == 1
