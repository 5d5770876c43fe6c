"""The semi-automatic interface: mark a few tensors, keep the rest of the program."""

from onecard import _torch
from onecard.parallel import clipping as _clipping
from onecard.parallel import resume as _resume  # noqa: F401 - takes over nn.Module.load_state_dict
from onecard.parallel.data import ShardDataloader, shard_dataloader
from onecard.parallel.layer import shard_layer, shard_op
from onecard.parallel.local_code import local_map
from onecard.parallel.optimizer import shard_optimizer
from onecard.parallel.sampler import DistributedBatchSampler
from onecard.parallel.zero import ShardingStage1, ShardingStage2, ShardingStage3
from onecard.tensor import DistTensor

_clipping.install()

# torch.optim and clip_grad_norm_ take the foreach path only for types that they know.
for _types in _torch.foreach_types:
    if DistTensor not in _types:
        _types.append(DistTensor)

__all__ = [
    "DistributedBatchSampler", "ShardDataloader", "ShardingStage1", "ShardingStage2", "ShardingStage3", "local_map",
    "shard_dataloader", "shard_layer", "shard_op",
    "shard_optimizer",
]  # fmt: skip
