"""Deferred models that a pipeline divides: each rank makes its own stages' tensors, and none ever has the whole model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard.errors import DispatchError
from onecard.testing import RankError, run_ranks
from onecard.train import unmade

WIDTH, BLOCKS = 96, 8
PLAN = {"per_host": 0, "parameters": "float32", "compute": "float32", "microbatches": 4}
STRATEGY = {"pipeline": {"enable": True, "degree": 2, "accumulate_steps": 4}}


class Block(nn.Module):
    """With a table that is no buffer, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.table = torch.linspace(0, 1, WIDTH).cos()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.layer(x)) * self.table)


def _model(deferred: bool) -> nn.Module:
    torch.manual_seed(0)
    if not deferred:
        with oc.one_card_random():
            return nn.Sequential(*[Block() for _ in range(BLOCKS)])
    with oc.deferred_init():
        return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def _bytes() -> int:
    """Of all memory of tensors that are alive here."""
    found = {}
    for x in gc.get_objects():
        if isinstance(x, Tensor) and type(x) in (Tensor, nn.Parameter, unmade.Unmade, unmade.UnmadeParameter):
            storage = _storage(x)
            if storage is not None:
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def _storage(x: Tensor) -> Any:
    was, unmade.looking.here = unmade.looking.here, True
    try:
        return None if x.is_meta or x.layout is not torch.strided else x.untyped_storage()
    finally:
        unmade.looking.here = was


def _step(kind: str, model: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if kind == "plain":
        return step
    if kind == "stages":
        return oc.to_static(step, stages=oc.Stages(k_steps=4))
    if kind.startswith("plan"):
        return oc.to_static(
            step, plan=oc.Plan(pp=2, dp=2 if kind == "plan dp" else 1, zero=int(kind == "plan dp"), **PLAN)
        )
    zero = {"sharding": {"enable": True, "stage": int(kind[-1])}} if kind.startswith("zero") else {}
    engine = oc.Engine(model, nn.MSELoss(), optimizer, strategy={**STRATEGY, **zero})
    spec = oc.InputSpec([8, WIDTH], "float32")
    engine.prepare(spec, spec, mode="train")
    return lambda x, y: engine.run((x, y))["loss"]


def _trained(kind: str, deferred: bool = True) -> tuple[list[float], float]:
    """Losses, and the most memory of tensors while the model is made, in shares of the whole of it."""
    gc.collect()
    before, most, make = _bytes(), [0], unmade.make

    def seen(x: Tensor) -> Tensor:
        new = isinstance(x, unmade.Unmade)
        made = make(x)
        most[0] = max(most[0], _bytes() - before) if new else most[0]
        return made

    unmade.make = seen
    try:
        model = _model(deferred)
        held = [*model.parameters()]
        step = _step(kind, model)
        most[0] = max(most[0], _bytes() - before) if deferred else 0
        x = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH).sin()
        losses = [float(step(x, x.cos())) for _ in range(4)]
    finally:
        unmade.make = make
    assert all(p is q for p, q in zip(held, model.parameters(), strict=True))
    whole = sum(p.numel() * p.element_size() for p in held)
    return losses, most[0] / whole


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["stages", "plan", "engine"])
def test_each_rank_makes_its_own_stages(kind: str) -> None:
    """Two stages: half of the model, and a little; the losses are those of the same model on one card."""
    wanted = run_ranks(_trained, 1, "plain", False)[0][0]
    for losses, share in run_ranks(_trained, 2, kind, timeout=100.0):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert 0.4 < share < 0.65


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["engine", "plan dp", "zero1", "zero3"])
def test_beside_other_axes(kind: str) -> None:
    """Parts of distributed tensors are made as late; ZeRO 3 divides each tensor before the next is made."""
    wanted = run_ranks(_trained, 1, "plain", False)[0][0]
    for losses, share in run_ranks(_trained, 4, kind, timeout=120.0):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert 0.3 < share < 0.65


def _asked_early() -> list[Any]:
    """Values that somebody wants before the first step are there, and stay."""
    model = _model(True)
    step = _step("engine", model)
    first: Any = model[0].layer.weight
    copied = model[7].layer.weight.detach().clone()
    with torch.no_grad():
        model[1].layer.bias.fill_(0.25)
    kinds = [type(model[i].layer.weight).__name__ for i in (6, 7)]
    x = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH).sin()
    losses = [float(step(x, x.cos())) for _ in range(2)]
    return [losses, float(copied.double().sum()), kinds, first is model[0].layer.weight]


def _asked_early_plain() -> list[Any]:
    model = _model(False)
    with torch.no_grad():
        model[1].layer.bias.fill_(0.25)
    copied = float(model[7].layer.weight.detach().double().sum())
    step = _step("plain", model)
    x = torch.linspace(-1, 1, 8 * WIDTH).reshape(8, WIDTH).sin()
    return [[float(step(x, x.cos())) for _ in range(2)], copied]


def test_values_that_are_asked_for_early() -> None:
    """A tensor is made for who reads it or writes to it before its stage is known."""
    wanted = run_ranks(_asked_early_plain, 1)[0]
    for losses, copied, kinds, same in run_ranks(_asked_early, 2, timeout=100.0):
        assert losses == pytest.approx(wanted[0], rel=1e-5)
        assert copied == pytest.approx(wanted[1], rel=1e-6)
        assert kinds == ["UnmadeParameter", "Parameter"] and same


def _shared_memory() -> str:
    with oc.deferred_init():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    try:
        unmade.wait(model.modules())
    except DispatchError as fault:
        return str(fault)
    return ""


def test_memory_that_two_share_is_refused() -> None:
    """They would be two tensors on their stages."""
    assert "share memory" in run_ranks(_shared_memory, 1)[0]


def _other_seeds() -> None:
    torch.manual_seed(oc.get_rank())
    with oc.deferred_init():
        model = nn.Sequential(*[Block() for _ in range(2)])
    _step("zero1", model)


def test_ranks_with_other_seeds_are_told_when_the_model_is_laid_out() -> None:
    """Each stage's ranks draw for themselves later on, where nothing could be compared."""
    with pytest.raises(RankError, match="draws with key"):
        run_ranks(_other_seeds, 4, timeout=60.0)
