"""Seed 002, section 2.3: change how a tensor lies: from Replicate to Shard(0), on its mesh and on another.

onecard run --nproc_per_node 4 examples/seeds/reshard_002.py
"""

from __future__ import annotations

import torch

import onecard as oc

mesh0 = oc.ProcessMesh([0, 1], dim_names=["x"])
mesh1 = oc.ProcessMesh([2, 3], dim_names=["x"])

dense_tensor = torch.tensor([[1, 2, 3], [4, 5, 6]])

placements0 = [oc.Replicate()]
placements1 = [oc.Shard(0)]


def reshard(mesh: oc.ProcessMesh) -> tuple[oc.DistTensor, oc.DistTensor]:
    """The tensor on mesh0, and after its change to ``mesh``. Ranks outside a mesh hold an empty part."""
    dist_tensor = oc.shard_tensor(dense_tensor, mesh0, placements0)
    dist_tensor_after_reshard = oc.reshard(dist_tensor, mesh, placements1)
    return dist_tensor, dist_tensor_after_reshard


if __name__ == "__main__":
    before, within = reshard(mesh0)
    _, across = reshard(mesh1)
    print("before", before)
    print("after, on the same mesh", within)
    print("after, on ranks [2, 3]", across)
