"""Tensor parallelism by torch DTensor's `parallelize_module`, for the GPT of `examples/gpt`.

The plan is that of torchtitan's Llama without sequence parallelism: the same division of the weights, and the same two
all-reduces a block each way, as the hand-written peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

if TYPE_CHECKING:
    from model import GPT


def parallelize(gpt: GPT, mesh: DeviceMesh) -> GPT:
    """Divide a GPT in place. Its logits are DTensors divided by class: run it under `loss_parallel()`."""
    outer = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    block_plan = {
        # One DTensor for q, k and v together: their three gradients are then summed before the one all-reduce.
        "attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.fc": ColwiseParallel(),
        "mlp.proj": RowwiseParallel(),
    }
    parallelize_module(gpt, mesh, outer)
    for block in gpt.blocks:
        parallelize_module(block, mesh, block_plan)
        block.attention.n_head //= mesh.size()  # the attention between the layers sees local tensors
    return gpt


def parameter_groups(model: nn.Module) -> list[dict[str, list[Tensor]]]:
    """DTensors and plain tensors apart: foreach optimizers cannot mix them."""
    groups: dict[bool, list[Tensor]] = {}
    for parameter in model.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]
