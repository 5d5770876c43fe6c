"""A plain tensor becomes a distributed one, and stays the object that it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate

from onecard._torch import names as _torch
from onecard._torch import patches
from onecard._torch.leaves import used_before
from onecard.errors import DispatchError
from onecard.place.mesh import ProcessMesh
from onecard.tensor.convert import checked, shard_tensor, told
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.moves import distribute


def taken(whole: Tensor, mesh: ProcessMesh, placements: Sequence[Placement]) -> DistTensor:
    """What takes a plain tensor's place, outside autograd: its memory, where a rank has all of it, so that views stay views."""
    made: DistTensor = told(whole, distribute(whole.detach(), checked(whole, mesh, placements, None), taken=True))
    return made


def become(tensor: Tensor, made: Tensor) -> None:
    """Whoever holds a plain tensor holds a distributed one from then on, with the same hooks and attributes; its gradient goes.

    Args:
        tensor: a leaf.
        made: distributed, outside autograd, of the same shape.

    Raises:
        RuntimeError: a graph of autograd, or a weak reference, holds the tensor.
    """
    taken: Any = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    if taken is made:
        taken.requires_grad_(tensor.requires_grad)
    of_tensor: Any = tensor  # a name that torch's own types leave out
    before, before_late = tensor._backward_hooks, of_tensor._post_accumulate_grad_hooks
    hooks, late = [*(before or {}).values()], [*(before_late or {}).values()]
    kept = {key: value for key, value in vars(tensor).items() if key not in vars(taken)}
    # Of the object, which stays: those registered again belong to what it becomes.
    tensor.grad = tensor._backward_hooks = of_tensor._post_accumulate_grad_hooks = None
    if isinstance(made, DistTensor):
        used_before(tensor, _was_used)
    try:
        torch.utils.swap_tensors(tensor, taken)
    except RuntimeError:
        tensor._backward_hooks, of_tensor._post_accumulate_grad_hooks = before, before_late
        raise
    vars(tensor).update({key: value for key, value in kept.items() if key not in vars(tensor)})
    for hook in hooks:
        tensor.register_hook(hook)
    for hook in late:
        tensor.register_post_accumulate_grad_hook(hook)


def _was_used(_: Any) -> None:
    raise DispatchError(
        "backward() comes to a parameter by a graph that was made before it became a distributed tensor (under run --auto the "
        "model's first forward makes it one): call the model before what else takes its parameters (a penalty on them), or lay "
        "it out ahead of the first step (onecard.parallelize)"
    )


def _assign(tensor: Any, value: Any) -> None:
    """``tensor.data = value``: torch would put a distributed tensor's inside into a plain object, and crash when it is used."""
    if not isinstance(value, DistTensor) or isinstance(tensor, DistTensor):
        taken = getattr(value, "taken_by", None) if type(value) not in (Tensor, nn.Parameter) else None
        _torch.set_data(tensor, value) if taken is None else taken(tensor)
        return
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise DispatchError(
            f"cannot assign {value._spec!r} to the data of a plain tensor of {[*tensor.shape]} {tensor.dtype}: "
            "want the same shape and dtype"
        )
    grad = tensor.grad
    try:
        become(tensor, value.detach())
    except RuntimeError as fault:
        tensor.grad = grad
        raise DispatchError(
            f"cannot assign {value._spec!r} to the data of a plain tensor of {[*tensor.shape]} "
            "that a graph of autograd, or a weak reference, holds. Copy into it: "
            "with torch.no_grad(): tensor.copy_(onecard.unshard(value))"
        ) from fault
    if grad is not None:
        mesh = value.mesh
        tensor.grad = shard_tensor(grad, mesh, [Replicate()] * mesh.ndim)


@patches.with_first_tensor
def _install() -> None:
    patches.replace("torch.Tensor.data", Tensor, "data", lambda torchs: property(torchs.__get__, _assign))
