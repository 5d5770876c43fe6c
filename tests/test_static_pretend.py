"""Steps recorded for ranks that are not there: node for node those of real ranks, in any world, without memory."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

import onecard as oc
from onecard.comm.issue import again
from onecard.errors import MeshError
from onecard.static.passes import optimised
from onecard.static.price.price import called
from onecard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))
HEADS, WIDTH = 8, 32


def grid(dp: int, tp: int) -> oc.ProcessMesh:
    return oc.ProcessMesh(np.arange(dp * tp).reshape(dp, tp), ["dp", "tp"])


def recorded(mesh: oc.ProcessMesh, layers: int = 1, width: int = WIDTH, dropout: float = 0.0, zero: bool = False,
             words: int = 64) -> oc.Recording:  # fmt: skip
    """The second step of a GPT, with clipping and AdamW; two sequences for each rank along dp."""
    model_file, placements = importlib.import_module("model"), importlib.import_module("placements")
    torch.manual_seed(0)
    config = model_file.GPTConfig(words, max_seq_len=8, n_layer=layers, n_head=HEADS, d_model=width, dropout=dropout)
    model = placements.shard_model(model_file.GPT(config), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    optimizer = oc.shard_optimizer(optimizer, oc.ShardingStage1("dp", mesh)) if zero else oc.shard_optimizer(optimizer)
    ids = torch.zeros(2 * mesh.shape[0], 9, dtype=torch.long)
    batch = placements.shard_batch((ids[:, :-1], ids[:, 1:]), mesh)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = model_file.next_byte_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step(*batch)
    return oc.record(step)(*batch)


def seen(recording: oc.Recording) -> list[Any]:
    """Of each input and node: what it is, on which tensors, from where in the program; of messages, the bytes."""
    inputs = [(i.kind, i.name, str(i.spec), i.facts) for i in recording.inputs]
    cost = {n.name: n for n in recording.cost().nodes}
    nodes = [
        (n.name, called(n) if n.target is not again.message else [str(n.args[2]), n.args[3], str(n.args[4])],
         str([a for a in n.args if isinstance(a, fx.Node | int | float | list | None)]), n.meta.get("tensor"),
         str(n.meta.get("spec")),
         n.meta["phase"], n.meta["module"], n.meta["line"], cost[n.name].sent, cost[n.name].alive)
        for n in recording.nodes()
    ]  # fmt: skip
    return [*inputs, *nodes]


WAYS: tuple[dict[str, Any], ...] = ({"dropout": 0.1}, {"zero": True, "words": 63})


def real() -> list[Any]:
    return [seen(recorded(grid(2, 2), **way)) for way in WAYS]


def pretended(world: int, rank: int, make: Callable[[], Any]) -> Any:
    with oc.pretend(world, rank, fake=True):
        return make()


@pytest.mark.proof
def test_a_pretended_rank_records_what_a_real_one_does() -> None:
    """Two of four ranks, each way: inputs, operators, layouts, lines, messages with their bytes, memory alive after each node."""
    ranks = run_ranks(real, 4)
    for rank, ways in ((0, ranks[0]), (3, ranks[3])):
        for way, expected in zip(WAYS, ways, strict=True):
            found = pretended(4, rank, lambda w=way: seen(recorded(grid(2, 2), **w)))
            differ = [
                (*a[:2], x, y)
                for a, b in zip(found, expected, strict=False)
                for x, y in zip(a, b, strict=True)
                if x != y
            ]
            assert not differ and len(found) == len(expected), (rank, way, differ[:2])
            assert {n[1][2] for n in found if isinstance(n[1], list)} == {"dp", "tp"}


@pytest.mark.proof
def test_64_ranks() -> None:
    """Each has its own part; messages are those of its place."""
    costs = {rank: pretended(64, rank, lambda: recorded(grid(8, 8))).cost() for rank in (17, 63)}
    assert len(costs[17].nodes) > 200 and costs[17].sent == costs[63].sent and costs[17].peak == costs[63].peak
    part = WIDTH * 64 * 4 // 8  # of the embedding's rows, as float32
    assert dict(costs[17].alive_at_peak)["model.lm_head.weight"] == part


@pytest.mark.proof
def test_the_last_rank_of_an_uneven_cut_has_less() -> None:
    """63 words over 8 ranks: 8 each, the last one 7. A rank whose place is wrong would show another one's part."""
    for rank, rows in ((17, 8), (22, 8), (23, 7)):
        recording = pretended(64, rank, lambda: recorded(grid(8, 8), words=63))
        facts = {i.name: i.facts[0] for i in recording.inputs if i.facts}
        assert facts["model.lm_head.weight"] == (rows, WIDTH), rank


