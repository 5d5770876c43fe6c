"""Names of Paddle's fleet that onecard has not, and what takes their place."""

from __future__ import annotations

from typing import NoReturn

from onecard import elsewhere

_UTIL = "`oc.barrier()`, `oc.all_reduce`, `oc.all_gather_object`"
_ENVIRONMENT = "nothing: the launcher's environment says who this rank is"
_ZERO = '`fleet.group_sharded_parallel(model, optimizer, level)`: "os", "os_g" or "p_g_os"'

ELSEWHERE = {
    "TensorParallel": "`fleet.distributed_model(model)`",
    "DistributedDataParallel": "`fleet.distributed_model(model)`",
    "GroupShardedStage2": _ZERO,
    "GroupShardedStage3": _ZERO,
    "DygraphShardingOptimizer": _ZERO,
    "HybridParallelOptimizer": "`fleet.distributed_optimizer(optimizer)`",
    "is_worker": "nothing: every rank is a worker",
    "is_server": elsewhere.NO_SERVERS,
    "init_worker": elsewhere.NO_SERVERS,
    "init_server": elsewhere.NO_SERVERS,
    "run_server": elsewhere.NO_SERVERS,
    "stop_worker": elsewhere.NO_SERVERS,
    "PaddleCloudRoleMaker": _ENVIRONMENT,
    "UserDefinedRoleMaker": _ENVIRONMENT,
    "worker_endpoints": _ENVIRONMENT,
    "server_num": elsewhere.NO_SERVERS,
    "server_index": elsewhere.NO_SERVERS,
    "server_endpoints": elsewhere.NO_SERVERS,
    "MultiSlotDataGenerator": elsewhere.NO_SERVERS,
    "Role": _ENVIRONMENT,
    "Fleet": "`fleet` itself",
    "UtilBase": _UTIL,
    "util": _UTIL,
    "metrics": "`oc.all_reduce(total)` of the sums and counts that a metric is made of; an `Engine` has `metrics=`",
    "base": "`fleet.DistributedStrategy`, `fleet.get_hybrid_communicate_group()`",
    "CommunicateTopology": "`fleet.get_hybrid_communicate_group().topology()`",
    "scaler": "`fleet.distributed_scaler`",
    "meta_optimizers": "fields of `fleet.DistributedStrategy`",
    "rank": "`fleet.worker_index()`",
    "nranks": "`fleet.worker_num()`",
    "local_rank": "`oc.paddle.ParallelEnv().local_rank`",
    "local_device_ids": "the launcher's `--devices`",
    "node_num": "the launcher's `--nnodes`",
    "state_dict": "`optimizer.state_dict()`; any layout, any number of ranks: `oc.checkpoint.save`",
    "save": "`oc.checkpoint.save`",
    "load_model": "`oc.checkpoint.load`",
    "set_lr": '`optimizer.param_groups[0]["lr"] = ...`',
    "get_lr": '`optimizer.param_groups[0]["lr"]`',
    "save_inference_model": "`torch.export` of the whole model",
    "save_persistables": "`model.state_dict()` holds this rank's parts, `fleet.held(p)` says which",
    "minimize": "`optimizer.minimize(loss)`",
    "PipelineParallelWithInterleave": "`fleet.distributed_model(PipelineLayer(..., num_virtual_pipeline_stages=2))`, which is a "
    "`PipelineParallel`, too",
    "PipelineParallelWithInterleaveFthenB": '`pipeline_configs = {"schedule_mode": "BFS"}`, num_virtual_pipeline_stages=2',
    "ShardingParallel": "`fleet.distributed_model(model)` under `sharding_degree`, or " + _ZERO,
    "HybridParallelGradScaler": "`fleet.distributed_scaler(torch.amp.GradScaler())`",
    "LocalSharedLayerDesc": "`fleet.SharedLayerDesc`",
    "NoPipelineParallel": "`fleet.distributed_model(model)`",
    "VPPFhenBInBalancedMemory": '`pipeline_configs = {"schedule_mode": "BFS"}`, num_virtual_pipeline_stages=2',
    "PipelineDatasetPreprocessor": "nothing: `model.train_batch([x, y], optimizer)` divides the batch",
    "PipelineParallelMicroStepLocations": "hooks of the stages' modules",
    "SegmentParallel": '`fleet.distributed_model(model)` under `hybrid_configs = {"sep_degree": n}`, with `fleet.ring_attention` '
    "or `fleet.ulysses_attention` in the model",
    "hybrid_parallel_util": "`fleet.sync(model.parameters())` for `fused_allreduce_gradients`; its broadcasts of parameters are "
    "done by `fleet.distributed_model`",
    "fused_allreduce_gradients": "`fleet.sync(model.parameters())`; clipping and `optimizer.step()` do it, too",
    "mix_precision_utils": "`strategy.amp = True` or `torch.autocast`, and `fleet.GradScaler`; gradients of bfloat16 models in "
    "float32: `master_weights=True` of a stage of ZeRO",
    "prepare_forward": "nothing: `fleet.meta_parallel.MoELayer` finds out how many rows go where",
    "limit_by_capacity": '`capacity` of a router: `gate={"type": "topk", "capacity": 1.25}`',
    "count_by_gate": "`layer.statistics()` of a `fleet.meta_parallel.MoELayer`",
    "timer_helper": "`model.timeline()` of a pipeline; `torch.profiler` else",
    "recompute_sequential": "`fleet.utils.recompute_sequential`",
    "recompute_hybrid": "`fleet.utils.recompute_hybrid`",
}


def refuse(module: str, name: str) -> NoReturn:
    """The AttributeError for a name that a module of fleet does not have.

    Example:
        >>> refuse("onecard.fleet", "is_worker")
        Traceback (most recent call last):
        AttributeError: onecard.fleet has no 'is_worker'. In its place: nothing: every rank is a worker
    """
    if found := ELSEWHERE.get(name) or elsewhere.MEGATRON.get(name):
        raise AttributeError(f"{module} has no {name!r}. In its place: {found}", name=name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
