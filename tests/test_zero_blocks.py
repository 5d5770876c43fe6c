"""Stage 3 by blocks: policies, recomputation, tied and outside uses, evaluation, faults; messages and memory."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_group_sharded import Deep
from test_zero import OPTIMIZERS, batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard import fleet
from onecard.errors import LayoutError
from onecard.tensor import buckets
from onecard.testing import assert_close, run_ranks
from onecard.train.zero import blocks
from onecard.train.zero.block_names import blocks_of

R, S = oc.Replicate(), oc.Shard
POLICIES: dict[str, Any] = {"always": True, "never": False, "by block": lambda name, block: name.startswith("blocks.1")}


def train(net: Any, optimizer: Any, place: Any, accumulate: int) -> list[float]:
    losses, data = [], batches()
    for step in range(5):
        for _ in range(accumulate):
            x, y = map(place, next(data))
            loss = cross_entropy(net(x, step), y) / accumulate
            loss.backward()
        if step == 1:  # a forward without a backward, and one that breaks off
            with torch.no_grad():
                losses.append(net(x, 0).square().mean().item())
            losses.append(net.eval()(x, 0).square().mean().item())
            net.train()
            handle = net.norm.register_forward_pre_hook(_fail)
            with pytest.raises(OSError):
                net(x, 0)
            handle.remove()
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _fail(*_: Any) -> None:
    raise OSError("the disk is full")


def on_mesh(tp: bool) -> tuple[Any, oc.ProcessMesh]:
    net, n = Deep(), oc.get_world_size()
    if not tp:
        mesh = oc.ProcessMesh(range(n), ["dp"])
        return oc.shard_layer(net, mesh), mesh
    mesh = oc.ProcessMesh(torch.arange(n).view(-1, 2).tolist(), ["dp", "tp"])
    oc.shard_layer(net, mesh)
    for block in net.blocks:
        block[0].weight = oc.shard_tensor(block[0].weight, mesh, [R, S(0)])
        block[2].weight = oc.shard_tensor(block[2].weight, mesh, [R, S(1)])
    return net, mesh


def policies(tp: bool) -> None:
    buckets.BUCKET_BYTES = 512
    for name, accumulate in [("fused", 1)] if tp else [("momentum", 2)]:
        alone = Deep()
        expected = train(alone, OPTIMIZERS[name](alone.parameters()), lambda x: x, accumulate)
        found: list[Any] = []
        for policy in POLICIES.values():
            for overlap in (False, True):
                net, mesh = on_mesh(tp)
                stage = oc.ShardingStage3("dp", mesh, overlap=overlap, model=net, reshard_after_forward=policy)
                optimizer = oc.shard_optimizer(OPTIMIZERS[name](net.parameters()), stage)
                rest = [R] * (mesh.ndim - 1)
                losses = train(net, optimizer, lambda x: oc.shard_tensor(x, mesh, [S(0), *rest]), accumulate)  # noqa: B023
                assert losses == pytest.approx(expected, rel=1e-5), (name, overlap)
                weights = [p.detach().full_tensor() for p in net.parameters()]
                for weight, p in zip(weights, alone.parameters(), strict=True):
                    assert_close(weight, p.detach(), rtol=1e-5, atol=1e-6)
                assert all(isinstance(p.placements[0], oc.Shard) for p in net.parameters())
                found.append((losses, weights))
        for losses, weights in found[1:]:
            assert losses == found[0][0] and all(map(torch.equal, weights, found[0][1]))


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize(("ranks", "tp"), [(3, False), (4, True)])
def test_policies_are_one_card_and_equal_bit_for_bit(ranks, tp):
    run_ranks(policies, ranks, tp)


def sent(policy: str, overlap: bool) -> tuple[dict[str, tuple[int, int]], list[int]]:
    """Messages of a step, and how many blocks are whole after forward and after backward."""
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    torch.manual_seed(0)
    net = oc.shard_layer(nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)]), mesh)
    made: list[blocks.ParameterBlocks] = []
    was = blocks.ParameterBlocks.__init__

    def init(self: Any, *args: Any) -> None:
        made.append(self)
        was(self, *args)

    blocks.ParameterBlocks.__init__ = init  # type: ignore[method-assign]
    chosen = {"always": True, "never": False, "by block": lambda name, block: name == "0"}[policy]
    stage = oc.ShardingStage3("dp", mesh, overlap=overlap, model=net, reshard_after_forward=chosen)
    optimizer = oc.shard_optimizer(torch.optim.AdamW(net.parameters(), fused=True), stage)
    whole = []
    for _ in range(2):
        with oc.explain() as report:
            loss = net(oc.shard_tensor(torch.ones(4, 16), mesh, [S(0)])).square().mean()
            whole.append(sum(p.whole.untyped_storage().nbytes() > 0 for u in made[0].units for p in u.pieces))
            loss.backward()
            whole.append(sum(p.whole.untyped_storage().nbytes() > 0 for u in made[0].units for p in u.pieces))
            optimizer.step()
            optimizer.zero_grad()
    counts: dict[str, tuple[int, int]] = {}
    for m in report.messages:
        if m.step.kind != "slice":
            number, size = counts.get(m.step.kind, (0, 0))
            counts[m.step.kind] = number + 1, size + m.step.bytes
    return counts, whole[2:]


@pytest.mark.proof
def test_messages_and_memory():
    """P elements: an all-gather of each block for forward, one for backward where it gave its parameters up, a reduce-scatter."""
    part = 4 * 16 * 16 // 2
    for overlap in (False, True):
        for policy, gathers, kept in (("always", 8, 0), ("never", 4, 4), ("by block", 5, 3)):
            counts, whole = run_ranks(sent, 2, policy, overlap)[0]
            assert counts == {"all_gather": (gathers, gathers * part), "reduce_scatter": (1, 4 * part)}, (
                policy,
                counts,
            )
            assert whole == [kept, 0], (policy, overlap)


def used(net: Any, x: Tensor) -> Any:
    return nn.functional.linear(net[0](x), net[1].weight)


def outside() -> None:
    """A parameter that is read outside of its block: before forward, in the loss, after backward."""
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    found = []
    for stage in (None, oc.ShardingStage3):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if stage:
            oc.shard_layer(net, mesh)
        optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
        optimizer = oc.shard_optimizer(optimizer, stage("dp", mesh, model=net)) if stage else optimizer
        seen = []
        for step in range(3):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            x = oc.shard_tensor(x, mesh, [S(0)]) if stage else x
            seen.append(net[0].weight.norm().item())
            loss = used(net, net(x)).square().mean() + net[0].weight.square().sum()
            loss.backward()
            seen += [loss.item(), net[1].weight.norm().item()]
            with torch.no_grad():
                net[1].bias.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(seen)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_parameters_that_are_read_outside_of_their_block():
    run_ranks(outside, 2)


class Layer(nn.Module):
    """Several modules, some in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


