"""Plan: how a job runs on many ranks, as one frozen value. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onecard.errors import PlanError
from onecard.pipeline.schedule import modes
from onecard.planning import json_text
from onecard.planning.fit import SIZES, Finding, findings, sizes_of
from onecard.planning.page import difference, page
from onecard.planning.transformer import Transformer
from onecard.planning.wanted import Fields, by_field

Recompute = Literal["none", "selective", "operators", "full"]
VERSION = 1
AXES = ("pp", "dp", "cp", "tp")
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_PLACEMENTS = re.compile(r"\s*(\w+)\s*:\s*(Shard\(\d+\)|Replicate(?:\(\))?)\s*(?:,|$)")
_ONE = ("F-then-B", "naive", "Eager1F1B", "ZBH2", "ZB1P", "ZB2P")
_SEVERAL = ("VPP", "BFS")
_FOLDED = ("ZBV", "VHalf", "VMin", "DualPipeV")


@by_field
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a job runs, and nothing of the machine's state.

    Ranks lie in a mesh with the axes (pp, dp, cp, tp), the last one varies fastest: neighbours along tp are neighbours on a host.

    Attributes:
        dp, tp, cp, pp: ranks along each mesh axis: data (batch), tensor, context (parts of a sequence in attention), pipeline.
        ep: ranks that have different experts, neighbours among those that dp (and cp) counts, whose number it divides.
        per_host: ranks on one host; 0 if all are on one.
        placements: (pattern of parameters' names, placements by mesh axis), such as ("*.q_proj.weight", "tp: Shard(0)"); the
            first pattern that fits counts; empty for programs whose layers say it themselves.
        outputs: (pattern of modules' names, how their outputs lie), such as ("blocks.*.mlp", "tp: Shard(1)"): there a sum over tp
            is divided, and what comes behind it works on a part: sequence parallelism of programs whose layers do not say it.
        sequence_parallel: between the layers that tp divides, each rank has its part of the sequence.
        schedule: the pipeline's, by its name in ``onecard.pipeline``; virtual: stages of each rank.
        stages: how many blocks each stage has, virtual ones in the order of the model; empty: as equal as can be.
        microbatch: sequences (rows of a batch) in one microbatch of one rank; microbatches: how many there are in a step.
        zero: what of the training state dp divides: 0 nothing, 1 optimizer states, 2 gradients too, 3 parameters too.
        replicas: in how many copies; dp / replicas ranks divide one.
        recompute: what is computed again in backward: nothing, the attention's core, all operators of blocks but attention in
            one kernel and every second product (torchtitan's "selective", "op"), or whole blocks;
            recompute_blocks: of so many blocks of a stage; 0 of all.
        parameters, gradients, states: dtypes in which they are kept; compute: in which products are made.
        master: whether the optimizer keeps parameters in float32 beside those.
        offload: whether the optimizer's states lie in the host's memory.
        compiled: whether neighbouring pointwise operators run as one kernel.
        overlap: whether messages along dp run beside computation; overlap_tp: and those along tp beside products, as
            fleet's layers and Megatron-LM's start them on GPUs; overlap_pp: whether a stage goes on while it sends and is sent.
        partial_sends: whether tp's ranks, which have the same to send to the next stage, send a part each, which is joined there.

    A schedule's name is kept as it stands in ``onecard.pipeline.modes.MODES``; 1F1B with several stages on each rank is VPP.
    Parameters in float32 have no copy in float32: master is False then.

    Raises:
        PlanError: a field that cannot be, by its name, with what works.

    Example:
        >>> plan = Plan(dp=8, tp=8, pp=16, microbatches=192, zero=1, sequence_parallel=True, recompute="selective")
        >>> print(plan)
        Plan for 1,024 ranks: pp 16 x dp 8 x tp 8, on 128 hosts of 8
          batch          1,536 sequences a step = 8 (dp) x 1 (microbatch) x 192 (microbatches)
          within layers  tensors over 8 ranks, sequence parallel
          pipeline       1F1B, 16 stages, as equal as can be
          kept           bfloat16 parameters, float32 gradients, float32 states of the optimizer, a float32 copy of the parameters
          states         ZeRO 1 divides optimizer states over 8 ranks
          recompute      backward computes the attention's core again
          computes       in bfloat16, kernel by kernel; messages along dp run beside computation
        >>> Plan(dp=8, replicas=3, zero=3)
        Traceback (most recent call last):
        onecard.errors.PlanError: Plan: replicas=3: does not divide dp=8; 1, 2, 4, 8 do
        >>> Plan.from_json(plan.to_json()) == plan
        True
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    per_host: int = 8
    placements: tuple[tuple[str, str], ...] = ()
    outputs: tuple[tuple[str, str], ...] = ()
    sequence_parallel: bool = False
    schedule: str = "1F1B"
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
    overlap_tp: bool = False
    overlap_pp: bool = True
    partial_sends: bool = False

    def __post_init__(self) -> None:
        want = Fields(self)
        want.whole("dp", "tp", "cp", "pp", "ep", "virtual", "microbatch", "microbatches", "replicas")
        want.whole("per_host", "recompute_blocks", least=0)
        want.yes_or_no(
            "sequence_parallel", "master", "offload", "compiled", "overlap", "overlap_tp", "overlap_pp", "partial_sends"
        )
        want.one_of("zero", (0, 1, 2, 3))
        want.one_of("recompute", ("none", "selective", "operators", "full"))
        want.one_of("parameters", DTYPES)
        want.one_of("gradients", DTYPES)
        want.one_of("states", DTYPES)
        want.one_of("compute", (*DTYPES, "tfloat32"))
        self._check_replicas(want)
        self._check_schedule(want)
        self._check_stages(want)
        self._check_named(want, "placements", "parameters", "such as (('*.q_proj.weight', 'tp: Shard(0)'),)")
        self._check_named(want, "outputs", "outputs of modules", "such as (('blocks.*.mlp', 'tp: Shard(1)'),)")
        if self.recompute_blocks and self.recompute == "none":
            raise want.stop("recompute_blocks", "nothing is computed again; give recompute='full' too")
        if self.parameters in ("float32", "float64"):
            object.__setattr__(self, "master", False)

    def _check_replicas(self, want: Fields) -> None:
        for name in ("replicas", "ep"):
            count = getattr(self, name)
            if self.dp % count:
                works = ", ".join(str(n) for n in range(1, min(self.dp, 10**4) + 1) if self.dp % n == 0)
                raise want.stop(name, f"does not divide dp={self.dp}; {works} do")
        if self.replicas > 1 and not self.zero:
            raise want.stop(
                "replicas", "zero=0 divides nothing, of which there could be copies; give zero=3, or replicas=1"
            )

    def _check_schedule(self, want: Fields) -> None:
        """Which it is, and whether each rank may have so many stages."""
        if not isinstance(self.schedule, str):
            raise want.stop("schedule", f"want a name, one of {', '.join(modes.MODES)}")
        try:
            name = modes.known(self.schedule)
        except modes.ModeError:
            raise want.stop("schedule", f"there is none of this name; there are {', '.join(modes.MODES)}") from None
        if self.virtual > 1:
            name = {"1F1B": "VPP", "F-then-B": "BFS"}.get(name, name)
        object.__setattr__(self, "schedule", name)
        if self.virtual > 1 and self.pp == 1:
            raise want.stop("virtual", "there is no pipeline (pp=1) whose ranks could have several stages; virtual=1")
        if self.pp == 1:
            return
        if self.virtual > 1 and name in _ONE:
            several = "1F1B (VPP), F-then-B (BFS) or ZBH1"
            raise want.stop("virtual", f"schedule {name} has one stage on each rank; virtual=1, or schedule {several}")
        if self.virtual != 2 and name in _FOLDED:
            raise want.stop(
                "schedule", f"folds the model in two: each rank has two stages; virtual=2, not {self.virtual}"
            )
        if self.virtual == 1 and name in _SEVERAL:
            one = {"VPP": "1F1B", "BFS": "F-then-B"}[name]
            raise want.stop(
                "schedule", f"has several stages on each rank, but virtual=1; virtual=2, or schedule={one!r}"
            )

    def _check_stages(self, want: Fields) -> None:
        if not isinstance(self.stages, tuple) or not all(type(n) is int and n >= 0 for n in self.stages):
            raise want.stop("stages", "want whole numbers: how many blocks each stage has, such as (8, 8, 8, 6)")
        if self.stages and len(self.stages) != self.pp * self.virtual:
            stages = f"pp x virtual = {self.pp} x {self.virtual} = {self.pp * self.virtual}"
            raise want.stop("stages", f"are {len(self.stages)}, but {stages}; give so many numbers, or none")
        if self.stages and not any(self.stages):
            raise want.stop("stages", "no stage has a block; leave stages empty")

    def _check_named(self, want: Fields, field: str, of: str, example: str) -> None:
        given = getattr(self, field)
        if not isinstance(given, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
            raise want.stop(field, f"want pairs of a pattern and placements, {example}")
        for pair in given:
            pattern, text = pair
            if not isinstance(pattern, str) or not isinstance(text, str) or not pattern:
                raise want.stop(field, f"{pair!r} is no pair of a pattern and placements, {example}")
            parts = _PLACEMENTS.findall(text)
            axes = [axis for axis, _ in parts]
            if _PLACEMENTS.sub("", text).strip() or not parts or len(set(axes)) < len(axes) or not {*axes} <= {*AXES}:
                raise want.stop(field, f"{text!r} (of {pattern!r}) does not say how {of} lie; write an axis ("
                                f"{', '.join(AXES)}) with Shard(dim) or Replicate(), {example}")  # fmt: skip

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def batch(self) -> int:
        """Sequences (rows) of one step, on all ranks together."""
        return self.dp * self.microbatch * self.microbatches

    def check(self, model: Transformer | None = None, **sizes: int) -> tuple[Finding, ...]:
        """What does not fit a model, what costs, and what has no effect.

        Args:
            model: its sizes.
            sizes: single ones instead: layers, hidden, heads, kv_heads, ffn, vocab, sequence.

        Example:
            >>> [str(finding) for finding in Plan(tp=16, per_host=0).check(heads=32, kv_heads=8)]
            ['tp=16 does not divide 8 key heads; tp=8 does']
        """
        unknown = sizes.keys() - {*SIZES}
        if unknown:
            raise PlanError(
                f"Plan.check: there is no size {min(unknown)!r}; there are {', '.join(SIZES)}", min(unknown)
            )
        return findings(self, (sizes_of(model) if model is not None else {}) | sizes)

    def diff(self, other: Plan) -> tuple[str, ...]:
        """The fields that differ, in words, this plan's value first.

        Example:
            >>> print(*Plan(dp=8).diff(Plan(dp=4, tp=2)), sep="\\n")
            dp: 8 -> 4 (ranks of data parallelism)
            tp: 1 -> 2 (ranks of tensor parallelism)
            so batch: 8 -> 4 (sequences of a step)
        """
        return difference(self, other)

    def __str__(self) -> str:
        return page(self)

    def to_json(self) -> str:
        """As JSON with a version; ``from_json`` reads it back."""
        return json_text.written(self, VERSION)

    @staticmethod
    def from_json(given: str | Path | Mapping[str, Any]) -> Plan:
        """What ``to_json`` wrote: a text, the path of a file, or a dict. Fields that are left out have their defaults.

        Raises:
            PlanError: with file, line and field: another version, an unknown field, a number that is a string, ...
        """
        return json_text.read(Plan, json_text.source(given, "Plan"), VERSION)

    def save(self, path: str | Path) -> None:
        """Writes it to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads it from a file; errors name the line."""
        return Plan.from_json(Path(path))
