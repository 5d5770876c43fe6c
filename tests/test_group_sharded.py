"""group_sharded_parallel: the three levels on plain modules, against one card; what each rank keeps; what is refused."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from amounts import cells
from fleet_programs import begin
from test_zero import OPTIMIZERS, batches
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import onecard as oc
from onecard import fleet
from onecard.errors import CommunicationError, FleetError
from onecard.fleet.layers import parameters
from onecard.tensor import buckets
from onecard.testing import assert_close, run_ranks

OLD = torch.torch_version.TorchVersion(torch.__version__) < (2, 13)

LEVELS = ("os", "os_g", "p_g_os")
STEPS = 4


class Deep(nn.Module):
    """Blocks that are run again in backward, one of them twice, tied weights, a frozen layer, one used every other time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 7, bias=False)
        self.frozen, self.sometimes = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, step: int) -> Tensor:
        h = self.embedding(x)
        for block in (*self.blocks, self.blocks[0]):
            h = h + (checkpoint(block, h, use_reentrant=False) if step % 3 == 1 else block(h))
        h = h + self.sometimes(h) if step % 2 else h
        return self.head(self.norm(self.frozen(h)))


def train(net: Any, optimizer: Any, accumulate: int, clip: bool, ranks: int = 1, rank: int = 0) -> list[float]:
    losses, data = [], batches()
    for step in range(STEPS):
        total = 0.0
        for _ in range(accumulate):
            x, y = (t.chunk(ranks)[rank] for t in next(data))
            loss = cross_entropy(net(x, step), y) / accumulate
            loss.backward()
            total += loss.item()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def levels() -> None:
    buckets.BUCKET_BYTES = 512
    ranks, rank = oc.get_world_size(), oc.get_rank()
    fleet.init(is_collective=True)
    group = oc.new_group(list(range(ranks)))
    settings = {"momentum": (1, True), "foreach": (3, False), "fused": (2, True)}
    for level, name in cells(LEVELS, [*settings], every=3):
        accumulate, clip = settings[name]
        alone = Deep()
        expected = train(alone, OPTIMIZERS[name](alone.parameters()), accumulate, clip)
        found = []
        for overlap, policy in ((False, True), (True, True), (True, lambda name, block: name != "blocks.1")):
            net: Any = Deep()
            made = OPTIMIZERS[name](net.parameters())
            net, optimizer, _ = fleet.group_sharded_parallel(
                net, made, level, group=group, overlap=overlap, reshard_after_forward=policy
            )
            assert optimizer is made
            losses = train(net, optimizer, accumulate, clip, ranks, rank)
            mean = torch.tensor(losses)
            oc.all_reduce(mean, oc.ReduceOp.AVG)
            assert mean.tolist() == pytest.approx(expected, rel=1e-5), (level, name, overlap)
            weights = {n: oc.unshard(p.detach()) for n, p in net.named_parameters()}
            found.append((losses, weights))
            for n, p in alone.named_parameters():
                assert_close(weights[n], p.detach(), rtol=1e-5, atol=1e-6)
            check_kept(net, optimizer, level)
        for other in found[1:]:
            assert other[0] == found[0][0] and all(torch.equal(other[1][n], w) for n, w in found[0][1].items())


def clipped() -> None:
    """Paddle's way to clip, and fleet's: by the norm of the whole gradient."""
    ranks, rank = oc.get_world_size(), oc.get_rank()
    fleet.init(is_collective=True)
    weights = []
    for how in ("alone", "grad_clip", "fleet"):
        net: Any = Deep()
        optimizer: Any = torch.optim.SGD(net.parameters(), 1.0)
        if how != "alone":
            net, optimizer, _ = fleet.group_sharded_parallel(net, optimizer, "os_g")
        if how == "grad_clip":
            optimizer = fleet.distributed_optimizer(optimizer, grad_clip=fleet.ClipGradByGlobalNorm(0.1))
        data = batches()
        for step in range(3):
            x, y = next(data) if how == "alone" else (t.chunk(ranks)[rank] for t in next(data))
            cross_entropy(net(x, step), y).backward()
            if how == "alone":
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            elif how == "fleet":
                fleet.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        weights.append([oc.unshard(p.detach()) for p in net.parameters()])
    for alone, one, other in zip(*weights, strict=True):
        assert_close(one, alone, rtol=1e-5, atol=1e-6)
        assert_close(other, alone, rtol=1e-5, atol=1e-6)


