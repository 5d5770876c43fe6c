"""Master weights, sums in 32 bits, states on the CPU, hybrid meshes; bytes of states without devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from amounts import share
from test_zero import STAGES, Net, batches, train
from torch import Tensor, nn

import onecard as oc
from onecard.testing import assert_close, run_ranks

R, S = oc.Replicate(), oc.Shard
BF16 = torch.bfloat16


class ByHand:
    """What mixed precision is on one card: AdamW on 32-bit copies."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.copies = [nn.Parameter(p.detach().float(), p.requires_grad) for p in net.parameters()]
        self.optimizer = torch.optim.AdamW(self.copies, 0.01)

    def step(self) -> None:
        for p, copy in zip(self.net.parameters(), self.copies, strict=True):
            copy.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for p, copy in zip(self.net.parameters(), self.copies, strict=True):
                p.copy_(copy)

    def zero_grad(self) -> None:
        self.net.zero_grad()


def masters() -> None:
    alone = Net().to(BF16)
    by_hand = ByHand(alone)
    expected = train(alone, by_hand, lambda x: x, 1, False)
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    place = lambda x: oc.shard_tensor(x, mesh, [S(0)])  # noqa: E731
    for stage in STAGES:
        for more in ({"master_weights": True}, {"offload": True, "overlap": True}):
            net = oc.shard_layer(Net().to(BF16), mesh)
            made = torch.optim.AdamW(net.parameters(), 0.01)
            optimizer = oc.shard_optimizer(made, STAGES[stage]("dp", mesh, reduce_dtype=torch.float32, **more))  # type: ignore[arg-type]
            losses = train(net, optimizer, place, 1, False)
            assert losses == pytest.approx(expected, rel=2e-2), (stage, more)  # activations are of 8 bits
            for param, copy in zip(net.parameters(), by_hand.copies, strict=True):
                state = optimizer.state.get(param)
                assert all(p.dtype is BF16 for group in optimizer.param_groups for p in group["params"])
                if state:
                    assert {state[k].dtype for k in ("master_weight", "exp_avg", "exp_avg_sq")} == {torch.float32}
                    assert_close(state["master_weight"], copy.detach(), rtol=0.1, atol=2e-2)
                    assert torch.equal(oc.unshard(param.detach()), oc.unshard(state["master_weight"]).to(BF16))
            resumed(net, optimizer, stage, more, mesh, place)


def resumed(net: Any, optimizer: Any, stage: int, more: Any, mesh: Any, place: Any) -> None:
    """States that are saved and loaded keep their 32 bits, so that the run goes on as it would have."""
    saved = optimizer.state_dict()
    saved = {
        **saved,
        "state": {
            k: {n: oc.unshard(v).clone() if isinstance(v, Tensor) else v for n, v in s.items()}
            for k, s in saved["state"].items()
        },
    }
    again = oc.shard_layer(Net().to(BF16), mesh)
    with torch.no_grad():
        for p, q in zip(again.parameters(), net.parameters(), strict=True):
            p.copy_(oc.unshard(q.detach()))
    second = oc.shard_optimizer(torch.optim.AdamW(again.parameters(), 0.01), STAGES[stage]("dp", mesh, **more))
    second.load_state_dict(saved)
    data = batches(7)
    x, y = map(place, next(data))
    for model, opt in ((net, optimizer), (again, second)):
        nn.functional.cross_entropy(model(x, 1), y).backward()
        opt.step()
        opt.zero_grad()
    for p, q in zip(net.parameters(), again.parameters(), strict=True):
        if p in optimizer.state:
            for key in ("master_weight", "exp_avg", "exp_avg_sq"):
                one, other = optimizer.state[p][key], second.state[q][key]
                assert torch.equal(oc.unshard(one), oc.unshard(other)) and other.dtype is torch.float32, key


def hybrid() -> None:
    """Cut over the inner axis, copied over the outer one; the batch is cut along both."""
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["replica", "shard"])
    alone = Net()
    expected = train(alone, torch.optim.AdamW(alone.parameters(), 0.01), lambda x: x, 2, True)
    for stage in STAGES:
        for overlap in (False, True):
            net = oc.shard_layer(Net(), mesh)
            made = torch.optim.AdamW(net.parameters(), 0.01)
            optimizer = oc.shard_optimizer(made, STAGES[stage]("shard", mesh, overlap=overlap))
            losses = train(net, optimizer, lambda x: oc.shard_tensor(x, mesh, [S(0), S(0)]), 2, True)
            assert losses == pytest.approx(expected, rel=1e-5)
            state = optimizer.state[net.wide.weight]["exp_avg"]
            assert state.placements[0] == R and isinstance(state.placements[1], oc.Shard), state.placements


def test_master_weights_and_offload():
    run_ranks(masters, 2)


@pytest.mark.proof
def test_hybrid_sharding():
    run_ranks(hybrid, 4)


