"""make_fx over a real backend: messages are in the graph, awaited, and a replay with new inputs equals the eager run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import onecard as oc
from onecard.comm import group
from onecard.comm.issue import collectives
from onecard.errors import CommunicationError
from onecard.testing import assert_close, run_ranks

R, S, P = oc.Replicate(), oc.Shard, oc.Partial
WHOLE = (5, 3)  # of which each kind of message moves uneven parts


def mesh() -> oc.ProcessMesh:
    return oc.ProcessMesh([1, 0], ["x"])  # the order of the parts is not that of the ranks


def moved(source: object, target: object) -> Callable[[Tensor], Tensor]:
    def program(local: Tensor) -> Tensor:
        x = oc.from_local(local * 2, mesh(), [source], shape=WHOLE)
        return oc.reshard(x, mesh(), [target]).to_local() + 1

    return program


def network(local: Tensor) -> Tensor:
    x = oc.from_local(local, mesh(), [S(0)], shape=WHOLE)
    y = oc.shard_tensor(torch.ones(3, 4), mesh(), [S(0)])
    return (x @ y).softmax(0).sum().full_tensor()


PROGRAMS = {
    "all_reduce": (P(), R), "all_reduce avg": (P("avg"), R), "all_reduce max": (P("max"), R), "reduce_scatter": (P(), S(0)),
    "all_gather": (S(0), R), "all_gather of another dim": (S(1), R), "all_to_all": (S(0), S(1)),
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_replay_equals_the_eager_run(backend: str) -> None:
    run_ranks(replays, 2, backend=backend)


def replays() -> None:
    programs = {name: (moved(*pair), pair[0]) for name, pair in PROGRAMS.items()} | {"network": (network, S(0))}
    for name, (program, source) in programs.items():
        for dtype in (torch.float32, torch.float64, torch.complex64, torch.bfloat16):
            if ("max" in name and dtype.is_complex) or (name == "network" and dtype is not torch.float32):
                continue
            for mode in ("real", "fake") if dtype is torch.float32 else ("real",):
                first, second = (torch.randn(5, 3).to(dtype)[cut(source)] for _ in range(2))
                graph = make_fx(program, tracing_mode=mode)(first.clone())
                waits = graph.code.count("_c10d_functional.wait_tensor")
                assert waits and waits == graph.code.count("_c10d_functional.") - waits, graph.code
                for given in (second, first):
                    assert_close(graph(given.clone()), program(given.clone()))


def cut(source: object) -> tuple[slice, ...]:
    return oc.shard_tensor(torch.zeros(WHOLE), mesh(), [source]).layout.local_slices(WHOLE)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_what_no_graph_can_hold_is_refused(backend: str) -> None:
    run_ranks(refusals, 2, backend=backend)


def refusals() -> None:
    line = group(mesh(), 0)
    graph = make_fx(lambda x: collectives.broadcast(x * 2, line, 0) + 1)(torch.ones(2))
    given = torch.full((2,), 1.0 + dist.get_rank())
    assert_close(graph(given), torch.full((2,), 5.0))  # rank 1 comes first on this mesh
    other = oc.ProcessMesh([0, 1], ["y"])
    with pytest.raises(CommunicationError, match="a reshard to another mesh cannot be traced"):
        make_fx(lambda x: oc.reshard(oc.from_local(x, mesh(), [R]), other, [S(0)]).to_local())(torch.ones(4))
    with pytest.raises(CommunicationError, match="barrier cannot be traced"):
        make_fx(lambda x: collectives.barrier(line) or x + 1)(torch.ones(4))