class Trunk(nn.Module):
    """As a transformer's: embeddings, layers in a list, a norm, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers, self.norm = (
            nn.Embedding(5, 4),
            nn.ModuleList([Layer() for _ in range(2)]),
            nn.LayerNorm(4),
        )
        self.first = nn.Parameter(torch.ones(4))


class Wrapped(nn.Module):
    """As Hugging Face's models with a head: the layers are two modules below."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = Trunk(), nn.Linear(4, 5, bias=False)
        self.head.weight = self.trunk.embedding.weight


def found(net: nn.Module, asked: Any = None) -> list[tuple[str, int]]:
    return [(name, len(params)) for name, _, params in blocks_of(net, [*net.parameters()], asked)]


def test_which_modules_are_blocks() -> None:
    inner = [("layers.0", 6), ("layers.1", 6), ("norm", 2)]
    own = ("", 2)  # tied, and the trunk's own
    assert found(Wrapped()) == [*[(f"trunk.{name}", n) for name, n in inner], own]
    lightning = nn.Module()
    lightning.model = Wrapped()
    assert found(lightning) == [*[(f"model.trunk.{name}", n) for name, n in inner], own]
    assert found(nn.Sequential(nn.Linear(2, 2), Layer())) == [("0", 2), ("1", 6)]
    assert found(Wrapped(), [Layer]) == [("trunk.layers.0", 6), ("trunk.layers.1", 6), ("", 4)]
    net = Wrapped()
    asked = ["trunk.layers.0", net.trunk.layers[0].mlp]
    assert found(net, asked) == [("trunk.layers.0.mlp", 4), ("trunk.layers.0", 2), ("", 10)]
    with pytest.raises(LayoutError, match=r"Wrapped has no module 'tail' below it; .*blocks=\['trunk'\]"):
        found(net, ["tail"])


def _given_data(by_hand: bool, looks: bool) -> tuple[list[float], list[float]]:
    """Losses beside one card's, where a program gives parameters other data than parts between steps."""
    mesh, every = oc.ProcessMesh([0, 1], ["dp"]), []
    for alone in (True, False):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if not alone and by_hand:
            fleet.init(is_collective=True)
            net, optimizer, _ = fleet.group_sharded_parallel(net, optimizer, "p_g_os")
        elif not alone:
            oc.shard_layer(net, mesh)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            oc.shard_optimizer(optimizer, oc.ShardingStage3("dp", mesh, model=net))
        x, losses = torch.randn(4, 6), []
        for _ in range(3):
            loss = net(x).square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if looks:  # a forward without a backward: parameters stay whole
                losses.append(net(x).square().mean().item())
            params = [*net.parameters()]
            nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(params).detach(), params)
        every.append(losses)
    return every[0], every[1]


@pytest.mark.share(1)
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("looks", [False, True])
def test_other_data_than_parts(by_hand: bool, looks: bool) -> None:
    for alone, found in run_ranks(_given_data, 2, by_hand, looks):
        assert found == pytest.approx(alone, rel=1e-4)


def _bounded() -> tuple[list[float], list[float]]:
    """Losses beside one card's: an embedding's forward writes to its weight (``max_norm``), in a block of a recorded step."""
    every = []
    for alone in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(12, 8, max_norm=1.0), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 12))
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)

        def step(ids: Tensor, net: Any = net, optimizer: Any = optimizer) -> Tensor:
            loss = cross_entropy(net(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        plan = oc.Plan(dp=2, zero=3, parameters="float32", compute="float32")
        run: Any = step if alone else oc.to_static(step, plan=plan)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [float(run(torch.randint(12, (8, 5)))) for _ in range(4)]
        every.append([*losses, *oc.unshard(net[0].weight).flatten().tolist()])
    return every[0], every[1]


@pytest.mark.proof
def test_a_block_that_writes_to_its_parameter() -> None:
    for alone, found in run_ranks(_bounded, 2):
        assert found == pytest.approx(alone, rel=1e-5)
