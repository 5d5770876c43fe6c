"""The manual level: parallel layers and collectives by hand, under Paddle's names. ``from onecard import fleet``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from onecard._addresses import module_or
from onecard.comm.issue.ranks import of_ranks
from onecard.comm.world import world
from onecard.errors import FleetError
from onecard.fleet import meta_parallel, names, utils
from onecard.fleet.experts.exchange import global_gather, global_scatter
from onecard.fleet.experts.model import balance, router_loss, update_router_bias
from onecard.fleet.front import training
from onecard.fleet.front.pipeline_parallel import PipelineParallel
from onecard.fleet.front.sharding import group_sharded_parallel, save_group_sharded_model
from onecard.fleet.front.training import distributed_model, distributed_optimizer
from onecard.fleet.gradients import clipping, scaling
from onecard.fleet.gradients.clipping import (
    ClipGradByGlobalNorm,
    ClipGradForMOEByGlobalNorm,
    clip_grad_norm_,
    grad_norm,
)
from onecard.fleet.gradients.hooks import sync
from onecard.fleet.gradients.scaling import GradScaler, distributed_scaler
from onecard.fleet.grid.rng import get_rng_state_tracker, model_parallel_random_seed
from onecard.fleet.grid.strategy import DistributedStrategy
from onecard.fleet.grid.topology import HybridCommunicateGroup, begin, get_hybrid_communicate_group
from onecard.fleet.layers import mappings, recomputing, saved
from onecard.fleet.layers.context import ring_attention, ulysses_attention
from onecard.fleet.layers.dropout import dropout
from onecard.fleet.layers.initial import (
    Assign,
    Constant,
    KaimingUniform,
    Normal,
    ParamAttr,
    Uniform,
    XavierNormal,
    XavierUniform,
    draw_parts,
)
from onecard.fleet.layers.layer_desc import LayerDesc, SharedLayerDesc
from onecard.fleet.layers.parameters import mark, part_sizes, sum_over
from onecard.fleet.layers.pipeline_layer import PipelineLayer
from onecard.fleet.layers.recomputing import recompute
from onecard.fleet.layers.sequence import mark_as_sequence_parallel_parameter
from onecard.fleet.layers.splitting import split_parameters
from onecard.fleet.layers.tokens import token_mean
from onecard.fleet.zero import sharded_model
from onecard.fleet.zero.sharded_model import GroupShardedModel
from onecard.train.shard import Run, held
from onecard.train.shard import Shard as Held

__all__ = [
    "Assign", "ClipGradByGlobalNorm", "ClipGradForMOEByGlobalNorm", "Constant", "DistributedStrategy", "FleetError",
    "GradScaler", "GroupShardedModel", "Held", "HybridCommunicateGroup", "KaimingUniform", "LayerDesc", "Normal",
    "ParamAttr", "PipelineLayer", "PipelineParallel", "Run", "SharedLayerDesc", "Uniform", "XavierNormal",
    "XavierUniform", "balance", "barrier_worker", "clip_grad_norm_", "distributed_model", "distributed_optimizer",
    "distributed_scaler", "draw_parts", "dropout", "get_hybrid_communicate_group", "get_rng_state_tracker",
    "global_gather", "global_scatter", "grad_norm", "group_sharded_parallel", "held", "init", "is_first_worker",
    "mappings", "mark", "mark_as_sequence_parallel_parameter", "meta_parallel", "model_parallel_random_seed", "names",
    "part_sizes", "recompute", "recomputing", "ring_attention", "router_loss", "saved", "save_group_sharded_model",
    "split_parameters", "sum_over", "sync", "token_mean", "training", "ulysses_attention", "update_router_bias", "utils",
    "worker_index", "worker_num",
]  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    return module_or(names.refuse)(__name__, name)


def init(
    role_maker: Any = None,
    is_collective: bool = True,
    strategy: DistributedStrategy | None = None,
    log_level: Any = None,
) -> None:
    """Lay the grid of ranks that a strategy describes. First call of a fleet program.

    Args:
        role_maker: none: the launcher's environment says who this rank is.
        is_collective: True; there are no parameter servers.
        strategy: a ``DistributedStrategy``; all ranks data parallel if left out.

    Raises:
        FleetError: degrees that do not fit this world; says which do.

    Source: ``paddle.distributed.fleet.init``.

    Example:
        >>> init(is_collective=True)
        >>> get_hybrid_communicate_group().topology()
        {'dp': 1, 'pp': 1, 'sharding': 1, 'sep': 1, 'mp': 1}
    """
    if role_maker is not None or not is_collective:
        raise FleetError(
            "fleet.init: there are no parameter servers and no role makers: fleet.init(is_collective=True, strategy=...)"
        )
    if strategy is not None and not isinstance(strategy, DistributedStrategy):
        raise FleetError(f"fleet.init(strategy=): want a fleet.DistributedStrategy, not {type(strategy).__name__}")
    begin(strategy or DistributedStrategy())
    training.install()
    clipping.install()
    sharded_model.install()
    scaling.install()


def worker_index() -> int:
    """This process' rank in the world."""
    return world.get_rank()


def worker_num() -> int:
    """How many ranks there are."""
    return world.get_world_size()


def is_first_worker() -> bool:
    """Whether this is rank 0."""
    return world.get_rank() == 0


def barrier_worker() -> None:
    """Wait until every rank is here."""
    from onecard.comm.issue import plain

    plain.barrier(of_ranks(name="world"))
