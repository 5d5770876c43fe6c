"""The semi-automatic interface: mark a few tensors, keep the rest of the program."""

from onecard.train import norms as _norms  # noqa: F401 - takes over get_total_norm
from onecard.train.data.data import ShardDataloader, shard_dataloader
from onecard.train.data.sampler import DistributedBatchSampler
from onecard.train.layer import shard_layer, shard_op
from onecard.train.local_code import local_map
from onecard.train.zero.optimizer import shard_optimizer
from onecard.train.zero.zero import ShardingStage1, ShardingStage2, ShardingStage3

__all__ = [
    "DistributedBatchSampler", "ShardDataloader", "ShardingStage1", "ShardingStage2", "ShardingStage3", "local_map",
    "shard_dataloader", "shard_layer", "shard_op",
    "shard_optimizer",
]  # fmt: skip
