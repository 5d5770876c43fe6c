"""Seed 002, section 2.2: a (4, 3) tensor on a 2 x 3 mesh of six ranks; each rank holds a part of shape (2, 1).

onecard run --nproc_per_node 6 examples/seeds/shard_tensor_002.py
"""

from __future__ import annotations

import torch

import onecard as oc

mesh = oc.ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])

dense_tensor = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]])


def shard() -> oc.DistTensor:
    """The dense tensor with dim 0 cut along mesh axis x and dim 1 along y."""
    placements = [oc.Shard(0), oc.Shard(1)]
    return oc.shard_tensor(dense_tensor, mesh, placements)


if __name__ == "__main__":
    dist_tensor = shard()
    print(mesh)
    print(dist_tensor)
    print("local shape", tuple(dist_tensor.to_local().shape), "at", dist_tensor.layout.local_offset(dist_tensor.shape))
