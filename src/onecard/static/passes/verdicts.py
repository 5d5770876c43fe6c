"""What a verdict on a step says of its microbatches: what is told, which results are sums, means or rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from onecard.static.passes.dependence import ADDS, COUNT, MIXED, ROWS, UNKNOWN, Doubt, Kind, Verdict
from onecard.static.passes.row_orders import is_ordered


def said(verdict: Verdict, k: int, whole: Collection[int] = ()) -> Iterator[Doubt]:
    """Where numbers are not the batch's in a step that is cut in ``k`` microbatches, whose gradients are merged as its loss says.

    ``whole``: the results that are what the whole batch gives.
    """
    if verdict.open:
        yield _told(
            "the step reads values, so that it cannot be seen on the whole batch, and whether a number in it counts rows "
            "(loss.sum() / len(x)) cannot be told: microbatches are averaged, as of a mean. Say avg=True, or avg=False for a sum"
        )
    if verdict.normalized:
        yield _told(
            f"batch norm at {verdict.normalized[0]} normalizes each microbatch by its own mean and variance, where one card "
            "takes those of the batch. avg=True (a Strategy: microbatch_loss=True) says that a loop of microbatches is meant"
        )
    if unknown := [kind.where for kind in verdict.losses if kind.how == UNKNOWN]:
        yield _told(
            f"whether the loss of a microbatch is a part of the batch's cannot be told: {unknown[0]} has no rule that says "
            f"whether rows stay apart. Microbatches are averaged, as of a mean; of a sum gradients are 1/{k} of one card's. Say "
            "avg=True for a mean, avg=False for a sum"
        )
    for kind in verdict.losses:
        if why := _why(kind):
            yield Doubt(
                f"the loss of a microbatch is no part of the batch's loss: {why}. Gradients and loss are means of what {k} "
                "microbatches give, which is not what one card computes",
                True,
            )
    if len({kind.degree for kind in verdict.losses if kind.how == ADDS}) > 1:
        yield Doubt(
            "one backward() begins at a sum over rows, another at a mean: gradients are merged as the first loss says",
            True,
        )
    for i, result in enumerate(verdict.results):
        if i not in whole and result is not None and (why := _why(result) or _why_count(result)):
            yield _told(
                f"result {i} is no sum and no mean over rows: {why}. The call gives the mean of what {k} microbatches give"
            )


def _told(words: str) -> Doubt:
    return Doubt(words, False)


def _why(kind: Kind) -> str:
    if kind.how == MIXED:
        return kind.where
    if is_ordered(kind):
        return "its rows are sorted, each microbatch's by itself"
    if kind.how == ADDS and kind.degree not in (0, 1):
        return f"{kind.where} gives a sum over rows that is multiplied or divided by their number more than once"
    return ""


def _why_count(kind: Kind) -> str:
    return f"{kind.where} makes another number of what rows give than their sum" if kind.how == COUNT else ""


def in_rows(verdict: Verdict) -> dict[int, int]:
    """The results that have a row for each row of the batch, with their degrees."""
    kinds = [
        (i, kind) for i, kind in enumerate(verdict.results) if kind is not None and kind.how == ROWS and not kind.order
    ]
    return {i: kind.degree for i, kind in kinds if kind.dim == 0 and kind.before == 1}


def is_mean(verdict: Verdict) -> bool:
    """Whether a loss is known to be a mean over rows."""
    return any(kind.how == ADDS and kind.degree == 0 for kind in verdict.losses)


def averaged(verdict: Verdict) -> bool:
    """Whether gradients of microbatches are averaged, not added: what is no sum over rows is taken for a mean."""
    first = next((kind for kind in verdict.losses), None)
    return first is None or first.how != ADDS or first.degree != 1


def joined(verdict: Verdict) -> dict[int, bool]:
    """The results that are sums over rows (True), or means."""
    adds = [(i, kind) for i, kind in enumerate(verdict.results) if kind is not None and kind.how == ADDS]
    return {i: kind.degree == 1 for i, kind in adds if kind.degree in (0, 1)}
