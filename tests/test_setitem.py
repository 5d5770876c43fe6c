"""x[index] = number on cut tensors: each rank writes to its part, without a message."""

from __future__ import annotations

import pytest
import torch

import onecard as oc
from onecard.testing import multirank

WRITES = [
    3,
    -1,
    (2, 1),
    (0, ..., 1),
    (..., 0),
    (slice(1, 4), 2),
    (slice(4, 2),),
    (slice(1, 3), slice(2, 9), slice(-2, None)),
    (1, 2, 0),
    (slice(None), torch.tensor([0, 3, -1])),
    (torch.tensor([0, 4]), 1),
    torch.tensor([1, 1]),
]
PLACEMENTS = [
    [oc.Replicate(), oc.Replicate()],
    [oc.Shard(0), oc.Shard(1)],
    [oc.Shard(1), oc.Shard(1)],
    [oc.Replicate(), oc.Shard(2)],
]


@multirank(4)
def test_numbers_reach_each_part():
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], ["x", "y"])
    plain = torch.arange(5 * 6 * 3.0).reshape(5, 6, 3)
    for placements in PLACEMENTS:
        for index in WRITES:
            expected, x = plain.clone(), oc.shard_tensor(plain, mesh, placements)
            expected[index] = 7.5
            with oc.no_implicit_communication():
                x[index] = 7.5
            assert torch.equal(x.full_tensor(), expected), (placements, index)
        for index in (9, (0, 9), torch.tensor([5])):
            with pytest.raises(IndexError):
                x[index] = 1.0
    pending = oc.from_local(torch.ones(4, 4), mesh, [oc.Partial(), oc.Shard(0)])
    pending[5] = 1.0
    assert pending.full_tensor().sum() == 2 * 28 + 4


@multirank(2)
def test_other_writes_go_as_before():
    mesh = oc.ProcessMesh([0, 1], ["x"])
    x = oc.shard_tensor(torch.zeros(4, 4), mesh, [oc.Shard(0)])
    x[:, 1] = torch.arange(4.0)  # no number
    assert x.full_tensor()[:, 1].tolist() == [0, 1, 2, 3]
    weight = oc.shard_tensor(torch.ones(4, 4), mesh, [oc.Shard(0)], requires_grad=True)
    y = weight * 2
    saved = (y * y).sum()
    with torch.no_grad():
        y[0] = 5.0  # changes what backward needs
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