@pytest.mark.proof
def test_large_models_take_no_memory() -> None:
    """A layer whose parameters take 30 GB for one rank of 100,000; as many nodes as in a world of half the size.

    In one of 64 the gradient of the embedding is another program: the few rows are gathered, the table is not summed.
    """
    small = pretended(50_000, 17, lambda: recorded(grid(6_250, 8), width=2**16, words=2**16))
    large = pretended(100_000, 17, lambda: recorded(grid(12_500, 8), width=2**16, words=2**16))
    assert len(list(large.nodes())) == len(list(small.nodes()))
    found = large.cost()
    parameters = sum(math.prod(i.facts[0]) * 4 for i in large.inputs if i.kind == "parameter")
    assert found.peak > found.inputs > 3 * parameters > 3e10  # parameters and two states
    assert found.sent["dp"] == pytest.approx(2 * parameters * 12_499 / 12_500, rel=1e-3)  # each gradient, once


def test_tensors_without_data_in_words() -> None:
    with oc.pretend(4, 1, fake=True), pytest.raises(MeshError, match=r"np\.arange"):
        oc.ProcessMesh(torch.arange(4), ["dp"])
    assert torch.arange(4).tolist() == [0, 1, 2, 3]


def test_a_step_on_the_meta_device() -> None:
    """The other way without memory: tensors on the meta device. Its messages are recorded as well."""
    mesh = grid(8, 8)
    with oc.pretend(64, 17):
        x = oc.shard_tensor(torch.empty(64, 64, device="meta"), mesh, [oc.Shard(0), oc.Shard(1)])
        w = oc.shard_tensor(torch.empty(64, 32, device="meta"), mesh, [oc.Replicate(), oc.Shard(0)])
        found = oc.record(lambda x, w: torch.relu(x @ w))(x, w).cost()
    assert found.sent == {"tp": 2 * 8 * 32 * 4 * 7 // 8} and found.products == 8 * 8 * 32


def nodes_at(ranks: int, stage: type, width: int = 1024) -> int:
    """Nodes of a recorded step under a stage of ZeRO on one of so many ranks, optimised."""
    with oc.pretend(ranks, 3, fake=True):
        mesh = oc.ProcessMesh(list(range(ranks)), ["dp"])
        model = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        oc.shard_layer(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        optimizer = oc.shard_optimizer(optimizer, stage("dp", mesh))
        x = oc.shard_tensor(torch.ones(1024, width), mesh, [oc.Shard(0)])

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step(x)
        return len([*optimised(oc.record(step)(x)).nodes()])


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("stage", [oc.ShardingStage1, oc.ShardingStage2, oc.ShardingStage3], ids=lambda s: s.__name__)
def test_a_step_of_zero_has_as_many_nodes_on_a_thousand_ranks(stage: type) -> None:
    found = {ranks: nodes_at(ranks, stage) for ranks in (8, 64, 1024)}
    assert found[1024] <= found[8] == found[64], found
    uneven = {ranks: nodes_at(ranks, stage, 1001) for ranks in (64, 512)}
    assert uneven[512] <= uneven[64] <= found[64] + 40, (uneven, found)
