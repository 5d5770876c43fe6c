"""Passes over messages: started early and awaited late, in one or in pieces, scattered. Bits and the order on all ranks stay."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from amounts import share
from static_programs import assert_replays, gpt, mixed
from test_static_passes import recorded_step, replayed, same
from torch import Tensor, fx

import onecard as oc
from onecard.comm.issue import again
from onecard.errors import RecordingError
from onecard.static.passes import (
    PASSES,
    cut_buckets,
    optimised,
    overlap,
    overlapped,
    plain_names,
    scattered,
    small_together,
)
from onecard.static.price import price
from onecard.static.price.live import Live
from onecard.static.step.order import Order, check_started, line_up
from onecard.testing import run_ranks

R, S = oc.Replicate(), oc.Shard


def messages(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is again.message]


def all_small() -> None:
    """Messages of every size are moved, buckets are small, in this process."""
    overlap.LARGE = 0
    PASSES["pieces"] = partial(cut_buckets, size=4096)


def hidden(graph: fx.Graph) -> int:
    """How many operators run while a message travels."""
    under_way, count = 0, 0
    for n in graph.nodes:
        under_way += (n.target is again.message and bool(n.kwargs.get("later"))) - (n.target is again.wait)
        count += under_way > 0 and hasattr(n.target, "_schema")
    return count


def moved_steps() -> list[Any]:
    all_small()
    size = oc.get_world_size()
    dp = oc.ProcessMesh(list(range(size)), ["dp"])
    found = []
    programs = (
        partial(gpt, dp),
        partial(gpt, oc.ProcessMesh(list(range(size)), ["tp"])),
        partial(mixed, dp, "sgd", 2),
    )
    for make in share(programs, 1):
        recording = recorded_step(make)
        before, expected = recording.graph, replayed(recording, recording.graph)
        for name, run in PASSES.items():
            made = run(before)
            assert made is before or same(recording, made, expected), name
            order = Order(before)
            assert not order.movable or name != "overlap" or line_up(made) == line_up(before)
            before = made
        check_started(before)
        found.append((len(messages(recording.graph)), len(messages(before)), hidden(before)))
    assert_replays(partial(gpt, dp))
    return found


@pytest.mark.proof
def test_moved_messages_keep_every_bit_on_two_ranks() -> None:
    found = run_ranks(moved_steps, 2)
    assert found[0] == found[1]
    (first, pieces, behind), *_ = found[0]
    assert pieces > first + 3 and behind > 50, found


@pytest.mark.proof
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_moved_messages_on_four_ranks(backend: str) -> None:
    found = run_ranks(four_steps, 4, backend=backend)
    first, pieces = found[0]
    assert (pieces > first) is (backend == "shm"), "Gloo's sums of four depend on where an element lies"


def four_steps() -> tuple[int, int]:
    all_small()
    make = partial(gpt, oc.ProcessMesh([0, 1, 2, 3], ["dp"]))
    run = assert_replays(make)
    recording = recorded_step(make)
    return len(messages(recording.graph)), len(messages(run.recordings[0].graph))


# -- reduce-scatter and buckets ----------------------------------------------------------------------------------------------


def cut_after_sum() -> list[Any]:
    where = oc.ProcessMesh([0, 1], ["dp"])
    generator = torch.Generator().manual_seed(2)
    x = oc.shard_tensor(torch.randn(8, 6, generator=generator), where, [S(0)])
    w = oc.shard_tensor(torch.randn(8, 6, generator=generator), where, [S(0)])
    found = []
    for dim in (0, 1):

        def step(x: Tensor, w: Tensor, dim: int = dim) -> Tensor:
            whole = oc.reshard(x.t() @ w, where, [R])
            return oc.reshard(whole, where, [S(dim)]) * 2

        recording = oc.to_static(step, without=[*PASSES])
        recording(x, w)
        recording(x, w)
        graph = plain_names(recording.recordings[0].graph)
        made = scattered(graph)
        assert same(recording.recordings[0], made)
        found.append([[n.args[2] for n in messages(g)] for g in (graph, made)])

        def both(x: Tensor, w: Tensor, dim: int = dim) -> Tensor:  # the whole is wanted, too
            whole = oc.reshard(x.t() @ w, where, [R])
            return oc.reshard(whole, where, [S(dim)]).sum() + whole.sum()

        kept = oc.to_static(both, without=["scatter"])
        kept(x, w)
        kept(x, w)
        assert [n.args[2] for n in messages(scattered(kept.recordings[0].graph))].count("reduce_scatter_tensor") == 0
    return found


def test_a_sum_that_is_cut_is_scattered() -> None:
    expected = [[["all_reduce"], ["reduce_scatter_tensor"]]] * 2
    assert run_ranks(cut_after_sum, 2) == [expected] * 2
    assert run_ranks(cut_after_sum, 2, backend="gloo") == [expected] * 2


def small_sums() -> list[int]:
    where = oc.ProcessMesh([0, 1], ["dp"])
    x = oc.shard_tensor(torch.arange(8.0).reshape(4, 2), where, [S(0)])

    def step(x: Tensor) -> tuple[Tensor, ...]:
        a = oc.unshard(x.sum())
        b = oc.unshard((x * 3).sum(0))
        c = oc.unshard((x * a).sum(0))  # needs the first
        d = oc.unshard((x + 1).sum())
        return a, b, c, d

    recording = oc.record(step)(x)
    plain = oc.to_static(step, without=[*PASSES])
    plain(x)
    plain(x)
    graph = plain.recordings[0].graph
    made = small_together(graph)
    assert same(plain.recordings[0], made)
    assert len(recording.results) == 4
    return [len(messages(g)) for g in (graph, made)]


def test_small_messages_travel_together() -> None:
    assert run_ranks(small_sums, 2) == [[4, 2]] * 2


# -- planted faults ------------------------------------------------------------------------------------------------------------


def moved(graph: fx.Graph, node: Callable[[fx.Node], bool], to: Callable[[fx.Node], bool]) -> fx.Graph:
    """A copy in which one node stands before another one."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    first = next(n for n in copy.nodes if node(n))
    next(n for n in copy.nodes if to(n)).prepend(first)
    return copy


