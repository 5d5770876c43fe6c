"""Ranks stay in step: which messages are sent never depends on a rank's own shard, its size or its data."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import onecard as oc
from onecard.comm.base import record
from onecard.testing import assert_close, run_ranks

S, R = oc.Shard, oc.Replicate


class Classifier(nn.Module):
    """A LayerNorm on an input cut by sequence, and a head of fewer classes than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x)).sum(1)


def classifier(mesh: oc.ProcessMesh) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain, twin = Classifier(), Classifier()
    twin.load_state_dict(plain.state_dict())

    def cut_head(name: str, module: nn.Module, mesh: oc.ProcessMesh) -> None:
        if name == "head":
            module.weight = oc.shard_tensor(module.weight, mesh, [S(0)])
            module.bias = oc.shard_tensor(module.bias, mesh, [S(0)])

    return plain, oc.shard_layer(twin, mesh, cut_head)


@pytest.mark.share(1)
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_clipping_where_a_shard_is_empty(backend: str) -> None:
    run_ranks(clipped, 4, backend=backend)


def clipped() -> None:
    mesh = oc.ProcessMesh([0, 1, 2, 3], ["tp"])
    plain, twin = classifier(mesh)
    x = torch.randn(2, 8, 6)
    messages: list[tuple[str, int]] = []
    for norm_type in (2.0, 1.0, float("inf")):
        for foreach in (None, True, False):
            norms = []
            for model, given in ((plain, x), (twin, oc.shard_tensor(x, mesh, [S(1)]))):
                model.zero_grad()
                model(given).square().sum().backward()
                messages.clear()
                record.observers.here.append(lambda m: messages.append((m.step.kind, m.step.bytes)))
                norms.append(oc.unshard(clip_grad_norm_(model.parameters(), 0.1, norm_type, foreach=foreach)))
                record.observers.here.pop()
            assert_close(norms[1], norms[0])
            for mine, theirs in zip(twin.parameters(), plain.parameters(), strict=True):
                assert_close(oc.unshard(mine.grad), theirs.grad)
            everywhere: list[object] = [None] * 4
            torch.distributed.all_gather_object(everywhere, messages)
            assert everywhere.count(everywhere[0]) == 4
