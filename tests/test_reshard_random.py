"""100 random reshards on real ranks, values and gradients, against numpy: any mesh to any mesh, any placements."""

import os
import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from naive_layouts import distribute, gathered

import onecard as oc
from onecard.place.layout import Layout
from onecard.tensor.moves import MeshTransfer, Reshard
from onecard.testing import assert_close, multirank

RANKS = 4
CASES = 100
SHAPES = [(1,), (2,), (3,), (4,), (2, 2), (2, 2), (1, 3), (2, 1), (1, 2, 2)]
FLOAT_OPS = ["sum", "avg", "max", "min", "product", "norm2.0"]
INT_OPS = ["sum", "max", "min", "product", "band", "bor", "bxor"]


def a_mesh(chance):
    shape = chance.choice(SHAPES)
    ranks = chance.sample(range(RANKS), int(np.prod(shape)))
    return oc.ProcessMesh(np.array(ranks).reshape(shape), [f"a{i}" for i in range(len(shape))])


def a_layout(chance, mesh, ndim, op):
    """Any axis on any dim, several on one in any order, or pending under ``op``."""
    dims, pending = [[] for _ in range(ndim)], []
    for axis in chance.sample(range(mesh.ndim), mesh.ndim):
        use = chance.choice([None, "pending", *2 * list(range(ndim))])
        if use == "pending" and op:
            pending.append((axis, op))
        elif isinstance(use, int):
            dims[use].append(axis)
    return Layout.make(mesh, tuple(map(tuple, dims)), tuple(sorted(pending)))


def a_case(chance):
    """(whole, source, target): numbers above 0, so that a norm can be them."""
    shape = tuple(chance.choice([0, 1, 2, 3, 5, 6]) for _ in range(chance.randrange(4)))
    whole_numbers = chance.random() < 0.25
    op, other = (chance.choice(INT_OPS if whole_numbers else FLOAT_OPS) for _ in range(2))
    numbers = np.random.default_rng(chance.randrange(2**32))
    whole = numbers.integers(1, 64, shape) if whole_numbers else numbers.uniform(0.5, 2, shape)
    source = a_layout(chance, a_mesh(chance), len(shape), op)
    if other.startswith("norm") and not source.pending:
        other = "sum"  # only a norm can become one
    if op.startswith("norm") != other.startswith("norm"):
        other = op if source.pending else "sum"
    mesh = source.mesh if chance.random() < 0.2 else a_mesh(chance)
    return np.asarray(whole), source, a_layout(chance, mesh, len(shape), other), numbers


def kind(one, two):
    """How two meshes lie to each other."""
    first, second = set(one.process_ids), set(two.process_ids)
    if one is two:
        return "one mesh"
    if not first & second:
        return "disjoint"
    if first == second:
        return "permuted or another shape"
    return "nested" if first < second or second < first else "overlapping"


def resharded(whole, source, target, numbers):
    """The tensor on the first mesh, and what the library makes of it on the second."""
    part = distribute(whole, source, numbers).get(source.mesh.coordinate(), np.empty(0, whole.dtype))
    x = oc.tensor.dist_tensor.wrap(torch.tensor(part), spec_of(source, whole))
    x = x.requires_grad_(x.is_floating_point())
    function = Reshard if source.mesh is target.mesh else MeshTransfer
    return x, function.apply(x, target)


def spec_of(layout, whole):
    shape, dtype = torch.Size(whole.shape), torch.from_numpy(whole).dtype
    return oc.tensor.spec.Spec.make(layout, shape, oc.tensor.spec.contiguous_stride(shape), dtype, torch.device("cpu"))


def check_values(y, whole, target):
    """Every rank's part, brought together without onecard."""
    parts = [None] * RANKS
    dist.all_gather_object(parts, y.to_local().detach().numpy())
    held = {target.mesh.coordinate(rank): parts[rank] for rank in target.mesh.process_ids}
    np.testing.assert_allclose(gathered(whole, target, held), whole)
    np.testing.assert_allclose(y.full_tensor().detach().numpy(), whole)  # outside both meshes, too


def check_gradient(x, y, whole):
    weight = torch.linspace(-1, 1, whole.size, dtype=y.dtype).reshape(whole.shape)
    (y * oc.shard_tensor(weight, y.mesh, [oc.Replicate()] * y.mesh.ndim)).sum().backward()
    assert x.grad.mesh is x.mesh
    if min(whole.shape, default=2) > 1:  # autograd's detach gathers a dim of one
        assert x.grad.layout.dims == x.layout.dims  # a sum may still be pending
    assert_close(x.grad.full_tensor(), weight)


@pytest.mark.proof
@multirank(RANKS)
def test_random_reshards_on_ranks():
    chance, seen = random.Random(20), Counter()
    os.environ["GROUP_RANK"] = str(oc.get_rank() // 2)
    for number in range(CASES):
        os.environ["LOCAL_WORLD_SIZE"] = str(RANKS if number % 2 else RANKS // 2)  # one host, or two
        whole, source, target, numbers = a_case(chance)
        x, y = resharded(whole, source, target, numbers)
        assert y.layout is target and tuple(y.shape) == whole.shape
        check_values(y, whole, target)
        if x.requires_grad:
            check_gradient(x, y, whole)
        seen.update([kind(source.mesh, target.mesh), "all"])
        seen.update({op for layout in (source, target) for _, op in layout.pending})
        seen["several axes on a dim"] += any(len(axes) > 1 for layout in (source, target) for axes in layout.dims)
        seen["no elements"] += not whole.size
    assert seen["all"] == CASES and min(seen[op] for op in {*FLOAT_OPS, *INT_OPS}) >= 1, seen
    assert len(seen) == 6 + len({*FLOAT_OPS, *INT_OPS}) + 2 and min(seen.values()) >= 1, seen
