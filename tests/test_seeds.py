"""A plain gradient that backward is given for a distributed value: as on one card, whatever made the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import onecard as oc
from onecard.testing import run_ranks


def _mesh(*ranks: int) -> oc.ProcessMesh:
    return oc.ProcessMesh([*ranks], ["x"])


MADE: dict[str, Callable[[Any], Any]] = {
    "a product": lambda a: a @ a.detach().t(),
    "a view": lambda a: a.reshape(2, 16),
    "a sum": lambda a: a.sum(0),
    "resharded": lambda a: oc.reshard(a, _mesh(0, 1), [Replicate()]) if isinstance(a, oc.DistTensor) else a * 1,
    "on another mesh": lambda a: oc.reshard(a, _mesh(1), [Shard(1)]) if isinstance(a, oc.DistTensor) else a * 1,
    "of parts": lambda a: (
        oc.from_local(a.to_local() * 3, _mesh(0, 1), [Shard(0)]) if isinstance(a, oc.DistTensor) else a * 3
    ),
    "whole": lambda a: a.full_tensor() if isinstance(a, oc.DistTensor) else a * 1,
}


def _gradients(kind: str, laid_out: bool) -> list[Any]:
    torch.manual_seed(0)
    a, seed = torch.randn(8, 4), torch.randn(())
    x = oc.shard_tensor(a, _mesh(0, 1), [Shard(0)]) if laid_out else a
    x.requires_grad_()
    made = MADE[kind](x)
    vector = torch.randn(made.shape)
    made.backward(vector, retain_graph=True)
    own = isinstance(x.grad, oc.DistTensor) == laid_out
    asked = torch.autograd.grad([made, x.square().sum()], [x], [vector, seed], retain_graph=True)[0]
    vector.requires_grad_()
    (first,) = torch.autograd.grad(made, x, vector, create_graph=True)
    (second,) = torch.autograd.grad((first * x.detach()).sum(), vector)
    return [own, *(oc.unshard(g).tolist() for g in (x.grad, asked, second))]


def _batched() -> list[str]:
    x = oc.shard_tensor(torch.randn(4, 3), _mesh(0, 1), [Shard(0)]).requires_grad_()
    said = []
    for call in (
        lambda: torch.autograd.grad(x.sin(), x, torch.eye(12).view(12, 4, 3), is_grads_batched=True),
        lambda: torch.autograd.functional.jacobian(torch.sin, x, vectorize=True),
    ):
        with pytest.raises(oc.errors.DispatchError) as fault:
            call()
        said.append(str(fault.value))
    return said


def test_rows_at_once_are_refused():
    for said in run_ranks(_batched, 2):
        assert all("Take a row at a time" in words for words in said)


@pytest.mark.parametrize("kind", MADE)
def test_it_lies_as_the_value_does(kind):
    expected = _gradients(kind, False)
    for found in run_ranks(_gradients, 2, kind, True):
        assert found[0]
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=1e-6)
