"""What pipelines and microbatches say in words that was silent, or an error of torch's own."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError, StageError
from onecard.testing import run_ranks


def _stepped(net: nn.Module, loss_of: Any) -> Any:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 32).view(8, 4), torch.arange(8) % 3


def _on_two() -> tuple[list[str], str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net = _layers()
        run = oc.to_static(_stepped(net, F.cross_entropy), stages=oc.Stages(2))
        run(*_batch())
        cut = _layers()
        oc.to_static(_stepped(cut, F.cross_entropy), stages=oc.Stages(2, at=["2"]))(*_batch())
    with pytest.raises(StageError) as refused:
        cut.double()
    return [str(w.message) for w in caught], str(refused.value)


@pytest.mark.proof
def test_ranks_without_parameters_and_conversions() -> None:
    for told, refused in run_ranks(_on_two, 2, timeout=60.0):
        (said,) = [words for words in told if "have no parameter" in words]  # not of the one with a part on each
        assert "layers are small beside messages" in said
        assert "keeps its dtype and device" in refused, refused


def _on_dp() -> str:
    net = _layers()
    run = oc.to_static(
        _stepped(net, F.cross_entropy), plan=oc.Plan(per_host=0, parameters="float32", compute="float32", dp=2)
    )
    for _ in range(2):
        run(*_batch())
    with pytest.raises(RuntimeError) as refused:
        net.double()
    return str(refused.value)


def test_a_conversion_of_what_a_recorded_step_holds() -> None:
    assert all("Linear.weight is a distributed tensor that" in said for said in run_ranks(_on_dp, 2, timeout=60.0))


def test_what_is_as_long_as_the_batch_and_no_argument() -> None:
    net, state = _layers(), torch.zeros(8, 3)
    run = oc.to_static(_stepped(net, lambda o, y: F.cross_entropy(o + state, y)), k_steps=2)
    run(*_batch())
    with pytest.raises(
        RecordingError, match=r"cannot with one of its 2 microbatches, at .*test_cut_told.py:\d+: Runtime"
    ):
        run(*_batch())


def test_smoothed_losses_with_weights_are_counted_under_a_plan() -> None:
    weight = torch.tensor([0.2, 1.0, 3.0])
    plan = oc.Plan(per_host=0, parameters="float32", compute="float32", microbatches=2)

    def loss_of(o: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(o, y, weight, label_smoothing=0.1, ignore_index=1)

    plain, found = _stepped(_layers(), loss_of), oc.to_static(_stepped(_layers(), loss_of), plan=plan)
    x, y = _batch()
    y[:3] = 1
    for _ in range(3):
        torch.testing.assert_close(found(x, y), plain(x, y))


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute of its own, and takes each second one twice as far."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count % 2 == 0:
            for p in self.param_groups[0]["params"]:
                p.grad.mul_(2.0)
        return super().step(closure)


def test_a_look_at_a_step_counts_none_of_its_optimizers_steps() -> None:
    plan = oc.Plan(per_host=0, parameters="float32", compute="float32")

    def losses(recorded: bool) -> list[float]:
        net = _layers()
        optimizer = Counting(net.parameters(), lr=0.3)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = oc.to_static(step, plan=plan) if recorded else step
        found = [float(run(*_batch())) for _ in range(4)]
        assert optimizer.count == 4
        return found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is recorded anew")
        assert losses(True) == pytest.approx(losses(False), rel=1e-5)