def test_clipping_by_the_norm_of_the_whole():
    run_ranks(clipped, 2)


def check_kept(net: Any, optimizer: Any, level: str) -> None:
    """Each rank holds its part of the states, and at "p_g_os" of the parameters, whose whole memory is given back."""
    for state in optimizer.state.values():
        for key, value in state.items():
            assert not isinstance(value, Tensor) or value.dim() == 0 or isinstance(value.placements[0], oc.Shard), key
    for p in net._sharded.twins:
        assert (p.untyped_storage().nbytes() == 0) == (level == "p_g_os")
    for p in net.parameters():
        whole = isinstance(p.placements[0], oc.Replicate)
        assert whole == (level != "p_g_os") and p.grad is None


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_three_levels_are_one_card(ranks):
    run_ranks(levels, ranks)


class Branching(nn.Module):
    """Two of three layers, by the data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        total = self.layers[0](x[:0]).sum()
        for row in x:
            number = int(row[0] > 0)
            total = total + self.layers[number](row).square().mean()
        return total / len(x)


def branches() -> None:
    """Ranks take other branches: the gradients of one card."""
    ranks, rank = oc.get_world_size(), oc.get_rank()
    fleet.init(is_collective=True)
    rows = torch.tensor([[-1.0, 2, 3, 4], [1.0, 2, 3, 4], [-2.0, 1, 0, 1], [3.0, 0, 1, 1]])
    for level in LEVELS[:2]:
        alone, net = Branching(), Branching()
        one = torch.optim.AdamW(alone.parameters(), 0.1)
        made: Any = torch.optim.AdamW(net.parameters(), 0.1)
        model, optimizer, _ = fleet.group_sharded_parallel(net, made, level, overlap=False)
        for step in range(4):
            for micro in range(2):
                here = rows if (step + micro) % 2 else rows.flip(0)
                here = here[[0, 2, 1, 3]]  # the ranks' rows go to different layers
                (alone(here) / 2).backward()
                (model(here.chunk(ranks)[rank]) / 2).backward()
            one.step(), one.zero_grad()
            optimizer.step(), optimizer.zero_grad()
        for (n, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert_close(oc.unshard(p.detach()), q.detach(), rtol=1e-5, atol=1e-6)
            assert (p in optimizer.state) == (q in one.state), n


class Crossing(nn.Module):
    """Two layers of one size, which ranks run in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 1) if oc.get_rank() else (1, 0):
            x = torch.tanh(self.layers[i](x))
        return x.square().mean()


def crossed(level: str, overlap: bool) -> str:
    buckets.BUCKET_BYTES = 64
    net = Crossing()
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
    made, optimizer, _ = fleet.group_sharded_parallel(net, optimizer, level, overlap=overlap)
    try:
        made(torch.ones(2, 4)).backward()
        optimizer.step()
    except CommunicationError as fault:
        return str(fault)
    return "no error"


def test_a_rank_whose_branch_leaves_a_parameter_out():
    run_ranks(branches, 2)
    for level, overlap in (("os_g", True), ("p_g_os", False)):  # of one size: nothing but their names tells them apart
        for found in run_ranks(crossed, 2, level, overlap):
            assert "but not for the same" in found or "different collectives" in found, (level, found)


def saved(folder: str) -> None:
    fleet.init(is_collective=True)
    first: dict[str, Tensor] = {}
    for level, other in (("os", "p_g_os"), ("p_g_os", "os_g")):
        net, optimizer, scaler = sharded(level)
        assert isinstance(scaler, fleet.GradScaler)
        train(net, optimizer, 1, False, oc.get_world_size(), oc.get_rank())
        fleet.save_group_sharded_model(net, f"{folder}/{level}", optimizer)
        first = {n: oc.unshard(p.detach()).clone() for n, p in net.named_parameters()}
        again, optimizer, _ = sharded(other)
        state = oc.load_state_dict({"model": again.state_dict()}, f"{folder}/{level}")
        again.load_state_dict(state["model"])
        for n, p in again.named_parameters():
            assert torch.equal(oc.unshard(p.detach()), first[n]), (level, n)
        whole = oc.checkpoint.load(f"{folder}/{level}")
        assert {*whole} == {"model", "optimizer"} and "exp_avg" in whole["optimizer"]["state"]["norm.weight"]
        oc.load_state_dict({"model": again, "optimizer": optimizer}, f"{folder}/{level}")
        named = dict(again.named_parameters())
        moment = oc.unshard(optimizer.state[named["norm.weight"]]["exp_avg"])
        assert torch.equal(moment, whole["optimizer"]["state"]["norm.weight"]["exp_avg"])


