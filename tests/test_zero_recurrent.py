"""Recurrent layers under ZeRO 3 by blocks as they are on a GPU, where torch lays their weights into one memory."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from amounts import patience
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard import fleet
from onecard.tensor.buckets import Cut
from onecard.testing import assert_close, run_ranks
from onecard.train.zero.gathered import GatheredParameter


def _laid_flat(weights: list[Tensor], *_: Any) -> Tensor:
    """As cuDNN's: each weight becomes a view of one memory."""
    flat = torch.cat([w.detach().reshape(-1) for w in weights])
    at = 0
    for w in weights:
        w.set_(flat.untyped_storage(), at, w.shape, w.stride())  # type: ignore[call-overload]
        at += w.numel()
    return flat


def _as_on_a_gpu() -> Any:
    """``flatten_parameters`` takes all tensors for those of a GPU."""
    asks = property(lambda self: sys._getframe(1).f_code.co_name == "flatten_parameters")
    return patch.multiple(torch.Tensor, is_cuda=asks, create=True)


def _flattens() -> list[Any]:
    return [
        _as_on_a_gpu(),
        patch.object(torch.backends.cudnn, "is_acceptable", lambda x: True),
        patch("torch.backends.cudnn.rnn.get_cudnn_mode", lambda mode: 2),
        patch.object(torch.cuda, "device_of", lambda x: nullcontext()),
        patch.object(torch, "_use_cudnn_rnn_flatten_weight", lambda: True),
        patch.object(torch, "_cudnn_rnn_flatten_weight", _laid_flat),
    ]


class Layer(nn.LSTM):
    """Says where its weights lie while it runs."""

    def forward(self, *given: Any) -> Any:  # type: ignore[override]
        self.flatten_parameters()  # as many programs do
        self.places = [
            (w.untyped_storage().data_ptr(), w.storage_offset())
            for w in self._flat_weights
            if not isinstance(w, oc.DistTensor)
        ]
        return super().forward(*given)


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = Layer(5, 6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def _trained(how: str) -> tuple[list[Tensor], list[tuple[int, int]]]:
    net: Any = Sequences()
    x, y = torch.randn(8, 4, 5, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    if how == "marks":
        oc.shard_layer(net, mesh)
        x, y = (oc.shard_tensor(t, mesh, [oc.Shard(0)]) for t in (x, y))
    optimizer: Any = torch.optim.SGD(net.parameters(), 0.1)
    if how == "marks":
        oc.shard_optimizer(optimizer, oc.ShardingStage3("dp", mesh, model=net))
    elif how:
        net, optimizer, _ = fleet.group_sharded_parallel(net, optimizer, how)
        x, y = (t.chunk(2)[oc.get_rank()] for t in (x, y))
    for _ in range(3):
        cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [oc.unshard(p.detach()).clone() for p in net.parameters()], net.rnn.places


def _compared(how: str) -> None:
    fleet.init(is_collective=True)
    patches = _flattens()
    for each in patches:
        each.start()
    try:
        alone, places = _trained("")
        assert len({storage for storage, _ in places}) == 1  # the imitation does what cuDNN does
        found, there = _trained(how)
    finally:
        for each in patches:
            each.stop()
    for mine, one in zip(found, alone, strict=True):
        assert_close(mine, one, rtol=1e-5, atol=1e-6)
    if how == "p_g_os":
        assert [at for _, at in there] == [at for _, at in places]
        assert len({storage for storage, _ in there}) == 1


@pytest.mark.share(1)
@pytest.mark.parametrize("how", ["marks", "os", "p_g_os"])
def test_weights_that_lie_in_one_memory(how: str) -> None:
    run_ranks(_compared, 2, how, timeout=patience(60.0))


def test_only_wholes_that_fill_a_memory_stay_together() -> None:
    """Others, one behind the other with gaps, or over each other, have memory of their own."""
    mesh = oc.ProcessMesh([0], ["dp"])
    flat = torch.arange(12.0)

    def piece(begin: int, length: int) -> GatheredParameter:
        part = oc.shard_tensor(torch.zeros(length), mesh, [oc.Shard(0)])
        whole = flat[begin : begin + length]
        return GatheredParameter(Cut(part, whole, part._spec.layout, 0, 0), part._spec, nn.Parameter(whole.clone()))

    def memories(*places: tuple[int, int]) -> int:
        pieces = [piece(*place) for place in places]
        GatheredParameter.together(pieces)
        return len({p.whole.untyped_storage()._cdata for p in pieces})

    assert memories((0, 4), (4, 8)) == 1
    assert memories((0, 4), (6, 6)) == 2
    assert memories((0, 4), (2, 4)) == 2
