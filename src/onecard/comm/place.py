"""What a process has decided for its own rank: tables that a pretended rank must neither read nor write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Table = TypeVar("Table", dict[Any, Any], list[Any])
tables: list[Any] = []


def of_this_rank(table: Table) -> Table:
    """Note a table whose entries hold for one rank only (programs, groups, specs that say whether this rank is ``here``).

    Every module-level table of ``comm`` and ``tensor`` is noted here, or the same on all ranks: a test lists them.

    Example:
        >>> found = of_this_rank({"rank": 3})
        >>> with nothing_decided():
        ...     found["rank"] = 0
        >>> found
        {'rank': 3}
        >>> tables.remove(found)
    """
    tables.append(table)
    return table


@contextmanager
def nothing_decided() -> Iterator[None]:
    """Inside, these tables begin empty; after it they are as they were, whatever was decided inside is dropped."""
    aside = [table.copy() for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, before in zip(tables, aside, strict=True):
            table.clear()
            table.extend(before) if isinstance(table, list) else table.update(before)
