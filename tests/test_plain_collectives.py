"""Plain tensors in comm: differentiable collectives against one process, groups of any ranks, tags, messages left under way."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import onecard as oc
from onecard.comm.issue import by_gpu, groups, plain, started, transfer
from onecard.comm.issue import differentiable as d
from onecard.comm.issue import message as messages
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.errors import CommunicationError
from onecard.fleet.front import collective
from onecard.testing import assert_close, run_ranks

N = 3
UNEVEN = [2, 0, 3]
Many = list[Tensor]


def the_input(rank: int, uneven: bool, seed: int = 0) -> Tensor:
    rows = UNEVEN[rank] if uneven else 5
    return torch.randn(rows, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * seed + rank))


def ahead(xs: Many) -> Many:
    return [torch.cat([x.split(UNEVEN)[r] for x in xs]) for r in range(N)]


def pieces(xs: Many) -> Many:
    return [torch.cat([x.split([1, 1, 2], 1)[r] for x in xs]) for r in range(N)]


# name: what a rank runs, what it is as one function of all ranks' tensors, whether ranks hold unequal lengths of dim 0
CASES: dict[str, tuple[Callable[[Tensor, Ranks], Tensor], Callable[[Many], Many], bool]] = {
    "all_reduce": (lambda x, g: d.all_reduce(x, group=g), lambda xs: [sum(xs)] * N, False),
    "all_reduce avg": (lambda x, g: d.all_reduce(x, "avg", g), lambda xs: [sum(xs) / N] * N, False),
    "all_gather": (lambda x, g: d.all_gather(x, 1, g), lambda xs: [torch.cat(xs, 1)] * N, False),
    "all_gather uneven": (lambda x, g: d.all_gather(x, 0, g, UNEVEN), lambda xs: [torch.cat(xs)] * N, True),
    "reduce_scatter": (lambda x, g: d.reduce_scatter(x, 0, g, UNEVEN), lambda xs: list(sum(xs).split(UNEVEN)), False),
    "reduce_scatter even": (
        lambda x, g: d.reduce_scatter(x.repeat(3, 1, 1), 0, g),
        lambda xs: list(sum(xs).repeat(3, 1, 1).chunk(3)),
        False,
    ),
    "all_to_all": (lambda x, g: d.all_to_all(x, 0, 1, g, UNEVEN, [1, 1, 2]), pieces, True),
    "all_to_all along one dim": (
        lambda x, g: d.all_to_all(x, 0, 0, g, [UNEVEN[g.index]] * N, UNEVEN),
        ahead,
        False,
    ),
    "broadcast": (lambda x, g: d.broadcast(x, 1, g), lambda xs: [xs[1]] * N, False),
    "reduce": (lambda x, g: d.reduce(x, 2, g), lambda xs: [xs[0] * 0, xs[1] * 0, sum(xs)], False),
    "scatter": (lambda x, g: d.scatter(x, 2, 0, g, UNEVEN), lambda xs: list(xs[2].split(UNEVEN)), False),
    "gather": (
        lambda x, g: d.gather(x, 1, 0, g, UNEVEN),
        lambda xs: [torch.cat(xs)[:0], torch.cat(xs), torch.cat(xs)[:0]],
        True,
    ),
}


def weights_of(y: Tensor, place: int) -> Tensor:
    return torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(100 + place))


def loss_of(y: Tensor, place: int) -> Tensor:
    """Of second order, so that gradients of gradients are there."""
    return (weights_of(y, place) * y * y).sum()


def run_cases(order: list[int]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    group = of_ranks(order, "any")
    found = {}
    for name, (run, _, uneven) in CASES.items():
        x = the_input(group.index, uneven).requires_grad_()
        y = run(x, group)
        (grad,) = torch.autograd.grad(loss_of(y, group.index), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sin().sum(), x)
        found[name] = (y.detach(), grad.detach(), second)
    return found


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_gradients_are_those_of_one_function_of_all_ranks(order: list[int]) -> None:
    results = run_ranks(run_cases, N, order)
    for name, (_, whole, uneven) in CASES.items():
        xs = [the_input(place, uneven).requires_grad_() for place in range(N)]
        ys = whole(xs)
        loss = sum(loss_of(y, place) for place, y in enumerate(ys))
        grads = torch.autograd.grad(loss, xs, create_graph=True, materialize_grads=True)
        seconds = torch.autograd.grad(sum(g.sin().sum() for g in grads), xs, materialize_grads=True)
        for place, rank in enumerate(order):
            mine = results[rank][name]
            for what, a, b in zip(
                ("value", "gradient", "second"), mine, (ys[place], grads[place], seconds[place]), strict=True
            ):
                assert a.shape == b.shape and torch.allclose(a, b), f"{name}, {what} at place {place}"


def pipeline_of_microbatches() -> tuple[list[float], Tensor, bool]:
    """Rank 0 sends two microbatches, rank 1 takes the second one first; gradients come back the same way."""
    rank, group = oc.get_rank(), of_ranks([0, 1], "pp")
    if rank == 2:
        with pytest.raises(CommunicationError, match=r"ranks \[0, 1\] was called by a rank outside"):
            plain.all_reduce(torch.ones(1), group)
        return [], torch.zeros(0), group.is_member()
    tags = [started.tag_of("forward", microbatch) for microbatch in range(2)]
    if rank == 0:
        w = torch.tensor([2.0, 3.0], requires_grad=True)
        for token in [d.send(w * (i + 1), 1, tag, group) for i, tag in enumerate(tags)]:
            token.backward()
        return [], w.grad, True
    losses = []
    for tag in reversed(tags):
        y = d.recv(torch.empty(2), 0, tag, group)
        loss = (y * y).sum()
        loss.backward()
        losses.append(loss.item())
    return losses, torch.zeros(0), True


def test_tags_tell_microbatches_apart() -> None:
    first, second, outside = run_ranks(pipeline_of_microbatches, 3)
    assert second[0] == [16.0 + 36.0, 4.0 + 9.0] and not outside[2]
    assert_close(first[1], torch.tensor([2.0 * (2 + 8), 2.0 * (3 + 12)]))  # of (w)^2 + (2 w)^2


def messages_under_way() -> tuple[list[Any], str]:
    rank, other, group = oc.get_rank(), 1 - oc.get_rank(), of_ranks()
    with oc.explain() as report:
        sums = started.all_reduce(torch.full((4,), float(rank + 1)), group)
        rows = started.all_gather(torch.full((2, 2), float(rank)), group, 1)
        part = started.reduce_scatter(torch.arange(6.0).view(2, 3), group, 1, [1, 2])
        found = [part.wait().tolist(), rows.wait().tolist(), sums.wait().tolist()]  # not in their order
        found.append(sums.wait().tolist())
        started.isend(torch.full((200_000,), float(rank)), other, 7, group)  # nobody waits for it
        found.append(started.irecv(torch.empty(200_000), other, 7, group).wait().unique().tolist())
    late = started.irecv(torch.empty(1), other, 8, group)
    begin = time.monotonic()
    with pytest.raises(CommunicationError) as error:
        late.wait(timeout=0.2)
    assert time.monotonic() - begin < 5
    kinds = [(m.operator, m.step.kind, m.step.bytes) for m in report.messages]
    assert kinds == [
        ("all_reduce", "all_reduce", 16),
        ("all_gather", "all_gather", 16),
        ("reduce_scatter", "reduce_scatter", 12),
        ("send", "send", 800_000),
    ]
    assert report.messages[0].source.rpartition(":")[0].endswith("test_plain_collectives.py")
    return found, str(error.value)


@pytest.mark.parametrize("backend", [None, "gloo"])
def test_started_and_awaited(backend: str | None) -> None:
    for rank, (found, error) in enumerate(run_ranks(messages_under_way, 2, backend=backend)):
        whole = [[[0.0], [6.0]], [[2.0, 4.0], [8.0, 10.0]]][rank]
        assert found == [whole, [[0.0, 0.0, 1.0, 1.0]] * 2, [3.0] * 4, [3.0] * 4, [float(1 - rank)]]
        assert f"rank {rank} waited" in error and f"recv with tag 8 from rank {1 - rank}" in error


def test_wrong_calls_are_told() -> None:
    world = of_ranks([0])
    for call, message in {
        lambda: of_ranks([0, 3]): r"names rank\(s\) \[3\]; this world has ranks 0 to 0: onecard.new_group",
        lambda: of_ranks([0, 0]): "names a rank twice",
        lambda: started.isend(torch.ones(1), 0, 0, world): "this rank itself",
        lambda: started.irecv(torch.ones(1), 2, 0, world): "place 2 of ranks .* is not there",
        lambda: d.all_reduce(torch.ones(1), "max"): r"all_reduce\('max'\) has no gradient",
        lambda: d.all_gather(torch.ones(1), 3): "there is no dim 3",
        lambda: d.all_gather(torch.ones(2), 0, sizes=[3]): "2 for this one",
        lambda: d.scatter(torch.ones(3), sizes=[1, 1]): "do not cut dim 0",
    }.items():
        with pytest.raises(CommunicationError, match=message):
            call()


# -- tensors of the CPU where a group carries a GPU's alone ------------------------------------------------------------------


def on_the_cpu() -> None:
    """Each message by way of another device: here a copy, in which the group works."""
    rank, seen = oc.get_rank(), list[int]()
    by_gpu.way = started.way = transfer.way = lambda process_group: torch.device("cpu")  # "another" one
    real = messages._all_reduce

    def all_reduce(pg: Any, ready: Any, op: str) -> Any:
        begin = real(pg, ready, op)
        return lambda into, given: (seen.append(into.data_ptr()), begin(into, given))[1]

    messages._BEGIN["all_reduce"] = ("all_reduce", all_reduce)
    oc.all_reduce(x := torch.tensor([rank + 1.0]))
    assert x.item() == 6.0 and seen and x.data_ptr() not in seen
    assert plain.all_gather(torch.tensor([rank]), of_ranks(), 0).tolist() == [0, 1, 2]
    assert plain.reduce_scatter(torch.arange(3.0), of_ranks(), 0).tolist() == [3.0 * rank]
    assert plain.broadcast(torch.tensor([rank]), of_ranks(), 2).item() == 2
    if rank == 0:
        oc.isend(torch.ones(2, 3).t(), 1)
    if rank == 1:
        oc.recv(y := torch.zeros(2, 3).t(), 0)
        assert y.sum() == 6
    mesh, other = oc.ProcessMesh([0, 1, 2], ["x"]), oc.ProcessMesh([2, 0], ["x"])
    z = oc.shard_tensor(torch.arange(12.0), mesh, [oc.Shard(0)])
    assert oc.reshard(z, other, [oc.Shard(0)]).full_tensor().tolist() == list(range(12))
    pair = of_ranks([0, 1], "pair")
    if rank < 2:  # there and back, each over a process group of its own
        assert groups.back_of(pair) is groups.back_of(pair) is not pair.process_group
        coming = started.irecv(torch.zeros(1), 1 - rank, 7, pair, ways=True)
        started.isend(torch.tensor([rank + 1.0]), 1 - rank, 7, pair, ways=True)
        assert coming.wait().item() == 2 - rank
    moved = started.shift(torch.tensor([rank]), (rank + 1) % 3, (rank - 1) % 3, of_ranks(), 1, "ring").wait()
    assert moved.item() == (rank - 1) % 3
    handle = plain_later(torch.ones(2))
    assert handle.wait().tolist() == [3.0, 3.0]


def plain_later(x: Tensor) -> Any:
    return started.all_reduce(x, of_ranks())


def test_what_lies_on_the_cpu_goes_by_way_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="NCCL has no tags"), monkeypatch.context() as patch:
        patch.setattr(collective, "way", lambda process_group: torch.device("cuda"))
        collective._untagged("isend", 3, SimpleNamespace(process_group=object()))  # type: ignore[arg-type]
    run_ranks(on_the_cpu, N)
