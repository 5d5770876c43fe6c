"""Paddle's ``fleet.utils``: recompute, and ``sequence_parallel_utils``."""

from onecard.fleet import sequence as sequence_parallel_utils
from onecard.fleet.recomputing import recompute

__all__ = ["recompute", "sequence_parallel_utils"]
