"""What Paddle's programs call and onecard does otherwise or has not: ``import onecard.paddle as dist`` is ``paddle.distributed``.

All other names are onecard's, and ``oc.NAME`` finds those of this room, too. The one that differs is ``parallelize``, which takes
Paddle's ``config``. Addresses are the same below it: ``onecard.paddle.fleet.meta_parallel``, ``onecard.paddle.sharding``.
"""

from __future__ import annotations

from typing import Any

from onecard import _addresses, elsewhere
from onecard.paddle import auto_parallel, sharding, stream
from onecard.paddle.intermediate import parallelize
from onecard.paddle.layer_plans import (
    ColWiseParallel,
    PrepareLayerInput,
    PrepareLayerOutput,
    RowWiseParallel,
    SequenceParallelBegin,
    SequenceParallelDisable,
    SequenceParallelEnable,
    SequenceParallelEnd,
)
from onecard.paddle.ranks import (
    ParallelEnv,
    destroy_process_group,
    get_mesh,
    init_parallel_env,
    is_available,
    set_mesh,
)
from onecard.paddle.sharding import group_sharded_parallel, save_group_sharded_model
from onecard.paddle.split_points import SplitPoint
from onecard.paddle.values import (
    LocalLayer,
    ReduceType,
    dtensor_from_fn,
    dtensor_from_local,
    dtensor_to_local,
    unshard_dtensor,
)
from onecard.paddle.whole_models import DataParallel, shard_scaler, to_distributed

__all__ = [
    "ColWiseParallel", "DataParallel", "LocalLayer", "ParallelEnv", "PrepareLayerInput", "PrepareLayerOutput", "ReduceType",
    "RowWiseParallel", "SequenceParallelBegin", "SequenceParallelDisable", "SequenceParallelEnable", "SequenceParallelEnd",
    "SplitPoint", "auto_parallel", "destroy_process_group", "dtensor_from_fn", "dtensor_from_local", "dtensor_to_local",
    "get_mesh", "group_sharded_parallel", "init_parallel_env", "is_available", "parallelize", "save_group_sharded_model",
    "set_mesh", "shard_scaler", "sharding", "stream", "to_distributed", "unshard_dtensor",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return _addresses.of_house(name, elsewhere.refuse)
