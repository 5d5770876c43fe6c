"""A dict of the entries that were used lately, whose look-up is a dict's."""

from __future__ import annotations

from typing import Any

LIMIT = 8192


class Recent(dict[Any, Any]):
    """Entries in two halves: new ones, and older ones that are dropped unless they are used before the new half is full.

    ``get`` looks at the new half alone; what it misses ``recall`` brings back from the older half. So at most twice
    ``limit`` entries are kept, those of the last ``limit`` misses among them.

    Example:
        >>> recent = Recent(limit=2)
        >>> for number in (1, 2, 3):
        ...     recent.keep(number, str(number))
        >>> recent.get(1), recent.recall(1), recent.get(1)
        (None, '1', '1')
        >>> recent.keep(4, "4")
        >>> recent.recall(2), recent.recall(3)
        (None, '3')
    """

    __slots__ = ("limit", "older")

    def __init__(self, limit: int = LIMIT) -> None:
        super().__init__()
        self.limit = limit
        self.older: dict[Any, Any] = {}

    def recall(self, key: Any) -> Any:
        """An entry that ``get`` does not see any more; None if it is gone."""
        found = self.older.pop(key, None)
        if found is not None:
            self.keep(key, found)
        return found

    def keep(self, key: Any, value: Any) -> None:
        """Add an entry."""
        if len(self) >= self.limit:
            self.older = dict(self)
            self.clear()
        self[key] = value

    def forget(self) -> None:
        """Drop all entries."""
        self.clear()
        self.older = {}
