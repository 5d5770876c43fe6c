"""Parameters and buffers laid out where they are: whoever holds one holds what lies on the mesh from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard._torch import fakes
from onecard._torch.hooks import without_products
from onecard._torch.names import without_weak_weights
from onecard.comm.base.warned import warn
from onecard.errors import PlanError
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor, shard_tensor
from onecard.tensor.aliasing.memory import users
from onecard.tensor.become import become, taken
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
    zero: int = 0,
    on: Callable[[str], ProcessMesh] | None = None,
) -> None:
    """Lay a module out in place: each parameter and buffer stays the object that it is.

    Lists of parameters that a program keeps, optimizers with their states, hooks and attributes go on with what lies on the mesh.

    Args:
        module: its plain tensors are the same on all ranks; what is distributed already stays.
        held: is told of a tensor, by name, whose place nothing can take, and which is replaced; None: that is an error.
        staged: a pipeline will divide it: of a deferred model each rank makes its own stages' parts, when these are known.
        zero: the stage that will divide what is whole until then: gradients, of stage 3 parameters, too.
        on: where the tensor of a name lies instead, of a pipeline whose stages have meshes of their own.

    Raises:
        PlanError: a lazy layer, which has no parameters yet;
            a graph that autograd keeps holds a parameter, so that nothing can take its place.
    """
    torch.clear_autocast_cache()  # casts of a forward that only looked refer to the parameters
    refuse_lazy(module, "laying a model out", PlanError)
    first = dict[int, str]()
    with without_weak_weights(module), without_products(module):
        shared = _shared(module)
        for name, tensor in _tensors(module):
            if id(tensor) in first or isinstance(tensor, DistTensor):
                continue
            first[id(tensor)] = name
            place = mesh if on is None else on(name)
            try:
                ways = where(name) if isinstance(tensor, nn.Parameter) else [Replicate()] * place.ndim
                _put(name, tensor, place, ways, staged, zero, name in shared)
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


_APART = (
    "something else has this tensor's memory, which was taken before the model was laid out (p.data, p.detach().numpy(), "
    "state_dict(), a view of a vector of all parameters, another parameter's data). It keeps the old memory: it does not see "
    "what is trained, and what is written to it is not seen by the model. Take it after the model's first step, or keep this "
    "parameter whole on each rank (a plan without tp here, and with zero < 3)"
)


def _shared(module: nn.Module) -> set[str]:
    """The tensors whose memory something else has, too: a view, an array, another parameter in the same place."""
    found, owners = set[str](), dict[int, dict[int, tuple[str, Any]]]()
    for name, x in _tensors(module):
        if (
            type(x) in (Tensor, nn.Parameter, nn.Buffer)
            and not x.is_meta
            and x.layout is torch.strided
            and not fakes.is_fake(x)
        ):
            owners.setdefault(_memory(x), {}).setdefault(id(x), (name, x))
    for owned in owners.values():
        each = [*owned.values()]
        spans = sorted((x.storage_offset(), x.storage_offset() + _extent(x)) for _, x in each)
        apart = all(a[1] <= b[0] for a, b in pairwise(spans))  # as the weights of a recurrent layer on a GPU
        if not apart or users(each[0][1]) > len(each):
            found |= {name for name, _ in each}
    return found


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _extent(x: Tensor) -> int:
    """How many elements of memory a tensor reaches over."""
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _put(
    name: str,
    tensor: Any,
    mesh: ProcessMesh,
    placements: Sequence[Placement],
    staged: bool,
    zero: int,
    shared: bool,
) -> None:
    grad = tensor.grad
    fakes.unnoted(tensor)
    placements = [_whole_if_one(tensor, p) for p in placements]
    leaves = staged or (zero == 3 and isinstance(tensor, nn.Parameter))
    lay = shard_tensor if leaves else taken
    try:
        if staged and unmade.is_unmade(tensor):
            unmade.lay_out(tensor, Layout.of(mesh, tensor.dim(), placements, "lay_out"))
        else:
            made: Any = lay(unmade.source(tensor), mesh, placements)
            if shared and _memory(made._local) != _memory(tensor):
                warn(f"{name}: {_APART}")
            become(tensor, made)
    except RuntimeError as fault:
        raise PlanError(
            f"{name}: a graph of autograd, or a weak reference, holds this parameter, so that its part cannot take its place. "
            "Lay the model out before its first forward with gradients; or drop the loss of an earlier one (del loss)"
        ) from fault
    if grad is not None:
        if (leaves or zero) and users(grad) > 1:
            warn(f"the gradient of {name}: {_APART}")
        tensor.grad = lay(grad, mesh, placements)
