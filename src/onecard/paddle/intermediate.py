"""``parallelize`` with Paddle's ``config``: a plain model and optimizer laid out by a dict of plans, one for each layer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement, Replicate
from torch.optim import Optimizer

from onecard.auto.apply import STAGES
from onecard.auto.swap import lay_out
from onecard.comm.base.warned import warn
from onecard.errors import PlanError
from onecard.paddle import layer_plans, split_points
from onecard.paddle.layer_plans import LayerPlan
from onecard.paddle.ranks import get_mesh, set_mesh
from onecard.place.mesh import ProcessMesh
from onecard.train import ShardingStage3, shard_optimizer

_KEYS = {
    "dp_config": ("sharding_level", "sharding_mesh_dim"),
    "mp_config": ("parallelize_plan",),
    "pp_config": ("split_spec", "global_spec"),
}


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    mesh: ProcessMesh | None = None,
    config: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[nn.Module, Optimizer | None]:
    """Lay a plain model and its optimizer out by a ``config``, in place; batches by ``oc.shard_dataloader``.

    Args:
        model: plain, the same on all ranks, before its first forward with gradients.
        optimizer: of its parameters, made before or after.
        mesh: with the axes that the config needs of "dp", "mp", "pp"; what ``set_mesh`` was given if left out.
        config: any of ``dp_config`` {"sharding_level": 0 to 3}, ZeRO; ``mp_config`` {"parallelize_plan": {name: a plan or a
            list of them}}, a name of a layer or of a parameter, a regular expression of all of it; ``pp_config``
            {"split_spec": a list of layers by name, or {name: SplitPoint.END}}. ``global_spec`` is not needed: what a stage
            is called with is brought to it.

    Returns:
        (model, optimizer), the same objects.

    Raises:
        PlanError: keys, names or degrees that do not fit; two plans for one parameter; no mesh.
        LayoutError: a plan that does not fit its layer.

    Source: ``paddle.distributed.parallelize``; ``oc.parallelize`` finds a plan, or takes an ``oc.Plan``.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> plan = {"0": layer_plans.ColWiseParallel(), "2": layer_plans.RowWiseParallel()}
        >>> model, _ = parallelize(model, mesh=ProcessMesh([0], ["mp"]), config={"mp_config": {"parallelize_plan": plan}})
        >>> model[0].weight.placements, model[2].weight.placements, model[2].bias.placements
        ((Shard(dim=0),), (Shard(dim=1),), (Replicate(),))
    """
    if config is None:
        raise PlanError(
            'parallelize: no config, as {"mp_config": {"parallelize_plan": {...}}}; oc.parallelize finds a plan'
        )
    _check(config)
    if mesh is not None:
        set_mesh(mesh)
    mesh = get_mesh()
    if mesh is None:
        raise PlanError("parallelize: no mesh: parallelize(..., mesh=mesh), or set_mesh(mesh) before")
    level, axis = _level(config.get("dp_config", {}), mesh)
    pipeline, plans = config.get("pp_config"), config.get("mp_config", {}).get("parallelize_plan", {})
    if plans and layer_plans.AXIS not in mesh.dim_names:
        raise PlanError(f"mp_config: {mesh!r} has no axis {layer_plans.AXIS!r} along which layers could be cut")
    if pipeline is None:
        stages, places = dict.fromkeys((name for name, _ in model.named_modules()), 0), [mesh]
    else:
        stages, places = split_points.stages_of(model, pipeline, mesh), split_points.meshes(mesh)
        _check_tied(model, stages)
    found = _matched(model, plans)
    layer_plans.check_ends(plan for _, _, plan, _ in found)
    _lay_out(model, stages, places, _placements(found))
    for name, layer, plan, _ in found:
        plan.around(layer, places[stages[name]])
    if pipeline is not None:
        for _, module, stage in split_points.whole_in_one(model, stages):
            split_points.bring(module, places[stage])
    if optimizer is not None:
        _shard(optimizer, model, mesh, level, axis)
    return model, optimizer


def _check(config: Mapping[str, Mapping[str, Any]]) -> None:
    for part, held in config.items():
        if part not in _KEYS:
            raise PlanError(f"parallelize: config[{part!r}]: it may have {', '.join(_KEYS)}")
        strange = [key for key in held if key not in _KEYS[part]]
        if strange:
            raise PlanError(f"parallelize: config[{part!r}][{strange[0]!r}]: it may have {', '.join(_KEYS[part])}")


_Found = tuple[str, nn.Module, LayerPlan, dict[str, Placement]]


def _matched(model: nn.Module, plans: Mapping[str, Any]) -> list[_Found]:
    """Each layer of each key, with its plan and the placements that it asks for."""
    found = list[_Found]()
    modules = dict(model.named_modules())
    for key, given in plans.items():
        wanted = list(given) if isinstance(given, Sequence) else [given]
        if not all(isinstance(plan, LayerPlan) for plan in wanted):
            raise PlanError(f"mp_config: {key!r}: {given!r}: want a plan, as ColWiseParallel(), or a list of them")
        layers = [(name, ()) for name in modules if re.fullmatch(key, name)] or _by_parameter(modules, key)
        if not layers:
            text = f"parallelize: mp_config: {type(model).__name__} has no layer {key!r}: nothing is done for it"
            warn(text)
        found += [(name, modules[name], p, p.placements(modules[name], own)) for name, own in layers for p in wanted]
    return found


def _by_parameter(modules: Mapping[str, nn.Module], key: str) -> list[tuple[str, tuple[str, ...]]]:
    """Layers of a key that names a parameter: "lm_head.weight"."""
    of_layer, _, parameter = key.rpartition(".")
    names = [name for name in modules if re.fullmatch(of_layer, name)]
    return [(name, (parameter,)) for name in names if modules[name]._parameters.get(parameter) is not None]


def _placements(found: Sequence[_Found]) -> dict[str, Placement]:
    """By the whole name of a parameter."""
    cut = dict[str, Placement]()
    for name, _, _, wanted in found:
        for parameter, placement in wanted.items():
            whole = f"{name}.{parameter}".lstrip(".")
            if cut.setdefault(whole, placement) != placement:
                raise PlanError(
                    f"mp_config: two plans for {whole!r}, one cuts it as {cut[whole]}, the other as {placement}"
                )
    return cut


def _lay_out(
    model: nn.Module, stages: Mapping[str, int], places: Sequence[ProcessMesh], cut: Mapping[str, Placement]
) -> None:
    """Each module's own tensors on its stage's mesh. Those of later modules are there already when a module's turn comes."""

    def where(name: str, prefix: str, mesh: ProcessMesh) -> list[Placement]:
        asked = cut.get(f"{prefix}.{name}".lstrip("."), Replicate())
        return [asked if axis == layer_plans.AXIS else Replicate() for axis in mesh.dim_names]

    for prefix, module in reversed([*model.named_modules()]):
        mesh = places[stages[prefix]]
        lay_out(module, mesh, lambda name, prefix=prefix, mesh=mesh: where(name, prefix, mesh))  # type: ignore[misc]


