"""Seed 002, section 3: how onecard finds layouts and messages, on C = Matmul(A, B), D = Relu(C).

    onecard run --nproc_per_node 2 examples/seeds/matmul_relu_002.py

Only A (Replicate) and B (Shard(0)) are marked. The report shows the rest: A is sliced to Shard(1), which sends
nothing; C is Partial; relu is not linear, so C is summed by an all-reduce before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

import onecard as oc

mesh = oc.ProcessMesh([0, 1], dim_names=["x"])

# The seed writes integers; floats run on every device.
dense_tensorA = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
dense_tensorB = torch.tensor([[5.0, 6.0], [7.0, 8.0]])
placementsA = [oc.Replicate()]
placementsB = [oc.Shard(0)]


def matmul_relu(tensorA: Tensor, tensorB: Tensor) -> tuple[Tensor, Tensor]:
    """C and D; the same lines run on one card."""
    tensorC = torch.matmul(tensorA, tensorB)
    tensorD = torch.relu(tensorC)
    return tensorC, tensorD


def run() -> tuple[Tensor, Tensor, oc.Report]:
    """C, D and the messages that they took. The all-reduce leaves C itself Partial or, once summed, Replicate."""
    dist_tensorA = oc.shard_tensor(dense_tensorA, mesh, placementsA)
    dist_tensorB = oc.shard_tensor(dense_tensorB, mesh, placementsB)
    with oc.explain() as report:
        dist_tensorC, dist_tensorD = matmul_relu(dist_tensorA, dist_tensorB)
    return dist_tensorC, dist_tensorD, report


if __name__ == "__main__":
    C, D, report = run()
    print(report)
    print("C", C)
    print("D", D)
