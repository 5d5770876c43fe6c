"""Tensor parallelism written by hand, as in Megatron-LM (Shoeybi et al., 2019), for the GPT of `examples/gpt`.

A block sends two all-reduces forward and two backward, the least this division of the weights allows. The local
operators are those of the one-card model, so that a benchmark measures the parallel layer and not other kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from model import GPT, Block

Group = dist.ProcessGroup


class CopyToRanks(torch.autograd.Function):
    """Identity forward, all-reduce of the gradient backward (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # In place: the gradient comes fresh from the matrix products of the column-parallel layers that share x.
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class SumOverRanks(torch.autograd.Function):
    """All-reduce forward, identity backward (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits (n, vocab / ranks) divided by class; three messages of n numbers."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Group) -> Tensor:
        local, elsewhere = local_ids(targets, logits.shape[1], group)
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        at_target = shifted.gather(1, local[:, None])[:, 0].masked_fill_(elsewhere, 0.0)
        dist.all_reduce(at_target, group=group)
        exponentials = shifted.exp_()
        normaliser = exponentials.sum(1)
        dist.all_reduce(normaliser, group=group)
        ctx.save_for_backward(exponentials.div_(normaliser[:, None]), local, elsewhere)
        return (normaliser.log() - at_target).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, elsewhere = ctx.saved_tensors
        grad_logits = softmax.clone()
        grad_logits.scatter_add_(1, local[:, None], elsewhere[:, None].to(softmax.dtype) - 1.0)
        return grad_logits.mul_(grad / len(local)), None, None


def local_ids(ids: Tensor, n_local: int, group: Group) -> tuple[Tensor, Tensor]:
    """Ids within this rank's `n_local` classes, 0 for the others, and which are the others."""
    local = ids - n_local * dist.get_rank(group)
    elsewhere = (local < 0) | (local >= n_local)
    return local.masked_fill(elsewhere, 0), elsewhere


def shard(parameter: Tensor, dim: int, group: Group) -> nn.Parameter:
    """This rank's part of a parameter whose `dim` divides by the number of ranks."""
    parts = parameter.detach().chunk(dist.get_world_size(group), dim)
    return nn.Parameter(parts[dist.get_rank(group)].clone())


class ColumnParallelLinear(nn.Module):
    """Outputs divided over the ranks. The input must have passed CopyToRanks, once for all layers that share it."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__()
        self.weight = shard(linear.weight, 0, group)
        self.bias = None if linear.bias is None else shard(linear.bias, 0, group)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Inputs divided over the ranks; the output is summed over them."""

    def __init__(self, linear: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = shard(linear.weight, 1, group)
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return SumOverRanks.apply(F.linear(x, self.weight), self.group) + self.bias


class VocabParallelEmbedding(nn.Module):
    """Rows of the table divided over the ranks; the output is summed over them."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.group = group
        self.weight = shard(embedding.weight, 0, group)

    def forward(self, ids: Tensor) -> Tensor:
        local, elsewhere = local_ids(ids, len(self.weight), self.group)
        found = F.embedding(local, self.weight).masked_fill(elsewhere[..., None], 0.0)
        return SumOverRanks.apply(found, self.group)


class ParallelBlock(nn.Module):
    """A pre-norm transformer block with its heads and hidden units divided over the ranks."""

    def __init__(self, block: Block, group: Group) -> None:
        super().__init__()
        self.group = group
        self.n_head = block.attention.n_head // dist.get_world_size(group)
        self.attention_norm, self.mlp_norm = block.attention_norm, block.mlp_norm
        self.q, self.k, self.v, self.fc = (
            ColumnParallelLinear(layer, group)
            for layer in (block.attention.q, block.attention.k, block.attention.v, block.mlp.fc)
        )
        self.out = RowParallelLinear(block.attention.out, group)
        self.proj = RowParallelLinear(block.mlp.proj, group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attention(CopyToRanks.apply(self.attention_norm(x), self.group))
        hidden = self.fc(CopyToRanks.apply(self.mlp_norm(x), self.group))
        return x + self.proj(F.gelu(hidden, approximate="tanh"))

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(2, (self.n_head, -1)).transpose(1, 2) for project in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MegatronGPT(nn.Module):
    """The GPT of `examples/gpt` (without dropout) with this rank's part of the weights of `gpt`.

    Takes (batch, time) int64 token ids, equal on all ranks, and returns logits (batch, time, vocab_size / ranks).
    """

    def __init__(self, gpt: GPT, group: Group) -> None:
        super().__init__()
        self.group = group
        self.token_embedding = VocabParallelEmbedding(gpt.token_embedding, group)
        self.position_embedding = gpt.position_embedding
        self.blocks = nn.ModuleList(ParallelBlock(block, group) for block in gpt.blocks)
        self.norm = gpt.norm
        self.lm_head = ColumnParallelLinear(gpt.lm_head, group)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token_embedding(ids) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(CopyToRanks.apply(self.norm(x), self.group))

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats, whole on every rank."""
        return VocabParallelCrossEntropy.apply(self(ids).flatten(0, 1), targets.flatten(), self.group)
