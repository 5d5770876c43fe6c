"""Where a strategy becomes what a recorded step takes: options of ``to_static``, a stage of ZeRO, a scaler."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from onecard.comm.world import world
from onecard.engine.strategy import GradientMerge, Pipeline, Strategy
from onecard.pipeline.cut.stages import Stages
from onecard.place.mesh import ProcessMesh
from onecard.train import ShardingStage1, ShardingStage2, ShardingStage3

PIPELINE = ("pp", "pipe", "stage")
"""Names of a mesh axis along which stages lie."""


def static_options(strategy: Strategy, mode: str, ranks: int, mesh: ProcessMesh | None = None) -> dict[str, Any]:
    """What ``to_static`` is given for a step of a mode, "train", "eval" or "predict".

    Example:
        >>> static_options(Strategy(gradient_merge={"enable": True, "k_steps": 4}), "train", 1)
        {'also': (), 'ask': True, 'k_steps': 4}
    """
    # What a library's model reads of its inputs (``if mask.all()``) is no reason to refuse it.
    options: dict[str, Any] = {"also": (strategy.amp.dtype,) if strategy.amp.enable else (), "ask": True}
    if strategy.fused_passes.enable:
        options["backend"] = "inductor"
    if strategy.fused_passes.without:
        options["without"] = strategy.fused_passes.without
    if mode != "train":
        if pipeline_degree(strategy, ranks, mesh) > 1:
            options["stages"] = _microbatches(strategy, ranks, mesh)["stages"].forward()
        return options
    again = strategy.recompute
    if again.enable and again.memory_limit is not None:
        options["memory_limit"] = again.memory_limit
    elif again.enable and not again.checkpoints:
        options["also"] += ("recompute",)
    return options | _microbatches(strategy, ranks, mesh)


def _microbatches(strategy: Strategy, ranks: int, mesh: ProcessMesh | None) -> dict[str, Any]:
    """How the batch is cut: gradient merge, or a pipeline."""
    merge, pipe = strategy.gradient_merge, strategy.pipeline
    if pipe.enable:
        if pipeline_degree(strategy, ranks, mesh) > 1:
            virtual = pipe.vpp_degree if pipe.vpp_degree > 1 else None
            axis = axis_of(mesh) or "pp"
            return {"stages": Stages(pipe.accumulate_steps, _avg(pipe), pipe.schedule_mode, virtual, pipe.at, axis)}
        return _merged(pipe.accumulate_steps, _avg(pipe)) if pipe.accumulate_steps > 1 else {}
    if not merge.enable or merge.k_steps == 1:
        return {}
    return _merged(merge.k_steps, _avg(merge) if merge.avg else False)


def _avg(of: Pipeline | GradientMerge) -> bool | None:
    """Whether means are taken whatever the loss is; None: as it says."""
    return True if of.microbatch_loss else None


def _merged(k_steps: int, avg: bool | None) -> dict[str, Any]:
    return {"k_steps": k_steps} | ({} if avg is None else {"avg": avg})


def pipeline_degree(strategy: Strategy, ranks: int, mesh: ProcessMesh | None) -> int:
    """How many ranks are one behind the other; 1 without a pipeline, and where one card stands for all ranks."""
    if not strategy.pipeline.enable or world.alone.here:
        return 1
    if strategy.pipeline.degree != -1:
        return strategy.pipeline.degree
    axis = axis_of(mesh)
    return ranks if axis is None or mesh is None else mesh.shape[mesh.axis(axis)]


def sharding_degree(strategy: Strategy) -> int:
    """Over how many ranks ZeRO divides, -1: all; 1 where one card stands for all ranks."""
    return 1 if world.alone.here else strategy.sharding.degree


def axis_of(mesh: ProcessMesh | None) -> str | None:
    """The axis of a mesh along which stages lie."""
    return next((name for name in PIPELINE if mesh is not None and name in mesh.dim_names), None)


def stage_of(strategy: Strategy, mesh: ProcessMesh, axis: str, model: torch.nn.Module) -> ShardingStage1 | None:
    """The stage of ZeRO that an optimizer is given; None: nothing is divided."""
    sharding = strategy.sharding
    if not sharding.enable:
        return None
    options: dict[str, Any] = {
        "overlap": sharding.overlap, "offload": sharding.offload,
        "master_weights": strategy.amp.enable and strategy.amp.level == "O2",
    }  # fmt: skip
    if sharding.stage == 3:
        return ShardingStage3(axis, mesh, model=model, **options)
    return (ShardingStage1, ShardingStage2)[sharding.stage - 1](axis, mesh, **options)


def skips_on_device(optimizer: Optimizer) -> None:
    """Have an optimizer that has a fused kernel take it, which looks itself whether a scaler found infinite gradients.

    Others have the host look, which a recorded step cannot.
    """
    if "fused" in optimizer.defaults and not getattr(optimizer, "_step_supports_amp_scaling", False):
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def scaler_of(strategy: Strategy, device: torch.device) -> torch.amp.GradScaler | None:
    """What scales a float16 step's loss; None: nothing has to."""
    amp = strategy.amp
    if not amp.enable or amp.dtype != "float16":
        return None
    grows = {
        "growth_factor": amp.incr_ratio,
        "backoff_factor": amp.decr_ratio,
        "growth_interval": amp.incr_every_n_steps,
    }
    if not amp.use_dynamic_loss_scaling:
        grows = {"growth_factor": 1.0 + 1e-9, "backoff_factor": 1.0 - 1e-9, "growth_interval": 2**31 - 1}
    return torch.amp.GradScaler(device.type, init_scale=amp.init_loss_scaling, **grows)  # type: ignore[arg-type]
