"""Where the model, the optimizers and the batch of an Engine lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.optim import Optimizer

from onecard.auto import swap
from onecard.comm.base.warned import warn
from onecard.comm.world import world
from onecard.engine.options import PIPELINE, axis_of, pipeline_degree, sharding_degree, stage_of
from onecard.engine.strategy import Strategy
from onecard.errors import EngineError, PlanError, StrategyError
from onecard.place.mesh import ProcessMesh
from onecard.planning.placements import DATA
from onecard.tensor import DistTensor, reshard, shard_tensor
from onecard.train import shard_optimizer
from onecard.train.unmade import is_unmade, wait

OTHERS = (*PIPELINE, "tp", "mp", "cp", "sp", "sep", "ep")


@dataclass(frozen=True)
class MeshPlace:
    """A mesh, and its axes that divide the batch; labels have their own where the model goes over several meshes."""

    mesh: ProcessMesh
    axes: tuple[str, ...]
    last: ProcessMesh
    device: torch.device | None = None  # of one rank's plain model: nothing is distributed

    @property
    def plain(self) -> bool:
        """Whether nothing is distributed."""
        return self.device is not None

    def placements(self, mesh: ProcessMesh, dims: int) -> list[Placement]:
        """Of a tensor of so many dims: its rows are cut."""
        return [Shard(0) if dims and name in self.axes else Replicate() for name in mesh.dim_names]

    def lay_out(self, x: Any, label: bool = False) -> Any:
        """A leaf of a batch: the same whole value on every rank, or what is distributed already."""
        if not isinstance(x, Tensor) or isinstance(x, DistTensor):
            return x
        if self.plain:
            return x.to(self.device)
        mesh = self.last if label else self.mesh
        return shard_tensor(x, mesh, self.placements(mesh, x.dim()))

    def read(self, x: Any, label: bool = False) -> Any:
        """A leaf that a loader has read, cut along the first axis."""
        if not isinstance(x, DistTensor):
            return x
        if self.plain:
            return x._local.to(self.device)
        wanted = self.placements(x.mesh, x.dim())
        return x if list(x.placements) == wanted else reshard(x, x.mesh, wanted)


def placed(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], strategy: Strategy) -> MeshPlace:
    """Lay modules and optimizers out; where the batch goes.

    A model without marks is copied to all ranks, which divide the batch; one with marks says itself. What is plain in it is
    the same on all ranks of its mesh. Parameters that others take the place of do so in the optimizers, too.

    Raises:
        StrategyError: degrees that do not fit the ranks, or the model's mesh.
    """
    ranks, model = world.get_world_size(), modules[0]
    meshes = list(dict.fromkeys(p.mesh for m in modules for p in m.parameters() if isinstance(p, DistTensor)))
    degree = pipeline_degree(strategy, ranks, meshes[0] if meshes else None)
    _check_pipeline(degree, ranks, meshes)
    deferred = any(is_unmade(p) for m in modules for p in m.parameters())
    if not meshes and ranks == 1 and not strategy.sharding.enable and not deferred:
        here = next((p.device for m in modules for p in m.parameters()), world.device())
        return MeshPlace(ProcessMesh([0], ["dp"]), (), ProcessMesh([0], ["dp"]), here)
    if not meshes and degree == ranks > 1 and _divides_nothing(strategy):  # each reads the whole batch
        wait(layer for module in modules for layer in module.modules())
        line = ProcessMesh(list(range(ranks)), ["pp"])
        return MeshPlace(line, (), line, next((p.device for p in model.parameters()), world.device()))
    mesh = meshes[0] if meshes else _mesh_of(strategy, ranks, degree)
    place = MeshPlace(mesh, _axes(mesh, modules), meshes[-1] if meshes else mesh)
    axis = _divided(strategy, place) if strategy.sharding.enable else ""
    if len(meshes) < 2:
        for module in modules:
            lay_out(module, mesh, optimizers, staged=degree > 1, zero=strategy.sharding.stage if axis else 0)
    for optimizer in optimizers:
        if not _is_laid_out(optimizer):
            shard_optimizer(optimizer, stage_of(strategy, mesh, axis, model))
        elif strategy.sharding.enable:
            raise EngineError(
                "Engine: the optimizer has been given to shard_optimizer already, and the strategy has sharding.enable=True: "
                "give the engine the plain optimizer, or sharding.enable=False"
            )
    return place


def _mesh_of(strategy: Strategy, ranks: int, stages: int) -> ProcessMesh:
    """Of all ranks, for a model without marks."""
    left = ranks // stages
    degree = sharding_degree(strategy) if strategy.sharding.enable else -1
    degree = left if degree == -1 else degree
    if left % degree:
        works = ", ".join(str(n) for n in range(1, left + 1) if left % n == 0)
        raise StrategyError(
            f"Strategy: sharding.degree={degree}: does not divide the {left} rank(s) of this world that divide the batch; "
            f"{works} do, -1 is all",
            "sharding.degree",
        )
    sizes = [("pp", stages)] * (stages > 1) + [("dp", left // degree if degree < left else left)]
    sizes += [("sharding", degree)] * (degree < left)
    return ProcessMesh(np.arange(ranks).reshape([size for _, size in sizes]), [name for name, _ in sizes])


def _divides_nothing(strategy: Strategy) -> bool:
    """Whether ZeRO has nothing to do where one rank reads the batch: it keeps float32 copies, or divides over others."""
    sharding, amp = strategy.sharding, strategy.amp
    return not sharding.enable or (sharding.degree in (-1, 1) and not (amp.enable and amp.level == "O2"))


def _check_pipeline(stages: int, ranks: int, meshes: Sequence[ProcessMesh]) -> None:
    """Whether as many ranks can be one behind the other."""
    if stages == 1:
        return
    axis = axis_of(meshes[0]) if len(meshes) == 1 else None
    if meshes and (axis is None or meshes[0].shape[meshes[0].axis(axis)] != stages):
        raise StrategyError(
            f"Strategy: pipeline.degree={stages}: the model's tensors lie on {', '.join(map(str, meshes))}; they need one mesh "
            f"with an axis 'pp' of {stages} ranks, along which nothing is cut",
            "pipeline.degree",
        )
    if ranks % stages:
        raise StrategyError(
            f"Strategy: pipeline.degree={stages}: does not divide the {ranks} rank(s) of this world", "pipeline.degree"
        )


def _axes(mesh: ProcessMesh, modules: Sequence[nn.Module]) -> tuple[str, ...]:
    """The axes that divide the batch: by their names, and those of other names along which no parameter is cut."""
    cut = set()
    for parameter in (p for m in modules for p in m.parameters() if isinstance(p, DistTensor) and p.mesh is mesh):
        cut |= {mesh.dim_names[axis] for axes in parameter._spec.layout.dims for axis in _numbers(axes)}
    return tuple(name for name in mesh.dim_names if name in DATA or (name not in OTHERS and name not in cut))


def _numbers(axes: Any) -> list[int]:
    """The axes of one dim of a layout, of merged parts too."""
    if isinstance(axes, int):
        return [axes]
    if hasattr(axes, "axes"):
        return _numbers(axes.axes)
    return [number for each in axes for number in _numbers(each)]


def _divided(strategy: Strategy, place: MeshPlace) -> str:
    """The axis along which ZeRO divides."""
    mesh, degree = place.mesh, sharding_degree(strategy)
    sizes = {name: mesh.shape[mesh.axis(name)] for name in place.axes}
    if not sizes:
        raise StrategyError(
            f"Strategy: sharding.enable=True: no axis of the model's mesh {mesh!r} divides the batch, whose ranks could share "
            "states: give the mesh an axis 'dp', or sharding.enable=False",
            "sharding.enable",
        )
    fits = [name for name, size in sizes.items() if degree in (-1, size)]
    if not fits:
        raise StrategyError(
            f"Strategy: sharding.degree={degree}: the model's mesh {mesh!r} divides the batch over "
            + ", ".join(f"{size} rank(s) along {name!r}" for name, size in sizes.items())
            + ": write one of these, or -1",
            "sharding.degree",
        )
    return fits[-1]


def _is_laid_out(optimizer: Optimizer) -> bool:
    """Whether it has been given to ``shard_optimizer``."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return any(getattr(hook, "__module__", "").startswith("onecard.train.zero") for hook in hooks)


