"""What a rank puts into its process for a while, and another rank of the same process must not meet: hooks of all modules and
optimizers, functions that a recording of a step follows."""

from __future__ import annotations

import math
from typing import Any

import torch

from onecard._torch.names import hooks_of_all

_PLACES: tuple[tuple[dict[str, Any], str], ...] = (
    (vars(torch.random), "default_generator"), (vars(torch.autograd), "_engine_run_backward"),
    *((vars(math), name) for name, function in vars(math).items() if callable(function)),
)  # fmt: skip


class Exchanged:
    """Of one rank. Made while no rank runs: what is in the process then stays there, for all of them.

    Example:
        >>> process, root = Exchanged(), math.sqrt
        >>> process.swap()  # the rank begins
        >>> math.sqrt = None  # as a recording does, whose rank stops here
        >>> process.swap()
        >>> math.sqrt is root
        True
        >>> process.swap()  # and goes on
        >>> math.sqrt is None
        True
        >>> process.swap()
    """

    def __init__(self) -> None:
        self._outer = [holder.get(name) for holder, name in _PLACES]
        self._known = [{*hooks} for hooks in hooks_of_all]
        self._mine: list[tuple[dict[str, Any], str, Any]] = []
        self._hooks: list[dict[int, Any]] = [{} for _ in hooks_of_all]
        self._here = False

    def swap(self) -> None:
        """Take out what is the rank's own, or put it back."""
        if self._here:
            self._mine = [
                (holder, name, holder[name])
                for (holder, name), outer in zip(_PLACES, self._outer, strict=True)
                if holder.get(name) is not outer
            ]
            for (holder, name), outer in zip(_PLACES, self._outer, strict=True):
                if holder.get(name) is not outer:
                    holder[name] = outer
            for hooks, known, mine in zip(hooks_of_all, self._known, self._hooks, strict=True):
                for number in [n for n in hooks if n not in known]:
                    mine[number] = hooks.pop(number)
        else:
            for holder, name, value in self._mine:
                holder[name] = value
            for hooks, mine in zip(hooks_of_all, self._hooks, strict=True):
                hooks.update(mine)
                mine.clear()
        self._here = not self._here
