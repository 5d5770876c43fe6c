"""Plan: how a job runs on many ranks, as one frozen value. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a job runs, and nothing of the machine's state.

    Ranks lie in a mesh with the axes (pp, dp, cp, tp), the last one varies fastest: neighbours along tp are neighbours on a host.

    Attributes:
        dp, tp, cp, pp: ranks along each mesh axis: data (batch), tensor, context (parts of a sequence in attention), pipeline.
        ep: experts, of whose axis dp is made; 1 until a model has some.
        per_host: ranks on one host; 0 if all are on one.
        placements: (pattern of parameters' names, placements by mesh axis), such as ("*.q_proj.weight", "tp: Shard(0)"); the
            first pattern that fits counts; empty for programs whose layers say it themselves.
        sequence_parallel: between the layers that tp divides, each rank has its part of the sequence.
        schedule: the pipeline's, by its name in ``onecard.pipeline``; virtual: stages of each rank.
        stages: how many blocks each stage has, virtual ones in the order of the model; empty: as equal as can be.
        microbatch: sequences (rows of a batch) in one microbatch of one rank; microbatches: how many there are in a step.
        zero: what of the training state dp divides: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        replicas: in how many copies; dp / replicas ranks divide one.
        recompute: what is computed again in backward: nothing, the attention's core, or whole blocks;
            recompute_blocks: of so many blocks of a stage; 0 of all.
        parameters, gradients, states: dtypes in which they are kept; compute: in which products are made.
        master: whether the optimizer keeps parameters in float32 beside those.
        offload: whether the optimizer's states lie in the host's memory.
        compiled: whether neighbouring pointwise operators run as one kernel.
        overlap: whether messages along dp run beside computation.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    per_host: int = 8
    placements: tuple[tuple[str, str], ...] = ()
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    virtual: int = 1
    stages: tuple[int, ...] = ()
    microbatch: int = 1
    microbatches: int = 1
    zero: int = 0
    replicas: int = 1
    recompute: Recompute = "none"
    recompute_blocks: int = 0
    parameters: str = "bfloat16"
    gradients: str = "float32"
    states: str = "float32"
    compute: str = "bfloat16"
    master: bool = True
    offload: bool = False
    compiled: bool = False
    overlap: bool = True

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def batch(self) -> int:
        """Sequences (rows) of one step, on all ranks together."""
        return self.dp * self.microbatch * self.microbatches
