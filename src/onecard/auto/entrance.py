"""What a model is called with, divided by rows where it enters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard._torch.hooks import LeftBehind
from onecard._torch.leaves import is_transformed, outside_transforms
from onecard._torch.names import tree_leaves, tree_map
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor, shard_tensor


class Entrance(LeftBehind):
    """Divides the rows of what a model is called with over axes of a mesh; every rank has the whole batch.

    Which tensors have rows is seen by the first one: those of the same length. Others are the same on all ranks, as they are, and
    what lies on a mesh already stays there: the states that a recurrent model has returned come again. Any choice gives the same
    numbers. So what ``torch.func`` puts in a tensor's place stays as it is.
    """

    def __init__(self, mesh: ProcessMesh, axes: tuple[str, ...]) -> None:
        self.mesh = mesh
        self._rows: list[Placement] = [Shard(0) if name in axes else Replicate() for name in mesh.dim_names]
        self._ranks = 1
        for name in axes:
            self._ranks *= mesh.shape[mesh.axis(name)]

    def __deepcopy__(self, memo: Any) -> Entrance:
        return self

    def before(self, module: nn.Module) -> None:
        """From now on, ahead of each forward of a module."""
        module.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self.divided(args, kwargs)

    def divided(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What somebody is called with, its rows divided."""
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim]
        if all(isinstance(x, DistTensor) for x in leaves) or any(map(is_transformed, leaves)):
            return args, kwargs
        rows = len(leaves[0])
        if rows < self._ranks:
            return args, kwargs

        def laid_out(x: Any) -> Any:
            if (
                not isinstance(x, Tensor)
                or isinstance(x, DistTensor)
                or not x.ndim
                or len(x) != rows
                or x.requires_grad
            ):
                return x
            if x.layout is not torch.strided:  # the operator that takes it says what it cannot
                return x
            return shard_tensor(x, self.mesh, self._rows)

        with outside_transforms():
            found: tuple[Any, Any] = tree_map(laid_out, (args, kwargs))
        return found
