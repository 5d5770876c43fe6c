"""What every rank of a mesh holds, in numpy: the naive reference for layouts, plans and transfers."""

from __future__ import annotations

import numpy as np

JOIN = {
    "sum": lambda parts: np.sum(parts, axis=0),
    "avg": lambda parts: np.mean(parts, axis=0),
    "max": lambda parts: np.max(parts, axis=0),
    "min": lambda parts: np.min(parts, axis=0),
    "product": lambda parts: np.prod(parts, axis=0),
    "norm2.0": lambda parts: np.sqrt(np.sum(np.square(parts), axis=0)),
    "band": lambda parts: np.bitwise_and.reduce(parts),
    "bor": lambda parts: np.bitwise_or.reduce(parts),
    "bxor": lambda parts: np.bitwise_xor.reduce(parts),
}


def places(mesh):
    return list(np.ndindex(*mesh.shape))


def line(mesh, axis, place):
    return [(*place[:axis], i, *place[axis + 1 :]) for i in range(mesh.shape[axis])]


def distribute(whole, layout, random):
    """What every rank holds; on pending axes random numbers whose reduction is the whole."""
    parts = {(): whole}
    for axis, op in layout.pending:
        n = layout.mesh.shape[axis]
        parts = {(*at, i): p for at, part in parts.items() for i, p in enumerate(summands(part, op, n, random))}
    axes = [axis for axis, _ in layout.pending]
    return {
        place: parts[tuple(place[a] for a in axes)][layout.local_slices(whole.shape, place)].copy()
        for place in places(layout.mesh)
    }


def summands(whole, op, n, random):
    """One tensor for each of n ranks; reduced by the operator they are the whole."""
    if np.issubdtype(whole.dtype, np.integer):
        return integers(whole, op, n, random)
    if op in ("sum", "avg"):
        parts = [random.normal(size=whole.shape) for _ in range(n - 1)]
        parts.append(whole - sum(parts))
        return [part * n for part in parts] if op == "avg" else parts
    if op == "product":
        parts = [random.uniform(0.5, 2, size=whole.shape) for _ in range(n - 1)]
        return [*parts, whole / np.prod([np.ones(whole.shape), *parts], axis=0)]
    if op == "norm2.0":
        shares = random.dirichlet(np.ones(n), size=whole.shape)
        return [whole * np.sqrt(shares[..., i]) for i in range(n)]
    away = {"max": -1, "min": 1}[op]
    owner = random.integers(n, size=whole.shape)
    return [whole + away * (owner != i) * random.uniform(size=whole.shape) for i in range(n)]


def integers(whole, op, n, random):
    """``summands`` of integers; under "band" and its kin every bit is decided by at least one."""
    others = [random.integers(0, 64, size=whole.shape) for _ in range(n - 1)]
    if op == "sum":
        return [*others, whole - sum(others)]
    if op == "bxor":
        return [*others, whole ^ np.bitwise_xor.reduce([np.zeros_like(whole), *others])]
    if op == "band":
        return [whole | r for r in (*others, ~np.bitwise_and.reduce([~np.zeros_like(whole), *others]))]
    if op == "bor":
        return [whole & r for r in (*others, ~np.bitwise_or.reduce([np.zeros_like(whole), *others]))]
    owner = random.integers(n, size=whole.shape)
    if op == "product":
        return [np.where(owner == i, whole, 1) for i in range(n)]
    return [whole + {"max": -9, "min": 9}[op] * (owner != i) for i in range(n)]


def gathered(whole, layout, local):
    """The whole tensor that the ranks hold, checked to be the same wherever it is held twice."""
    joined = dict(local)
    for axis, op in layout.pending:
        joined = {p: JOIN[op]([joined[q] for q in line(layout.mesh, axis, p)]) for p in joined}
    result = np.full(whole.shape, np.nan)
    for place, part in joined.items():
        slices = layout.local_slices(whole.shape, place)
        assert part.shape == layout.local_shape(whole.shape, place), f"shape at {place}"
        assert np.isnan(result[slices]).all() or np.allclose(result[slices], part), f"ranks differ at {place}"
        result[slices] = part
    return result
