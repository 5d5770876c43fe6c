"""Plans of single layers, for the ``parallelize_plan`` of ``parallelize``: how parameters are cut, what happens around forward.

Source: ``paddle.distributed``'s classes of these names. Any plan gives one card's numbers: operators get what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from onecard.errors import LayoutError, PlanError
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor, reshard, shard_tensor

AXIS = "mp"


class LayerPlan:
    """What is done with one layer. Subclasses: those of this module."""

    def placements(self, layer: nn.Module, names: Iterable[str]) -> dict[str, Placement]:
        """For each parameter that is cut along mp, how; ``names``: those that the plan's key names, all it knows if none."""
        return {}

    def around(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        """Hooks of the layer's forward."""


class ColWiseParallel(LayerPlan):
    """Cut a linear layer's outputs, or an embedding's width: of ``nn.Linear`` the weight and bias along dim 0, of
    ``nn.Embedding`` the weight along dim 1.

    Args:
        gather_output: whether what it returns is brought to all ranks.

    Example:
        >>> ColWiseParallel().placements(nn.Linear(2, 4), ())
        {'weight': Shard(dim=0), 'bias': Shard(dim=0)}
    """

    def __init__(self, gather_output: bool = False) -> None:
        self.gather_output = gather_output

    def placements(self, layer: nn.Module, names: Iterable[str]) -> dict[str, Placement]:
        """Of matrices the outputs, of vectors their only dim."""
        found = _parameters(layer, names or ("weight", "bias"))
        return {n: Shard(1 if p.dim() > 1 and isinstance(layer, nn.Embedding) else 0) for n, p in found}

    def around(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        if self.gather_output:
            layer.register_forward_hook(lambda _, args, out: _of_first(out, lambda x: _whole(x, mesh, False)))


class RowWiseParallel(LayerPlan):
    """Cut a linear layer's inputs, or an embedding's rows: of ``nn.Linear`` the weight along dim 1, of ``nn.Embedding`` along
    dim 0. A bias is on all ranks.

    Args:
        is_input_parallel: False: what it is called with is cut first, as ``SequenceParallelBegin`` does.

    Example:
        >>> RowWiseParallel().placements(nn.Embedding(8, 4), ())
        {'weight': Shard(dim=0)}
    """

    def __init__(self, is_input_parallel: bool = True) -> None:
        self.is_input_parallel = is_input_parallel

    def placements(self, layer: nn.Module, names: Iterable[str]) -> dict[str, Placement]:
        """Of matrices the inputs."""
        found = _parameters(layer, [name for name in names if name != "bias"] or ("weight",))
        for name, p in found:
            if p.dim() != 2:
                raise LayoutError(
                    f"RowWiseParallel: cuts a matrix, and {name!r} of {type(layer).__name__} is {[*p.shape]}"
                )
        return {n: Shard(0 if isinstance(layer, nn.Embedding) else 1) for n, _ in found}

    def around(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        if not self.is_input_parallel:
            _before(layer, lambda x: _cut(x, mesh, False))


class PrepareLayerInput(LayerPlan):
    """A forward pre-hook: ``fn(process_mesh=mesh)`` returns it, and it is called with the layer and its inputs."""

    def __init__(self, fn: Callable[..., Callable[..., Any]]) -> None:
        self.fn = _callable(self, fn)

    def around(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        layer.register_forward_pre_hook(self.fn(process_mesh=mesh))


class PrepareLayerOutput(LayerPlan):
    """A forward hook: ``fn(process_mesh=mesh)`` returns it, and it is called with the layer, its inputs and its output."""

    def __init__(self, fn: Callable[..., Callable[..., Any]]) -> None:
        self.fn = _callable(self, fn)

    def around(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        layer.register_forward_hook(self.fn(process_mesh=mesh))


class _Transposes(LayerPlan):
    """Sequence parallel around a layer.

    Args:
        need_transpose: the program's values are (batch, time, width) outside, and (time, batch, width) while they are cut.
    """

    def __init__(self, need_transpose: bool = True) -> None:
        self.need_transpose = need_transpose


class SequenceParallelBegin(_Transposes):
    """After this layer, the last before them, layers compute a part of the time steps each.

    They see (time, batch, width), as in Paddle; (batch, time, width) with ``need_transpose=False``, which ``End`` is given, too.
    """

    def around(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        layer.register_forward_hook(lambda _, args, out: _of_first(out, lambda x: _cut(x, mesh, self.need_transpose)))


class SequenceParallelEnd(_Transposes):
    """From this layer on, the first after them, layers compute all time steps; ``need_transpose`` as ``Begin`` has it."""

    def around(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        _before(layer, lambda x: _whole(x, mesh, self.need_transpose))


def check_ends(plans: Iterable[LayerPlan]) -> None:
    """Refuse what ``Begin`` has turned and ``End`` does not turn back, or the other way round."""
    listed = [*plans]
    begins, ends = (
        {plan.need_transpose for plan in listed if isinstance(plan, kind)}
        for kind in (SequenceParallelBegin, SequenceParallelEnd)
    )
    if begins and ends and begins != ends:
        raise PlanError(
            f"SequenceParallelBegin(need_transpose={begins.pop()}) and SequenceParallelEnd(need_transpose={ends.pop()}): what "
            "leaves the last layer would be turned, against the labels. Give both the same"
        )


class SequenceParallelEnable(LayerPlan):
    """This layer alone computes a part of the time steps: called with (batch, time, width), it sees (time, batch, width)."""

    def around(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        _before(layer, lambda x: _cut(x, mesh, True))
        layer.register_forward_hook(lambda _, args, out: _of_first(out, lambda x: _whole(x, mesh, True)))


class SequenceParallelDisable(_Transposes):
    """This layer alone computes all time steps, among those that compute a part."""

    def around(self, layer: nn.Module, mesh: ProcessMesh) -> None:
        _before(layer, lambda x: _whole(x, mesh, self.need_transpose))
        layer.register_forward_hook(lambda _, args, out: _of_first(out, lambda x: _cut(x, mesh, self.need_transpose)))


def _parameters(layer: nn.Module, names: Iterable[str]) -> list[tuple[str, nn.Parameter]]:
    held = {name: layer._parameters.get(name) for name in names}
    return [(name, p) for name, p in held.items() if p is not None]


def _callable(plan: LayerPlan, fn: Any) -> Callable[..., Callable[..., Any]]:
    if not callable(fn):
        raise PlanError(f"{type(plan).__name__}: want a function of process_mesh that returns the hook, not {fn!r}")
    found: Callable[..., Callable[..., Any]] = fn
    return found


def _before(layer: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change the first tensor that a layer is called with, by place or by name."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            return _of_first(args, change), kwargs
        name = next((k for k, v in kwargs.items() if isinstance(v, Tensor)), None)
        if name is None:
            raise LayoutError(f"{type(module).__name__}: it is called with no tensor that could be cut or made whole")
        return args, {**kwargs, name: change(kwargs[name])}

    layer.register_forward_pre_hook(hook, with_kwargs=True)


def _of_first(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a layer is called with or returns, its first value changed."""
    return (change(value[0]), *value[1:]) if isinstance(value, tuple) else change(value)


def _cut(x: Any, mesh: ProcessMesh, transpose: bool) -> DistTensor:
    """Along time, on the axis mp: of (batch, time, width) dim 1 where the batch is known to be dim 0, else dim 0."""
    x = _laid_out(x, mesh)
    x = x.transpose(0, 1) if transpose else x
    placements = list(x.placements)
    batch_first = any(p == Shard(0) for i, p in enumerate(placements) if i != mesh.axis(AXIS))
    placements[mesh.axis(AXIS)] = Shard(1 if batch_first else 0)
    return reshard(x, mesh, placements)


def _whole(x: Any, mesh: ProcessMesh, transpose: bool) -> DistTensor:
    """The same on all ranks of the axis mp."""
    x = _laid_out(x, mesh)
    placements = list(x.placements)
    placements[mesh.axis(AXIS)] = Replicate()
    x = reshard(x, mesh, placements)
    return x.transpose(0, 1) if transpose else x


def _laid_out(x: Any, mesh: ProcessMesh) -> Any:
    if not isinstance(x, Tensor) or x.dim() != 3:
        what = f"{[*x.shape]}" if isinstance(x, Tensor) else type(x).__name__
        raise LayoutError(f"sequence parallel: want (batch, time, width), or (time, batch, width), not {what}")
    return x if isinstance(x, DistTensor) else shard_tensor(x, mesh, [Replicate()] * mesh.ndim)