def said(graph: fx.Graph) -> str:
    try:
        check_started(graph)
    except RecordingError as fault:
        return str(fault)
    return "nothing"


def faults() -> list[Any]:
    overlap.LARGE = 0
    where = oc.ProcessMesh([0, 1], ["dp"])
    x = oc.shard_tensor(torch.arange(1.0, 9.0).reshape(4, 2), where, [S(0)])

    def step(x: Tensor) -> Tensor:
        y = (x * 0.5).sum(0)
        w = oc.unshard(y.detach())
        z = torch.tanh(x).exp()
        return w + oc.unshard(z.sum())

    run = oc.to_static(step, without=["buckets", "overlap"])
    run(x)
    run(x)
    recording = run.recordings[0]
    graph = recording.graph
    first = messages(graph)[0]
    inplace = fx.Graph()  # the buffer is written once more before it is sent, as a program may do
    names: dict[fx.Node, fx.Node] = {}
    for n in graph.nodes:
        if n is first:
            written = inplace.call_function(torch.ops.aten.exp_.default, (names[n.args[0]],))  # type: ignore[index]
            written.meta.update(n.args[0].meta)  # type: ignore[union-attr]
        names[n] = inplace.node_copy(n, names.__getitem__)
    good = overlapped(inplace)
    found: list[Any] = [same(recording.with_graph(inplace), good), hidden(good), said(good)]
    # A message before its data: by hand, and by a pass that forgets the write.
    early = moved(inplace, lambda n: n.target is again.message, lambda n: n.name == written.name)
    found += [same(recording.with_graph(inplace), early), Order(inplace).keeps(inplace.nodes)]
    sequence = [n for n in inplace.nodes if n is not written]
    found += [Order(inplace).keeps([*sequence[:-1], written, sequence[-1]])]
    lying = Order.__init__

    def forgets(self: Order, graph: fx.Graph, *known: Any) -> None:
        lying(self, graph, *known)
        for n in messages(graph):
            self.needs[n] = [*n.all_input_nodes]

    Order.__init__ = forgets  # type: ignore[method-assign]
    try:
        found.append(said(overlapped(inplace)))
    finally:
        Order.__init__ = lying  # type: ignore[method-assign]
    # A wait after the reader, and one that is lost.
    found.append(said(moved(good, lambda n: n.target is again.wait, lambda n: n.op == "output")))
    lost = fx.Graph()
    lost.output(lost.graph_copy(good, {}))
    lost.erase_node(next(n for n in lost.nodes if n.target is again.wait))
    return [*found, said(lost)]


def test_planted_faults_are_seen() -> None:
    right, behind, fine, wrong, order, moved_write, forgotten, late, lost = run_ranks(faults, 2)[0]
    assert right and behind > 1 and fine == "nothing" and order
    assert not wrong and not moved_write
    assert "still sends or fills: a pass has moved it" in forgotten and "a pass has moved it" in late
    assert "a pass has moved it" in lost, "what reads the sum is before any wait"


