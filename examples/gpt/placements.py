"""All that this example says about parallelism: where the weights and the batch of the GPT go.

Axis "tp" is tensor parallelism as in Megatron-LM (Shoeybi et al., 2019): heads, hidden units, vocabulary are divided.
Axis "dp" is data parallelism: the batch is divided. A mesh may have either or both; onecard infers all the rest.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import Placement

import onecard as oc

# A weight of nn.Linear is (out, in): Shard(0) divides its outputs (column parallel), Shard(1) its inputs (row).
# A parameter that is not named here is Replicate.
TENSOR_PARALLEL = {
    "token_embedding.weight": oc.Shard(0),  # by vocabulary
    "attention.q.weight": oc.Shard(0),  # by head
    "attention.q.bias": oc.Shard(0),
    "attention.k.weight": oc.Shard(0),
    "attention.v.weight": oc.Shard(0),
    "attention.v.bias": oc.Shard(0),
    "attention.out.weight": oc.Shard(1),
    "mlp.fc.weight": oc.Shard(0),  # by hidden unit
    "mlp.fc.bias": oc.Shard(0),
    "mlp.proj.weight": oc.Shard(1),
    "lm_head.weight": oc.Shard(0),  # by vocabulary: the loss takes the divided logits as they are
}


def place(mesh: oc.ProcessMesh, **by_axis: Placement) -> list[Placement]:
    """One placement for each axis of the mesh: those given by the axis' name, else Replicate."""
    return [by_axis.get(axis, oc.Replicate()) for axis in mesh.dim_names]


def shard_parameters(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    """Replace the parameters of one layer by distributed ones (the `shard_fn` of `oc.shard_layer`)."""
    for short, parameter in list(layer.named_parameters(recurse=False)):
        matches = (where for suffix, where in TENSOR_PARALLEL.items() if f"{name}.{short}".endswith(suffix))
        placements = place(mesh, tp=next(matches, oc.Replicate()))
        setattr(layer, short, oc.shard_tensor(parameter, mesh, placements))


def shard_model(model: nn.Module, mesh: oc.ProcessMesh) -> nn.Module:
    """Shard the parameters of a `model.GPT` in place."""
    return oc.shard_layer(model, mesh, shard_parameters)


def shard_batch(batch: tuple[Tensor, ...], mesh: oc.ProcessMesh) -> tuple[Tensor, ...]:
    """Divide a batch that every rank holds whole."""
    return tuple(oc.shard_tensor(x, mesh, place(mesh, dp=oc.Shard(0))) for x in batch)
