"""A tensor's strides are those of one card, and its memory has them: after every reshard and every operator."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onecard as oc
from onecard.tensor.aliasing import strides
from onecard.testing import assert_close, multirank

R, S, P = oc.Replicate(), oc.Shard, oc.Partial
PLACEMENTS = [R, S(0), S(1), P()]
ORDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.view(x.shape),
    "transposed": lambda x: x.transpose(0, 1),
    "moved": lambda x: x.unsqueeze(2).movedim(0, 2),
}


def true(x: oc.DistTensor) -> bool:
    return strides.placed(x._local, x._spec)


@pytest.mark.proof
@multirank(2)
def test_strides_after_every_reshard() -> None:
    mesh = oc.ProcessMesh([0, 1], ["x"])
    for shape, order, first, second in product(
        [(1, 15), (15, 1), (4, 6), (3, 5)], ORDERS.values(), PLACEMENTS, PLACEMENTS
    ):
        plain = torch.arange(float(torch.Size(shape).numel())).view(shape)
        x, expected = order(oc.shard_tensor(plain, mesh, [first])), order(plain)
        y = oc.reshard(x, mesh, [second])
        own = expected if y is x else expected.clone()  # a reshard that moves is a clone
        for found, alike in ((x, expected), (y, own), (y.clone(), own.clone()), (y + 1, own + 1)):
            assert telling(found) == telling(alike) and true(found), (shape, first, second, found, alike.stride())
            whole = found.full_tensor()
            assert whole.stride() == found.stride(), (shape, first, second, found, whole.stride())
            assert_close(whole, alike)
        assert can_be_flat(y) == can_be_flat(y.full_tensor()) == can_be_flat(expected)


def telling(x: Tensor) -> list[int]:
    """Strides of dims of more than one element; of others torch's kernels and its meta tensors differ."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def can_be_flat(x: Tensor) -> bool:
    try:
        x.view(-1)
    except RuntimeError as fault:
        assert "view size is not compatible" in str(fault)
        return False
    return True


@multirank(2)
def test_strides_of_what_has_gaps_or_is_expanded() -> None:
    """A reshard that moves gives memory of its own: strides are those of a clone."""
    mesh = oc.ProcessMesh([0, 1], ["x"])
    plain = torch.arange(24.0).view(4, 6)
    programs = [lambda x: x[:, ::2], lambda x: x[:1].expand(4, 6), lambda x: x.t()[1:4]]
    for program, first in product(programs, PLACEMENTS[:3]):
        expected, x = program(plain), program(oc.shard_tensor(plain, mesh, [first]))
        for target in PLACEMENTS[1:]:
            y = oc.reshard(x, mesh, [target])
            if y.layout is not x.layout:
                assert y.stride() == expected.clone().stride()
            assert_close(y.full_tensor(), expected)


# Kernels that order their results otherwise than torch foretells, or than the whole's strides say of a shard.
KERNELS: dict[str, Callable[[Tensor], object]] = {
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False),
    "geqrf": torch.geqrf,
    "convolution": lambda x: F.conv1d(x.unsqueeze(0), torch.ones(3, x.shape[0], 2)),
    "copysign": lambda x: torch.copysign(x, torch.tensor(-1.0)),
    "batch_norm": lambda x: F.batch_norm(x.unsqueeze(1), None, None, training=True),
    "log_softmax": lambda x: torch.autograd.grad(x.log_softmax(-1).square().sum(), x),
    "huber": lambda x: torch.autograd.grad(F.huber_loss(x, x.detach() * 2), x),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([1]), 0.5),
    "matmul": lambda x: (x @ x.mT, x.mT @ x),
}


@multirank(2)
def test_strides_of_results_are_true_on_every_rank() -> None:
    mesh = oc.ProcessMesh([0, 1], ["x"])
    torch.manual_seed(0)
    for (name, program), turned, first in product(KERNELS.items(), (False, True), PLACEMENTS[:3]):
        x = oc.shard_tensor(torch.randn(6, 4), mesh, [first])
        x = (x.t() if turned else x).detach().requires_grad_()
        for _ in range(2):  # decided, then run by the cached program
            made = program(x)
            for result in made if isinstance(made, tuple) else [made]:
                assert true(result), (name, turned, first, result._spec, result.stride(), result._local.stride())
                assert can_be_flat(result.detach()) == result.is_contiguous()
