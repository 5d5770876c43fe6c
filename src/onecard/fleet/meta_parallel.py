"""Paddle's ``fleet.meta_parallel``: the layers that are cut, pipelines, and the random states of their dropout."""

from typing import NoReturn

from onecard.fleet import names
from onecard.fleet.experts.gates import BaseGate, GShardGate, NaiveGate, SwitchGate
from onecard.fleet.experts.layer import MoELayer
from onecard.fleet.experts.networks import GroupedExperts
from onecard.fleet.experts.top_k import TopKGate
from onecard.fleet.front.pipeline_parallel import PipelineParallel
from onecard.fleet.grid.rng import RNGStatesTracker, get_rng_state_tracker, model_parallel_random_seed
from onecard.fleet.layers.heads import QKVParallelLinear
from onecard.fleet.layers.layer_desc import LayerDesc, SharedLayerDesc
from onecard.fleet.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from onecard.fleet.layers.pipeline_layer import PipelineLayer
from onecard.fleet.layers.vocabulary import ParallelCrossEntropy, VocabParallelEmbedding, class_center_sample

__all__ = [
    "BaseGate", "ColumnParallelLinear", "GShardGate", "GroupedExperts", "LayerDesc", "MergedColumnParallelLinear",
    "MoELayer", "NaiveGate", "ParallelCrossEntropy", "PipelineLayer", "PipelineParallel", "QKVParallelLinear",
    "RNGStatesTracker", "RowParallelLinear", "SharedLayerDesc", "SwitchGate", "TopKGate", "VocabParallelEmbedding",
    "class_center_sample", "get_rng_state_tracker", "model_parallel_random_seed", "names",
]  # fmt: skip


def __getattr__(name: str) -> NoReturn:
    names.refuse("onecard.fleet.meta_parallel", name)
