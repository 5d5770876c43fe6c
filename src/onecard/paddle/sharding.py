"""``paddle.distributed.sharding``: the optimizer's states, gradients and parameters divided over ranks."""

from onecard.fleet.front.sharding import group_sharded_parallel, save_group_sharded_model

__all__ = ["group_sharded_parallel", "save_group_sharded_model"]
