"""A decoder by its sizes and a plan, made of fleet's parallel layers: recorded to price a job, or trained."""

from __future__ import annotations

from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from onecard.comm.issue.ranks import Ranks
from onecard.errors import FleetError
from onecard.fleet.grid.rng import get_rng_state_tracker
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.fleet.layers import context, sequence
from onecard.fleet.layers.dropout import dropout
from onecard.fleet.layers.linear import ColumnParallelLinear
from onecard.fleet.layers.transformer import NORMS, ParallelTransformerLayer, rotary_turns
from onecard.fleet.layers.vocabulary import ParallelCrossEntropy, VocabParallelEmbedding
from onecard.planning.latent import LatentLayer, LatentMixtureLayer
from onecard.planning.mixture import MixtureLayer
from onecard.planning.plan import Plan
from onecard.planning.transformer import Transformer


def build(transformer: Transformer, plan: Plan, device: Any = None) -> Decoder:
    """This rank's part of the whole decoder, all its blocks, in ``plan.compute``.

    Call ``fleet.init`` before, with the mesh axes mp = ``plan.tp`` and sep = ``plan.cp``. Pipelines, data parallelism and ZeRO
    are what the caller does with it.

    Raises:
        FleetError: the grid has other degrees.

    Example:
        >>> import onecard as oc
        >>> from onecard import fleet
        >>> sizes = Transformer(layers=2, hidden=64, heads=4, vocab=128, sequence=16)
        >>> with oc.pretend(8, fake=True):
        ...     strategy = fleet.DistributedStrategy()
        ...     strategy.hybrid_configs = {"mp_degree": 2}
        ...     fleet.init(is_collective=True, strategy=strategy) and None
        ...     model = build(sizes, Plan(tp=2, dp=4, sequence_parallel=True))
        ...     tokens = torch.zeros(3, 16, dtype=torch.long)
        ...     loss = model(tokens, tokens)
        >>> len(model.blocks), model.blocks[0].fc1.weight.shape, loss.dtype
        (2, torch.Size([128, 64]), torch.float32)
    """
    return Decoder(transformer, plan, device)


