"""Rows of a value, taken one by one by what ranks have of them, in whatever order."""

from __future__ import annotations

import torch
from torch import Tensor

from onecard.proof.alike import marks_of, most_of
from onecard.proof.whole import apart, scale_of


class LastRows:
    """The rows of a value along its last dim, of which each can be taken once.

    Args:
        value: with a row for each number of all dims but the last; of one dim each number is a row.
        bound: how far equal numbers may be apart, relatively to the largest of the value.

    Example:
        >>> rows = LastRows(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), 1e-9)
        >>> rows.take(torch.tensor([[5.0, 6.0], [1.0, 2.0]])), rows.take(torch.tensor([[1.0, 2.0]]))
        (True, False)
        >>> rows.all_taken
        False
    """

    def __init__(self, value: Tensor, bound: float) -> None:
        self.table, self.scale, self.bound = _table(value), scale_of(value), bound
        marks = marks_of(self.table)
        self._order = marks.argsort().tolist()
        self._marks = marks[torch.tensor(self._order, dtype=torch.long, device="cpu")].tolist()
        self._left = [True] * len(self._marks)
        self._slack = bound * self.scale * most_of(self.table.shape[1]) * 2 + 1e-12

    @property
    def all_taken(self) -> bool:
        """Whether each row was taken."""
        return not any(self._left)

    def take(self, part: Tensor) -> bool:
        """Take the rows of a part, if each of them is left."""
        rows = _table(part)
        if not rows.numel() or rows.shape[1] != self.table.shape[1] or len(rows) > len(self.table):
            return False
        marks, found, at = marks_of(rows), list[tuple[int, int]](), 0
        for mine in marks.argsort().tolist():
            mark = float(marks[mine])
            while at < len(self._marks) and (not self._left[at] or self._marks[at] < mark - self._slack):
                at += 1
            if at == len(self._marks) or self._marks[at] > mark + self._slack:
                return False
            found.append((at, mine))
            at += 1
        given = rows[torch.tensor([i for _, i in found], device="cpu")]
        want = self.table[torch.tensor([self._order[i] for i, _ in found], device="cpu")]
        if apart(given, want) * scale_of(given, want) > self.bound * self.scale:
            return False
        for i, _ in found:
            self._left[i] = False
        return True


def _table(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() > 1 and x.numel() else x.reshape(-1, 1)


__all__ = ["LastRows"]
