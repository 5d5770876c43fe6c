"""Names that other libraries have and onecard has not, and what takes their place. The pages for newcomers show this table."""

from __future__ import annotations

import sys
from typing import NoReturn

_STAGE_1 = '`oc.shard_optimizer(opt, oc.ShardingStage1("dp", mesh))`'
_STAGE_3 = '`oc.shard_optimizer(opt, oc.ShardingStage3("dp", mesh))`: with `model=model` block by block, ahead'
_LINEAR = "the weight's placements, in the `shard_fn` of `oc.shard_layer`: `Shard(0)` by columns, `Shard(1)` by rows"
_SAVED = "`oc.checkpoint.{0}`, or `oc.{0}_state_dict`; DCP's own takes distributed tensors as well"
_SEQUENCE = (
    "`oc.reshard(x, mesh, [oc.Shard(1)])` of (batch, time, width): norms, dropout and linear layers keep the cut"
)
NO_SERVERS = "nothing: there are no parameter servers"
_MESH = "`oc.ProcessMesh(ranks, dim_names=[...])`; `oc.from_device_mesh` converts"
_DDP = "`oc.shard_layer(model, mesh)`, `oc.shard_optimizer(opt)`, `oc.shard_dataloader(loader, mesh)`"

PADDLE = {
    "DistAttr": 'placements, or for each dim its axis: `oc.shard_tensor(x, mesh, [None, "mp"])`',
    "Placement": "`torch.distributed.tensor.Placement`, of which `oc.Shard`, `oc.Replicate` and `oc.Partial` are",
    "ParallelMode": "the word that `hcg.get_parallel_mode()` returns",
    "ToDistributedConfig": "nothing: the plan is found; one of your own is an `oc.Plan`",
    "create_nd_mesh": "`oc.ProcessMesh(ranks, dim_names=[...])`",
    "enable_auto_dp": "`onecard run --auto`, or `oc.parallelize(model, optimizer, loader)`",
    "moe_global_mesh_tensor": "experts stacked in one weight, `oc.Shard(0)` along the axis of the experts",
    "moe_sub_mesh_tensors": "experts stacked in one weight, `oc.Shard(0)` along the axis of the experts",
    "fetch": "`x.full_tensor()`, `x.item()`",
    "rpc": "`torch.distributed.rpc`",
    "io": "`oc.checkpoint`",
    "gloo_init_parallel_env": "nothing: on CPUs ranks meet as they are; `ONECARD_BACKEND=gloo`",
    "gloo_barrier": "`oc.barrier()`",
    "gloo_release": "nothing: it is ended with the process",
    "QueueDataset": NO_SERVERS,
    "InMemoryDataset": NO_SERVERS,
    "CountFilterEntry": NO_SERVERS,
    "ShowClickEntry": NO_SERVERS,
    "ProbabilityEntry": NO_SERVERS,
    "seed": "`oc.manual_seed(s)`",
}

DTENSOR = {
    "DTensor": "`oc.DistTensor`; `oc.from_dtensor` and `oc.to_dtensor` convert without a copy",
    "DeviceMesh": _MESH,
    "init_device_mesh": _MESH,
    "distribute_tensor": "`oc.shard_tensor(x, mesh, placements)`",
    "distribute_module": "`oc.shard_layer(module, mesh, shard_fn, input_fn, output_fn)`",
    "parallelize_module": "`oc.shard_layer(module, mesh, shard_fn)`",
    "ColwiseParallel": _LINEAR,
    "RowwiseParallel": _LINEAR,
    "SequenceParallel": _SEQUENCE,
    "PrepareModuleInput": "mostly nothing: plain inputs count as replicated, operators move what they need; else `input_fn`",
    "PrepareModuleOutput": "mostly nothing; else `output_fn` of `oc.shard_layer`",
    "loss_parallel": "nothing: `cross_entropy` takes logits that are cut along the classes",
    "implicit_replication": "nothing: plain tensors count as replicated",
    "register_sharding": "`oc.register_rule(name, row, verify=[a sample call])`",
    "context_parallel": "by hand: `ring_attention` and `ulysses_attention` of `onecard.fleet`",
    "redistribute": "`oc.reshard(x, mesh, placements)`",
    "CommDebugMode": "`with oc.explain() as report:`",
}

FSDP = {
    "DistributedDataParallel": _DDP,
    "DDP": _DDP,
    "DistributedSampler": "`oc.shard_dataloader(loader, mesh, shard_dims=...)`; the batch size is that of the whole batch",
    "fully_shard": _STAGE_3,
    "FullyShardedDataParallel": _STAGE_3,
    "FSDP": _STAGE_3,
    "HSDP": "a mesh of two axes, the batch cut along both, `oc.ShardingStage3` of the inner one",
    "ZeroRedundancyOptimizer": _STAGE_1,
    "MixedPrecisionPolicy": "`model.to(torch.bfloat16)` and `master_weights=True` of a stage; or `torch.autocast`",
    "MixedPrecision": "`model.to(torch.bfloat16)` and `master_weights=True` of a stage; or `torch.autocast`",
    "auto_wrap_policy": "`blocks=` of `oc.ShardingStage3`, beside `model=model`: modules, names, classes; else repeated layers",
    "ignored_params": "nothing: what is in no optimizer of a stage stays as it is",
    "register_fsdp_forward_method": "nothing: a parameter is gathered where an operator reads it, in any method",
    "CPUOffloadPolicy": "`offload=True` of a stage: the optimizer's states",
    "no_sync": "nothing: gradients stay pending until the optimizer, or clipping, needs them; stages 2 and 3 of ZeRO sum in each",
    "create_selective_checkpoint_contexts": "torch's own, with `torch.utils.checkpoint`: both work as they are",
    "init_process_group": "nothing: the first message does it; a group that the program makes itself is used",
    "all_to_all": "`oc.alltoall`, or `all_to_all` of `onecard.differentiable`; distributed tensors need no collective",
    "save": _SAVED.format("save"),
    "load": _SAVED.format("load"),
    "compile": "`oc.to_static(step, backend=\"inductor\")`: the step as a graph, its runs of operators by torch's compiler",
}  # fmt: skip

