"""No product is priced below what a device can do: its multiply-adds are counted, and the sizes told to kernels are those."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard.static.price import families

B, T, H = 4, 6, 32


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.layer = kind(H, H, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(H, H, 64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x, x * 2)
        return y


class Distances(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(48, H))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x.flatten(0, 1), self.points)


_ROWS = B * T
# What forward takes at least, in multiply-adds; backward twice that, or once where nobody wants the input's gradient.
MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LSTM": (lambda: Recurrent(nn.LSTM), _ROWS * 8 * H * H),
    "LSTM both ways": (lambda: Recurrent(nn.LSTM, bidirectional=True), 2 * _ROWS * 8 * H * H),
    "LSTM of two layers": (lambda: Recurrent(nn.LSTM, num_layers=2), 2 * _ROWS * 8 * H * H),
    "GRU": (lambda: Recurrent(nn.GRU), _ROWS * 6 * H * H),
    "bilinear": (Twice, _ROWS * 64 * H * H),
    "linear": (lambda: nn.Linear(H, 64), _ROWS * H * 64),
    "distances": (Distances, _ROWS * 48 * H),
}


def _recorded(model: nn.Module) -> oc.Recording:
    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = F.mse_loss(model(x), torch.zeros(()))
        loss.backward()
        return loss.detach()

    run = oc.to_static(step)
    x = torch.randn(B, T, H)
    for _ in range(2):
        run(x)
    return run.recordings[0]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", MODELS)
def test_products_take_no_less_than_a_device_can(name: str) -> None:
    make, least = MODELS[name]
    torch.manual_seed(0)
    recording = _recorded(make())
    machine = oc.Machine.preset("A100")
    cost = recording.cost(machine)
    forward = sum(n.products for n in cost.nodes if n.phase == "forward")
    backward = sum(n.products for n in cost.nodes if n.phase == "backward")
    assert forward == pytest.approx(least, rel=0.01) and backward >= 0.99 * least
    rate = machine.dtypes.get("float32", machine.flops)
    assert all(n.seconds >= 2 * n.products / rate for n in cost.nodes), name


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_products_multiply_to_what_is_counted(name: str) -> None:
    recording = _recorded(MODELS[name][0]())
    cost = recording.cost(oc.Machine.preset("A100"))
    told = 0
    for node, found in zip(recording.nodes(), cost.nodes, strict=True):
        if found.products and (sizes := families.sizes(node)):
            told += 1
            assert sum(map(prod, sizes)) == found.products, (name, found.name)
    assert told or name not in ("linear", "GRU")
