"""Paddle's ``fleet.meta_parallel``: the layers that are cut, and the random states of their dropout."""

from typing import NoReturn

from onecard.fleet import names
from onecard.fleet.heads import QKVParallelLinear
from onecard.fleet.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from onecard.fleet.rng import RNGStatesTracker, get_rng_state_tracker, model_parallel_random_seed
from onecard.fleet.vocabulary import ParallelCrossEntropy, VocabParallelEmbedding, class_center_sample

__all__ = [
    "ColumnParallelLinear", "MergedColumnParallelLinear", "ParallelCrossEntropy", "QKVParallelLinear", "RNGStatesTracker",
    "RowParallelLinear", "VocabParallelEmbedding", "class_center_sample", "get_rng_state_tracker",
    "model_parallel_random_seed", "names",
]  # fmt: skip


def __getattr__(name: str) -> NoReturn:
    names.refuse("onecard.fleet.meta_parallel", name)
