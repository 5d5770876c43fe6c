"""Paddle's ``fleet.utils``: recompute, and ``sequence_parallel_utils``."""

from typing import NoReturn

from onecard.fleet import names
from onecard.fleet.layers import sequence as sequence_parallel_utils
from onecard.fleet.layers.recomputing import recompute, recompute_hybrid, recompute_sequential

__all__ = ["recompute", "recompute_hybrid", "recompute_sequential", "sequence_parallel_utils"]


def __getattr__(name: str) -> NoReturn:
    names.refuse("onecard.fleet.utils", name)
