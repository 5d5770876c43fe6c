"""A transformer layer made of the cut layers: what the recipes of Megatron-LM come to, and what the memory tables measure."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.grid.rng import get_rng_state_tracker
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.fleet.layers import context, sequence
from onecard.fleet.layers.dropout import dropout
from onecard.fleet.layers.heads import QKVParallelLinear
from onecard.fleet.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from onecard.fleet.layers.recomputing import recompute

Recompute = Literal["none", "selective", "operators", "full"]
Attention = Literal["scores", "flash"]
RECOMPUTES = ("none", "selective", "operators", "full")
NORMS: dict[str, Any] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class ParallelTransformerLayer(nn.Module):
    """A pre-norm transformer layer, (time, batch, hidden) -> the same, its heads and hidden units divided over the ranks.

    Args:
        hidden, n_heads: of the whole layer; ``n_kv_heads``: key heads, as many as queries if left out.
        ffn: hidden units of the MLP; 4 * hidden if left out.
        attention_dropout, hidden_dropout: probabilities; the first one of "scores" alone.
        causal: whether a position sees only those before it.
        sequence_parallel: each rank has its part of the time between the cut layers: x is (time / n, batch, hidden).
        recompute: "selective": scores, softmax, dropout and their product with the values are computed again in backward;
            "operators": all but attention in one kernel, messages, and every second product is (gate and up are products of
            their own then); "full": all of the layer is.
        mp_group: the ranks that share it; those along mp if left out.
        head_dim: of one head; hidden / n_heads if left out.
        norm: "layer" or "rms"; bias: whether linear layers have one; qkv_bias: queries, keys and values in any case;
            qk_norm: norms of queries and keys, head by head; gated: SwiGLU, silu(gate) * up, instead of GELU.
        attention: "scores" makes products, softmax and dropout one by one; "flash" is torch's one kernel, which keeps no scores.
        sep_group: ranks among which the time of the whole sequence is cut (``fleet.context.cut``): flash attention is then
            ``ring_attention``.

    Source: Shoeybi et al. (2019); Korthikanti et al. (2022); Touvron et al. (2023) for rms, rotary and gated.
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
        *,
        head_dim: int | None = None,
        norm: Literal["layer", "rms"] = "layer",
        bias: bool = True,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        gated: bool = False,
        attention: Attention = "scores",
        sep_group: Ranks | None = None,
    ) -> None:
        super().__init__()
        if (head_dim is None and hidden % n_heads) or recompute not in RECOMPUTES:
            raise FleetError(
                f"a layer of hidden {hidden}, {n_heads} heads, recompute={recompute!r}: heads divide hidden; recompute is "
                f"one of {', '.join(map(repr, RECOMPUTES))}"
            )
        if (
            norm not in NORMS
            or attention not in ("scores", "flash")
            or (sep_group is not None and attention != "flash")
        ):
            raise FleetError(
                f"a layer with norm={norm!r}, attention={attention!r}: norm is 'layer' or 'rms', attention 'scores' or 'flash', "
                "and 'flash' where ranks share the sequence (sep_group)"
            )
        self.causal, self.recompute, self.sequence_parallel = causal, recompute, sequence_parallel
        self.attention_dropout, self.hidden_dropout = attention_dropout, hidden_dropout
        self.head_dim = head_dim or hidden // n_heads
        self.attention, self.gated, self.sep_group = attention, gated, sep_group
        group = mp_group or get_hybrid_communicate_group().group("mp")
        kinds: tuple[Any, ...] = (
            QKVParallelLinear,
            ColumnParallelLinear,
            MergedColumnParallelLinear,
            RowParallelLinear,
        )
        if sequence_parallel:
            kinds = (
                sequence.QKVSequenceParallelLinear,
                sequence.ColumnSequenceParallelLinear,
                sequence.MergedColumnSequenceParallelLinear,
                sequence.RowSequenceParallelLinear,
            )
        where = {"mp_group": group, "device": device, "dtype": dtype}
        qkv, column, merged, row = kinds
        units = 4 * hidden if ffn is None else ffn
        self.norm1 = NORMS[norm](hidden, eps=1e-5, device=device, dtype=dtype)
        self.qkv = qkv(hidden, self.head_dim, n_heads, n_kv_heads, has_bias=bias or qkv_bias, **where)
        self.q_norm, self.k_norm = (
            NORMS[norm](self.head_dim, eps=1e-5, device=device, dtype=dtype) if qk_norm else None for _ in range(2)
        )
        self.proj = row(
            n_heads * self.head_dim, hidden, has_bias=bias, input_is_parallel=True, unit=self.head_dim, **where
        )
        self.norm2 = NORMS[norm](hidden, eps=1e-5, device=device, dtype=dtype)
        self.up = (
            column(hidden, units, has_bias=bias, gather_output=False, **where)
            if gated and recompute == "operators"
            else None
        )
        if gated and self.up is None:
            self.fc1 = merged(hidden, [units, units], has_bias=bias, **where)
        else:
            self.fc1 = column(hidden, units, has_bias=bias, gather_output=False, **where)
        self.fc2 = row(units, hidden, has_bias=bias, input_is_parallel=True, **where)
        # Norms of heads see this rank's heads, those between the cut layers its part of the sequence.
        seen = ([self.norm1, self.norm2] if sequence_parallel else []) + ([self.q_norm, self.k_norm] if qk_norm else [])
        for module in seen:
            for parameter in module.parameters():
                sequence.mark_as_sequence_parallel_parameter(parameter, group)

    def forward(self, x: Tensor, turns: Tensor | None = None) -> Tensor:
        """x, and what attention and MLP add to it.

        Args:
            turns: of rotary positions, complex (time, 1, 1, head_dim / 2): ``rotary_turns``.
        """
        if self.recompute == "none" or self.recompute == "selective" or not self.training:
            return self._layer(x, turns)
        return recompute(self._layer, x, turns, policy=_Policy() if self.recompute == "operators" else None)

    def _layer(self, x: Tensor, turns: Tensor | None) -> Tensor:
        x = x + self._dropout(self._attention(self.norm1(x), turns))
        return x + self._dropout(self._mlp(self.norm2(x)))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.fc2(self._units(x))

    def _units(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        if not self.gated:
            return F.gelu(hidden, approximate="tanh")
        gate, up = (hidden, self.up(x)) if self.up is not None else self.fc1.split(hidden)
        return F.silu(gate) * up

    def _attention(self, x: Tensor, turns: Tensor | None) -> Tensor:
        q, k, v = self.qkv.split(self.qkv(x))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if turns is not None:
            q, k = rotated(q, turns), rotated(k, turns)
        core = self._flash if self.attention == "flash" else self._core
        if self.recompute == "selective" and self.training:
            return self.proj(recompute(core, q, k, v))
        return self.proj(core(q, k, v))

    def _flash(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As ``_core``, by a kernel that never has all scores at once."""
        time, batch, heads, width = q.shape
        if heads % k.shape[2]:  # queries that share keys unevenly, on this rank
            k, v = self.qkv.expand(k, 2), self.qkv.expand(v, 2)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        if self.sep_group is not None and self.sep_group.size > 1:
            y = context.ring_attention(q, k, v, self.causal, group=self.sep_group)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=k.shape[1] != heads)
        return y.permute(2, 0, 1, 3).reshape(time, batch, heads * width)

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


class _Policy:
    """What recompute by operators keeps of a layer, as torchtitan's: attention, messages, every second product."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}  # so far, in forward and in backward

    def __call__(self, ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = str(func)
        if name in ("aten.mm.default", "aten.addmm.default"):
            self._products[ctx.is_recompute] += 1
            kept = self._products[ctx.is_recompute] % 2 == 1
        else:
            kept = "attention" in name or name.startswith(("c10d", "_c10d"))
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def rotary_turns(positions: Tensor, head_dim: int, theta: float = 10000.0) -> Tensor:
    """The turns that ``ParallelTransformerLayer`` gives queries and keys at positions: complex64, (time, 1, 1, head_dim / 2).

    Source: Su et al. (2021); pairs of neighbours turn, as in LLaMA's reference code.
    """
    each = theta ** (-torch.arange(0, head_dim, 2, device=positions.device)[: head_dim // 2].float() / head_dim)
    angles = torch.outer(positions.float(), each)
    return torch.polar(torch.ones_like(angles), angles)[:, None, None, :]


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """(time, batch, heads, width), turned in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def _known(name: str) -> str | None:
    """A random state that the program has begun; else torch's own."""
    return name if name in get_rng_state_tracker().states else None