def sharded(level: str) -> Any:
    net = Deep()
    made = OPTIMIZERS["fused"](net.parameters())
    return fleet.group_sharded_parallel(net, made, level, scaler=torch.amp.GradScaler("cpu"))


@pytest.mark.proof
def test_saved_models_load_at_other_levels(tmp_path: Path) -> None:
    run_ranks(saved, 2, str(tmp_path))


def test_words():
    fleet.init(is_collective=True)
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    with pytest.raises(FleetError, match="level is 'zero'; there are 'os', 'os_g', 'p_g_os'"):
        fleet.group_sharded_parallel(net, optimizer, "zero")
    with pytest.raises(FleetError, match="parameters that are not the model's"):
        fleet.group_sharded_parallel(copy.deepcopy(net), optimizer, "os")
    cut = nn.Linear(2, 2)
    heads = fleet.Held((2, 2), 0, (fleet.Run(0, 2),), oc.new_group([0]), (), ((0, 1),))
    parameters.hold(cut.weight, heads)
    with pytest.raises(FleetError, match="rows that several ranks hold"):
        fleet.group_sharded_parallel(cut, torch.optim.SGD(cut.parameters(), 0.1), "os")
    with pytest.raises(FleetError, match="takes what group_sharded_parallel returned"):
        fleet.save_group_sharded_model(net, "nowhere")  # type: ignore[arg-type]


def converted() -> None:
    """``Module.to`` between steps of "p_g_os": nothing where nothing changes, else refused; a part of the model, too."""
    found = []
    for between in (
        lambda net: net,
        lambda net: net.to(torch.float32),
        lambda net: net[2].cpu(),
        lambda net: net.float(),
    ):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        net, optimizer, _ = fleet.group_sharded_parallel(net, torch.optim.AdamW(net.parameters(), 0.05), "p_g_os")
        for _ in range(3):
            loss = net(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            between(net)
        found.append(float(loss.detach()))
    assert len({*found}) == 1, found
    for convert in (net.double, net[0].half, lambda: net.to(torch.bfloat16)):
        with pytest.raises(FleetError, match=r"weight' would become .* convert the model before it"):
            convert()


def test_conversions_between_steps() -> None:
    run_ranks(converted, 2)


def recorded() -> None:
    cases = [("os", False, True), ("os_g", True, True), *product(("p_g_os",), (False, True), (False, True))]
    for level, overlap, policy in cases:
        found = []
        for static in (False, True):
            torch.manual_seed(0)
            net: Any = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7))
            net, optimizer, _ = fleet.group_sharded_parallel(
                net, torch.optim.AdamW(net.parameters(), 0.05), level, overlap=overlap, reshard_after_forward=policy
            )

            def step(x: Tensor, y: Tensor, net: Any = net, optimizer: Any = optimizer) -> Tensor:
                loss = cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            run: Any = oc.to_static(step) if static else step
            data, losses = torch.Generator().manual_seed(oc.get_rank()), []
            for _ in range(5):
                given = torch.randn(4, 6, generator=data), torch.randint(7, (4,), generator=data)
                losses.append(run(*given).item())
            found.append(losses)
            if static:
                assert len(run.recordings) == 1
        assert found[1] == found[0] and len(found[0]) == 5, (level, overlap, policy)


@pytest.mark.proof
def test_steps_are_recorded() -> None:
    run_ranks(recorded, 2)


