"""Resuming: what is loaded takes the layout of what it is loaded into, so that a resumed run is the one that was stopped.

torch loads an optimizer's states as they come, and a module's with ``assign=True``. Plain whole tensors, which is what files
hold, would stay whole on every rank: right numbers, no memory saved, and a message for each of them in every step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from onecard.comm.base import record
from onecard.place.layout import Layout
from onecard.tensor import DistTensor, reshard
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.moves import Reshard
from onecard.tensor.spec import Spec, contiguous_stride

ShardState = Callable[[str, Any, Any], Any]

# Scalars that torch's optimizers count with. They stay plain, also beside a parameter that is a scalar itself.
_COUNTERS = {"step", "eta", "mu", "mu_product"}
_seen: WeakKeyDictionary[Optimizer, Any] = (
    WeakKeyDictionary()
)  # the states that were looked through: loading makes others


# How ``shard_optimizer`` was told to lay out the states of an optimizer.
sharders: WeakKeyDictionary[Optimizer, ShardState] = WeakKeyDictionary()


def place_for(
    optimizer: Optimizer, key: str, param: Any, there: Any, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Where a state of this shape is loaded to: into the tensor that is there, or a new one in the layout that it is to have.

    Example:
        >>> weight = torch.ones(3)
        >>> place_for(torch.optim.SGD([weight]), "momentum_buffer", weight, None, (3,), torch.float32).shape
        torch.Size([3])
    """
    if isinstance(there, Tensor) and there.shape == tuple(shape) and there.dtype == dtype:
        return there
    if not isinstance(param, DistTensor) or not shape:
        device = param.device if len(shape) else "cpu"  # counters, which torch keeps there
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    alike = tuple(shape) == tuple(param.shape)
    layout = param._spec.layout.reduced() if alike else _reduced(param._spec.layout, param.shape, shape)
    made = _blank(shape, dtype, layout, param)
    return sharders[optimizer](key, param, made) if alike and optimizer in sharders else made


def _blank(shape: Sequence[int], dtype: torch.dtype, layout: Layout, param: DistTensor) -> DistTensor:
    size = torch.Size(shape)
    spec = Spec.make(layout, size, contiguous_stride(size), dtype, param.device)
    local = param._local.new_zeros(layout.local_shape(size) if spec.here else (0,), dtype=dtype)
    return wrap(local, spec)


def lay_out_states(optimizer: Optimizer, shard_fn: ShardState | None = None) -> None:
    """Give the states of distributed parameters their parameter's layout, or the one that ``shard_fn`` gives.

    Rows and columns (Adafactor) are cut as the parameter is along what they have of it, tensors of another shape (the history
    of LBFGS) are replicated, counters stay plain.
    """
    _seen[optimizer] = optimizer.state
    for param, state in optimizer.state.items():
        if isinstance(param, DistTensor):
            for key, value in state.items():
                if is_like(param, key, value):
                    state[key] = shard_fn(key, param, _first(value, param)) if shard_fn else lay_out_as(value, param)
                else:
                    state[key] = _on_mesh(value, param)


def is_like(param: Any, key: Any, value: Any) -> bool:
    """Whether a state belongs to its parameter element by element.

    Example:
        >>> weight = torch.ones(3)
        >>> is_like(weight, "exp_avg", torch.zeros(3)), is_like(weight, "step", torch.tensor(1.0))
        (True, False)
    """
    return isinstance(value, Tensor) and value.shape == param.shape and not (value.dim() == 0 and key in _COUNTERS)


def lay_out_loaded(optimizer: Optimizer, args: Any = (), kwargs: Any = None) -> None:
    """Before a step: lay out the states, if they have been loaded since the last one."""
    if _seen.get(optimizer) is not optimizer.state:
        lay_out_states(optimizer)


def _first(value: Tensor, param: DistTensor) -> Tensor:
    """A state for ``shard_fn``: as a first step makes it, like its parameter; what lies on the mesh may lie as it does."""
    return value if isinstance(value, DistTensor) and value.mesh is param.mesh else lay_out_as(value, param)


def _on_mesh(value: Any, param: DistTensor) -> Any:
    if isinstance(value, list):
        return [_on_mesh(item, param) for item in value]
    if not isinstance(value, Tensor) or isinstance(value, DistTensor) or value.dim() == 0:
        return value
    return lay_out_with(value, _reduced(param._spec.layout, param.shape, value.shape))


def _reduced(layout: Layout, shape: Sequence[int], other: Sequence[int]) -> Layout:
    """The layout of a tensor that was made of one of another shape: cut along the dims that it has whole."""
    if len(shape) != len(other):
        return Layout.replicated(layout.mesh, len(other))
    dims = [axes if n == m else () for axes, n, m in zip(layout.dims, shape, other, strict=True)]
    return Layout.make(layout.mesh, tuple(dims))


def lay_out_as(value: Tensor, like: DistTensor) -> DistTensor:
    """A tensor under the layout of another one of its shape; itself if it has it. Outside autograd.

    Example:
        >>> from onecard import ProcessMesh, Shard, shard_tensor
        >>> like = shard_tensor(torch.ones(4), ProcessMesh([0], ["x"]), [Shard(0)])
        >>> lay_out_as(torch.zeros(4), like).placements
        (Shard(dim=0),)
    """
    return lay_out_with(value, like._spec.layout.reduced())


def lay_out_with(value: Tensor, layout: Layout) -> DistTensor:
    """A tensor under a layout. Outside autograd."""
    if isinstance(value, DistTensor) and value._spec.layout is layout:
        return value
    moved: Any = reshard(value.detach(), layout.mesh, layout.placements)  # type: ignore[arg-type]
    return moved if moved._spec.layout is layout else Reshard.apply(moved, layout)  # an order of axes of its own


_load_state_dict = nn.Module.load_state_dict


def load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
    """``nn.Module.load_state_dict``, which keeps the layouts of distributed parameters and buffers."""
    targets = {name: t for name, t in _named(module) if isinstance(t, DistTensor)}
    if targets and isinstance(state_dict, Mapping):
        state_dict = _laid_out(state_dict, targets, assign)
    return _load_state_dict(module, state_dict, strict, assign)


def _named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _laid_out(state_dict: Mapping[str, Any], targets: dict[str, DistTensor], assign: bool) -> OrderedDict[str, Any]:
    """A state dict whose tensors lie as their targets do: those that take their place, and those of other meshes.

    A plain tensor that is copied needs nothing: each rank takes its part of it. What does not fit is left for torch to say.
    """
    made: OrderedDict[str, Any] = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        made._metadata = state_dict._metadata  # type: ignore[attr-defined]
    twins: dict[Any, Any] = {}  # tensors that share memory go on sharing it
    for name, target in targets.items():
        value = made.get(name)
        if not isinstance(value, Tensor) or value.shape != target.shape:
            continue
        if assign:
            made[name] = _in_place_of(target, value, twins)
        elif isinstance(value, DistTensor):
            made[name] = lay_out_as(value, target)
    return made


def _in_place_of(target: DistTensor, value: Tensor, twins: dict[Any, Any]) -> Tensor:
    if value.is_meta:
        return value
    memory = (
        value.untyped_storage().data_ptr(),
        value.storage_offset(),
        value.stride(),
        value.shape,
        target._spec.layout,
    )
    laid_out = lay_out_as(value, target)._alias() if memory not in twins else twins[memory]._alias()
    twins.setdefault(memory, laid_out)
    made = nn.Parameter(laid_out, target.requires_grad) if isinstance(target, nn.Parameter) else laid_out
    if words := record.words_of(target):
        record.name(made, words)
    return made
