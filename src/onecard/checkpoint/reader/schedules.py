"""What a schedule keeps of each group of its optimizer, where the groups are not those that were saved, or stand otherwise.

An optimizer's groups follow the names of their parameters; a schedule's lists know groups by their place only. torch would take
them as they are: rates change places at the schedule's next step, or a group that was split off keeps its rate for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onecard.comm.base.warned import warn

BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums")
"""Lists of torch's schedules with an entry for each group."""
_INNER = "_schedulers"
"""States of those that one is made of."""


@dataclass(frozen=True)
class GroupOrder:
    """Which saved group each group of an optimizer was; None of one that is new.

    Attributes:
        optimizer: itself, or its state dict; saved: how many groups there were.
    """

    optimizer: Any
    of: tuple[int | None, ...]
    saved: int

    @property
    def as_it_was(self) -> bool:
        """Whether nothing has to follow."""
        return self.of == tuple(range(self.saved))

    def follow(self, saved: Any, own: Any) -> Any:
        """The saved state of a schedule as it is for the groups of now; ``own``: its state before, for groups that are new.

        Example:
            >>> GroupOrder(None, (1, 0, None), 2).follow({"base_lrs": [0.1, 0.2], "last_epoch": 3}, {"base_lrs": [0, 0, 7]})
            {'base_lrs': [0.2, 0.1, 7], 'last_epoch': 3}
        """
        if self.as_it_was or not isinstance(saved, dict):
            return saved
        made = {key: self._list(value, own.get(key)) if key in BY_GROUP else value for key, value in saved.items()}
        if isinstance(saved.get(_INNER), list | tuple):
            mine = [*own.get(_INNER, ()), *[{}] * len(saved[_INNER])]
            made[_INNER] = [self.follow(value, before) for value, before in zip(saved[_INNER], mine, strict=False)]
        return made

    def _list(self, saved: Any, own: Any) -> Any:
        if not isinstance(saved, list | tuple) or len(saved) != self.saved:
            return saved
        if None in self.of and (not isinstance(own, list | tuple) or len(own) != len(self.of)):
            return saved
        return type(saved)(own[i] if j is None else saved[j] for i, j in enumerate(self.of))


@dataclass
class GroupOrders:
    """Those of all optimizers of a load, and the states of schedules that are dicts.

    Attributes:
        orders: noted as optimizers are walked through; dicts: by their place, with their state before.
    """

    orders: list[GroupOrder] = field(default_factory=list)
    dicts: list[tuple[str, dict[Any, Any], dict[Any, Any]]] = field(default_factory=list)

    def note(self, optimizer: Any, of: Sequence[int | None], saved: int) -> None:
        """An optimizer's groups."""
        self.orders.append(GroupOrder(optimizer, tuple(of), saved))

    def note_dict(self, path: str, value: dict[Any, Any]) -> None:
        """A dict of the state that is filled: it may be what a schedule's ``state_dict()`` gave."""
        inner = any(path.startswith(f"{outer}.{_INNER}") for outer, _, _ in self.dicts)
        if "last_epoch" in value and ("_last_lr" in value or _INNER in value) and not inner:
            self.dicts.append((path, value, dict(value)))

    def follow(self, schedule: Any, saved: Any) -> Any:
        """The saved state of a schedule, for the groups of its optimizer."""
        mine = [order for order in self.orders if order.optimizer is getattr(schedule, "optimizer", None)]
        return mine[0].follow(saved, schedule.state_dict()) if mine else saved

    def finish(self) -> None:
        """States that are dicts, when all are filled."""
        moved = [order for order in self.orders if not order.as_it_was]
        for path, value, before in self.dicts:
            if len(self.orders) == 1:
                value.update(self.orders[0].follow(dict(value), before))
            elif moved:
                warn(
                    f"{path!r} is a schedule's state dict, whose lists follow the groups of an optimizer, and the groups of one "
                    f"of the {len(self.orders)} optimizers stand otherwise than they were saved. Which is the schedule's is not "
                    "known: its lists are as they were saved. Give the schedule itself in place of its state dict",
                )
