"""Seed 002, section 2.3: change how a tensor lies on its mesh, here from Replicate to Shard(0).

    onecard run --nproc_per_node 2 examples/seeds/reshard_002.py

The seed also moves the tensor from ranks [0, 1] to ranks [2, 3]; onecard cannot change the mesh of a tensor yet.
"""

from __future__ import annotations

import torch

import onecard as oc

mesh0 = oc.ProcessMesh([0, 1], dim_names=["x"])

dense_tensor = torch.tensor([[1, 2, 3], [4, 5, 6]])

placements0 = [oc.Replicate()]
placements1 = [oc.Shard(0)]


def reshard() -> tuple[oc.DistTensor, oc.DistTensor]:
    """The tensor before and after."""
    dist_tensor = oc.shard_tensor(dense_tensor, mesh0, placements0)
    dist_tensor_after_reshard = oc.reshard(dist_tensor, mesh0, placements1)
    return dist_tensor, dist_tensor_after_reshard


if __name__ == "__main__":
    before, after = reshard()
    print("before", before)
    print("after", after)
