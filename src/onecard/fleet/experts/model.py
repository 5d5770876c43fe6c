"""What a program asks of all mixtures of a model together: their routers' losses, biases, and how well they balance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onecard.fleet.experts.gates import BaseGate
from onecard.fleet.experts.layer import MoELayer
from onecard.fleet.experts.top_k import TopKGate
from onecard.train.balance import table


def _gates(model: nn.Module) -> Iterator[BaseGate]:
    return (module for module in model.modules() if isinstance(module, BaseGate))


def router_loss(model: nn.Module, clear: bool = True) -> Tensor:
    """The losses of all routers of the last forward, each times its ``loss_weight``; 0 if there are none. Add it to the loss.

    It is that of the whole batch, the same on all ranks. A ``PipelineLayer``'s is added by ``train_batch``.

    Example:
        >>> from onecard.fleet.experts.layer import MoELayer
        >>> layer = MoELayer(4, [nn.Linear(4, 4)] * 2, {"type": "topk", "balance_loss": 0.5})
        >>> _ = layer(torch.ones(3, 4))
        >>> round(router_loss(layer).item(), 3)
        0.5
    """
    losses = [gate.loss_weight * loss for gate in _gates(model) if (loss := gate.get_loss(clear)) is not None]
    if losses:
        return torch.stack(losses).sum()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return torch.zeros((), device=device)


def update_router_bias(model: nn.Module) -> None:
    """After ``optimizer.step()``: move the biases of all routers that have one (``TopKGate(bias_rate=)``).

    Source: DeepSeek-AI, DeepSeek-V3 (2024), balancing without a loss.
    """
    for gate in _gates(model):
        if isinstance(gate, TopKGate):
            gate.update_bias()


def balance(model: nn.Module) -> Any:
    """A table of how each mixture of a model balances, since it was asked before; ``rich.print`` shows it.

    Every rank that has the layers calls it.

    Example:
        >>> from onecard.fleet.experts.layer import MoELayer
        >>> model = nn.Sequential(MoELayer(4, [nn.Linear(4, 4) for _ in range(2)], {"type": "naive"}))
        >>> _ = model(torch.ones(3, 4))
        >>> balance(model).row_count
        1
    """
    mixtures = {name: module for name, module in model.named_modules() if isinstance(module, MoELayer)}
    return table({name: module.statistics() for name, module in mixtures.items()})
