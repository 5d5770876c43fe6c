"""onecard: write for one card, train on any mesh, same numbers."""

from torch.distributed.tensor import Partial, Replicate, Shard

from onecard.comm import from_device_mesh, to_device_mesh
from onecard.mesh import ProcessMesh
from onecard.tensor import (
    DistTensor,
    GatheredOperatorWarning,
    from_dtensor,
    from_local,
    reshard,
    shard_tensor,
    to_dtensor,
    unshard,
)

__version__ = "0.1.0"
__all__ = [
    "DistTensor", "GatheredOperatorWarning", "Partial", "ProcessMesh", "Replicate", "Shard", "from_device_mesh",
    "from_dtensor", "from_local", "reshard", "shard_tensor", "to_device_mesh", "to_dtensor", "unshard",
]  # fmt: skip
