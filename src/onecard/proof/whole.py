"""Parts put together: a value of all ranks as the one tensor that it stands for, and ranks whose copies are not equal."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.proof.seen import Value
from onecard.rules.verify.split import coordinates, joined

FLOOR = 1e-12
"""Numbers that are smaller count as zero."""


def scale_of(*values: Tensor) -> float:
    """The largest number of some tensors, of those that are finite."""
    found = [x.double().abs() for x in values if x.numel()]
    return max((float(torch.where(x.isfinite(), x, 0.0).max()) for x in found), default=0.0)


def apart(a: Tensor, b: Tensor) -> float:
    """How far two tensors of one shape are apart, relatively to their largest number; NaN equals NaN.

    Example:
        >>> apart(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0]))
        0.2
    """
    if not a.numel() or (a.dtype == b.dtype and torch.equal(a, b)):
        return 0.0
    if not (a.is_floating_point() or a.is_complex() or b.is_floating_point()):
        return 0.0 if torch.equal(a, b.to(a.dtype)) else 1.0
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    same = (x == y) | (x.isnan() & y.isnan())
    off = torch.where(same, 0.0, (x - y).abs())
    if bool(off.isnan().any()) or bool(off.isinf().any()):
        return float("inf")
    scale = scale_of(x.abs(), y.abs())
    return float(off.max()) / scale if scale > FLOOR else 0.0


@dataclass(frozen=True, slots=True)
class Whole:
    """A value of all ranks.

    Attributes:
        value: the whole tensor; None where there is none to be made.
        layout: how the ranks say that they hold it.
        odd: ranks whose copy is not what most others hold of the same part.
        why: what is wrong with the parts themselves: shapes that do not fit.
        local: each rank's part.
    """

    value: Tensor | None
    layout: Layout
    odd: tuple[int, ...]
    why: str
    local: dict[int, Tensor]


def whole(values: Mapping[int, Value], bound: float) -> Whole:
    """Put the ranks' parts of a distributed value together.

    Args:
        values: of the ranks of its mesh, or of so many that they have all parts.
        bound: how far copies may be apart.
    """
    spec = next(iter(values.values())).spec
    assert spec is not None
    layout, shape = spec.layout, spec.shape
    local = {rank: value.local for rank, value in values.items()}
    here = [rank for rank in layout.mesh.process_ids if rank in local]
    if len(here) < layout.mesh.size and not _have_all(layout, tuple(shape), here):
        return Whole(None, layout, (), "", local)
    parts = {}
    for rank in here:
        place = layout.mesh.coordinate(rank)
        assert place is not None
        want = layout.local_shape(shape, place)
        if tuple(local[rank].shape) != want:
            why = f"rank {rank} has a part of {list(local[rank].shape)}, the layout [{layout}] says {list(want)}"
            return Whole(None, layout, (rank,), why, local)
        parts[place] = local[rank]
    held = joined(layout, parts) if layout.pending else parts
    first = next(iter(held.values()))
    made = torch.zeros(tuple(shape), dtype=first.dtype, device="cpu")
    boxes = _boxes(layout, tuple(shape))
    groups: dict[Hashable, list[tuple[tuple[int, ...], Tensor]]] = {}
    for place, part in held.items():
        groups.setdefault(boxes[place], []).append((place, part))
    odd: list[int] = []
    for members in groups.values():
        place, part = members[0]
        layout.local_part(made, place).copy_(part) if not layout.merged else _fill(made, layout, place, part)
        odd += _odd(layout.mesh, members, bound)
    return Whole(made, layout, tuple(sorted(odd)), "", local)


def _have_all(layout: Layout, shape: tuple[int, ...], here: Sequence[int]) -> bool:
    """Whether some ranks of a mesh have all parts: in a recorded pipeline a stage's copies lie on its own ranks alone."""
    places = {layout.mesh.coordinate(rank) for rank in here}
    boxes = _boxes(layout, shape)
    kept = {boxes[place] for place in places if place is not None}
    if {*boxes.values()} != kept:
        return False
    pending = [axis for axis, _ in layout.pending]
    lines = {tuple(x for axis, x in enumerate(place) if axis not in pending) for place in places if place is not None}
    return len(places) == len(lines) * prod(layout.mesh.shape[axis] for axis in pending)


def _fill(made: Tensor, layout: Layout, place: tuple[int, ...], part: Tensor) -> None:
    """Write a part whose dims are merged, so that it is no block of the whole."""
    at = layout.local_part(torch.arange(made.numel(), device="cpu").view(made.shape), place).reshape(-1)
    made.view(-1)[at] = part.reshape(-1)


@lru_cache(maxsize=4096)
def _boxes(layout: Layout, shape: tuple[int, ...]) -> dict[tuple[int, ...], Hashable]:
    """What tells the part of each place of the mesh from others: copies have the same."""
    opened, sizes = layout.opened(shape) if layout.merged else (layout, shape)
    return {place: opened.box(sizes, place) for place in coordinates(layout.mesh)}


def _odd(mesh: ProcessMesh, members: list[tuple[tuple[int, ...], Tensor]], bound: float) -> list[int]:
    """Ranks that hold another copy of a part than most; of two both, since nobody knows which."""
    kinds: list[list[int]] = []
    firsts: list[Tensor] = []
    for place, part in members:
        rank = int(mesh.mesh[place])
        found = next((i for i, x in enumerate(firsts) if apart(x, part) <= bound), None)
        if found is None:
            firsts.append(part)
            kinds.append([rank])
        else:
            kinds[found].append(rank)
    if len(kinds) < 2:
        return []
    most = max(map(len, kinds))
    right = [kind for kind in kinds if len(kind) == most]
    keep = right[0] if len(right) == 1 else []
    return [rank for kind in kinds for rank in kind if kind is not keep]
