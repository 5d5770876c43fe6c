"""shard_layer and shard_op: lay out a module's parameters, and the inputs and outputs of one call."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate
from torch.utils.weak import WeakIdKeyDictionary

from onecard._torch.names import tree_map
from onecard.comm.base import record
from onecard.errors import LayoutError, OnecardError
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor, reshard, shard_tensor
from onecard.train.common_memory import tell_parted
from onecard.train.lazy import refuse_lazy

# Plain tensors whose place distributed ones have taken, with their names and those (``weakref``): an optimizer that holds one
# trains nothing, and a layer that has one, too, is tied.
replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()

ShardFn = Callable[[str, nn.Module, ProcessMesh], None]


def shard_layer(
    module: nn.Module,
    mesh: ProcessMesh,
    shard_fn: ShardFn | None = None,
    input_fn: Callable[[Any, ProcessMesh], Any] | None = None,
    output_fn: Callable[[Any, ProcessMesh], Any] | None = None,
) -> nn.Module:
    """Lay out a module's parameters and buffers on a mesh, in place.

    Args:
        module: any module; its parameters hold the same whole values on every rank.
        mesh: where it goes.
        shard_fn: called as ``shard_fn(name, submodule, mesh)`` for the module (name "") and each submodule; it assigns
            what it wants cut: ``submodule.weight = oc.shard_tensor(submodule.weight, mesh, [oc.Shard(0)])``. What it
            leaves plain is replicated. A parameter or buffer that two modules share stays shared, so it has one layout.
        input_fn, output_fn: ``fn(inputs, mesh)`` and ``fn(outputs, mesh)``, run around each forward; they return what
            takes the place of the positional inputs (a tuple) and of the output.

    Returns:
        The module.

    Raises:
        LayoutError: placements that do not fit a tensor (a note names the submodule if ``shard_fn`` asked for them);
            ``shard_fn`` makes two of a parameter that modules share; a lazy layer, which has no parameters yet.
        CommunicationError: the mesh names ranks that the world does not have.

    Source: ``paddle.distributed.shard_layer``; ``distribute_module`` of PyTorch.

    Example:
        >>> layer = shard_layer(nn.Linear(2, 3), ProcessMesh([0], ["x"]))
        >>> layer.weight.placements
        (Replicate(),)
    """
    if not isinstance(module, nn.Module) or not isinstance(mesh, ProcessMesh):
        given = f"{type(module).__name__}, {type(mesh).__name__}"
        raise LayoutError(
            f"shard_layer({given}): want shard_layer(module, mesh, shard_fn): an nn.Module, then a ProcessMesh"
        )
    if shard_fn is not None and not callable(shard_fn):
        raise LayoutError(
            f"shard_layer: shard_fn is a {type(shard_fn).__name__}: want a function shard_fn(name, submodule, mesh) that assigns "
            "what is divided: submodule.weight = onecard.shard_tensor(submodule.weight, mesh, [onecard.Shard(0)])"
        )
    moved: dict[int, Any] = {}  # what has taken the place of a plain tensor, by its id
    kept: list[Any] = []  # the plain tensors, so that no id is used again
    refuse_lazy(module, "oc.shard_layer", LayoutError)
    tell_parted(module, "shard_layer")
    shared = _shared(module)
    for name, submodule in list(module.named_modules()):
        before: dict[str, Any] = {**submodule._parameters, **submodule._buffers}
        for key, tensor in before.items():
            if tensor is None:
                continue
            known = moved[id(tensor)] if id(tensor) in moved else _tied(tensor, mesh, f"{name}.{key}")
            if known is not None:
                setattr(submodule, key, known)
        _name_tensors(submodule, name)
        if shard_fn is not None:
            _run_shard_fn(shard_fn, name, submodule, mesh)
        _replicate(submodule, mesh)
        _name_tensors(submodule, name)
        for key, tensor in before.items():
            if tensor is not None and not isinstance(tensor, DistTensor):
                kept.append(tensor)
                moved[id(tensor)] = getattr(submodule, key)
                replaced[tensor] = f"{name}.{key}" if name else key, weakref.ref(moved[id(tensor)])
    _check_shared(module, shared)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda _, inputs: _as_tuple(input_fn(inputs, mesh)))
    if output_fn is not None:
        module.register_forward_hook(lambda _, inputs, outputs: output_fn(outputs, mesh))
    return module


def _tied(tensor: Tensor, mesh: ProcessMesh, name: str) -> Any:
    """What an earlier call has put in a parameter's place in another module: they were one, and are."""
    was, known = replaced.get(tensor, ("", lambda: None))
    made = known()
    if made is None or not isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
        return None
    if made.process_mesh is not mesh:
        raise LayoutError(
            f"shard_layer: {name.lstrip('.')!r} {list(tensor.shape)} is one parameter with {was!r}, which lies on "
            f"{made.process_mesh!r} already: on {mesh!r} as well it would be a second one, trained apart. Lay both out on one "
            "mesh, and bring the weight to where it is used: linear(x, oc.reshard(layer.weight, mesh, placements)), whose "
            "gradient comes back to it"
        )
    return made


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _shared(module: nn.Module) -> list[list[str]]:
    """The names of each parameter and buffer that has several."""
    names: dict[int, list[str]] = {}
    for name, tensor in _named(module).items():
        names.setdefault(id(tensor), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _check_shared(module: nn.Module, shared: Sequence[Sequence[str]]) -> None:
    """What was one parameter before is one now."""
    now: dict[str, Any] = _named(module) if shared else {}
    for first, *others in shared:
        for other in others:
            if first in now and other in now and now[first] is not now[other]:
                raise LayoutError(
                    f"shard_layer: {first!r} and {other!r} were one tensor, and shard_fn made two of it, "
                    f"{list(now[first].placements)} and {list(now[other].placements)}, which would be trained apart. Give "
                    "both names the same placements, or leave alone what is distributed already: "
                    "if isinstance(parameter, oc.DistTensor): continue"
                )


def _run_shard_fn(shard_fn: ShardFn, name: str, submodule: nn.Module, mesh: ProcessMesh) -> None:
    try:
        shard_fn(name, submodule, mesh)
    except OnecardError as fault:
        fault.add_note(f"shard_layer: in shard_fn, for submodule {name!r} ({type(submodule).__name__})")
        raise


def _name_tensors(module: nn.Module, prefix: str) -> None:
    """Let messages and the debug check call a module's own parameters and buffers by their names."""
    for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
        for key, tensor in tensors.items():
            if tensor is not None:
                record.name(tensor, f"{kind} {prefix}.{key}" if prefix else f"{kind} {key}")


def _replicate(module: nn.Module, mesh: ProcessMesh) -> None:
    """Replicate the parameters and buffers of a module itself that are still plain."""
    everywhere = [Replicate()] * mesh.ndim
    for key, param in module._parameters.items():
        if param is not None and not isinstance(param, DistTensor):
            module._parameters[key] = shard_tensor(param, mesh, everywhere)  # type: ignore[assignment]
    for key, buffer in module._buffers.items():
        if buffer is not None and not isinstance(buffer, DistTensor):
            module._buffers[key] = shard_tensor(buffer, mesh, everywhere)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def shard_op(
    op: Callable[..., Any],
    mesh: ProcessMesh,
    in_placements: Sequence[Any] | None = None,
    out_placements: Sequence[Any] | None = None,
) -> Callable[..., Any]:
    """A callable that runs ``op`` on inputs laid out as told, and lays out its outputs.

    Args:
        op: a function or module of tensors.
        mesh: where it runs.
        in_placements: one entry for each tensor among the positional arguments: placements, a dims mapping
            (``[None, "mp"]``), or None to leave it as it is. Left out: plain tensors are replicated.
        out_placements: likewise for the outputs.

    Returns:
        A function with the arguments and results of ``op``; differentiable.

    Raises:
        LayoutError: more or fewer entries than tensors.

    Source: ``paddle.distributed.shard_op``.

    Example:
        >>> import torch
        >>> mesh = ProcessMesh([0], ["mp"])
        >>> shard_op(torch.matmul, mesh, [["mp", None], None])(torch.ones(2, 2), torch.ones(2, 2)).placements
        (Shard(dim=0),)
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        laid_out = _lay_out(args, mesh, in_placements, "in_placements")
        result = op(*laid_out, **kwargs)
        if out_placements is None:
            return result
        if isinstance(result, Tensor):
            return _lay_out((result,), mesh, _for_one(out_placements), "out_placements")[0]
        return type(result)(_lay_out(tuple(result), mesh, out_placements, "out_placements"))

    return run


def _for_one(placements: Sequence[Any]) -> Sequence[Any]:
    """``[Shard(0)]`` for a single output means ``[[Shard(0)]]``."""
    plain = all(p is None or isinstance(p, str | Placement) for p in placements)
    return [placements] if plain and any(p is not None for p in placements) else placements


def _lay_out(values: tuple[Any, ...], mesh: ProcessMesh, placements: Sequence[Any] | None, what: str) -> list[Any]:
    if placements is None:
        return [tree_map(lambda v: _on_mesh(v, mesh), value) for value in values]
    tensors = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
    if len(placements) != len(tensors):
        raise LayoutError(
            f"shard_op: {len(placements)} entries in {what} for {len(tensors)} tensor(s); give one for each, None to "
            "leave a tensor as it is"
        )
    result = list(values)
    for i, wanted in zip(tensors, placements, strict=True):
        result[i] = _on_mesh(values[i], mesh) if wanted is None else reshard(values[i], mesh, wanted)
    return result


def _on_mesh(value: Any, mesh: ProcessMesh) -> Any:
    if isinstance(value, DistTensor):
        return value if value.mesh is mesh else reshard(value, mesh, [Replicate()] * mesh.ndim)
    return shard_tensor(value, mesh, [Replicate()] * mesh.ndim) if isinstance(value, Tensor) else value
