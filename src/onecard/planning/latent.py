"""Latent attention: queries, keys and values through small latents, and a part of each head that turns; of fleet's layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecard.fleet.layers import mappings, sequence
from onecard.fleet.layers.linear import ColumnParallelLinear
from onecard.fleet.layers.recomputing import recompute
from onecard.fleet.layers.transformer import ParallelTransformerLayer, rotated
from onecard.planning.mixture import MixtureLayer
from onecard.planning.transformer import Transformer


class _Latent(ParallelTransformerLayer):
    """A layer whose queries come from ``q_latent`` numbers of a token (0: from all of it), keys and values from ``kv_latent``.

    Each rank of tp makes the latents of its part of the sequence, or all of them, and its heads from them. One key of
    ``rope_dim`` numbers turns for all heads. Values are widened to the width of keys for the kernel, as Megatron-LM does.

    Source: DeepSeek-AI, arXiv 2405.04434, section 2.1.
    """

    def __init__(self, sizes: Transformer, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.latent, group = sizes, options["mp_group"]
        where: dict[str, Any] = {"device": options.get("device"), "dtype": options.get("dtype")}
        hidden, heads, nope, rope = sizes.hidden, sizes.heads, sizes.per_head, sizes.rope_dim
        column = sequence.ColumnSequenceParallelLinear if self.sequence_parallel else ColumnParallelLinear
        cut = {"has_bias": False, "gather_output": False, "mp_group": group, **where}
        self.qkv = None
        self.q_down = nn.Linear(hidden, sizes.q_latent, bias=False, **where) if sizes.q_latent else None
        self.q_norm = nn.RMSNorm(sizes.q_latent, eps=1e-6, **where) if sizes.q_latent else None
        self.q_up = column(sizes.q_latent or hidden, heads * (nope + rope), unit=nope + rope, **cut)
        self.kv_down = nn.Linear(hidden, sizes.kv_latent + rope, bias=False, **where)
        self.kv_norm = nn.RMSNorm(sizes.kv_latent, eps=1e-6, **where)
        self.kv_up = column(sizes.kv_latent, heads * 2 * nope, unit=2 * nope, **cut)
        self.mp = group
        if self.sequence_parallel:
            for module in filter(None, (self.q_down, self.q_norm, self.kv_down, self.kv_norm)):
                for parameter in module.parameters():
                    sequence.mark_as_sequence_parallel_parameter(parameter, group)

    def _attention(self, x: Tensor, turns: Tensor | None) -> Tensor:
        nope, rope = self.latent.per_head, self.latent.rope_dim
        given = x if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x))
        q_nope, q_rope = self.q_up(given).unflatten(-1, (-1, nope + rope)).split([nope, rope], -1)
        down, k_rope = self.kv_down(x).split([self.latent.kv_latent, rope], -1)
        k_nope, v = self.kv_up(self.kv_norm(down)).unflatten(-1, (-1, 2 * nope)).split([nope, nope], -1)
        whole = sequence.all_gather(k_rope, 0, self.mp) if self.sequence_parallel else mappings.copy_to(k_rope, self.mp)
        k_rope = whole[:, :, None]
        if turns is not None:
            q_rope, k_rope = rotated(q_rope, turns), rotated(k_rope, turns)
        q = torch.cat([q_nope, q_rope], -1)
        k = torch.cat([k_nope, k_rope.expand(-1, -1, k_nope.shape[2], -1)], -1)
        again = self.recompute == "selective" and self.training
        made = recompute(self._flash, q, k, F.pad(v, (0, rope))) if again else self._flash(q, k, F.pad(v, (0, rope)))
        made = made.unflatten(-1, (-1, nope + rope))
        return self.proj(made[..., :nope].flatten(-2))


class LatentLayer(_Latent):
    """A layer with latent attention and an MLP."""


class LatentMixtureLayer(_Latent, MixtureLayer):
    """A layer with latent attention and experts."""

    def __init__(self, sizes: Transformer, *args: Any, **options: Any) -> None:
        super().__init__(sizes, sizes, *args, **options)
