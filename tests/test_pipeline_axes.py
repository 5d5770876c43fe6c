"""Stages whose layers cut the sequence: sequence parallel (mp) and context parallel (sep) under schedules, against one card."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fleet_programs import close
from pipeline_programs import WIDTH, Embed, OneCard, begin, compare, head, token_loss, tokens
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.fleet.layers import context, sequence
from onecard.testing import run_ranks

Desc = fleet.LayerDesc
CLASSES = 12


class Mlp(nn.Module):
    """Norm, column, row, of a part of the sequence each; or their one-card twins."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        if parallel:
            for p in self.norm.parameters():
                fleet.mark_as_sequence_parallel_parameter(p)
            self.up: Any = sequence.ColumnSequenceParallelLinear(
                WIDTH, 16, has_bias=True, gather_output=False, seq_dim=1
            )
            self.down: Any = sequence.RowSequenceParallelLinear(
                16, WIDTH, has_bias=True, input_is_parallel=True, seq_dim=1
            )
        else:
            self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Table(sequence.VocabSequenceParallelEmbedding):
    def __init__(self) -> None:
        super().__init__(CLASSES, WIDTH, seq_dim=1)


def table_head(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, Table):
        x = sequence.all_gather(x, 1)
    return F.linear(x, layer.weight)


def sequence_parallel_layers(parallel: bool) -> list[Any]:
    table = (Table,) if parallel else (nn.Embedding,)
    first = fleet.SharedLayerDesc("table", table[0], None, "weight", *(() if parallel else (CLASSES, WIDTH)))
    last = copy.copy(first)
    last.forward_func = table_head
    return [first, Desc(Mlp, parallel), Desc(Mlp, parallel), last]


def with_sequence_parallel() -> None:
    for mode in ("1F1B", "ZBH1", "ZBV"):
        begin(mode, 3, 2, mp=2, pp=2)
        torch.manual_seed(3)
        single = OneCard(sequence_parallel_layers(False))
        torch.manual_seed(3)
        mine = fleet.PipelineLayer(
            sequence_parallel_layers(True),
            loss_fn=lambda out, y: fleet.meta_parallel.ParallelCrossEntropy(num_classes=CLASSES)(out, y).mean(),
        )
        model = fleet.distributed_model(mine)
        train(model, mine, single, [tokens(5, step) for step in range(2)], None, f"sp x pp, {mode}")


class Attention(nn.Module):
    """Attention along a sequence that is cut along sep; on one card, along the whole."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        if self.how == "whole":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attention = fleet.ring_attention if self.how == "ring" else fleet.ulysses_attention
            y = attention(q, k, v, causal=True)
        return x + F.gelu(self.out(y.transpose(1, 2).flatten(2)))


def context_layers(how: str) -> list[Any]:
    ends = [fleet.SharedLayerDesc("embedding", Embed), fleet.SharedLayerDesc("embedding", Embed, head)]
    return [ends[0], Desc(Attention, how), Desc(Attention, how), Desc(nn.LayerNorm, WIDTH), ends[1]]


def with_context_parallel() -> None:
    for mode, how in (("1F1B", "ring"), ("ZBV", "ulysses"), ("ZBH1", "ring")):
        hcg = begin(mode, 3, 2, sep=2, pp=2)
        torch.manual_seed(3)
        single = OneCard(context_layers("whole"))
        torch.manual_seed(3)
        mine = fleet.PipelineLayer(context_layers(how), loss_fn=token_loss)
        model = fleet.distributed_model(mine)
        train(model, mine, single, [tokens(5, step) for step in range(2)], hcg.group("sep"), f"sep x pp, {mode}, {how}")


def train(model: Any, mine: Any, single: Any, batches: list[Any], sep: Any, what: str) -> None:
    ours = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9))
    theirs = torch.optim.SGD(single.parameters(), lr=0.3, momentum=0.9)
    for x, y in batches:
        expected = token_loss(single(x), y)
        expected.backward()
        norm = nn.utils.clip_grad_norm_(single.parameters(), 0.3)
        if sep is not None:
            x, y = context.cut(x), context.cut(y)
        loss = model.forward_backward_pipeline([x, y]).clone()
        if sep is not None:
            oc.all_reduce(loss, oc.ReduceOp.AVG, group=sep)
        close(loss, expected.detach(), f"{what}: loss")
        close(nn.utils.clip_grad_norm_(model.parameters(), 0.3), norm, f"{what}: norm")
        compare(mine, single, what, gradients=True)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    compare(mine, single, f"{what}, after steps")


def on_four_ranks() -> None:
    with_sequence_parallel()
    with_context_parallel()


@pytest.mark.proof
def test_stages_that_cut_the_sequence() -> None:
    run_ranks(on_four_ranks, 4)
