"""Reports the collectives that a test calls on torch.distributed directly to the flight board."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from onecard.comm.base import flight

_NAMES = [
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *("barrier", "broadcast", "broadcast_object_list", "gather", "monitored_barrier", "reduce", "reduce_scatter"),
    *("reduce_scatter_tensor", "scatter"),
]


def watch() -> None:
    """Wraps the collectives of torch.distributed in this process, for good: it is a rank of a test."""
    for name in _NAMES:
        function = getattr(dist, name, None)
        if function is not None:
            setattr(dist, name, _watched(name, function))


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        board = flight.board.here
        if board is None or board.inside:  # inside: somebody above has said it better
            return function(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs).arguments
            group: Any = given.get("group") or dist.group.WORLD
            ranks, group_name = tuple(dist.get_process_group_ranks(group)), group.group_name
        except Exception:  # a wrong call, or this rank is not in the group: torch says what is wrong
            return function(*args, **kwargs)
        tensors = (v for v in given.values() if isinstance(v, torch.Tensor) and v.layout is torch.strided)
        board.enter(name, ranks, next((v.nbytes for v in tensors), 0), group_name)
        try:
            return function(*args, **kwargs)
        finally:
            board.leave()

    return wrapper