def lay_out(
    module: nn.Module,
    mesh: ProcessMesh,
    optimizers: Sequence[Optimizer],
    where: swap.Where | None = None,
    staged: bool = False,
    zero: int = 0,
) -> None:
    """Lay a module out in place: who holds a parameter (lists, averages, optimizers) holds what lies on the mesh.

    Where a graph holds one nothing can take its place. What is there instead takes its place in optimizers, with its hooks,
    states and attributes.

    Args:
        where: the placements of the parameter of a name; None: all are the same on all ranks.
        staged, zero: as of ``swap.lay_out``.
    """
    before = dict(module.named_parameters(remove_duplicate=False))
    swap.lay_out(module, mesh, where or (lambda _: [Replicate()] * mesh.ndim), _told, staged, zero)
    after = dict(module.named_parameters(remove_duplicate=False))
    taken = {id(old): (old, after[name]) for name, old in before.items() if after[name] is not old}
    for old, new in taken.values():
        _carry_over(old, new)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [taken[id(p)][1] if id(p) in taken else p for p in group["params"]]
        for old, new in taken.values():
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)


def _told(name: str, fault: PlanError) -> None:
    warn(
        f"Engine: {name} is replaced by another object, so that lists of parameters which the program keeps hold the old one, "
        f"which is not trained: {fault}",
    )


def _carry_over(old: Any, new: Any) -> None:
    for name, value in vars(old).items():
        if name not in vars(new):
            setattr(new, name, value)
    for hook in (getattr(old, "_backward_hooks", None) or {}).values():
        new.register_hook(hook)
    for hook in (getattr(old, "_post_accumulate_grad_hooks", None) or {}).values():
        new.register_post_accumulate_grad_hook(hook)


def in_16_bits(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters of all but norms, whose statistics want float32."""
    batch = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    kept = (*batch, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    for module in model.modules():
        if not isinstance(module, kept):
            for p in module.parameters(recurse=False):
                if p.is_floating_point():
                    p.data = p.data.to(dtype)
