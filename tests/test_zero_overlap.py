"""Sums of gradients that run while backward does: bit for bit those that do not, whatever a program does in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_zero import OPTIMIZERS, STAGES, distributed, one_card, train
from torch import Tensor, nn

import onecard as oc
from onecard.comm.issue import collectives
from onecard.tensor import buckets
from onecard.testing import assert_close, run_ranks

R, S = oc.Replicate(), oc.Shard


def optimizer_of(stage: int, net: nn.Module, mesh: oc.ProcessMesh, overlap: bool, name: str = "foreach") -> Any:
    made = OPTIMIZERS[name](net.parameters())
    if stage:
        return oc.shard_optimizer(made, STAGES[stage]("dp", mesh, overlap=overlap))
    return oc.shard_optimizer(made, overlap=overlap)


def small_buckets() -> None:
    """So that a small net has several: the first ones travel while backward goes on. Results take the memory of old ones."""
    buckets.BUCKET_BYTES, buckets.Room.LEAST = 512, 0


def on_and_off(tp: bool, large: bool) -> None:
    small_buckets()
    if large:
        buckets.LARGE = 64  # all but the smallest travel alone, from and to where they lie
    begun = counted()
    for stage in (0, *STAGES):
        for name, accumulate, clip in [("fused", 3, False)] if tp else [("foreach", 1, True), ("momentum", 2, True)]:
            found = []
            for overlap in (False, True):
                net, mesh = distributed(tp)
                optimizer = optimizer_of(stage, net, mesh, overlap, name)
                rest = [R] * (mesh.ndim - 1)
                before = len(begun)
                losses = train(net, optimizer, lambda x: oc.shard_tensor(x, mesh, [S(0), *rest]), accumulate, clip)  # noqa: B023
                assert (len(begun) > before) == overlap
                found.append((losses, [p.detach().full_tensor() for p in net.parameters()]))
            assert found[0][0] == found[1][0], (stage, name)
            for off, on in zip(found[0][1], found[1][1], strict=True):
                assert torch.equal(off, on), (stage, name)
            losses, weights = one_card(name, accumulate, clip)
            assert found[1][0] == pytest.approx(losses, rel=1e-5), (stage, name)
            for on, weight in zip(found[1][1], weights, strict=True):
                assert_close(on, weight, rtol=1e-5, atol=1e-6)


def counted() -> list[str]:
    """Notes what is left under way."""
    begun: list[str] = []
    for name in ("reduced", "scattered"):
        was = getattr(collectives, name)

        def start(*args: Any, name: str = name, was: Any = was, **kwargs: Any) -> Any:
            handle = was(*args, **kwargs)
            if handle._work is not None:
                begun.append(name)
            return handle

        setattr(collectives, name, start)
    return begun


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize(("ranks", "tp", "large"), [(3, False, False), (4, True, False), (2, False, True)])
def test_on_and_off_are_equal_bit_for_bit(ranks, tp, large):
    run_ranks(on_and_off, ranks, tp, large)


def linear(stage: int, overlap: bool, width: int = 8, n: int = 3, kind: Any = torch.optim.SGD) -> Any:
    torch.manual_seed(0)
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
    net = oc.shard_layer(nn.Sequential(*[nn.Linear(width, width) for _ in range(n)]), mesh)
    made = kind(net.parameters(), 0.1)
    stages: Any = STAGES[stage]("dp", mesh) if stage else None
    return net, oc.shard_optimizer(made, stages, overlap=overlap), mesh


def inputs(mesh: oc.ProcessMesh, seed: int = 3, width: int = 8) -> Tensor:
    return oc.shard_tensor(torch.randn(4, width, generator=torch.Generator().manual_seed(seed)), mesh, [S(0)])


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def corners() -> None:
    small_buckets()
    for stage in (0, *STAGES):
        found = []
        for overlap in (False, True):
            net, optimizer, mesh = linear(stage, overlap)
            seen: list[float] = []
            # a hook that reads, and one that writes, in the middle of backward
            net[2].weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.norm().item()))
            net[1].weight.register_post_accumulate_grad_hook(halve)
            for step in range(5):
                if step != 3:
                    net(inputs(mesh, step)).square().mean().backward()
                if step in (1, 3):  # more microbatches than the step before
                    for micro in range(2):
                        net(inputs(mesh, 10 * step + micro)).square().mean().backward()
                if step == 2:  # asked for, not kept
                    (asked,) = torch.autograd.grad(net(inputs(mesh)).sum(), [net[0].weight])
                    seen.append(asked.norm().item())
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            found.append((seen, [p.detach().full_tensor() for p in net.parameters()]))
        assert found[0][0] == pytest.approx(found[1][0], rel=1e-6), stage
        for off, on in zip(found[0][1], found[1][1], strict=True):
            assert_close(off, on, rtol=1e-6, atol=1e-7)


def after_a_fault() -> None:
    """A backward that breaks off leaves a reducer that goes on."""
    small_buckets()
    for stage in (0, *STAGES):
        weights = []
        for fails in (False, True):
            net, optimizer, mesh = linear(stage, True)
            for step in range(4):
                if fails and step == 2:
                    h = net[2](net[1](_Failing.apply(net[0](inputs(mesh)))))
                    with pytest.raises(OSError):
                        h.sum().backward()
                    optimizer.zero_grad()
                net(inputs(mesh, step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append([p.detach().full_tensor() for p in net.parameters()])
        for one, other in zip(*weights, strict=True):
            assert torch.equal(one, other), stage


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise OSError("the disk is full")


def checkpointed() -> None:
    """Blocks that are run again: a backward within a backward, in which a tied parameter gets a gradient more than once."""
    small_buckets()
    from torch.utils.checkpoint import checkpoint

    for stage in (0, *STAGES):
        found = []
        for overlap in (False, True, None):
            torch.manual_seed(0)
            mesh = oc.ProcessMesh(range(oc.get_world_size()), ["dp"])
            net: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            if overlap is not None:
                oc.shard_layer(net, mesh)
            optimizer: Any = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
            if overlap is not None:
                optimizer = oc.shard_optimizer(optimizer, STAGES[stage]("dp", mesh) if stage else None, overlap=overlap)
            for step in range(4):
                x = inputs(mesh, step) if overlap is not None else inputs(mesh, step).full_tensor()
                h = x.requires_grad_()
                for reentrant in (True, False, True):
                    h = checkpoint(net, h, use_reentrant=reentrant)
                h.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([oc.unshard(p.detach()) for p in net.parameters()])
        for off, on, alone in zip(*found, strict=True):
            assert_close(off, on, rtol=1e-6, atol=1e-7)
            assert_close(on, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.proof
def test_hooks_asked_gradients_faults_and_checkpoints():
    run_ranks(many, 2)


def many() -> None:
    corners()
    after_a_fault()
    checkpointed()


def clipped_messages(stage: int, overlap: bool) -> dict[str, tuple[int, int]]:
    net, optimizer, mesh = linear(stage, overlap, 64)
    for _ in range(3):
        with oc.explain() as report:
            net(inputs(mesh, 0, 64)).square().mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    counts: dict[str, tuple[int, int]] = {}
    for m in report.messages:
        if m.step.kind != "slice" and m.operator != "mean":
            number, size = counts.get(m.step.kind, (0, 0))
            counts[m.step.kind] = number + 1, size + m.step.bytes
    return counts


@pytest.mark.proof
def test_clipping_costs_one_small_message():
    """Stage 1 too: what is clipped is cut first, and the norm is made of the parts'."""
    part = 4 * 3 * (64 * 64 + 64) // 2
    for stage, overlap in ((1, False), (1, True), (2, False), (2, True)):
        found = run_ranks(clipped_messages, 2, stage, overlap)[0]
        assert found["reduce_scatter"] == (1, part) and found["all_gather"] == (1, part), (stage, overlap, found)
        number, size = found["all_reduce"]
        assert number == 1 and size <= 64, (stage, overlap, found)
