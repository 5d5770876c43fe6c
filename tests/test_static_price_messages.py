"""The price of messages that are no collective along an axis: between meshes, and tagged sends and receives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecard as oc
from onecard import pipeline
from onecard.comm.issue import started
from onecard.testing import run_ranks


def told(messages: list[Any]) -> dict[str, int]:
    """Bytes by axis, as ``explain`` tells them."""
    sent: Counter[str] = Counter()
    for m in messages:
        axis = m.step.axis
        sent["between meshes" if axis < 0 else m.step.source.mesh.dim_names[axis]] += m.step.bytes
    return {axis: count for axis, count in sent.items() if count}


def two_stages() -> tuple[dict[str, int], dict[str, int], int, float, str]:
    """A step by marks: what the recording's price says on this rank, and what ``explain`` counts."""
    meshes = [oc.ProcessMesh([i], ["pp"]) for i in range(2)]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    for part, mesh in zip(net, meshes, strict=True):
        oc.shard_layer(part, mesh)
        part.register_forward_pre_hook(lambda _, args, mesh=mesh: (oc.reshard(args[0], mesh, [oc.Replicate()]),))

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = pipeline.step_by_marks(net, F.mse_loss, x, y, "1F1B", 4)
        net.zero_grad()
        return loss

    x, y = torch.randn(8, 6), torch.randn(8, 6)
    step(x, y)
    with oc.explain() as report:
        step(x, y)
    recording = oc.record(step)(x, y)
    found = recording.cost()
    seconds = sum(n.seconds for n in found.nodes if n.axis)
    return (
        {a: n for a, n in found.sent.items() if n},
        told(report.messages),
        len(report.messages),
        seconds,
        str(recording),
    )


def test_messages_between_meshes_are_those_of_a_run() -> None:
    for priced, sent, count, seconds, text in run_ranks(two_stages, 2):
        assert priced == sent and sum(sent.values()) > 0, (priced, sent)
        assert count >= 8 and seconds > 0 and "between meshes" in text.splitlines()[0]


def passed_on() -> tuple[dict[str, int], dict[str, int], dict[str, float]]:
    """Rank 0 sends, rank 1 receives."""
    x = torch.ones(5, 7)

    def step(x: Tensor) -> Tensor:
        if oc.get_rank() == 0:
            started.isend(x * 2, 1, 3)
            return x.sum()
        return started.irecv(torch.empty_like(x), 0, 3).wait().sum()

    with oc.explain() as report:
        step(x)
    found = oc.record(step)(x).cost(oc.Machine(latency=1.0, bandwidth=140.0))
    return {a: n for a, n in found.sent.items() if n}, told(report.messages), found.seconds_by("operator")


def test_tagged_sends_and_receives() -> None:
    one, two = run_ranks(passed_on, 2)
    assert one[0] == one[1] and sum(one[0].values()) == 5 * 7 * 4
    assert two[0] == two[1] == {}
    assert [one[2]["send"], two[2]["recv"]] == pytest.approx([2.0, 2.0])


def moved(rank: int) -> tuple[oc.Recording, dict[str, int]]:
    """From ranks 0 and 1 to ranks 2 and 3, as one of them records it."""
    with oc.pretend(4, rank=rank):
        one, two = oc.ProcessMesh([0, 1], ["x"]), oc.ProcessMesh([2, 3], ["x"])
        x = oc.shard_tensor(torch.ones(8, 4), one, [oc.Shard(0)])
        with oc.explain() as report:
            oc.reshard(x, two, [oc.Shard(1)])
        return oc.record(lambda x: oc.reshard(x, two, [oc.Shard(1)]))(x), told(report.messages)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_price_and_link_are_those_of_the_rank_that_recorded(rank: int, tmp_path: Path) -> None:
    """Also outside of its world, and from a file."""
    recording, sent = moved(rank)
    count = 4 * 4 * 4 if rank < 2 else 0
    assert sent == ({"between meshes": count} if count else {})
    recording.save(tmp_path / "step")
    for held in (recording, oc.load_recording(tmp_path / "step")):
        assert held.cost().sent == {"between meshes": count}
        for per_host, rate in ((0, 64.0), (4, 64.0), (2, 8.0)):
            found = held.cost(
                oc.Machine(latency=1.0, bandwidth=64.0, between_hosts=8.0, memory=1e30, per_host=per_host)
            )
            assert found.seconds == pytest.approx(1.0 + 64 / rate), (rank, per_host)  # a receiver takes as much
            assert found.between_hosts == (count if per_host == 2 else 0)
        linked = oc.Machine(memory=1e30).with_links(**{"between meshes": oc.Link(2.0, 32.0)})
        assert held.cost(linked).seconds == pytest.approx(2.0 + 64 / 32)
    events = tmp_path / "trace.json"
    recording.trace(events)
    assert any("between meshes" in str(e) for e in json.loads(events.read_text())["traceEvents"])
