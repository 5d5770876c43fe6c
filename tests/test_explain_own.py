"""What explain and the price of a recording say of messages that a program sends itself with torch.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

import onecard as oc
from onecard.testing import multirank

MESH = oc.ProcessMesh([0, 1], ["dp"])
AT = f"{Path(__file__).name}:{{}}"


def step(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    world: Any = dist.group.WORLD
    return x.sum() + functional.all_reduce(torch.ones(7), "sum", world).sum()


LINES = [step.__code__.co_firstlineno + 1, step.__code__.co_firstlineno + 3]


@multirank(2)
def test_own_messages_are_listed_beside() -> None:
    """In eager, recorded and replayed; what onecard sends itself is not among them, and totals are without them."""
    run = oc.to_static(step)
    for call in (step, run, run, run):
        with oc.explain() as report:
            assert call(torch.ones(5)).item() == 24.0
            oc.shard_tensor(torch.ones(4), MESH, [oc.Shard(0)]).full_tensor()
        assert [sent.bytes for sent in report.own] == [20, 28]
        assert [m.step.kind for m in report.messages if m.step.bytes] == ["all_gather"]
    with oc.explain() as report:
        step(torch.ones(5))
    assert f"and your own allreduce of 20 bytes at {AT.format(LINES[0])}\n" in str(report)
    recording = run.recordings[0]
    beside = f"your own allreduce at {AT.format(LINES[0])}, your own all_reduce at {AT.format(LINES[1])}"
    assert str(recording.cost()).endswith(f"without messages that you send with torch.distributed: {beside}")
    assert "no message, 2 of your own" in str(recording)


@multirank(2)
def test_groups_that_torch_dispatches() -> None:
    """NCCL's and Gloo's messages are seen as operators; the same message is told once."""
    group: Any = dist.new_group(backend="gloo")
    with patch.object(dist, "get_backend", return_value="gloo"), oc.explain() as report:
        dist.all_reduce(torch.ones(5), group=group)
        functional.all_reduce(torch.ones(7), "sum", group).sum().item()
        outputs = torch.empty(2)
        dist.all_gather_into_tensor(outputs, torch.ones(1), group=group)
    assert [sent.bytes for sent in report.own] == [20, 28, 4]
    assert {Path(sent.source.rpartition(":")[0]).name for sent in report.own} == {Path(__file__).name}, [
        s.source for s in report.own
    ]