DEEPSPEED = {
    "GatheredParameters": "`p.full_tensor()` reads the whole parameter; `with torch.no_grad(): p.copy_(whole)` writes it, on all "
    "ranks alike",
    "register_external_parameter": "nothing: a parameter that is read outside its module is gathered there",
    "zero_to_fp32": "`oc.checkpoint.convert`, or `oc.checkpoint.load` into one card's model",
    "initialize": _STAGE_3,
    "PipelineModule": "`fleet.PipelineLayer`; by marks `pipeline.step_by_marks`",
    "TiedLayerSpec": "`fleet.SharedLayerDesc`",
    "LayerSpec": "`fleet.LayerDesc`",
    "MoE": '`fleet.meta_parallel.MoELayer(hidden_size, [fleet.LayerDesc(...)] * num_experts, {"type": "topk", "top_k": k, '
    '"capacity": capacity_factor})` under `ep_degree`',
    "split_params_into_different_moe_groups_for_optimizer": "nothing: parameters say which are experts",
}
MEGATRON = {
    "copy_to_tensor_model_parallel_region": "`oc.fleet.mappings.copy_to(x)`",
    "reduce_from_tensor_model_parallel_region": "`oc.fleet.mappings.reduce_from(x)`",
    "scatter_to_tensor_model_parallel_region": "`oc.fleet.mappings.scatter_to(x)`",
    "gather_from_tensor_model_parallel_region": "`oc.fleet.mappings.gather_from(x)`",
    "scatter_to_sequence_parallel_region": "`oc.fleet.utils.sequence_parallel_utils.scatter(x)`",
    "gather_from_sequence_parallel_region": "`oc.fleet.utils.sequence_parallel_utils.all_gather(x)` before a layer that is cut, "
    "else `gather(x)`",
    "reduce_scatter_to_sequence_parallel_region": "`oc.fleet.utils.sequence_parallel_utils.reduce_scatter(x)`",
    "vocab_parallel_cross_entropy": "`oc.fleet.meta_parallel.ParallelCrossEntropy()(logits, labels)`",
    "initialize_model_parallel": "`oc.fleet.init(strategy=...)` with `hybrid_configs`",
    "TopKRouter": '`gate={"type": "topk", ...}` of `oc.fleet.meta_parallel.MoELayer`',
    "MoEAlltoAllTokenDispatcher": "nothing: `oc.fleet.meta_parallel.MoELayer` sends tokens by all-to-all; by hand "
    "`oc.fleet.global_scatter` and `oc.fleet.global_gather`",
    "MoEAllGatherTokenDispatcher": "nothing: `oc.fleet.meta_parallel.MoELayer` sends each token to its experts alone",
    "SequentialMLP": "a list of modules as `experts` of `oc.fleet.meta_parallel.MoELayer`",
    "TEGroupedMLP": "`oc.fleet.meta_parallel.GroupedExperts`",
    "SharedExpertMLP": "`shared_experts=` of `oc.fleet.meta_parallel.MoELayer`, `overlap=True` for its overlap",
    "get_expert_model_parallel_group": "`get_expert_parallel_group()` of `oc.fleet.get_hybrid_communicate_group()`",
    "get_expert_data_parallel_group": "`get_moe_sharding_parallel_group()` of `oc.fleet.get_hybrid_communicate_group()`",
}

ALL = {
    "paddle.distributed": PADDLE, "torch.distributed.tensor": DTENSOR,
    "torch.distributed": FSDP, "deepspeed": DEEPSPEED, "megatron.core": MEGATRON,
}  # fmt: skip


def refuse(name: str) -> NoReturn:
    """The AttributeError for a name that ``onecard`` does not have.

    Example:
        >>> refuse("fetch")
        Traceback (most recent call last):
        AttributeError: onecard has no 'fetch' (paddle.distributed). In its place: `x.full_tensor()`, `x.item()`
    """
    for library, names in ALL.items():
        if name in names:
            raise AttributeError(f"onecard has no {name!r} ({library}). In its place: {names[name]}", name=name)
    raise AttributeError(f"module 'onecard' has no attribute {name!r}", name=name, obj=sys.modules["onecard"])


def table(names: dict[str, str]) -> str:
    """The rows of a page.

    Example:
        >>> print(table({"DDP": "nothing"}))
        | `DDP` | nothing |
    """
    return "\n".join(f"| `{name}` | {instead} |" for name, instead in names.items())
