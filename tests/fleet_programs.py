"""What the tests of the manual level share: a fleet program begun, and a local result compared with its part of one card's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from onecard import fleet


def begin(**degrees: int) -> fleet.HybridCommunicateGroup:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {f"{axis}_degree": n for axis, n in degrees.items()}
    fleet.init(is_collective=True, strategy=strategy)
    return fleet.get_hybrid_communicate_group()


def close(mine: Tensor, expected: Tensor, what: str = "", tolerance: float = 1e-5) -> None:
    """Equal to 1e-5 of the largest number."""
    assert mine.shape == expected.shape, f"{what}: {list(mine.shape)} instead of {list(expected.shape)}"
    if expected.numel():
        far = (mine - expected).abs().max().item()
        assert far <= tolerance * max(expected.abs().max().item(), 1e-3), f"{what}: {far}"


def part_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a whole tensor of one card."""
    return fleet.held(parameter).take(whole)


def compare(
    mine: nn.Module,
    single: nn.Module,
    names: dict[str, str] | None = None,
    gradients: bool = True,
    tolerance: float = 1e-5,
) -> None:
    """Parameters (and gradients) of a module against those of its one-card twin."""
    theirs = dict(single.named_parameters())
    for name, parameter in mine.named_parameters():
        twin = theirs[(names or {}).get(name, name)]
        close(parameter.detach(), part_of(parameter, twin.detach()), name, tolerance)
        if gradients:
            assert parameter.grad is not None and twin.grad is not None, name
            close(parameter.grad, part_of(parameter, twin.grad), f"gradient of {name}")


def seeded(make: Any, *args: Any, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    return make(*args, **options)
