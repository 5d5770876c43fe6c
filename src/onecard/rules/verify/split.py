"""Cut a whole tensor as a layout says for every coordinate of a mesh; check that local results make a whole one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.place.reductions import commute, join

Coordinate = tuple[int, ...]
_TOLERANCE = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def coordinates(mesh: ProcessMesh) -> list[Coordinate]:
    """Every coordinate of a mesh."""
    return list(product(*(range(size) for size in mesh.shape)))


def split(whole: Tensor, layout: Layout, generator: torch.Generator) -> dict[Coordinate, Tensor]:
    """The local tensor at every coordinate.

    Where the layout is pending the ranks get random numbers whose reduction is ``whole``.
    """
    axes = [axis for axis, _ in layout.pending]
    parts: dict[Coordinate, Tensor] = {(): whole}
    for axis, op in layout.pending:
        ranks = layout.mesh.shape[axis]
        parts = {(*at, i): p for at, part in parts.items() for i, p in enumerate(summands(part, op, ranks, generator))}
    local = {}
    for place in coordinates(layout.mesh):
        # Its elements lie in memory in the order of the whole's, also where they are random.
        like = torch.empty_like(layout.local_part(whole, place))
        local[place] = like.copy_(layout.local_part(parts[tuple(place[a] for a in axes)], place))
    return local


def summands(whole: Tensor, op: str, ranks: int, generator: torch.Generator) -> list[Tensor]:
    """Random tensors, one for each rank, that ``op`` reduces to ``whole``.

    Example:
        >>> parts = summands(torch.tensor([1.0, 5.0]), "max", 3, torch.Generator())
        >>> torch.stack(parts).amax(0)
        tensor([1., 5.])
    """
    if op == "avg":
        return [part * ranks for part in summands(whole, "sum", ranks, generator)]
    if whole.dtype is torch.bool:
        parts = [whole & (_random(whole, generator) < 0) for _ in range(ranks - 1)]
        return [*parts, whole.clone()]
    if op == "sum":
        parts = [noise(whole, generator) for _ in range(ranks - 1)]
        return [*parts, whole - sum(parts)] if parts else [whole]
    if op == "product":
        factors = [noise(whole, generator).abs() + 0.5 for _ in range(ranks - 1)]
        return [*factors, whole / math.prod(factors)] if factors else [whole]
    sign = {"max": -1, "min": 1}[op]
    owner = torch.randint(ranks, whole.shape, generator=generator, device="cpu")
    return [torch.where(owner == i, whole, whole + sign * noise(whole, generator).abs()) for i in range(ranks)]


def _random(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu").to(like.device)


def noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random numbers of a tensor's shape and dtype."""
    numbers = _random(like, generator)
    return (numbers if like.is_floating_point() or like.is_complex() else numbers * 4).to(like.dtype)


def mismatch(
    whole: Tensor, layout: Layout, local: Mapping[Coordinate, Tensor], values: bool = True, rounding: float = 1e-9
) -> str:
    """Why the ranks' local tensors are not ``whole`` laid out so; "" if they are.

    Args:
        whole: the result on one card.
        layout: how the ranks are said to hold it.
        local: the tensor at every coordinate.
        values: False if only shapes and dtypes mean anything (``empty_like``).
        rounding: how far floating values may differ, absolutely or relatively (see ``tolerance``).
    """
    if not commute(op for _, op in layout.pending):
        return f"two reductions that do not commute are pending: {layout.pending}"
    for place, tensor in local.items():
        if tensor.dtype != whole.dtype:
            return f"dtype {tensor.dtype} at {place}, want {whole.dtype}"
        if tuple(tensor.shape) != layout.local_shape(whole.shape, place):
            return f"shape {list(tensor.shape)} at {place}, want {list(layout.local_shape(whole.shape, place))}"
    if not values:
        return ""
    for place, tensor in joined(layout, local).items():
        want = layout.local_part(whole, place)
        if not close(tensor, want, rounding):
            return f"values at {place}: {_brief(tensor)}, want {_brief(want)}"
    return ""


def joined(layout: Layout, local: Mapping[Coordinate, Tensor]) -> dict[Coordinate, Tensor]:
    """What the ranks hold once pending axes are reduced; on those axes only coordinate 0 is kept."""
    found = dict(local)
    for axis, op in layout.pending:
        groups: dict[Coordinate, list[Tensor]] = {}
        for place, tensor in sorted(found.items()):
            groups.setdefault((*place[:axis], 0, *place[axis + 1 :]), []).append(tensor)
        found = {place: join(torch.stack(parts), op) for place, parts in groups.items()}
    return found


def tolerance(tensor: Tensor) -> float:
    """How far results may be off that were computed from or in a tensor's dtype."""
    return _TOLERANCE.get(tensor.dtype, 1e-9)


def close(a: Tensor, b: Tensor, rounding: float) -> bool:
    """Equal up to rounding; NaN equals NaN."""
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.allclose(a, b, rtol=rounding, atol=rounding, equal_nan=True)


def _brief(tensor: Tensor) -> str:
    flat = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in tensor.flatten()[:4].tolist()]
    return f"[{', '.join(flat)}{', ...' if tensor.numel() > 4 else ''}]"