class Sequences(nn.Module):
    """A recurrent network, whose kernels keep views of all its weights."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = kind(5, 6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def recurrent() -> None:
    fleet.init(is_collective=True)
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    group = torch.distributed.new_group([0, 1])  # torch's own
    x, y = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    for kind in (nn.LSTM, nn.GRU):
        found = []
        for how in ("alone", "marks", "p_g_os"):
            net: Any = Sequences(kind)
            given: Any = (x, y)
            if how == "marks":
                oc.shard_layer(net, mesh)
                given = tuple(oc.shard_tensor(t, mesh, [oc.Shard(0)]) for t in given)
            optimizer: Any = torch.optim.AdamW(net.parameters(), 0.01)
            if how == "marks":
                oc.shard_optimizer(optimizer, oc.ShardingStage3("dp", mesh, model=net))
            elif how == "p_g_os":
                net, optimizer, _ = fleet.group_sharded_parallel(net, optimizer, how, group=group)
                given = tuple(t.chunk(2)[oc.get_rank()] for t in given)
            for _ in range(3):
                cross_entropy(net(given[0]), given[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([oc.unshard(p.detach()) for p in net.parameters()])
        for other in found[1:]:
            for mine, one in zip(other, found[0], strict=True):
                assert_close(mine, one, rtol=1e-5, atol=1e-6)


@pytest.mark.proof
def test_recurrent_networks_by_blocks() -> None:
    run_ranks(recurrent, 2)


def beside_tensor_parallel() -> None:
    """Ranks of other parts ask for a whole tensor each for themselves."""
    begin(dp=2, mp=2)
    for level in LEVELS:
        torch.manual_seed(0)
        net: Any = fleet.distributed_model(
            nn.Sequential(fleet.meta_parallel.ColumnParallelLinear(6, 8), nn.Linear(8, 4))
        )
        kept = {n: p.detach().clone() for n, p in net.named_parameters()}
        net, _, _ = fleet.group_sharded_parallel(net, torch.optim.AdamW(net.parameters()), level)
        for name, p in net.named_parameters():
            assert torch.equal(p.full_tensor(), kept[name]) and torch.equal(oc.unshard(p), kept[name]), (level, name)


def test_whole_tensors_beside_tensor_parallel_layers() -> None:
    run_ranks(beside_tensor_parallel, 4)


@pytest.mark.parametrize("fake", [True] if OLD else [True, False])  # its AdamW takes no parameters on the meta device
def test_pretended(fake: bool) -> None:
    for level in LEVELS:
        with oc.pretend(4, rank=1, fake=fake), torch.device("cpu" if fake else "meta"):
            fleet.init(is_collective=True)
            net: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
            net, optimizer, _ = fleet.group_sharded_parallel(net, torch.optim.AdamW(net.parameters()), level)
            net(torch.ones(2, 6)).sum().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            assert net[0].weight.grad.shape == (8, 6)
            assert optimizer.state[next(net.parameters())]["exp_avg"]._local.shape == (2, 6)


def test_what_cannot_be_exchanged_is_said() -> None:
    fleet.init(is_collective=True)
    for level in LEVELS:
        net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        kept = {n: v.clone() for n, v in net.state_dict().items()}
        fleet.group_sharded_parallel(net, torch.optim.SGD(net.parameters(), 0.1), level)
        with pytest.raises(FleetError, match="exchange it before, or write the values"):
            net[0].weight = nn.Parameter(torch.ones(2, 2))
        with pytest.raises(RuntimeError, match="without assign=True"):
            net.load_state_dict(kept, assign=True)
        with pytest.raises(FleetError, match="remove it before"):
            del net[0].bias
        with pytest.raises(FleetError, match="layer '1', a Linear, is set after group_sharded_parallel"):
            net[1] = nn.Linear(2, 2)
        net[1] = net[1]
        net.append(nn.ReLU())
        with pytest.raises(FleetError, match="is of level"):
            fleet.group_sharded_parallel(net, torch.optim.SGD(net.parameters(), 0.1), "os" if level != "os" else "os_g")
        with pytest.raises(FleetError, match=r"create_graph=True\) for parameters of group_sharded_parallel"):
            torch.autograd.grad(net(torch.ones(1, 2)).square().sum(), [*net.parameters()], create_graph=True)
        if level != "p_g_os":
            net.double()
            with pytest.raises(FleetError, match="before group_sharded_parallel"):
                net(torch.ones(1, 2).double())