def _check_tied(model: nn.Module, stages: Mapping[str, int]) -> None:
    """One parameter lies on one stage."""
    first = dict[int, str]()
    for name, p in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(p), name)
        if stages[name.rpartition(".")[0]] != stages[other.rpartition(".")[0]]:
            raise PlanError(
                f"pp_config: {other!r} and {name!r} are one parameter, and would lie on two stages: split so "
                "that both are on one, or cut a recorded step, which takes tied weights: oc.Engine with strategy.pipeline"
            )


def _level(config: Mapping[str, Any], mesh: ProcessMesh) -> tuple[int, str]:
    """The stage of ZeRO, and along which axis."""
    level, axis = int(config.get("sharding_level", 0)), config.get("sharding_mesh_dim") or "dp"
    if level not in (0, *STAGES):
        raise PlanError(f"dp_config: sharding_level={level}: want 0, 1, 2 or 3")
    if level and axis not in mesh.dim_names:
        raise PlanError(f"dp_config: sharding_level={level}: {mesh!r} has no axis {axis!r} to divide states along")
    return level, axis


def _shard(optimizer: Optimizer, model: nn.Module, mesh: ProcessMesh, level: int, axis: str) -> None:
    if level == 3 and split_points.AXIS not in mesh.dim_names:
        shard_optimizer(optimizer, ShardingStage3(axis, mesh, model=model))
    else:
        shard_optimizer(optimizer, STAGES[level](axis) if level else None)
