"""sharding_degree of fleet.init: ZeRO stage 1 beside the other axes, by Paddle's two calls, against one card."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fleet_programs import begin, close, compare, part_of
from pipeline_programs import OneCard, gpt, token_loss, tokens
from pipeline_programs import compare as compare_stages
from test_zero import OPTIMIZERS
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard import fleet
from onecard.errors import FleetError
from onecard.fleet.gradients import sums as gradients
from onecard.testing import run_ranks

mp = fleet.meta_parallel
CLIPS = ("none", "grad_clip", "fleet", "torch")


class Net(nn.Module):
    """Two layers that tensor parallelism cuts, norms that it does not, uneven sizes, a layer for every other step."""

    def __init__(self, parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 6)
        if parallel:
            self.up = mp.ColumnParallelLinear(6, 10, has_bias=True, gather_output=False)
            self.down = mp.RowParallelLinear(10, 6, input_is_parallel=True)
        else:
            self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm, self.sometimes, self.head = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 7)

    def forward(self, x: Tensor, often: bool) -> Tensor:
        h = self.embedding(x)
        h = h + self.down(torch.tanh(self.up(h)))
        h = h + self.sometimes(h) if often else h
        return self.head(self.norm(h))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(7, (8,), generator=made), torch.randint(7, (8,), generator=made)


def trained(degrees: dict[str, int], name: str, clip: str, accumulate: int) -> None:
    hcg = begin(**degrees)
    data = hcg.data()
    alone, net = Net(False), Net(degrees.get("mp", 1) > 1)
    with torch.no_grad():
        for path, p in net.named_parameters():
            p.copy_(part_of(p, alone.get_parameter(path).detach()))
    model = fleet.distributed_model(net)
    limit = fleet.ClipGradByGlobalNorm(0.3) if clip == "grad_clip" else None
    one: Any = OPTIMIZERS[name](alone.parameters())
    ours = fleet.distributed_optimizer(OPTIMIZERS[name](model.parameters()), grad_clip=limit)
    plans = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (one, ours)]
    for step in range(5):
        for micro in range(accumulate):
            x, y = batch(10 * step + micro)
            (cross_entropy(alone(x, step % 2 == 0), y) / accumulate).backward()
            x, y = (t.chunk(data.size)[data.index] for t in (x, y))
            (cross_entropy(model(x, step % 2 == 0), y) / accumulate).backward()
        if clip != "none":
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
        if clip in ("fleet", "torch"):
            call = fleet.clip_grad_norm_ if clip == "fleet" else nn.utils.clip_grad_norm_
            close(call(model.parameters(), 0.3), norm)
        for each, plan in zip((one, ours), plans, strict=True):
            each.step()
            each.zero_grad(set_to_none=step != 3)
            plan.step()
        if step == 2:
            ours.load_state_dict(ours.state_dict())
        compare(net, alone, gradients=False)
    for p, state in ours.state.items():
        assert type(p) is nn.Parameter
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                assert value.to_local().numel() < p.numel(), key


def grids() -> None:
    for number, degrees in enumerate(({"sharding": 4}, {"dp": 2, "sharding": 2}, {"sharding": 2, "mp": 2})):
        names = ("momentum", "fused", "foreach")
        for i, clip in enumerate(CLIPS):
            trained({"dp": 1, **degrees}, names[(i + number) % 3], clip, 1 + i % 2)


@pytest.mark.proof
def test_grids_are_one_card() -> None:
    run_ranks(grids, 4)


def stages() -> None:
    """ZeRO 1 beside pipeline stages with a tied embedding."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "pp_degree": 2, "sharding_degree": 2}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 2}
    fleet.init(is_collective=True, strategy=strategy)
    data = fleet.get_hybrid_communicate_group().data()
    torch.manual_seed(3)
    single = OneCard(gpt(1))
    torch.manual_seed(3)
    mine = fleet.PipelineLayer(gpt(1), loss_fn=token_loss)
    model: Any = fleet.distributed_model(mine)
    made = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    ours = fleet.distributed_optimizer(made, grad_clip=fleet.ClipGradByGlobalNorm(0.2))
    theirs = torch.optim.AdamW(single.parameters(), 0.01, eps=1e-3)
    for step in range(3):
        x, y = tokens(8, step)
        token_loss(single(x), y).backward()
        nn.utils.clip_grad_norm_(single.parameters(), 0.2)
        theirs.step()
        theirs.zero_grad()
        model.train_batch([t.chunk(2)[data.index] for t in (x, y)], ours)
        compare_stages(mine, single, f"step {step}")


@pytest.mark.proof
def test_beside_stages() -> None:
    run_ranks(stages, 4)


