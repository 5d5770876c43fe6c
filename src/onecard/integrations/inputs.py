"""What a model is called with, divided where it enters."""

from __future__ import annotations

from torch import nn

from onecard.auto.entrance import Entrance
from onecard.errors import MeshError
from onecard.place.mesh import ProcessMesh


def shard_inputs(model: nn.Module, mesh: ProcessMesh, shard_dims: str | tuple[str, ...]) -> nn.Module:
    """Divide the rows of what a model is called with; every rank gives it the whole batch.

    For a loop that somebody else's trainer runs: its loader is not ours to divide.

    Args:
        model: laid out on the mesh; each of its forwards takes whole plain tensors of (batch, ...), by position or by name, and
            divides dim 0 of those that have as many rows as the first one. Fewer rows than ranks stay on all ranks.
        mesh, shard_dims: the axes along which rows are divided, as in ``shard_dataloader``.

    Returns:
        The model.

    Raises:
        MeshError: the mesh has no such axis.

    Source: ``input_fn`` of ``distribute_module`` of PyTorch, for batches by name as well.

    Example:
        >>> import torch
        >>> mesh = ProcessMesh([0], ["dp"])
        >>> model = shard_inputs(nn.Linear(4, 2), mesh, "dp")
        >>> model(input=torch.ones(8, 4)).placements
        (Shard(dim=0),)
    """
    axes = (shard_dims,) if isinstance(shard_dims, str) else tuple(shard_dims)
    for name in axes:
        if name not in mesh.dim_names:
            raise MeshError(f"shard_inputs: {mesh!r} has no axis {name!r}: one of {', '.join(mesh.dim_names)}")
    Entrance(mesh, axes).before(model)
    return model
