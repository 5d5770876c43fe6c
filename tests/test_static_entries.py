"""Parameters, buffers and layers that come to a recorded program later: the step is recorded anew, and computes with them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError


class Net(nn.Module):
    """A model that asks for what it may have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.criterion = nn.Linear(6, 7, bias=False), nn.CrossEntropyLoss()
        self.register_parameter("gain", None)
        self.register_buffer("mask", None)
        self.empty, self.named, self.listed = nn.ModuleList(), nn.ModuleDict(), nn.ParameterList([torch.ones(7)])
        self.listed.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Any = self.layer(x)
        out = out if self.gain is None else out * self.gain
        out = out if self.mask is None else out * self.mask
        for more in (*self.empty, *self.named.values()):
            out = out + more(x)
        for p in self.listed:
            out = out * p
        late = getattr(self, "late", None)
        return self.criterion(out if late is None else out + late, y)


def _layer() -> nn.Linear:
    return nn.Linear(6, 7).requires_grad_(False)


def _ramp(low: float) -> Tensor:
    return torch.linspace(low, 2.0, 7)


COMERS: dict[str, Callable[[Any, Any], Any]] = {
    "weights of classes": lambda net, opt: setattr(net.criterion, "weight", _ramp(0.1)),
    "a bias": lambda net, opt: setattr(net.layer, "bias", nn.Parameter(_ramp(0.5), requires_grad=False)),
    "a parameter that was None": lambda net, opt: setattr(net, "gain", nn.Parameter(_ramp(0.5), requires_grad=False)),
    "a buffer that was None": lambda net, opt: setattr(net, "mask", _ramp(0.0)),
    "a late buffer": lambda net, opt: net.register_buffer("late", _ramp(0.0)),
    "a late parameter": lambda net, opt: setattr(net, "late", nn.Parameter(_ramp(0.0), requires_grad=False)),
    "a first layer of a list": lambda net, opt: net.empty.append(_layer()),
    "a first layer of a dict": lambda net, opt: net.named.update({"a": _layer()}),
    "a parameter of a list": lambda net, opt: net.listed.append(nn.Parameter(_ramp(0.5), requires_grad=False)),
    "moments that are None": lambda net, opt: [held.update(momentum_buffer=None) for held in opt.state.values()],
}


def _trained(comes: Any, options: dict[str, Any] | None) -> tuple[list[float], list[str]]:
    net: Any = Net()
    opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = net(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    run: Any = step if options is None else oc.to_static(step, **options)
    made, seen = torch.Generator().manual_seed(1), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(8):
            if i == 4:
                torch.manual_seed(3)
                comes(net, opt)
            seen.append(run(torch.randn(8, 6, generator=made), torch.randint(7, (8,), generator=made)).item())
    return seen, [str(each.message) for each in told]


@pytest.mark.share(3)
@pytest.mark.parametrize("options", [{}, {"k_steps": 2}], ids=["recorded", "in microbatches"])
@pytest.mark.parametrize("name", COMERS)
def test_what_comes_later_is_seen_at_once(name: str, options: dict[str, Any]) -> None:
    wanted, (found, told) = _trained(COMERS[name], None)[0], _trained(COMERS[name], options)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert told, "a step that computes with more is another one"
    if name != "moments that are None":  # the step itself makes them anew
        assert all("recorded anew: what differs" in said for said in told), told


def test_words_name_what_has_come() -> None:
    _, told = _trained(COMERS["a bias"], {})
    assert "'bias' in the parameters of net.layer, which was None" in told[0]
    _, told = _trained(COMERS["a parameter of a list"], {})
    assert "the parameters of net.listed: there were 1, and are 2" in told[0]


def test_a_parameter_of_no_optimizer_is_told_in_microbatches() -> None:
    net: Any = nn.Linear(6, 7)
    opt = torch.optim.SGD([net.weight], 0.1)

    def step(x: Tensor, y: Tensor) -> None:
        F.cross_entropy(net(x), y).backward()
        opt.step()
        opt.zero_grad()

    run = oc.to_static(step, k_steps=2)
    with pytest.raises(RecordingError, match="in no group of the optimizer"):
        for _ in range(2):
            run(torch.randn(8, 6), torch.randint(7, (8,)))