def scaled() -> None:
    """An infinity on one rank skips the step on all, whatever the grid."""
    hcg = begin(dp=1, sharding=2, mp=2)
    net = Net(True)
    model = fleet.distributed_model(net)
    ours = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    scaler = fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=4.0))
    for step in range(3):
        before = [p.detach().clone() for p in net.parameters()]
        x, y = (t.chunk(2)[hcg.data().index] for t in batch(step))
        bad = float("inf") if step == 1 and oc.get_rank() == 2 else 0.0
        hook = net.up.weight.register_hook(lambda grad, bad=bad: grad + bad)
        scaler.scale(cross_entropy(model(x, True), y)).backward()
        hook.remove()
        scaler.unscale_(ours)
        fleet.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(ours)
        scaler.update()
        ours.zero_grad()
        same = [torch.equal(a, p.detach()) for a, p in zip(before, net.parameters(), strict=True)]
        assert all(same) if step == 1 else not any(same), step
    assert scaler.get_scale() == 2.0


def sent() -> dict[str, int]:
    """Bytes by kind of a step that nobody clips."""
    begin(dp=1, sharding=2)
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model = fleet.distributed_model(net)
    ours = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    found: dict[str, int] = {}
    for step in range(2):
        model(torch.randn(4, 64)).square().mean().backward()
        with oc.explain() as report:
            ours.step()
        ours.zero_grad()
        for m in report.messages if step else ():
            if m.step.kind != "slice" and m.step.bytes > 64:
                found[m.step.kind] = found.get(m.step.kind, 0) + m.step.bytes
    with pytest.raises(FleetError, match="call closure\\(\\) before step"):
        ours.step(lambda: 0.0)
    return found


@pytest.mark.proof
def test_an_infinity_and_what_is_sent() -> None:
    run_ranks(scaled, 4)
    part = 4 * 2 * 64 * 64 // 2
    assert run_ranks(sent, 2)[0] == {"reduce_scatter": part, "all_gather": part}


def summed_twice() -> None:
    """Planted: what was summed for clipping is summed again, as if it were a summand."""
    gradients.is_whole = lambda p: False  # an average of equal numbers: right, and sent for nothing
    begin(dp=1, sharding=2)
    was = gradients._reduce
    gradients._reduce = lambda grads, group, op: was(grads, group, "sum")
    trained({"sharding": 2}, "momentum", "fleet", 1)


def test_a_planted_sum_is_seen() -> None:
    with pytest.raises(Exception, match="AssertionError"):
        run_ranks(summed_twice, 2)


def with_experts(degrees: dict[str, int], early: bool) -> list[Tensor]:
    """This rank's parameters after steps of a mixture, and an average of them that a hook of the optimizer makes."""
    data = begin(**degrees).data()
    oc.manual_seed(0)
    moe = mp.MoELayer(8, mp.GroupedExperts(4, 8, 12), {"type": "topk", "top_k": 2})
    net = nn.Sequential(nn.Linear(8, 8), moe, nn.Linear(8, 4))
    model = fleet.distributed_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = [p.detach().clone() for p in net.parameters()]

    def follow(*_: Any) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(average, [p.detach() for p in net.parameters()], 0.3)

    if early:
        optimizer.register_step_post_hook(follow)
    ours = fleet.distributed_optimizer(optimizer)
    if not early:
        ours.register_step_post_hook(follow)
    draw = torch.Generator().manual_seed(4)
    for _ in range(3):
        x, y = torch.randn(8, 8, generator=draw), torch.randint(4, (8,), generator=draw)
        mine = (t.chunk(data.size)[data.index] for t in (x, y))
        cross_entropy(model(next(mine)), next(mine)).backward()
        ours.step()
        ours.zero_grad()
    return [*(p.detach() for p in net.parameters()), *average]


def test_experts_and_hooks_behind_the_step() -> None:
    """Experts of which no other rank has a copy; a hook that was there before the optimizer was divided."""
    wanted = run_ranks(with_experts, 2, {"dp": 2, "ep": 2}, False)
    for early in (False, True):
        found = run_ranks(with_experts, 2, {"dp": 1, "sharding": 2, "ep": 2}, early)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


class Branches(nn.Module):
    """A rank takes one of three layers of several sizes, by its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways, self.head = nn.ModuleList(nn.Linear(6, n) for n in (6, 6, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.ways[int(x[0, 0])](x)[:, :4])


def branched(clips: bool) -> float:
    """How far parameters are from the plain program's after steps in which ranks take other branches."""
    data = begin(dp=1, sharding=2).data()
    alone, net = Branches(), Branches()
    model = fleet.distributed_model(net)
    limit = fleet.ClipGradByGlobalNorm(1e9) if clips else None
    ours = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), grad_clip=limit)
    theirs = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step, taken in enumerate([(0, 1), (2, 0), (1, 1), (0, 2)]):
        draw = torch.Generator().manual_seed(step)
        halves = [torch.randn(4, 6, generator=draw) for _ in taken]
        for half, way in zip(halves, taken, strict=True):
            half[0, 0] = way
        torch.stack([alone(half).square().mean() for half in halves]).mean().backward()
        model(halves[data.index]).square().mean().backward()
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    return max((a - b).abs().max().item() for a, b in zip(net.parameters(), alone.parameters(), strict=True))


@pytest.mark.parametrize("clips", [False, True])
def test_branches_that_some_ranks_take(clips: bool) -> None:
    """Ranks fill their messages with the same parameters' gradients, whichever they have themselves."""
    assert max(run_ranks(branched, 2, clips)) < 1e-6
