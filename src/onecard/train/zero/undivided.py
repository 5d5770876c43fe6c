"""An axis of the mesh along which ranks do the same work: said once, before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onecard.comm.base.record import user_line
from onecard.comm.base.state import Kept, faked
from onecard.comm.base.warned import warn
from onecard.comm.issue import trace
from onecard.comm.world import world
from onecard.tensor import DistTensor
from onecard.tensor.dispatch.entry import divided
from onecard.tensor.dist_tensor import as_one_card

_told: Kept[set[str]] = Kept(set)


def tell(params: Iterable[Any]) -> None:
    """Warn of axes along which no operand was cut or pending, now that these have gradients: each rank has the whole batch."""
    held = [p for p in params if isinstance(p, DistTensor)]
    sizes = {
        name: size for mesh in {p.mesh for p in held} for name, size in zip(mesh.dim_names, mesh.shape, strict=True)
    }
    idle = [name for name, size in sizes.items() if size > 1 and name not in divided.here and name not in _told.here]
    idle = [name for name in idle if not any(_is_divided(p.grad, name) for p in held)]
    if not idle or faked.here or trace.faking() or world.alone.here:
        return
    _told.here.update(idle)
    name = idle[0]
    cure = f"Each has its rows by loader = onecard.shard_dataloader(loader, mesh, shard_dims={name!r})"
    if as_one_card.here:  # the model divides what it is called with
        cure = (
            "A model divides the rows of the first tensor that it is called with; fewer rows than ranks are whole on each: take "
            "larger batches, or fewer ranks"
        )
    warn(
        f"{user_line()}: nothing is divided along {name!r}: each of its {sizes[name]} ranks has read the whole batch and "
        f"computes all of it. {cure}",
    )


def _is_divided(grad: Any, name: str) -> bool:
    """Whether a gradient is cut or pending along an axis: one that a program makes of what ranks have, which no operator saw."""
    if not isinstance(grad, DistTensor):
        return False
    pairs = zip(grad.mesh.dim_names, grad.placements, strict=True)
    return any(axis == name and not where.is_replicate() for axis, where in pairs)
