"""A decoder's block with experts in the place of its MLP, by its sizes, made of fleet's layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onecard.fleet.experts.layer import MoELayer
from onecard.fleet.experts.networks import GroupedExperts
from onecard.fleet.layers.transformer import ParallelTransformerLayer
from onecard.planning.transformer import Transformer


class MixtureLayer(ParallelTransformerLayer):
    """A ``ParallelTransformerLayer`` whose MLP is a ``MoELayer``: experts along ep, each cut along mp, router with a loss.

    What every token goes to (``shared_ffn``) is the MLP that it has there; without it, it has none.

    Args:
        sizes: of the decoder; the others are those of ``ParallelTransformerLayer``.
    """

    def __init__(self, sizes: Transformer, *args: Any, **options: Any) -> None:
        where: dict[str, Any] = {name: options.get(name) for name in ("mp_group", "device", "dtype")}
        args = (*args[:3], sizes.shared_ffn or sizes.expert_ffn, *args[4:])
        super().__init__(*args, **options)
        if not sizes.shared_ffn:
            self.fc1 = self.fc2 = self.up = None
        self.shared = bool(sizes.shared_ffn)
        act = "swiglu" if sizes.gated else "gelu"
        experts = GroupedExperts(sizes.experts, sizes.hidden, sizes.expert_ffn, act, **where)
        gate = {
            "type": "topk",
            "top_k": sizes.top_k,
            "balance_loss": 0.01,
            "device": where["device"],
            "dtype": where["dtype"],
        }
        group = where["mp_group"]
        self.moe = MoELayer(
            sizes.hidden, experts, gate, mp_group=group, sequence_parallel=self.sequence_parallel and group.size > 1
        )

    def _mlp(self, x: Tensor) -> Tensor:
        made = self.moe(x)
        return made + super()._mlp(x) if self.shared else made
