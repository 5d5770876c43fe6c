"""Routers in the stages of a pipeline: their losses go with the values from stage to stage, and are added to the loss once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from onecard.comm.base.state import arrives
from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks
from onecard.comm.world import world
from onecard.fleet.experts.gates import BaseGate
from onecard.fleet.experts.model import router_loss
from onecard.fleet.layers.pipeline_layer import PipelineLayer


def has_routers(module: PipelineLayer, group: Ranks) -> bool:
    """Whether any stage has a router; the same on all ranks of the pipeline."""
    mine = any(isinstance(each, BaseGate) for each in module.modules())
    if group.size == 1 or not arrives():
        return mine
    said = torch.tensor([int(mine)], device="cpu")
    return bool(plain.all_reduce(said, group, "max", call="PipelineLayer").item())


def routed_stage(module: PipelineLayer, stage: int, value: Any) -> Any:
    """What a stage makes of (value, the routers' losses of the stages before); the first is given the value alone."""
    value, before = value if stage else (value, torch.zeros((), device=world.device()))
    value = module.run_stage(stage, value)
    layers = nn.ModuleList(m for i in module.layers_of(stage) if (m := module._modules.get(str(i))) is not None)
    lost = router_loss(layers)
    return value, before + lost if torch.is_grad_enabled() else before
