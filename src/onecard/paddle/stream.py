"""``paddle.distributed.stream``: collectives with ``use_calc_stream``, which has no counterpart: each is in order as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from onecard.fleet.front import collective, exchanges

__all__ = [
    "all_gather", "all_reduce", "alltoall", "alltoall_single", "broadcast", "gather", "recv", "reduce", "reduce_scatter",
    "scatter", "send",
]  # fmt: skip


def _on_any_stream(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call; ``use_calc_stream`` is said and not needed: the next operator on the tensor waits for the message."""

    @functools.wraps(call)
    def run(*args: Any, use_calc_stream: bool = False, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return run


all_gather = _on_any_stream(collective.all_gather)
all_reduce = _on_any_stream(collective.all_reduce)
alltoall = _on_any_stream(collective.alltoall)
alltoall_single = _on_any_stream(exchanges.alltoall_single)
broadcast = _on_any_stream(collective.broadcast)
gather = _on_any_stream(collective.gather)
recv = _on_any_stream(collective.recv)
reduce = _on_any_stream(collective.reduce)
reduce_scatter = _on_any_stream(collective.reduce_scatter)
scatter = _on_any_stream(collective.scatter)
send = _on_any_stream(collective.send)
