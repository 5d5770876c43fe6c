"""Which stage of a pipeline has which tensor of a plain model, and on which ranks each stage lies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from torch import nn

from onecard.errors import PlanError
from onecard.fleet.layers.segments import balanced, uniform
from onecard.place.mesh import ProcessMesh
from onecard.planning.fold import block_paths
from onecard.planning.plan import Plan

AXIS = "pp"


def meshes(mesh: ProcessMesh) -> list[ProcessMesh]:
    """Each stage's ranks, of a mesh with an axis "pp"; of one rank a mesh with the axis "dp"."""
    count = mesh.get_dim_size(AXIS)
    if mesh.ndim > 1:
        return [mesh.get_mesh_with_dim(AXIS, i) for i in range(count)]
    return [ProcessMesh([rank], ["dp"]) for rank in mesh.process_ids]


def stages_of(model: nn.Module, plan: Plan) -> dict[str, int | None]:
    """The stage of each parameter and buffer of a model, by its first name; None: every stage has it.

    Stages begin at blocks (``plan.stages`` counts them), what stands before the first block is the first stage's, what stands
    behind the last one the last stage's, in the order in which the model names them. Where a model has no blocks, or fewer than
    stages, its layers are divided, so that parameters are about equally many. A buffer beside no parameter, which is in no block,
    is the same on every stage: a table of positions.

    Raises:
        PlanError: fewer layers than stages; ``plan.stages`` counts other blocks.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        >>> stages_of(model, Plan(pp=2))
        {'0.weight': 0, '0.bias': 0, '2.weight': 1, '2.bias': 1}
    """
    blocks = _of_blocks(model, plan) or _of_layers(model, plan)
    found = dict[str, int | None]()
    at, count = 0, plan.pp
    owners = dict(model.named_modules(remove_duplicate=False))
    for name in _names(model):
        path = name.rpartition(".")[0]
        inside = next((blocks[head] for head in _heads(path) if head in blocks), None)
        at = at if inside is None else inside
        trained = any(p is not None for p in owners[path]._parameters.values())
        shared = inside is None and not trained and "running_mean" not in owners[path]._buffers  # which a norm writes
        found[name] = None if shared else min(at, count - 1)
    return found


def _names(model: nn.Module) -> Iterator[str]:
    """Parameters and buffers in the order of the modules that have them."""
    for path, module in model.named_modules(remove_duplicate=False):
        for key in (*module._parameters, *module._buffers):
            yield f"{path}.{key}" if path else key


def _heads(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _of_blocks(model: nn.Module, plan: Plan) -> dict[str, int]:
    """The stages of a model's blocks; none if they do not make the stages."""
    paths = block_paths(model)
    if plan.stages and sum(plan.stages) != len(paths):
        raise PlanError(
            f"parallelize: stages={plan.stages} are of {sum(plan.stages)} blocks, and {type(model).__name__} has {len(paths)}: "
            "the plan was made for another program",
            "stages",
        )
    if len(paths) < plan.pp:
        return {}
    bounds = [0, *accumulate(plan.stages)] if plan.stages else uniform(len(paths), plan.pp)
    return dict(zip(paths, _spread(bounds), strict=True))


def _of_layers(model: nn.Module, plan: Plan) -> dict[str, int]:
    """The stages of the modules that have parameters of their own."""
    sizes = {
        path: sum(p.numel() for p in module._parameters.values() if p is not None)
        for path, module in model.named_modules()
        if any(p is not None for p in module._parameters.values())
    }
    if len(sizes) < plan.pp:
        raise PlanError(
            f"parallelize: pp={plan.pp}: {type(model).__name__} has {len(sizes)} layer{'s' * (len(sizes) != 1)} with parameters, "
            f"too few for {plan.pp} stages; pp={max(1, len(sizes))} or less",
            "pp",
        )
    return dict(zip(sizes, _spread(balanced([*sizes.values()], plan.pp)), strict=True))


def _spread(bounds: Sequence[int]) -> Iterator[int]:
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        yield from [stage] * (end - begin)
