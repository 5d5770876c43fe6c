"""Which ranks hold copies of a parameter, and over whose data its gradient is a mean: experts lie on some ranks only.

An expert is sent the tokens of all ranks beside which it lies (``Shard.experts``), so that backward leaves there the sum of what
their losses say of it. What is missing are the other ranks that have the same expert; then it is divided by how many losses
there are. Every other parameter has a copy on each rank that sees other data, and the gradient of that rank's loss.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.comm.world import world
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.train import unreduced
from onecard.train.shard import held


def data_of(p: Tensor) -> Ranks | None:
    """The ranks that see other data, of a parameter of ``distributed_model``."""
    state = unreduced.of(p)
    return None if state is None else state.data


def beside(p: Tensor) -> Ranks | None:
    """The ranks that see other data, and have other experts or other parts in this parameter's place; None: none has."""
    what, data = held(p), data_of(p)
    if what.experts is not None:
        return what.experts if what.experts.size > 1 else None
    part = what.group
    if part is None or data is None or part.size == 1 or not {*part.ranks} <= {*data.ranks}:
        return None
    return part


def averaged_over(p: Tensor) -> Ranks | None:
    """The ranks whose gradients are averaged: those that see other data and hold a copy."""
    data, others = data_of(p), beside(p)
    if data is None or others is None:
        return data
    return get_hybrid_communicate_group().same_experts(others)


def share(p: Tensor) -> int:
    """By what the average of what backward left is still to be divided: of how many ranks' losses each is a sum."""
    data, over = data_of(p), averaged_over(p)
    return 1 if data is None or over is None else data.size // over.size


def divided_over(p: Tensor, group: Ranks) -> Ranks:
    """Those of a group that see other data and hold a copy: over which ZeRO divides it."""
    others = beside(p)
    if others is None:
        return group
    same = get_hybrid_communicate_group().same_experts(others)
    return of_ranks([rank for rank in same.ranks if rank in group.ranks], group.name)


def lines(p: Tensor) -> list[Ranks]:
    """Groups whose ranks hold copies of it, but where it is cut among them."""
    hcg, others = get_hybrid_communicate_group(), beside(p)
    axes = [axis for axis, n in hcg.degrees.items() if n > 1 and axis != "pp"]
    if others is None:
        return [hcg.group(axis) for axis in axes]
    rest = [hcg.group(axis) for axis in axes if axis not in ("dp", "sharding", "sep")]
    return [hcg.same_experts(others), *(line for line in rest if not {*line.ranks} <= {*others.ranks})]


def on_all_ranks(parameters: Iterable[Tensor]) -> bool:
    """Whether every rank of the world has a copy or a part of each of them: no stages, no experts of some ranks."""
    stages = get_hybrid_communicate_group().degrees.get("pp", 1)
    return stages == 1 and all(held(p).experts is None and beside(p) is None for p in parameters)


def copies(p: Tensor) -> Ranks | None:
    """All ranks that hold the same numbers; None where no other does."""
    cut = {*held(p).group.ranks} if held(p).group is not None else set()  # type: ignore[union-attr]
    found = [line for line in lines(p) if line.size > 1 and not {*line.ranks} <= cut]
    if len(found) < 2:
        return found[0] if found else None
    return along(found)


def along(groups: Iterable[Ranks]) -> Ranks:
    """The ranks that are reached by going along several groups. The same on each of them."""
    hcg, me = get_hybrid_communicate_group(), world.get_rank()
    ranks = {me}
    for group in groups:
        steps = [_away(hcg, me, rank) for rank in group.ranks]
        ranks = {_moved(hcg, rank, step) for rank in ranks for step in steps}
    return of_ranks(sorted(ranks), "+".join(group.name for group in groups))


def _away(hcg: object, start: int, rank: int) -> tuple[int, ...]:
    mesh = hcg.mesh  # type: ignore[attr-defined]
    return tuple(b - a for a, b in zip(mesh.coordinate(start), mesh.coordinate(rank), strict=True))


def _moved(hcg: object, rank: int, step: tuple[int, ...]) -> int:
    mesh, at = hcg.mesh, 0  # type: ignore[attr-defined]
    for size, place, by in zip(mesh.shape, mesh.coordinate(rank), step, strict=True):
        at = at * size + place + by
    return int(mesh.process_ids[at])