def drops_one() -> tuple[list[float], list[str]]:
    where = oc.ProcessMesh([0, 1], ["dp"])
    x = oc.shard_tensor(torch.arange(4.0), where, [S(0)])

    def dropped(graph: fx.Graph) -> fx.Graph:
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        if oc.get_rank() == 1:
            copy.erase_node(messages(copy)[0])
        return copy

    PASSES["common_subexpressions"] = dropped
    step = oc.to_static(lambda x: oc.unshard(x.sum()) * 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [float(step(x)) for _ in range(3)]
    return found, [str(w.message) for w in said]


def test_a_pass_that_drops_a_message_on_one_rank_is_left_out_on_all() -> None:
    for found, said in run_ranks(drops_one, 2):
        assert found == [12.0] * 3 and len(said) == 1
        assert "the pass 'common_subexpressions' is left out: after it ranks would send other messages" in said[0]


def sends_alike() -> tuple[bool, int, float]:
    """A part that is filled up with zeros is sent in backward again; and two results are gathered from one tensor."""
    where = oc.ProcessMesh([0, 1], ["dp"])
    x = oc.shard_tensor(torch.rand(1, 2, 3, 6, 5), where, [S(0)], requires_grad=True)

    def pooled(x: Any) -> Tensor:
        return torch.autograd.grad(torch.nn.functional.max_pool3d(x, (3, 2, 2)).square().sum(), x)[0]

    step = oc.to_static(pooled)
    same_gradient = all(torch.equal(step(x).full_tensor(), pooled(x).full_tensor()) for _ in range(3))
    twice = oc.to_static(lambda x: (oc.reshard(x, where, [R]), oc.reshard(x, where, [R])))
    y = oc.shard_tensor(torch.ones(4, 100), where, [S(0)])
    for _ in range(3):
        one, other = twice(y)
    one.add_(1)
    return same_gradient, len(messages(step.recordings[0].graph)), other.full_tensor().max().item()


def test_equal_messages_are_one_on_all_ranks_and_results_have_their_own_memory() -> None:
    assert run_ranks(sends_alike, 2) == [(True, 1, 1.0)] * 2


# -- the order in which gradients are summed -------------------------------------------------------------------------------


def products_before() -> list[int]:
    """How many products of the step come before each message of gradients is started, with weights of 1 MiB and small biases."""
    with oc.pretend(2, 0, fake=True):
        mesh = oc.ProcessMesh([0, 1], ["dp"])
        layers = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
        oc.shard_layer(layers, mesh)
        optimizer = oc.shard_optimizer(torch.optim.SGD(layers.parameters(), lr=0.1))
        x = oc.shard_tensor(torch.ones(65536, 512), mesh, [oc.Shard(0)])

        def step(x: Tensor) -> None:
            layers(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        graph = optimised(oc.record(step)(x)).graph
    found, products = [], 0
    for node in graph.nodes:
        found += [products] * (node.target is again.message)
        products += price.work(node).macs > 0 if node.op == "call_function" else 0
    return [*found, products]


def test_a_recording_starts_each_large_gradient_when_it_is_there() -> None:
    """From the last layer to the first; the bucket of the small ones, which needs the very first, holds up nobody."""
    *weights, small, all_of_them = products_before()
    assert len(weights) == 4 and weights == sorted(set(weights)), "each after products of its own"
    assert weights[0] <= all_of_them - 5 and small >= weights[-1]


def test_few_messages_are_under_way_and_the_peak_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine weights that are gathered one after the other, behind a larger one, which leaves room; nine sums that could all travel
    at once."""
    monkeypatch.setattr(overlap, "LARGE", 0)
    with oc.pretend(2, fake=True):
        mesh = oc.ProcessMesh([0, 1], ["tp"])
        weights = [oc.shard_tensor(torch.randn(64, 64), mesh, [S(0)]) for _ in range(9)]
        wide = oc.shard_tensor(torch.randn(64, 512), mesh, [S(0)])

        def gathered(x: Tensor) -> Tensor:
            x = torch.relu(x @ oc.reshard(wide, mesh, [R])).narrow(1, 0, 64)
            for w in weights:
                x = torch.relu(x @ oc.reshard(w, mesh, [R]))
            return x

        def summed(x: Tensor) -> Any:
            return sum(torch.relu(oc.reshard(y, mesh, [R])) for y in [x @ w for w in weights])

        for step, where in ((gathered, R), (summed, S(1))):
            graph = oc.record(step)(oc.shard_tensor(torch.randn(8, 64), mesh, [where])).graph
            made = overlapped(graph)
            assert Live(made).peak <= Live(graph).peak, step
            now = most = 0
            for n in made.nodes:
                now += (n.target is again.message and bool(n.kwargs.get("later"))) - (n.target is again.wait)
                most = max(most, now)
            assert 1 < most <= overlap.AT_ONCE + 1, (step, most)


def halves_of_sums() -> list[Any]:
    """All ranks take the first half of a sum: that is the part of one of them, and no reduce-scatter."""
    x, n = torch.arange(8.0) * (1 + oc.get_rank()), torch.arange(4) + oc.get_rank()

    def step(x: Tensor, n: Tensor) -> tuple[Tensor, ...]:
        total, count, most = x * 1, n.sum(0, keepdim=True), n.amax(0, keepdim=True)
        oc.all_reduce(total)
        oc.all_reduce(count)
        oc.all_reduce(most, oc.ReduceOp.MAX)
        return total.narrow(0, 0, 4).clone(), count, most

    static = oc.to_static(step)
    for _ in range(3):
        found = static(x, n)
    return [t.tolist() for t in found] + [[n.args[2] for n in messages(static.recordings[0].graph)]]


def test_a_part_that_all_ranks_take_and_sums_beside_maxima() -> None:
    expected = [[0.0, 3.0, 6.0, 9.0], [6 + 10], [4], ["all_reduce"] * 3]
    assert run_ranks(halves_of_sums, 2) == [expected] * 2
