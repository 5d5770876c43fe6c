"""group_sharded_parallel: ZeRO for a local model, on the machinery of the marks.

The model computes with plain parameters. The optimizer is given distributed ones over the same memory, whose gradients are the
ranks' own, still to be averaged; what ``onecard.ShardingStage1`` and its kin do with such parameters is all that is done here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from onecard.checkpoint import save_state_dict
from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks, as_ranks
from onecard.errors import FleetError
from onecard.fleet.front.pipeline_parallel import PipelineParallel
from onecard.fleet.gradients import holders
from onecard.fleet.gradients import sums as gradients
from onecard.fleet.gradients.scaling import distributed_scaler
from onecard.fleet.grid import topology
from onecard.fleet.layers.pipeline_layer import PipelineLayer
from onecard.fleet.zero import carried
from onecard.fleet.zero.sharded_model import AXIS, GroupShardedModel, Sharded
from onecard.fleet.zero.written import refuse_bounded
from onecard.tensor import DistTensor
from onecard.train.lazy import refuse_lazy
from onecard.train.shard import held
from onecard.train.zero.blocks import BlockSpec, Policy
from onecard.train.zero.zero import ShardingStage1, ShardingStage2, ShardingStage3

LEVELS: dict[str, type[ShardingStage1]] = {"os": ShardingStage1, "os_g": ShardingStage2, "p_g_os": ShardingStage3}


def group_sharded_parallel(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str,
    scaler: torch.amp.GradScaler | None = None,
    group: Any = None,
    offload: bool = False,
    sync_buffers: bool = False,
    buffer_max_size: int = 2**23,
    segment_size: int = 2**20,
    sync_comm: bool = False,
    overlap: bool | None = None,
    reshard_after_forward: Policy = True,
    master_weights: bool = False,
    reduce_dtype: torch.dtype | None = None,
    blocks: BlockSpec = None,
    grad_accum_dtype: torch.dtype | None = None,
) -> tuple[GroupShardedModel, torch.optim.Optimizer, torch.amp.GradScaler | None]:
    """Divide a local model's optimizer states, gradients and parameters over the ranks that see other data (ZeRO).

    Gradients are averaged over the group, so that a loss that is a mean over this rank's samples is trained as the mean over all.

    Args:
        model: of plain parameters, first values those of the group's first rank.
        optimizer: any of torch's over the model's parameters; states that it has are cut too.
        level: "os" (states), "os_g" (gradients too), "p_g_os" (parameters too: gathered block by block).
        scaler: returned, made to skip a step on all ranks together.
        group: the ranks that see other data and hold copies of one model (also a ``torch.distributed`` group); if left out,
            those of ``fleet.init``'s grid.
        sync_buffers: give the buffers the first rank's values now.
        buffer_max_size, segment_size: of Paddle, which this does not need: buckets are of 25 MiB.
        sync_comm: nothing is under way while something else runs: ``overlap=False``.
        grad_accum_dtype: in which the gradients of microbatches add up, ``torch.float32`` for 16-bit parameters; with
            ``master_weights``, which are updated by them as they are. The parameters' own if left out.
        offload, overlap, reshard_after_forward, master_weights, reduce_dtype, blocks: as of ``oc.ShardingStage3``.

    Returns:
        The model, the optimizer and the scaler: the objects that were given. Other optimizers of the model are made parts of this
        when they are given here too, or else at their first step.

    Raises:
        FleetError: a level that there is not, an optimizer of other parameters.

    Source: ``paddle.distributed.sharding.group_sharded_parallel``.

    Example:
        >>> net = nn.Linear(4, 2)
        >>> net, optimizer, _ = group_sharded_parallel(net, torch.optim.AdamW(net.parameters()), "os_g")
        >>> net(torch.ones(3, 4)).sum().backward()
        >>> optimizer.step()
    """
    ranks = topology.data_ranks() if group is None else as_ranks(group)
    call = "group_sharded_parallel"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise FleetError(f"{call} takes a torch optimizer, not {type(optimizer).__name__}")
    if level not in LEVELS:
        raise FleetError(f"{call}: level is {level!r}; there are {', '.join(map(repr, LEVELS))}")
    sharded: Sharded | None = getattr(model, "_sharded", None)
    if sharded is None:
        _check(model, level, ranks)
        _own_parameters(model, optimizer)
        carried.declare(model)
        for p in [*model.parameters(), *(model.buffers() if sync_buffers else ())]:
            plain.broadcast(p.detach(), holders.divided_over(p, ranks), 0, call=call)
        running = False if sync_comm else overlap
        stage: Any = LEVELS[level](AXIS, None, running, master_weights, reduce_dtype, offload)
        if grad_accum_dtype is not None and not (master_weights or offload):
            raise FleetError(
                f"{call}: grad_accum_dtype={grad_accum_dtype} without master_weights: 16-bit parameters would meet gradients "
                "of another dtype: master_weights=True"
            )
        sharded = Sharded(model, level, stage, ranks, reshard_after_forward, blocks, grad_accum_dtype)
    elif (level, ranks.ranks) != (sharded.level, sharded.group.ranks):
        raise FleetError(
            f"{call}: the model is of level {sharded.level!r} over ranks {list(sharded.group.ranks)} already; another optimizer "
            "of it is of the same"
        )
    sharded.adopt(optimizer)
    return cast(GroupShardedModel, model), optimizer, None if scaler is None else distributed_scaler(scaler)


def _own_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for each in optimizer.param_groups for p in each["params"]):
        raise FleetError("group_sharded_parallel: the optimizer holds parameters that are not the model's")


def _check(model: nn.Module, level: str, group: Ranks) -> None:
    call = "group_sharded_parallel"
    if not group.is_member():
        raise FleetError(f"{call}: this rank is not in {group!r}; call it on its members only")
    refuse_lazy(model, call, FleetError)
    _check_grid(model, level, group)
    refuse_bounded(model, group, call)
    for p in model.parameters():
        if isinstance(p, DistTensor):
            raise FleetError(
                f"{call}: the model holds a {type(p).__name__}; with placements: oc.shard_optimizer(opt, stage)"
            )
        gradients.refuse_parts(p, group, call)
        if held(p).copies:
            raise FleetError(
                f"{call}: a parameter of shape {list(p.shape)} has rows that several ranks hold (key and value heads fewer than "
                "ranks), whose sums do not fit the parts that ZeRO makes. By marks they do: oc.shard_optimizer(opt, "
                "oc.ShardingStage1('dp', mesh))"
            )


def _check_grid(model: nn.Module, level: str, group: Ranks) -> None:
    """Beside stages and tensor parallel layers the group is that of the copies, and no other."""
    call = "group_sharded_parallel"
    data = topology.data_ranks()
    beside = any(held(p).group is not None or held(p).sums or gradients.in_stages(p) for p in model.parameters())
    if isinstance(model, PipelineLayer):
        raise FleetError(
            f"{call}: a PipelineLayer is a pipeline's after fleet.distributed_model(model): give what that returns"
        )
    if isinstance(model, PipelineParallel) and level == "p_g_os":
        raise FleetError(
            f"{call}: level 'p_g_os' would gather a stage's parameters again for the forward and the backward of every "
            "microbatch: 'os_g' divides states and gradients. By marks oc.ShardingStage3 goes with pipeline.step_by_marks"
        )
    if beside and group.ranks != data.ranks:
        raise FleetError(
            f"{call}: ranks {list(group.ranks)} do not hold copies of the same parameters: beside mp_degree and pp_degree "
            f"those are {list(data.ranks)}: group=hcg.data(), or leave it out"
        )


def save_group_sharded_model(
    model: GroupShardedModel, output: str | Path, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Save the model, and the optimizer, of ``group_sharded_parallel`` under a folder. Every rank calls it.

    It is a checkpoint, of ``{"model": model, "optimizer": optimizer}``: any number of ranks, level and degree loads it, with
    ``oc.load_state_dict({"model": model, "optimizer": optimizer}, output)``.

    Raises:
        FleetError: a model that is not of ``group_sharded_parallel``.

    Source: ``paddle.distributed.sharding.save_group_sharded_model``.
    """
    if not isinstance(model, GroupShardedModel):
        raise FleetError(
            f"save_group_sharded_model takes what group_sharded_parallel returned, not {type(model).__name__}: "
            "oc.save_state_dict(model.state_dict(), path)"
        )
    save_state_dict({"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}, output)
