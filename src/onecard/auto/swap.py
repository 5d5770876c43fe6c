"""Parameters and buffers laid out where they are: whoever holds one holds what lies on the mesh from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard._torch import fakes
from onecard._torch.hooks import without_products
from onecard._torch.names import without_weak_weights
from onecard.errors import PlanError
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor, shard_tensor
from onecard.tensor.become import become
from onecard.train import shard_layer, unmade
from onecard.train.lazy import refuse_lazy

Where = Callable[[str], Sequence[Placement]]
"""The placements of the parameter of a name; buffers are the same on all ranks."""


def lay_out(
    module: nn.Module,
    mesh: ProcessMesh,
    where: Where,
    held: Callable[[str, PlanError], None] | None = None,
    staged: bool = False,
) -> None:
    """Lay a module out in place: each parameter and buffer stays the object that it is.

    Lists of parameters that a program keeps, optimizers with their states, hooks and attributes go on with what lies on the mesh.

    Args:
        module: its plain tensors are the same on all ranks; what is distributed already stays.
        held: is told of a tensor, by name, whose place nothing can take, and which is replaced; None: that is an error.
        staged: a pipeline will divide it: of a deferred model each rank makes its own stages' parts, when these are known.

    Raises:
        PlanError: a lazy layer, which has no parameters yet;
            a graph that autograd keeps holds a parameter, so that nothing can take its place.
    """
    refuse_lazy(module, "laying a model out", PlanError)
    first: dict[int, str] = {}
    with without_weak_weights(module), without_products(module):
        for name, tensor in _tensors(module):
            if id(tensor) in first or isinstance(tensor, DistTensor):
                continue
            first[id(tensor)] = name
            replicated = [Replicate()] * mesh.ndim
            try:
                _put(name, tensor, mesh, where(name) if isinstance(tensor, nn.Parameter) else replicated, staged)
            except PlanError as fault:
                if held is None:
                    raise
                held(name, fault)
    shard_layer(module, mesh)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _whole_if_one(tensor: Tensor, placement: Placement) -> Placement:
    """A dim of one element cannot be cut: operators take it whole, and each of its copies would be gathered."""
    dim = placement.dim if isinstance(placement, Shard) else None
    return Replicate() if dim is not None and tensor.ndim and tensor.shape[dim % tensor.ndim] == 1 else placement


def _put(name: str, tensor: Any, mesh: ProcessMesh, placements: Sequence[Placement], staged: bool) -> None:
    grad = tensor.grad
    fakes.unnoted(tensor)
    placements = [_whole_if_one(tensor, p) for p in placements]
    try:
        if staged and unmade.is_unmade(tensor):
            unmade.lay_out(tensor, Layout.of(mesh, tensor.dim(), placements, "lay_out"))
        else:
            become(tensor, shard_tensor(unmade.source(tensor), mesh, placements))
    except RuntimeError as fault:
        raise PlanError(
            f"{name}: a graph of autograd, or a weak reference, holds this parameter, so that its part cannot take its place. "
            "Lay the model out before its first forward with gradients; or drop the loss of an earlier one (del loss)"
        ) from fault
    if grad is not None:
        tensor.grad = shard_tensor(grad, mesh, placements)
