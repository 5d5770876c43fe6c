"""The step of a classifier, as training loops have it."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer


def classifier_step(net: nn.Module, optimizer: Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    """Forward, backward, update; gives the loss."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
