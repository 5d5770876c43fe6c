"""Parts of ZeRO's machinery, each by itself: buckets, meshes whose ranks come in another order."""

from __future__ import annotations

import copy
from typing import Any

import torch
from fleet_programs import close
from torch import Tensor, nn

import onecard as oc
from onecard import fleet
from onecard.tensor.buckets import fill
from onecard.testing import run_ranks
from onecard.train.zero import reducer


def test_buckets_are_full_and_no_fuller() -> None:
    assert fill([4, 4, 4, 9, 1, 3], lambda n: n, 8) == [[4, 4], [4], [9], [1, 3]]


def turned() -> None:
    """Ranks along the axis that are not in the order of their numbers; one parameter, which is a message alone."""
    mesh = oc.ProcessMesh([1, 0], ["dp"])
    for stage in (oc.ShardingStage1, oc.ShardingStage2, oc.ShardingStage3):
        torch.manual_seed(0)
        alone = nn.Linear(6, 8, bias=False)
        net = oc.shard_layer(nn.Linear(6, 8, bias=False), mesh)
        with torch.no_grad():
            net.weight.copy_(alone.weight)
        both = [torch.optim.AdamW(each.parameters(), 0.01, eps=1e-3) for each in (alone, net)]
        oc.shard_optimizer(both[1], stage("dp", mesh))
        for number in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            alone(x).square().mean().backward()
            net(oc.shard_tensor(x, mesh, [oc.Shard(0)])).square().mean().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        close(oc.unshard(net.weight.detach()), alone.weight.detach(), stage.__name__)


def test_a_mesh_in_another_order() -> None:
    run_ranks(turned, 2)


def many_buckets() -> list[int]:
    """Eight buckets whose sums run beside backward: none is lost, and few are under way."""
    reducer.LEAST = 64
    mesh, most = oc.ProcessMesh([0, 1], ["dp"]), []
    for stage in (oc.ShardingStage1, oc.ShardingStage2):
        torch.manual_seed(0)
        alone = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
        net = oc.shard_layer(copy.deepcopy(alone), mesh)
        both = [torch.optim.SGD(each.parameters(), 0.1) for each in (alone, net)]
        oc.shard_optimizer(both[1], stage("dp", mesh, overlap=True))
        summed: Any = net[0].weight
        most.append(0)

        def look(grad: Any, summed: Any = summed) -> None:
            most[-1] = max(most[-1], len(summed._summed_by._started))

        for number in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            alone(x).square().mean().backward()
            given = oc.shard_tensor(x, mesh, [oc.Shard(0)]).requires_grad_()
            given.register_hook(look)  # the last gradient of all
            net(given).square().mean().backward()
            for optimizer in both:
                optimizer.step()
                optimizer.zero_grad()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            close(oc.unshard(p.detach()), q.detach(), stage.__name__)
    return most


def test_many_buckets_are_under_way_a_few_at_a_time() -> None:
    for most in run_ranks(many_buckets, 2):
        assert all(1 < n <= reducer.AT_ONCE for n in most), most


def summed_in(dtype: torch.dtype | None) -> list[int]:
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    net = oc.shard_layer(nn.Linear(8, 8, bias=False, dtype=torch.bfloat16), mesh)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    oc.shard_optimizer(optimizer, oc.ShardingStage2("dp", mesh, reduce_dtype=dtype))
    x = oc.shard_tensor(torch.ones(4, 8, dtype=torch.bfloat16), mesh, [oc.Shard(0)])
    with oc.explain() as report:
        net(x).sum().backward()
    return [m.step.bytes for m in report.messages if m.step.kind == "reduce_scatter"]


def test_sums_are_made_in_the_dtype_that_was_asked_for() -> None:
    assert run_ranks(summed_in, 2, torch.float32) == [[4 * 32]] * 2
    assert run_ranks(summed_in, 2, None) == [[2 * 32]] * 2


class Clamped(nn.Linear):
    """A layer that writes to its weight when it is called."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(x)


def written_in_forward() -> None:
    """What a block writes to a parameter while it is whole stays written, in a block without a backward, too."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    torch.manual_seed(0)
    alone = nn.Sequential(Clamped(6, 6), Clamped(6, 6))
    net = oc.shard_layer(copy.deepcopy(alone), mesh)
    both = [torch.optim.SGD(each.parameters(), 0.1) for each in (alone, net)]
    oc.shard_optimizer(both[1], oc.ShardingStage3("dp", mesh, model=net))
    for number in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        given = oc.shard_tensor(x, mesh, [oc.Shard(0)])
        for each, rows in ((alone, x), (net, given)):
            with torch.no_grad():
                each(rows)
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            close(oc.unshard(p.detach()), q.detach(), "after a forward")
        for each, rows, optimizer in ((alone, x, both[0]), (net, given, both[1])):
            each(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            close(oc.unshard(p.detach()), q.detach(), "after a step")


def test_what_a_block_writes_to_its_weight_stays() -> None:
    run_ranks(written_in_forward, 2)


def norms_of_copies() -> None:
    """A norm over the stages of a pipeline by marks, each parameter on two ranks of its mesh: counted once."""
    meshes = [oc.ProcessMesh([0, 1], ["dp"]), oc.ProcessMesh([2, 3], ["dp"])]
    torch.manual_seed(0)
    whole = [torch.randn(4, 6), torch.randn(6)]
    parts = [oc.shard_tensor(g, mesh, [oc.Replicate()]) for g, mesh in zip(whole, meshes, strict=True)]
    for order in (1.0, 2.0, float("inf")):
        found = oc.unshard(nn.utils.get_total_norm(parts, order))
        close(found, nn.utils.get_total_norm(whole, order), f"order {order}")


def test_a_norm_counts_copies_once() -> None:
    run_ranks(norms_of_copies, 4)


def part_written_while_whole() -> None:
    """A block stays whole after its forward; then the program writes to the optimizer's parts."""
    fleet.init(is_collective=True)
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = copy.deepcopy(alone)
    both = [torch.optim.SGD(each.parameters(), 0.1) for each in (alone, model)]
    net, *_ = fleet.group_sharded_parallel(model, both[1], "p_g_os", reshard_after_forward=False)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    net(x)
    with torch.no_grad():
        for p in (p for optimizer in both for p in optimizer.param_groups[0]["params"]):
            p.mul_(0.5)
    close(net(x).detach(), alone(x).detach(), "after a write to the parts")


def test_what_is_written_to_a_part_while_the_whole_is_shown_counts() -> None:
    run_ranks(part_written_while_whole, 2)


def test_memory_is_given_up_after_what_is_under_way_has_come() -> None:
    """A block that is gathered ahead and then not called."""
    mesh = oc.ProcessMesh([0], ["dp"])
    net = oc.shard_layer(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), mesh)
    stage = oc.ShardingStage3("dp", mesh, model=net, overlap=True)
    oc.shard_optimizer(torch.optim.SGD(net.parameters(), 0.1), stage)
    weight: Any = net[1].weight
    unit = next(u for u in weight._blocks.units if any(piece.x is weight for piece in u.pieces))
    unit.start()
    end, seen = unit._end, []
    unit._end = lambda: (seen.append(unit.whole_bytes()), end())
    unit.whole_bytes = lambda: unit.pieces[0]._buffer.untyped_storage().nbytes()
    unit.release()
    assert seen == [weight.nbytes] and unit.whole_bytes() == 0
