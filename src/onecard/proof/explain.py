"""What would explain that a value is not the one card's: a sum that is missing, or done twice, another part, an old value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from onecard.proof.whole import apart, scale_of

NEAR = 1e-5  # what explains a value explains it to so many digits


def explained(
    local: Mapping[int, Tensor],
    right: Mapping[int, Tensor],
    groups: Sequence[tuple[int, ...]] = (),
    earlier: Sequence[Mapping[int, Tensor]] = (),
    draws: bool = False,
) -> str:
    """The likeliest reason, in words; "" where nothing fits.

    Args:
        local, right: of each rank, what it has and what it should have.
        groups: ranks that send each other messages.
        earlier: what was right before, newest first.
        draws: random numbers are drawn.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> explained({0: 2 * x, 1: 2 * x}, {0: x, 1: x}, [(0, 1)])
        '2 times the right value: summed twice over ranks [0, 1], or a sum in place of a mean'
    """
    wrong = [rank for rank in local if rank in right and not _same(local[rank], right[rank])]
    if not wrong:
        return ""
    for reason in (
        _zero(local, wrong),
        _ratio(local, right, wrong, groups),
        _missing_sum(local, right, wrong, groups),
        _others_part(local, right, wrong),
        _stale(local, wrong, earlier),
        _shifted(local, right, wrong),
        "other random numbers than on one card" if draws else "",
    ):
        if reason:
            return reason
    return ""


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and apart(a, b) <= NEAR


def _zero(local: Mapping[int, Tensor], wrong: Sequence[int]) -> str:
    if all(not local[rank].any() for rank in wrong):
        return f"zero on rank(s) {[*wrong]}: nothing was computed or received there"
    return ""


def _ratio(
    local: Mapping[int, Tensor], right: Mapping[int, Tensor], wrong: Sequence[int], groups: Sequence[tuple[int, ...]]
) -> str:
    found = {ratio_of(local[rank], right[rank]) for rank in wrong}
    if len(found) != 1 or (ratio := found.pop()) is None:
        return ""
    for ranks in sorted(groups, key=len):
        n = len(ranks)
        if abs(ratio - n) <= NEAR * n:
            return f"{n} times the right value: summed twice over ranks {list(ranks)}, or a sum in place of a mean"
        if abs(ratio - 1 / n) <= NEAR:
            return f"1/{n} of the right value: a sum over ranks {list(ranks)} is missing, or a mean stands in place of a sum"
        if abs(ratio - n**0.5) <= NEAR * n:
            return f"the right value times the root of {n}: a norm in which each of ranks {list(ranks)} counts the same"
        if abs(ratio - n * n) <= NEAR * n * n:
            return f"{n * n} times the right value: two sums too many over ranks {list(ranks)}"
    return f"{ratio:.6g} times the right value, in every element: a factor too many or too few"


def ratio_of(x: Tensor, right: Tensor) -> float | None:
    """The one factor between two tensors; None if there is none."""
    if x.shape != right.shape or not x.is_floating_point() or not right.any():
        return None
    a, b = x.double().reshape(-1), right.double().reshape(-1)
    ratio = float(a @ b / (b @ b))
    return ratio if ratio and apart(a, ratio * b) <= NEAR else None


def _missing_sum(
    local: Mapping[int, Tensor], right: Mapping[int, Tensor], wrong: Sequence[int], groups: Sequence[tuple[int, ...]]
) -> str:
    for ranks in sorted(groups, key=len):
        if any(rank not in local or rank not in right for rank in ranks) or not {*wrong} & {*ranks}:
            continue
        if len({local[rank].shape for rank in ranks}) != 1 or not local[ranks[0]].is_floating_point():
            continue
        total = torch.stack([local[rank].double() for rank in ranks]).sum(0)
        if all(_same(total, right[rank].double()) for rank in ranks):
            return f"the parts of ranks {list(ranks)} add up to the right value: their sum is missing"
        if all(_same(total / len(ranks), right[rank].double()) for rank in ranks):
            return f"the mean of the parts of ranks {list(ranks)} is the right value: their mean is missing"
        # Of one rank it was lost, or came twice. Of two ranks this would say no more than that the other one is right.
        for rank in ranks if len(ranks) > 2 else ():
            rest = total - local[rank].double()
            if all(_same(rest, right[r].double()) for r in ranks):
                return f"without rank {rank}'s part the sum of ranks {list(ranks)} is right"
    return ""


def _others_part(local: Mapping[int, Tensor], right: Mapping[int, Tensor], wrong: Sequence[int]) -> str:
    found = {
        rank: next((other for other in right if other != rank and _same(local[rank], right[other])), None)
        for rank in wrong
    }
    if all(other is not None for other in found.values()):
        said = ", ".join(f"rank {rank} has rank {other}'s" for rank, other in [*found.items()][:4])
        return f"another rank's part: {said}"
    return ""


def _stale(local: Mapping[int, Tensor], wrong: Sequence[int], earlier: Sequence[Mapping[int, Tensor]]) -> str:
    for steps, before in enumerate(earlier, 1):
        if all(rank in before and _same(local[rank], before[rank]) for rank in wrong):
            return f"the value of {steps} step(s) before: it was not brought up to date on rank(s) {[*wrong]}"
    return ""


def _shifted(local: Mapping[int, Tensor], right: Mapping[int, Tensor], wrong: Sequence[int]) -> str:
    for rank in wrong:
        x, want = local[rank], right[rank]
        if x.shape != want.shape:
            return ""
        for dim in range(x.dim()):
            n = x.shape[dim]
            for by in (1, -1):
                if n > 2 and _same(x.narrow(dim, max(by, 0), n - 1), want.narrow(dim, max(-by, 0), n - 1)):
                    return f"shifted by {abs(by)} along dim {dim} on rank {rank}"
    return ""


def worst(x: Tensor, right: Tensor) -> tuple[tuple[int, ...], float, float]:
    """The place where two tensors are furthest apart, and both numbers there."""
    if x.shape != right.shape or not x.numel():
        return (), float("nan"), float("nan")
    a, b = (t.double() if not t.is_complex() else t.abs().double() for t in (x, right))
    at = int((a - b).abs().nan_to_num(float("inf")).reshape(-1).argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(at, device="cpu"), x.shape)) if x.dim() else ()
    return place, float(a.reshape(-1)[at]), float(b.reshape(-1)[at])


def near(x: Tensor, place: tuple[int, ...], count: int = 5) -> str:
    """The numbers around a place, along the last dim."""
    row = x[place[:-1]].reshape(-1) if place else x.reshape(-1)
    start = max(min((place[-1] if place else 0) - count // 2, row.numel() - count), 0)
    shown = row[start : start + count]
    return "[" + ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in shown.tolist()) + "]"


__all__ = ["explained", "near", "ratio_of", "scale_of", "worst"]
