"""Tensors under Paddle's names, and layers of local code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement

from onecard._torch.names import tree_leaves
from onecard.errors import LayoutError
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor, from_local, reshard, shard_tensor, unshard
from onecard.tensor.dist_tensor import describe
from onecard.train.local_code import local_map

dtensor_from_local = from_local
unshard_dtensor = unshard


class ReduceType:
    """How summands become one value: ``oc.Partial(ReduceType.kRedSum)``. Source: ``paddle.distributed.ReduceType``."""

    kRedSum, kRedMax, kRedMin, kRedProd, kRedAvg = "sum", "max", "min", "product", "avg"


def dtensor_from_fn(
    fn: Callable[..., Tensor], mesh: ProcessMesh, placements: Sequence[Placement], *args: Any, **kwargs: Any
) -> DistTensor:
    """What a function makes, laid out: ``fn(*args, **kwargs)`` on every rank, of which each keeps its part.

    Without a whole tensor on any rank: ``oc.rand``, ``oc.randn``, ``oc.deferred_init``.

    Source: ``paddle.distributed.dtensor_from_fn``.

    Example:
        >>> import torch
        >>> from onecard import Shard
        >>> dtensor_from_fn(torch.ones, ProcessMesh([0], ["x"]), [Shard(0)], 4, 2).placements
        (Shard(dim=0),)
    """
    return shard_tensor(fn(*args, **kwargs), mesh, placements)


def dtensor_to_local(
    x: DistTensor, mesh: ProcessMesh | None = None, placements: Sequence[Placement] | None = None
) -> Tensor:
    """This rank's part, first brought to ``placements`` if they are others. Differentiable, as ``x.to_local()`` is.

    Source: ``paddle.distributed.auto_parallel.api.dtensor_to_local``.
    """
    if placements is not None or mesh is not None:
        x = reshard(x, mesh or x.process_mesh, x.placements if placements is None else placements)
    return x.to_local()


class LocalLayer(nn.Module):
    """A layer whose ``forward`` runs on this rank's parts, and whose outputs are laid out again. Subclass it.

    Args:
        out_dist_attrs: for each output its mesh, all of them one, and its placements.

    Raises:
        LayoutError: outputs of several meshes; another number of them than ``forward`` returns.

    Source: ``paddle.distributed.LocalLayer``; ``oc.local_map`` is the same of a function.

    Example:
        >>> import torch
        >>> from onecard import Shard
        >>> class Double(LocalLayer):
        ...     def forward(self, part):
        ...         return 2 * part
        >>> mesh = ProcessMesh([0], ["x"])
        >>> Double([(mesh, [Shard(0)])])(shard_tensor(torch.ones(2), mesh, [Shard(0)])).full_tensor()
        tensor([2., 2.])
    """

    def __init__(self, out_dist_attrs: Sequence[tuple[ProcessMesh, Sequence[Placement]]]) -> None:
        super().__init__()
        if len({id(mesh) for mesh, _ in out_dist_attrs}) != 1:
            raise LayoutError("LocalLayer: want [(mesh, placements), ...] of one mesh, an entry for each output")
        self.out_dist_attrs = [(mesh, tuple(placements)) for mesh, placements in out_dist_attrs]

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """``forward`` of this rank's parts."""
        strange = [k for k, v in kwargs.items() if any(isinstance(x, DistTensor) for x in tree_leaves(v))]
        strange += [f"argument {i}" for i, v in enumerate(inputs) if not isinstance(v, Tensor) and _is_dist(v)]
        if strange:
            raise LayoutError(
                f"{type(self).__name__}: {strange[0]} holds a distributed tensor: give those as arguments by place, one each"
            )
        mesh = self.out_dist_attrs[0][0]
        elsewhere = [x for x in inputs if isinstance(x, DistTensor) and x.process_mesh is not mesh]
        if elsewhere:
            raise LayoutError(
                f"{type(self).__name__}: its outputs lie on {mesh!r}, and it is given {describe(elsewhere[0])}: "
                "oc.reshard(x, mesh, placements) first"
            )
        into = [x.placements if isinstance(x, DistTensor) else None for x in inputs if isinstance(x, Tensor)]
        outputs = [placements for _, placements in self.out_dist_attrs]
        return local_map(super().__call__, into, outputs[0] if len(outputs) == 1 else outputs, mesh)(*inputs, **kwargs)


def _is_dist(value: Any) -> bool:
    return any(isinstance(x, DistTensor) for x in tree_leaves(value))
