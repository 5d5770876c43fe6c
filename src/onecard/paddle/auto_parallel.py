"""``paddle.distributed.auto_parallel``, which programs also call ``fleet.auto``: placements, and the engine."""

from torch.distributed.tensor import Partial, Replicate, Shard

from onecard.engine import Engine, Strategy
from onecard.paddle.ranks import get_mesh, set_mesh
from onecard.paddle.values import dtensor_from_fn, dtensor_from_local, dtensor_to_local, unshard_dtensor
from onecard.place.mesh import ProcessMesh
from onecard.tensor import reshard, shard_tensor
from onecard.train import shard_dataloader, shard_layer, shard_op, shard_optimizer

__all__ = [
    "Engine", "Partial", "ProcessMesh", "Replicate", "Shard", "Strategy", "dtensor_from_fn", "dtensor_from_local",
    "dtensor_to_local", "get_mesh", "reshard", "set_mesh", "shard_dataloader", "shard_layer", "shard_op", "shard_optimizer",
    "shard_tensor", "unshard_dtensor",
]  # fmt: skip
