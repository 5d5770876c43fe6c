"""A transformer layer made of the cut layers: what the recipes of Megatron-LM come to, and what the memory tables measure."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.grid.rng import dropout, get_rng_state_tracker
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.fleet.layers import sequence
from onecard.fleet.layers.heads import QKVParallelLinear
from onecard.fleet.layers.linear import ColumnParallelLinear, RowParallelLinear
from onecard.fleet.layers.recomputing import recompute

Recompute = Literal["none", "selective", "full"]


class ParallelTransformerLayer(nn.Module):
    """A pre-norm transformer layer, (time, batch, hidden) -> the same, its heads and hidden units divided over the ranks.

    Args:
        hidden, n_heads: of the whole layer; ``n_kv_heads``: key heads, as many as queries if left out.
        ffn: hidden units of the MLP; 4 * hidden if left out.
        attention_dropout, hidden_dropout: probabilities.
        causal: whether a position sees only those before it.
        sequence_parallel: each rank has its part of the time between the cut layers: x is (time / n, batch, hidden).
        recompute: "selective": scores, softmax, dropout and their product with the values are computed again in backward;
            "full": all of the layer is.
        mp_group: the ranks that share it; those along mp if left out.

    Source: Shoeybi et al. (2019); Korthikanti et al. (2022).
    """

    def __init__(
        self,
        hidden: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        ffn: int | None = None,
        attention_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        causal: bool = True,
        sequence_parallel: bool = False,
        recompute: Recompute = "none",
        mp_group: Ranks | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if hidden % n_heads or recompute not in ("none", "selective", "full"):
            raise FleetError(
                f"a layer of hidden {hidden}, {n_heads} heads, recompute={recompute!r}: heads divide hidden; recompute is "
                "'none', 'selective' or 'full'"
            )
        self.causal, self.recompute, self.sequence_parallel = causal, recompute, sequence_parallel
        self.attention_dropout, self.hidden_dropout = attention_dropout, hidden_dropout
        self.head_dim = hidden // n_heads
        group = mp_group or get_hybrid_communicate_group().group("mp")
        kinds: tuple[Any, Any, Any] = (QKVParallelLinear, ColumnParallelLinear, RowParallelLinear)
        if sequence_parallel:
            kinds = (
                sequence.QKVSequenceParallelLinear,
                sequence.ColumnSequenceParallelLinear,
                sequence.RowSequenceParallelLinear,
            )
        where = {"mp_group": group, "device": device, "dtype": dtype}
        qkv, column, row = kinds
        units = 4 * hidden if ffn is None else ffn
        self.norm1 = nn.LayerNorm(hidden, device=device, dtype=dtype)
        self.qkv = qkv(hidden, self.head_dim, n_heads, n_kv_heads, has_bias=True, **where)
        self.proj = row(hidden, hidden, input_is_parallel=True, unit=self.head_dim, **where)
        self.norm2 = nn.LayerNorm(hidden, device=device, dtype=dtype)
        self.fc1 = column(hidden, units, has_bias=True, gather_output=False, **where)
        self.fc2 = row(units, hidden, input_is_parallel=True, **where)
        if sequence_parallel:
            for norm in (self.norm1, self.norm2):
                for parameter in norm.parameters():
                    sequence.mark_as_sequence_parallel_parameter(parameter, group)

    def forward(self, x: Tensor) -> Tensor:
        """x, and what attention and MLP add to it."""
        return recompute(self._layer, x) if self.recompute == "full" and self.training else self._layer(x)

    def _layer(self, x: Tensor) -> Tensor:
        x = x + self._dropout(self._attention(self.norm1(x)))
        hidden = F.gelu(self.fc1(self.norm2(x)), approximate="tanh")
        return x + self._dropout(self.fc2(hidden))

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv.split(self.qkv(x))
        if self.recompute == "selective" and self.training:
            return self.proj(recompute(self._core, q, k, v))
        return self.proj(self._core(q, k, v))

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (time, batch, heads, width) -> (time, batch, heads * width)."""
        k, v = self.qkv.expand(k, 2), self.qkv.expand(v, 2)
        time, batch, heads, width = q.shape
        q, k, v = (x.permute(1, 2, 0, 3).reshape(batch * heads, -1, width) for x in (q, k, v))
        # One operator, which keeps q and k alone, and nothing in place: a policy of recompute may keep its result.
        if self.causal:
            mask = torch.full((time, time), -math.inf, dtype=q.dtype, device=q.device).triu_(1)
        else:
            mask = q.new_empty((1, 1))
        scale = 1 / math.sqrt(width)
        scores = torch.baddbmm(mask[None], q, k.transpose(1, 2), beta=int(self.causal), alpha=scale)
        weights = dropout(scores.softmax(-1), self.attention_dropout, self.training, rng_name=_known("local_seed"))
        return weights.bmm(v).view(batch, heads, time, width).permute(2, 0, 1, 3).reshape(time, batch, heads * width)

    def _dropout(self, x: Tensor) -> Tensor:
        name = "local_seed" if self.sequence_parallel else "global_seed"
        return dropout(x, self.hidden_dropout, self.training, rng_name=_known(name))


def _known(name: str) -> str | None:
    """A random state that the program has begun; else torch's own."""
    return name if name in get_rng_state_tracker().states else None