def bytes_of(stage: int | None, ranks: int) -> float:
    """GB of parameters, gradients and states that a rank holds between the second backward and step."""
    with oc.pretend(ranks, rank=ranks // 2):
        mesh = oc.ProcessMesh(range(ranks), ["dp"])
        width, layers = 4096, 36  # with 12 width**2 a layer: 7.25 billion, and 7.5 with the embedding
        net = nn.ModuleList()
        with torch.device("meta"):
            net.append(nn.Embedding(50_304 + 11_008, width, dtype=BF16))
            for _ in range(layers):
                net.append(nn.Linear(width, 3 * width, bias=False, dtype=BF16))
                net.append(nn.Linear(width, width, bias=False, dtype=BF16))
                net.append(nn.Linear(width, 4 * width, bias=False, dtype=BF16))
                net.append(nn.Linear(4 * width, width, bias=False, dtype=BF16))
        assert sum(p.numel() for p in net.parameters()) == pytest.approx(7.5e9, rel=1e-3)
        oc.shard_layer(net, mesh)
        stages: Any = STAGES[stage or 1]("dp", mesh, master_weights=True)
        optimizer = oc.shard_optimizer(torch.optim.AdamW(net.parameters(), foreach=False), stages)
        for step in range(2):
            optimizer.step() if step else None
            optimizer.zero_grad()
            h = net[0](oc.shard_tensor(torch.zeros(ranks, 1, dtype=torch.int64, device="meta"), mesh, [S(0)]))
            for i in range(layers):
                q, o, up, down = net[4 * i + 1 : 4 * i + 5]
                h = h + o(q(h)[..., :width])
                h = h + down(torch.relu(up(h)))
            h.float().square().mean().backward()
        held = [t for p in net.parameters() for t in (p, p.grad)]
        held += [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim()]
        return sum(t._local.nbytes for t in held) / 1e9


@pytest.mark.proof
def test_bytes_are_those_of_the_zero_paper():
    """Figure 1: 7.5 billion parameters, mixed precision with Adam, 64 ranks."""
    paper = [(1, 1, 120.0), *zip(STAGES, [64] * 3, [31.4, 16.6, 1.9], strict=True)]
    for stage, ranks, gb in share(paper, 2):
        assert round(bytes_of(stage, ranks), 1) == gb, stage


def views_of_parameters() -> None:
    """A view that had to be copied shows what a step has written, and what the program writes counts in the next step."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    given, x = torch.arange(12.0).reshape(6, 2), torch.ones(4, 6)
    for cut in (R, S(0)):  # by ZeRO, and by hand
        alone, weight = nn.Parameter(given.clone()), nn.Parameter(oc.shard_tensor(given, mesh, [cut]))
        optimizers = [torch.optim.SGD([p], 0.5) for p in (alone, weight)]
        oc.shard_optimizer(optimizers[1], oc.ShardingStage1("dp", mesh, offload=True))
        views, batches = [p.detach()[1:5] for p in (alone, weight)], (x, oc.shard_tensor(x, mesh, [S(0)]))
        for step in range(3):
            for p, optimizer, batch in zip((alone, weight), optimizers, batches, strict=True):
                (batch @ p).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_close(oc.unshard(views[1]), views[0])
            for p in (alone, weight):
                p.data.mul_(-1.0) if step == 1 else p.detach().clamp_(max=5.0)
            assert_close(oc.unshard(weight.detach()), alone.detach())


def test_views_of_parameters_whose_states_are_elsewhere():
    run_ranks(views_of_parameters, 2)


def assigned_states() -> None:
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    weight = nn.Parameter(oc.shard_tensor(torch.ones(4), mesh, [R]))
    optimizer = oc.shard_optimizer(torch.optim.SGD([weight], 0.5), oc.ShardingStage1("dp", mesh, offload=True))
    for value in (3.0, 5.0):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.state[weight] = {"master_weight": oc.shard_tensor(torch.full((4,), value), mesh, [S(0)])}
        (weight * 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_close(oc.unshard(weight.detach()), torch.full((4,), value - 1.0))


def test_a_copy_that_the_program_assigns_is_taken():
    run_ranks(assigned_states, 2)


def one_element() -> None:
    """A parameter of one element has no part for each rank, with a copy as without."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    x = torch.arange(8.0).reshape(4, 2)
    for stage in STAGES:
        for more in ({"offload": True}, {"master_weights": True}, {}):
            dtype = BF16 if "master_weights" in more else torch.float32
            given = [torch.tensor([0.5], dtype=dtype), torch.full((1, 1), 0.25, dtype=dtype)]
            alone = [nn.Parameter(t.clone()) for t in given]
            laid = [nn.Parameter(oc.shard_tensor(t, mesh, [R])) for t in given]
            made = [torch.optim.SGD(p, 0.125, momentum=0.5) for p in (alone, laid)]
            optimizers = [made[0], oc.shard_optimizer(made[1], STAGES[stage]("dp", mesh, **more))]  # type: ignore[arg-type]
            for params, optimizer, batch in zip(
                (alone, laid), optimizers, (x, oc.shard_tensor(x, mesh, [S(0)])), strict=True
            ):
                for _ in range(2):
                    (batch.to(dtype) * params[0] + params[1]).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            for one, other in zip(alone, laid, strict=True):
                assert_close(oc.unshard(other.detach()), one.detach())


def test_a_parameter_of_one_element():
    run_ranks(one_element, 2)
