"""Metrics of torchmetrics: once a distributed tensor is added to a state, it holds what the whole batch counts, on every rank.

torchmetrics adds the states of all ranks when a metric is computed, as each rank had counted a part. What is whole on every rank
would count once for each of them.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_MODULE, _UPDATE = "torchmetrics.metric", "wrapped_func"


def there() -> bool:
    """Whether the program has torchmetrics at all.

    Example:
        >>> there() == ("torchmetrics.metric" in sys.modules)
        True
    """
    return _MODULE in sys.modules


def counts_the_whole() -> None:
    """A plain tensor has just taken a distributed one's value: if it is a state of a metric, that one is not to be added up."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == _MODULE and frame.f_code.co_name == _UPDATE:
            keep_apart(frame.f_locals.get("self"))
            return
        frame = frame.f_back


def keep_apart(metric: Any) -> None:
    """Have a metric leave its states as they are when it is computed: each rank has the whole.

    Example:
        >>> from types import SimpleNamespace
        >>> metric = SimpleNamespace(sync_on_compute=True, _to_sync=True)
        >>> keep_apart(metric)
        >>> metric._to_sync
        False
    """
    for name in ("sync_on_compute", "dist_sync_on_step", "_to_sync"):  # the last is what ``compute`` reads
        if hasattr(metric, name):
            setattr(metric, name, False)
