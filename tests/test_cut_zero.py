"""Pipelines cut out of recorded steps beside ZeRO 3: blocks that write to their parameters, stages that send nothing."""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard import recorded
from onecard.tensor.staged import is_elsewhere
from onecard.testing import run_ranks
from onecard.train.zero.gathered import GatheredParameter


class Bounded(nn.Module):
    """An embedding whose forward writes to its weight; ``again``: which its backward reads."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.again = nn.Parameter(torch.randn(8, 4)), again

    def forward(self, x: Tensor) -> Tensor:
        found = F.embedding(x, self.weight, max_norm=1.0)
        return F.linear(found, self.weight) if self.again else found


def _trained(again: bool, stages: Any, calls: int) -> list[float]:
    net: Any = nn.Sequential(Bounded(again), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    x = torch.arange(8).view(8, 1)
    if stages is not None:
        mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["pp", "dp"])
        oc.shard_layer(net, mesh)
        optimizer = torch.optim.SGD(net.parameters(), 0.5)
        oc.shard_optimizer(optimizer, oc.ShardingStage3("dp", mesh, model=net))
        x = oc.shard_tensor(x, mesh, [oc.Replicate(), oc.Shard(0)])

    def step(x: Tensor) -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run: Any = step if stages is None else oc.to_static(step, stages=stages)
    for _ in range(calls):
        run(x)
    held = net[0].weight
    return [] if is_elsewhere(held) else oc.unshard(held).flatten().tolist()


def _beside(again: bool, calls: int) -> tuple[list[float], Any, list[str]]:
    """Weights of one card and of a pipeline, or what is refused; and what is told."""
    alone = _trained(again, None, calls)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found: Any = _trained(again, oc.Stages(2, at=["1"]), calls)
        except oc.errors.RecordingError as why:
            found = str(why)
    return alone, found, [str(w.message) for w in caught]


def test_a_block_that_writes_to_its_parameter() -> None:
    """The third call is written down once more, which all ranks agree on: also of a stage that sends nothing along dp."""
    for rank, (alone, found, told) in enumerate(run_ranks(_beside, 4, False, 4, timeout=60.0)):
        assert found == (pytest.approx(alone, rel=1e-5) if rank < 2 else [])
        assert not any("nothing is divided" in said for said in told)


def test_one_that_its_backward_reads() -> None:
    for _, found, _ in run_ranks(_beside, 4, True, 1, timeout=60.0):
        assert "writes in a microbatch's forward to what the backward of an earlier one reads" in found


def _blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh()) for _ in range(4)])


def _sent(at: list[str]) -> tuple[list[int], list[float]]:
    """The sizes of what a rank sends to other stages in a step of blocks whose parameters ZeRO 3 gathers; losses."""
    model = _blocks()
    strategy = {
        "pipeline": {"enable": True, "degree": 2, "accumulate_steps": 4, "at": at},
        "sharding": {"enable": True, "stage": 3},
    }
    engine = oc.Engine(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.5), strategy=strategy)
    spec = oc.InputSpec([16, 32], "float32")
    engine.prepare(spec, spec, mode="train")
    x = torch.linspace(-1, 1, 16 * 32).reshape(16, 32)
    losses = [float(engine.run((x, x.sin()))["loss"]) for _ in range(3)]
    graph = engine.main_program.graph
    sends = [n for n in graph.nodes if n.op == "call_function" and getattr(n.target, "__name__", "").startswith("send")]
    given = [x for n in sends for x in (n.args[0] if isinstance(n.args[0], list | tuple) else [n.args[0]])]
    return [prod(x.meta["tensor"][0]) for x in given], losses


@pytest.mark.proof
@pytest.mark.parametrize("at", [[], ["2"]])
def test_stages_send_activations_and_no_gathered_parameters(at: list[str]) -> None:
    """A cut lies before what gathers a block's parameters, not between it and the block."""
    found = run_ranks(_sent, 4, at, timeout=100.0)
    rows = 16 // 4 // 2
    assert [sizes for sizes, _ in found] == [[rows * 32] * 4] * 2 + [[rows * 32] * 4 + [1]] * 2  # and the loss
    model = _blocks()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    x, wanted = torch.linspace(-1, 1, 16 * 32).reshape(16, 32), []
    for _ in range(3):
        loss = F.mse_loss(model(x), x.sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(float(loss.detach()))
    for _, losses in found:
        assert losses == pytest.approx(wanted, rel=1e-5)


def _looked_at() -> list[int]:
    """The memory of each parameter that a look at a step gathers, in bytes."""
    found: list[int] = []
    allocate = GatheredParameter.allocate

    def seen(self: GatheredParameter) -> None:
        allocate(self)
        if recorded.recorder is not None:
            found.append(self.whole.untyped_storage().nbytes())

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step is told to add to a list, which is this one
        patch.setattr(GatheredParameter, "allocate", seen)
        _sent([])
    return found


@pytest.mark.proof
def test_a_look_at_a_step_has_no_memory_for_gathered_parameters() -> None:
    """All of them at once would be the whole model, on each rank."""
    for found in run_ranks(_looked_at, 4, timeout=100.0):
        assert len(found) >= 16 and not any(found)
