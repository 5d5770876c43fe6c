"""Stages of a pipeline, named by layers: which lies where, and what is called on another stage's values brings them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from torch import nn
from torch.distributed.tensor import Partial, Replicate

from onecard._torch.names import tree_map
from onecard.errors import PlanError
from onecard.place.mesh import ProcessMesh
from onecard.tensor import DistTensor, reshard

AXIS = "pp"


class SplitPoint(Enum):
    """Where a stage begins or ends, by a layer's name. Source: ``paddle.distributed.SplitPoint``."""

    BEGINNING = 0
    END = 1


def stages_of(model: nn.Module, config: Mapping[str, Any], mesh: ProcessMesh) -> dict[str, int]:
    """The stage of each module, by its name; modules are in the order of ``named_modules``, the model itself is of the first.

    Raises:
        PlanError: names that are no layers, another number of stages than the mesh has, layers that do not divide evenly.
    """
    if AXIS not in mesh.dim_names:
        raise PlanError(f"pp_config: {mesh!r} has no axis {AXIS!r} for the stages")
    known, count = [name for name, _ in model.named_modules()][1:], mesh.get_dim_size(AXIS)
    split = config.get("split_spec")
    points = split if isinstance(split, Mapping) else _even([split] if isinstance(split, str) else split, known, count)
    begins = {_begin(name, point, known) for name, point in points.items()}
    if len(begins) != count - 1:
        raise PlanError(
            f"pp_config: split_spec makes {len(begins) + 1} stages, and the axis {AXIS!r} of the mesh has {count}"
        )
    found, stage = {"": 0}, 0
    for name in known:
        stage += name in begins
        found[name] = stage
    return found


def _even(prefixes: Any, known: list[str], count: int) -> dict[str, SplitPoint]:
    """As many layers to each stage, of the lists that are named."""
    if not isinstance(prefixes, list | tuple):
        raise PlanError(
            f'pp_config: split_spec: want a name, as "model.layers", or {{name: SplitPoint.END}}, not {prefixes!r}'
        )
    layers = [name for name in known if any(re.fullmatch(rf"{prefix}\.\d+", name) for prefix in prefixes)]
    if not layers or len(layers) % count:
        raise PlanError(
            f"pp_config: split_spec={prefixes!r} names {len(layers)} layers, which {count} stages do not divide evenly; name the "
            "places: {'model.layers.3': SplitPoint.END}"
        )
    share = len(layers) // count
    return {layers[i * share - 1]: SplitPoint.END for i in range(1, count)}


def _begin(name: str, point: Any, known: list[str]) -> str:
    """The first module of the stage that a split point opens."""
    if name not in known or not isinstance(point, SplitPoint):
        raise PlanError(
            f"pp_config: split_spec: {name!r}: {point!r}: want a layer's name and SplitPoint.BEGINNING or END"
        )
    if point is SplitPoint.BEGINNING:
        return name
    after = known[known.index(name) + 1 :]
    found = next((other for other in after if not other.startswith(f"{name}.")), None)
    if found is None:
        raise PlanError(f"pp_config: split_spec: nothing comes behind {name!r}, so that no stage begins there")
    return found


def meshes(mesh: ProcessMesh) -> list[ProcessMesh]:
    """Each stage's ranks."""
    return [mesh.get_mesh_with_dim(AXIS, i) for i in range(mesh.get_dim_size(AXIS))]


def whole_in_one(model: nn.Module, stages: Mapping[str, int]) -> Iterator[tuple[str, nn.Module, int]]:
    """Each module of which all parts lie on one stage."""
    for name, module in model.named_modules():
        inside = {stage for other, stage in stages.items() if other == name or not name or other.startswith(f"{name}.")}
        if len(inside) == 1:
            yield name, module, inside.pop()


def bring(module: nn.Module, mesh: ProcessMesh) -> None:
    """What a module is called with comes to its stage, where it is not there yet."""

    def moved(x: Any) -> Any:
        if not isinstance(x, DistTensor) or x.process_mesh is mesh:
            return x
        had = dict(zip(x.process_mesh.dim_names, x.placements, strict=True))
        there = [had.get(name, Replicate()) for name in mesh.dim_names]
        return reshard(x, mesh, [Replicate() if isinstance(p, Partial) else p for p in there])

    def hook(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        found: tuple[Any, Any] = tree_map(moved, (args, kwargs))
        return found

    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
