"""auto_mode="full": an Engine of a model without marks finds its plan for the batch, and computes one card's numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_programs import MLP, small
from torch import nn

import onecard as oc
from onecard.errors import EngineError
from onecard.machine.cost import Machine
from onecard.testing import RankError, run_ranks

SLOW = Machine(latency=1e-9, bandwidth=1e12, memory=1e10, flops=1e9)


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, count: int = 24, width: int = 16) -> None:
        torch.manual_seed(1)
        self.x, self.y = torch.randn(count, width), torch.randn(count, width)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]


def _fit(
    mode: str, how: str, section: dict[str, Any] | None = None, machine: Machine = SLOW
) -> tuple[list[float], str, str]:
    from onecard.engine import full

    full.this_machine = lambda: machine  # type: ignore[attr-defined]
    torch.manual_seed(2)
    model = MLP(16, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = oc.Engine(model, nn.MSELoss(), optimizer, strategy={"auto_mode": mode, "seed": 3, **(section or {})})
    data = Pairs()
    if how == "fit":
        losses = engine.fit(data, batch_size=6, epochs=2, shuffle=True, verbose=0).losses
    elif how == "loader":
        losses = [engine.run(batch)["loss"] for _ in range(2) for batch in engine.dataloader(data, 6)]
    elif how == "specs":
        spec = oc.InputSpec([6, 16], "float32")
        engine.prepare(spec, spec, mode="train")
        losses = [engine.run((data.x[i : i + 6], data.y[i : i + 6]))["loss"] for i in range(0, 24, 6)]
    else:
        losses = engine.fit(iter([(data.x[:6], data.y[:6])]), verbose=0).losses
    said = "" if engine.plans is None else str(engine.plans.best.tp)
    return [float(x) for x in losses], said, str(getattr(model.w0.weight, "placements", ""))


@pytest.mark.proof
@pytest.mark.parametrize("how", ["fit", "loader", "specs"])
def test_the_plan_is_found_and_the_numbers_are_one_cards(how):
    wanted, plan, _ = _fit("full", how)
    assert plan == ""  # one rank has nothing to divide
    for found, tp, placements in run_ranks(_fit, 2, "full", how):
        assert found == pytest.approx(wanted, rel=1e-5)
        assert tp == "2" and placements == "(Shard(dim=0),)"


def _where_memory_is_short(dtype: torch.dtype) -> tuple[list[float], str]:
    from onecard.engine import full

    found = full.plan
    full.plan = lambda *args, **kwargs: found(*args, **kwargs, objective="memory")  # type: ignore[attr-defined]
    torch.manual_seed(2)
    model, data = MLP(16, 64).to(dtype), Pairs()
    data.x, data.y = data.x.to(dtype), data.y.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = oc.Engine(model, nn.MSELoss(), optimizer, strategy={"auto_mode": "full"})
    losses = engine.fit(data, batch_size=6, verbose=0).losses
    return [float(x) for x in losses], "" if engine.plans is None else f"{engine.strategy.sharding.enable}"


@pytest.mark.share(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_plan_asks_for_is_enabled(dtype):
    wanted, _ = _where_memory_is_short(dtype)
    for found, enabled in run_ranks(_where_memory_is_short, 2, dtype):
        assert found == pytest.approx(wanted, rel=1e-5) and enabled == "True"


@pytest.mark.proof
def test_what_is_enabled_is_pinned():
    wanted = _fit("semi", "fit")[0]
    given = {"sharding": {"enable": True, "stage": 2}}
    fast = Machine(latency=1e-9, bandwidth=1e13, memory=1e9, flops=1e15)
    for section in (given, {"gradient_merge": {"enable": True, "k_steps": 3}}):
        for found, tp, _ in run_ranks(_fit, 2, "full", "fit", section, fast):
            assert found == pytest.approx(wanted, rel=1e-5) and tp in ("1", "2")


class Batches:
    """One batch, four times."""

    def __init__(self, *batch: torch.Tensor) -> None:
        self.batch = batch

    def __iter__(self) -> Any:
        return iter([self.batch] * 4)


def _pipeline(stages: int) -> tuple[list[float], str]:
    torch.manual_seed(0)
    program = small()["gpt deep"]
    model = program.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    strategy: dict[str, Any] = {"auto_mode": "full"}
    if stages > 1:
        strategy["pipeline"] = {"enable": True, "degree": stages, "accumulate_steps": 4, "schedule_mode": "1F1B"}
    loss = lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    engine = oc.Engine(model, loss, optimizer, strategy=strategy)
    torch.manual_seed(5)
    x, y = program.batch()
    losses = engine.fit(Batches(x, y), verbose=0).losses
    return [float(value) for value in losses], "" if engine.plans is None else str(engine.plans.best.pp)


@pytest.mark.proof
def test_a_pipeline_that_is_asked_for():
    wanted, _ = _pipeline(1)
    for found, pp in run_ranks(_pipeline, 2, 2, timeout=120.0):
        assert found == pytest.approx(wanted, rel=1e-5) and pp == "2"


def _unknown() -> None:
    engine = oc.Engine(
        MLP(4, 8), nn.MSELoss(), torch.optim.SGD(MLP(4, 8).parameters(), 0.1), strategy={"auto_mode": "full"}
    )
    with pytest.raises(EngineError, match="a plan is found for a batch: call fit or dataloader"):
        engine.place()


def test_what_says_no_batch_is_told():
    run_ranks(_unknown, 2)
    with pytest.raises(RankError, match="can be read only once"):
        run_ranks(_fit, 2, "full", "once")
