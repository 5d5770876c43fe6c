"""Pointwise operators as one kernel: what such a kernel reads and writes, what is kept, and what ends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard.static.passes.awaited import awaited
from onecard.static.passes.fused import fused
from onecard.static.price.live import Live
from onecard.static.step.nodes import kernel


def kernels(function: Callable[..., Any], *tensors: Tensor) -> list[tuple[str, int]]:
    """The kernels of a recorded function: names of operators, bytes touched."""
    graph = fused(oc.record(function)(*tensors).graph)
    graph.lint()
    return [(" ".join(n.meta["operators"]), n.meta["touched"]) for n in graph.nodes if n.target is kernel]


X, Y = torch.rand(64, 128), torch.rand(64, 128)
SIZE = X.nbytes


def test_a_chain_reads_and_writes_once() -> None:
    assert kernels(lambda x: (x * 2 + 1).relu().exp(), X) == [("mul add relu exp", 2 * SIZE)]
    assert kernels(lambda x, y: ((x + y) * y).sigmoid(), X, Y) == [("add mul sigmoid", 3 * SIZE)]
    assert kernels(lambda x: x.exp(), X) == []


def test_what_others_read_is_written() -> None:
    assert kernels(lambda x: ((y := x * 2), y.exp()), X) == [("mul exp", 3 * SIZE)]
    inside = kernels(lambda x, y: ((z := (x * 2).exp()) @ y.t(), z.sum()), X, Y)
    assert inside[0] == ("mul exp", 2 * SIZE)


def test_products_end_a_kernel() -> None:
    found = kernels(lambda x, y: ((x * 2 + 1) @ y.t()).relu().exp(), X, Y)
    assert [name for name, _ in found] == ["mul add", "relu exp"]


def test_rows_are_summed_inside_and_columns_at_the_end() -> None:
    weight = torch.rand(128)
    (norm,) = kernels(lambda x, w: x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * w, X, weight)
    assert norm == ("pow mean add rsqrt mul mul", 2 * SIZE + weight.nbytes)
    columns = kernels(lambda x: ((x * 2).sum(0) + 1).exp(), X)
    assert columns == [("mul sum", SIZE + 128 * 4), ("add exp", 2 * 128 * 4)]


def test_writes_in_place_are_left_alone() -> None:
    found = kernels(lambda x: ((y := x * 2), z := y + 1, y.add_(3), z.exp()), X)
    assert all("add_" not in name for name, _ in found)


def test_sizes_that_differ_are_not_joined() -> None:
    small = torch.rand(64, 2)
    found = kernels(lambda x, s: (x * 2 + 1, s * 2 + 1), X, small)
    assert sorted(size for _, size in found) == [2 * small.nbytes, 2 * SIZE]


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_what_only_kernels_need_is_not_kept() -> None:
    """silu's result is computed again in backward, where its operand is kept anyway; what a product needs is kept."""
    unit, x = Unit(), torch.rand(512, 32)

    def step(x: Tensor) -> None:
        unit(x).square().mean().backward()

    recording = oc.record(step)(x)
    kept = []
    for graph in (recording.graph, fused(recording.graph)):
        live = Live(graph)
        kept.append(next(live.after[n.prev] for n in graph.nodes if n.meta.get("phase") == "backward"))
    assert kept[0] - kept[1] == 512 * 64 * 4  # the result of silu
    names = [n.meta["operators"] for n in fused(recording.graph).nodes if n.target is kernel]
    assert ["silu", "mul"] in names and ["silu", "mul", "mul"] in names
    machine = oc.Machine.preset("A100")
    plain, whole = recording.cost(machine), recording.with_graph(fused(recording.graph)).cost(machine)
    assert whole.products == plain.products and whole.touched < plain.touched and whole.seconds < plain.seconds


def test_a_message_is_awaited_where_it_is_used() -> None:
    with oc.pretend(2, fake=True):
        group = oc.new_group([0, 1])

        def step(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
            total = x * 2
            oc.all_reduce(total, group=group)
            beside = y @ z
            used = total + beside
            oc.all_reduce(used, group=group)
            return used, beside

        recording = oc.record(step)(*(torch.zeros(64, 64) for _ in range(3)))
    graph = awaited(recording.graph)
    graph.lint()
    names = [n.target.__name__.partition(".")[0] for n in graph.nodes if n.op == "call_function"]
    assert names == ["mul", "message", "mm", "wait", "add", "message"]  # the second one is used at once
    machine = oc.Machine(beside=1.0)
    assert recording.with_graph(graph).cost(machine).seconds < recording.cost(machine).seconds


def test_a_block_of_a_model_ends_a_kernel() -> None:
    blocks = nn.Sequential(nn.ReLU(), nn.Sigmoid())
    assert kernels(lambda x: blocks(x), X) == []  # one is in blocks.0, one in blocks.1
    assert kernels(lambda x: F.sigmoid(F.relu(x)), X) == [("relu sigmoid", 2 * SIZE)]