class Decoder(nn.Module):
    """Embedding, blocks, norm, head and loss; between them (time, batch, hidden), as Megatron-LM has it.

    Attributes:
        blocks: each a ``ParallelTransformerLayer``. Before: ``embedding``, ``positions``; after: ``norm``, ``head``, ``loss``.
    """

    turns: Tensor | None

    def __init__(self, sizes: Transformer, plan: Plan, device: Any = None) -> None:
        super().__init__()
        mp, self.sep = _groups(sizes, plan)
        self.group, self.sequence_parallel, self.dropout = mp, plan.sequence_parallel and mp.size > 1, sizes.dropout
        # Products in float8 are of tensors in bfloat16, which are rounded for them.
        dtype = torch.bfloat16 if plan.compute.startswith("float8") else getattr(torch, plan.compute)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        cut: dict[str, Any] = {"mp_group": mp, **where}
        embedding = sequence.VocabSequenceParallelEmbedding if self.sequence_parallel else VocabParallelEmbedding
        self.embedding = embedding(sizes.vocab, sizes.hidden, **cut)
        self.positions = (
            nn.Embedding(sizes.rows or sizes.sequence, sizes.hidden, **where) if sizes.positions == "learned" else None
        )
        self.embedding_norm = NORMS[sizes.norm](sizes.hidden, eps=1e-5, **where) if sizes.embedding_norm else None
        width = sizes.head_dim or sizes.hidden // sizes.heads
        turns = (
            rotary_turns(self._places(sizes.sequence, device), sizes.rope_dim or width)
            if sizes.positions == "rotary"
            else None
        )
        self.register_buffer("turns", turns, persistent=False)
        again = _again(sizes.layers, plan)
        self.blocks = nn.ModuleList(
            self._block(sizes, width, again[i], cut, i < sizes.dense_layers) for i in range(sizes.layers)
        )
        self.norm = NORMS[sizes.norm](sizes.hidden, eps=1e-5, **where)
        head = sequence.ColumnSequenceParallelLinear if self.sequence_parallel else ColumnParallelLinear
        self.head = head(sizes.hidden, sizes.vocab, has_bias=False, gather_output=False, **cut)
        if sizes.tied:
            self.head.weight = self.embedding.weight
        self.loss = ParallelCrossEntropy(mp, num_classes=sizes.vocab)
        if self.sequence_parallel:
            for module in filter(None, (self.norm, self.positions, self.embedding_norm)):
                for p in module.parameters():
                    sequence.mark_as_sequence_parallel_parameter(p, mp)

    def _block(
        self, sizes: Transformer, width: int, again: Any, cut: dict[str, Any], dense: bool
    ) -> ParallelTransformerLayer:
        mixed = bool(sizes.experts) and not dense
        kind: Any = ParallelTransformerLayer
        if sizes.kv_latent:
            kind = partial(LatentMixtureLayer if mixed else LatentLayer, sizes)
        elif mixed:
            kind = partial(MixtureLayer, sizes)
        made: ParallelTransformerLayer = kind(
            sizes.hidden,
            sizes.heads,
            sizes.kv_heads or None,
            sizes.ffn or None,
            attention_dropout=sizes.dropout,
            hidden_dropout=sizes.dropout,
            sequence_parallel=self.sequence_parallel,
            recompute=again,
            head_dim=width,
            norm=sizes.norm,
            bias=sizes.bias,
            qkv_bias=sizes.qkv_bias,
            qk_norm=sizes.qk_norm,
            gated=sizes.gated,
            attention=sizes.attention,
            sep_group=self.sep,
            **cut,
        )
        return made

    def _places(self, time: int, device: Any) -> Tensor:
        """The positions of this rank's part of the sequence."""
        if self.sep is None:
            return torch.arange(time, device=device)
        return context.positions(time, self.sep).to(device)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy, float32, of (batch, time) ids and labels; with cp this rank's part of the time of both."""
        x = self.before(tokens)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.after(x, labels)

    def before(self, tokens: Tensor) -> Tensor:
        """What the first block is given: (time, batch, hidden), of the time this rank's part if it is cut."""
        x = self.embedding(tokens.t())
        if self.positions is not None:
            places = self._places(tokens.shape[1] * (self.sep.size if self.sep else 1), tokens.device)
            if self.sequence_parallel:
                places = places.chunk(self.group.size)[self.group.index]
            x = x + self.positions(places)[:, None]
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        name = "local_seed" if self.sequence_parallel else "global_seed"
        known = name if name in get_rng_state_tracker().states else None
        return dropout(x, self.dropout, self.training, rng_name=known)

    def after(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss of what the last block gives."""
        if not self.sequence_parallel and self.group.size == 1:
            logits = self.head(self.norm(x))
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.t().flatten())
        return self.loss(self.head(self.norm(x)), labels.t()).mean()


def _groups(sizes: Transformer, plan: Plan) -> tuple[Ranks, Ranks | None]:
    """The ranks along mp, and those along sep if the sequence is cut."""
    grid = get_hybrid_communicate_group()
    wanted = {"mp": plan.tp, "sep": plan.cp}
    if any(grid.degrees[axis] != count for axis, count in wanted.items()):
        raise FleetError(
            f"the grid is {grid.degrees}; the plan has tp={plan.tp}, cp={plan.cp}: strategy.hybrid_configs = "
            f'{{"mp_degree": {plan.tp}, "sep_degree": {plan.cp}}} before fleet.init'
        )
    return grid.group("mp"), grid.group("sep") if plan.cp > 1 else None


def _again(layers: int, plan: Plan) -> list[Any]:
    """What each block computes again: with ``recompute_blocks`` the first ones of each stage alone."""
    if not plan.recompute_blocks:
        return [plan.recompute] * layers
    count = plan.pp * plan.virtual
    stages = plan.stages or tuple(layers // count + (i < layers % count) for i in range(count))
    found: list[Any] = []
    for begin, end in pairwise([0, *accumulate(stages)]):
        found += [plan.recompute if i < plan.recompute_blocks else "none" for i in range(end - begin)]
    return found
