"""Strategy: how a step is recorded and laid out, as one value under Paddle's names. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from onecard.engine import fields as may
from onecard.engine import with_plan
from onecard.engine.fields import Checked
from onecard.errors import StrategyError
from onecard.pipeline.schedule import modes
from onecard.planning import json_text
from onecard.planning.plan import Plan

VERSION = 1
_CLIP = "Engine(..., clip_grad_norm=1.0)"


def _schedule(path: str, value: Any) -> str:
    try:
        return modes.known(value)
    except modes.ModeError:
        raise may.stop(path, value, f"there is no such schedule; there are {', '.join(modes.MODES)}") from None


@dataclass
class Sharding(Checked):
    """ZeRO: what of the training state is divided over the ranks that divide the batch.

    Attributes:
        stage: 1 optimizer states, 2 gradients too, 3 parameters too.
        degree: over how many of these ranks; -1: all.
        offload: the optimizer's states lie in the host's memory.
        overlap: whether gradients are summed while backward runs; None: on a GPU.
    """

    enable: bool = False
    stage: int = 1
    degree: int = -1
    offload: bool = False
    overlap: bool | None = None

    path: ClassVar[str] = "sharding."
    checks: ClassVar[Mapping[str, may.Check]] = {
        "enable": may.yes_or_no, "stage": may.one_of(1, 2, 3), "degree": may.whole(rest=True), "offload": may.yes_or_no,
        "overlap": may.one_of(None, True, False),
    }  # fmt: skip
    elsewhere: ClassVar[Mapping[str, str]] = {
        "enable_overlap": "sharding.overlap",
        "overlap_grad_comm": "sharding.overlap",
        "param_bucket_size_numel": "nothing: messages are as large as the pass 'pieces' makes them",
        "grad_bucket_size_numel": "nothing: messages are as large as the pass 'pieces' makes them",
        "partition_algor": "nothing: each tensor is cut along the dim that divides best",
        "enable_tuning": "nothing: there is nothing to tune by hand",
        "enable_hierarchical_comm": "sharding.degree: so many ranks next to each other divide one copy",
        "release_gradients": "nothing: gradients are freed at their last use",
    }  # fmt: skip


@dataclass
class Pipeline(Checked):
    """Stages of the model on different ranks, and the batch in microbatches.

    Attributes:
        schedule_mode: by its name in ``onecard.pipeline``, in any spelling.
        micro_batch_size: rows of one microbatch on one rank; accumulate_steps: how many microbatches there are.
        vpp_degree: stages of each rank.
        degree: how many ranks are one behind the other; -1: the model's mesh says it, or all are.
        at: the modules at which stages begin, by their names; none: as balanced as can be.
        microbatch_loss: the loss of a microbatch is meant (negatives of its own rows); gradients are means of theirs.
    """

    enable: bool = False
    schedule_mode: str = "1F1B"
    micro_batch_size: int = 1
    accumulate_steps: int = 1
    vpp_degree: int = 1
    degree: int = -1
    at: tuple[str, ...] = ()
    microbatch_loss: bool = False

    path: ClassVar[str] = "pipeline."
    checks: ClassVar[Mapping[str, may.Check]] = {
        "enable": may.yes_or_no, "schedule_mode": _schedule, "micro_batch_size": may.whole(), "accumulate_steps": may.whole(),
        "vpp_degree": may.whole(), "degree": may.whole(rest=True), "at": may.names("names of modules"),
        "microbatch_loss": may.yes_or_no,
    }  # fmt: skip
    elsewhere: ClassVar[Mapping[str, str]] = {
        "pp_degree": "pipeline.degree",
        "vpp_seg_method": "pipeline.at: the modules at which stages begin",
        "split_backward": "pipeline.schedule_mode: 'ZBH1' and 'ZBV' halve backward",
        "generation_batch_size": "nothing: Engine.predict takes batches of any size",
        "enable_send_recv_overlap": "nothing: messages between stages run beside computation",
        "job_schedule_profiler_start": "recording.trace(path) of Engine.main_program",
        "job_schedule_profiler_stop": "recording.trace(path) of Engine.main_program",
    }  # fmt: skip


@dataclass
class Recompute(Checked):
    """What forward made is dropped and made again in backward.

    Attributes:
        checkpoints: modules whose whole forward is run again: names, their last parts, patterns ("blocks.*"), names of classes;
            a list's are its members. "repeated": the model's repeated layers. Empty: what is cheap, and norms, wherever it is.
        memory_limit: bytes that may be alive at once on a rank: as little is computed again as it takes. None: all that is asked.
    """

    enable: bool = False
    checkpoints: tuple[str, ...] = ()
    memory_limit: int | None = None

    path: ClassVar[str] = "recompute."
    checks: ClassVar[Mapping[str, may.Check]] = {
        "enable": may.yes_or_no, "checkpoints": may.names("names of modules"), "memory_limit": may.whole(none=True),
    }  # fmt: skip
    elsewhere: ClassVar[Mapping[str, str]] = {
        "modules": "recompute.checkpoints",
        "no_recompute_segments": "recompute.checkpoints: names, or patterns, of those that are to be computed again",
        "sr": "recompute.checkpoints",
        "refined_ops_patterns": "recompute.memory_limit: as little is computed again as it takes",
        "enable_tuning": "recompute.memory_limit: as little is computed again as it takes",
    }


@dataclass
class Amp(Checked):
    """Mixed precision: forward runs as under ``torch.autocast``.

    Attributes:
        level: "O1": parameters stay float32; "O2": they have ``dtype``, and the optimizer keeps float32 copies.
        init_loss_scaling, incr_every_n_steps, incr_ratio, decr_ratio, use_dynamic_loss_scaling: of the loss under float16.
        custom_white_list, custom_black_list: functions of torch ("softmax", "linear") that run in ``dtype``, or in float32,
            whatever autocast's own lists say.
    """

    enable: bool = False
    dtype: str = "bfloat16"
    level: str = "O1"
    init_loss_scaling: float = 2.0**16
    incr_every_n_steps: int = 2000
    incr_ratio: float = 2.0
    decr_ratio: float = 0.5
    use_dynamic_loss_scaling: bool = True
    custom_white_list: tuple[str, ...] = ()
    custom_black_list: tuple[str, ...] = ()

    path: ClassVar[str] = "amp."
    checks: ClassVar[Mapping[str, may.Check]] = {
        "enable": may.yes_or_no, "dtype": may.one_of("bfloat16", "float16"),
        "level": may.one_of("O1", "O2", also={"o1": "O1", "o2": "O2"}), "init_loss_scaling": may.number(),
        "incr_every_n_steps": may.whole(), "incr_ratio": may.number(1.0), "decr_ratio": may.number(),
        "use_dynamic_loss_scaling": may.yes_or_no, "custom_white_list": may.names("names of torch's functions"),
        "custom_black_list": may.names("names of torch's functions"),
    }  # fmt: skip
    elsewhere: ClassVar[Mapping[str, str]] = {
        "use_pure_fp16": "amp.dtype='bfloat16', amp.level='O2': a scaler takes no gradients that are float16",
        "use_fp16_guard": "nothing: a part of the model that is to stay float32 runs under torch.autocast(..., enabled=False)",
        "use_bf16_guard": "nothing: a part of the model that is to stay float32 runs under torch.autocast(..., enabled=False)",
        "use_master_grad": "nothing: gradients of float32 parameters are float32, those of amp.level='O2' are taken over as such",
        "use_promote": "nothing: autocast promotes",
        "decr_every_n_nan_or_inf": "nothing: the scale is lowered at each step that is skipped",
        "custom_black_varnames": "amp.custom_black_list: functions",
        "use_optimizer_fp16": "amp.level='O2'",
    }  # fmt: skip


@dataclass
class GradientMerge(Checked):
    """The batch in ``k_steps`` microbatches, one after the other; the optimizer steps once.

    Attributes:
        avg: gradients are merged as the loss says, a mean or a sum over the batch; False: added up.
        microbatch_loss: the loss of a microbatch is meant (negatives of its own rows); gradients are means of theirs.
    """

    enable: bool = False
    k_steps: int = 1
    avg: bool = True
    microbatch_loss: bool = False

    path: ClassVar[str] = "gradient_merge."
    checks: ClassVar[Mapping[str, may.Check]] = {
        "enable": may.yes_or_no, "k_steps": may.whole(), "avg": may.yes_or_no,
        "microbatch_loss": may.yes_or_no,
    }  # fmt: skip


@dataclass
class FusedPasses(Checked):
    """What rewrites the recording.

    Attributes:
        enable: neighbouring operators become one kernel, by torch's compiler.
        without: passes of ``onecard.static.passes.PASSES`` that do not run; the others always do.
    """

    enable: bool = False
    without: tuple[str, ...] = ()

    path: ClassVar[str] = "fused_passes."
    checks: ClassVar[Mapping[str, may.Check]] = {"enable": may.yes_or_no, "without": may.names("names of passes")}
    elsewhere: ClassVar[Mapping[str, str]] = {
        "fused_passes_list": "nothing: fused_passes.enable=True fuses what torch's compiler can, fused_passes.without leaves "
        "passes of onecard out",
    }  # fmt: skip


_PARALLEL = "marks: oc.shard_tensor and oc.shard_layer lay parameters out"


@dataclass(init=False)
class Strategy(Checked):
    """How an ``Engine`` runs a step. Each field is checked when it is set.

    Args:
        config: a dict of fields, or of sections and their fields.

    Attributes:
        sharding, pipeline, recompute, amp, gradient_merge, fused_passes: see ``help(type(strategy.sharding))``, and so on; a dict
            may be assigned to each.
        auto_mode: "semi": what is not marked is laid out by itself; "full": a model without marks is laid out as the plan
            says that is found for the first batch (``oc.plan``); what is enabled here is pinned.
        seed: of the random numbers, on all ranks, at ``prepare``; None: as they are.

    Raises:
        StrategyError: a name that there is not, or a value that cannot be, as soon as it is set; ``field`` is which.

    Source: ``paddle.distributed.auto_parallel.Strategy``.

    Example:
        >>> strategy = Strategy()
        >>> strategy.sharding.enable, strategy.sharding.stage = True, 2
        >>> strategy.gradient_merge = {"enable": True, "k_steps": 4}
        >>> print(strategy)
        Strategy: sharding (stage 2), gradient_merge (k_steps 4)
        >>> strategy.sharding.stage = 4
        Traceback (most recent call last):
        onecard.errors.StrategyError: Strategy: sharding.stage=4: want one of 1, 2, 3
        >>> Strategy.from_json(strategy.to_json()) == strategy
        True
    """

    sharding: Sharding
    pipeline: Pipeline
    recompute: Recompute
    amp: Amp
    gradient_merge: GradientMerge
    fused_passes: FusedPasses
    auto_mode: str
    seed: int | None

    checks: ClassVar[Mapping[str, may.Check]] = {
        "sharding": may.section(Sharding), "pipeline": may.section(Pipeline), "recompute": may.section(Recompute),
        "amp": may.section(Amp), "gradient_merge": may.section(GradientMerge), "fused_passes": may.section(FusedPasses),
        "auto_mode": may.one_of("semi", "full"), "seed": may.whole(least=0, none=True),
    }  # fmt: skip
    elsewhere: ClassVar[Mapping[str, str]] = {
        "hybrid_configs": "the model's mesh for mp; sharding.degree, pipeline.degree; the ranks that are left divide the batch",
        "tensor_parallel": _PARALLEL,
        "mp_optimization": "nothing: messages of cut layers are started early and awaited where they are read",
        "sp_optimization": "oc.reshard(x, mesh, [oc.Shard(1)]): norms and dropout keep the cut",
        "dp_optimization": "nothing: gradients travel in buckets, beside backward",
        "tuning": "nothing: there is nothing to tune by hand",
        "dataset": "engine.fit(dataset, batch_size=...)",
        "split_data": "nothing: the batch is always divided; batch_size is the whole batch's",
        "batch_dim": "nothing: the batch is dim 0 of each input",
        "data_parallel": "nothing: the batch is divided over the ranks unless the model's mesh says otherwise",
        "gradient_scale": "nothing: gradients are those of one card",
        "gradient_scale_using_allreduce_avg": "nothing: gradients are those of one card",
        "gradient_clip": _CLIP,
        "grad_clip": _CLIP,
        "qat": "nothing: quantise the model before it is given to the Engine",
        "reinit": "nothing: parameters are those that the model has",
        "result": "engine.main_program, engine.cost()",
        "return_numpy": "nothing: run returns numbers for loss and metrics, tensors for outputs",
        "use_cache": "nothing: a step is recorded once",
        "all_ranks": "nothing: each rank records its own",
        "lamb": "an optimizer of torch's",
        "lars": "an optimizer of torch's",
        "localsgd": "nothing: gradients are summed at every step",
        "dgc": "nothing: gradients are not compressed",
        "sync_batch_norm": "nothing: batch norm is that of the whole batch",
        "sequence_parallel": "oc.reshard(x, mesh, [oc.Shard(1)]): norms and dropout keep the cut",
        "full_graph": "nothing: a recording is always the whole step",
    }  # fmt: skip

    def __init__(self, config: Mapping[str, Any] | Strategy | None = None, **more: Any) -> None:
        for name, check in self.checks.items():
            default: Any = {"auto_mode": "semi", "seed": None}.get(name, {})
            object.__setattr__(self, name, check(name, default))
        if config is not None and not isinstance(config, Mapping | Strategy):
            raise StrategyError(f"Strategy({config!r}): want a dict of {', '.join(self.checks)}")
        given = config.as_dict() if isinstance(config, Strategy) else dict(config or {})
        self.update(given | more)

    def copy(self) -> Strategy:
        """Another one with the same values."""
        return Strategy(self)

    def owned_by(self, owner: str) -> Strategy:
        """A copy that can no longer be changed."""
        made = self.copy()
        for part in (made, *(p for p in vars(made).values() if isinstance(p, Checked))):
            object.__setattr__(part, "_owner", owner)
        return made

    def to_json(self) -> str:
        """As JSON with a version; ``from_json`` reads it back."""
        return json.dumps({"onecard": "Strategy", "version": VERSION, **self.as_dict()}, indent=2) + "\n"

    @staticmethod
    def from_json(given: str | Path | Mapping[str, Any]) -> Strategy:
        """What ``to_json`` wrote: a text, the path of a file, or a dict. Fields that are left out have their defaults.

        Raises:
            PlanError: with file, line and field.
        """
        return json_text.read(Strategy, json_text.source(given, "Strategy"), VERSION)

    @staticmethod
    def of_plan(plan: Plan) -> Strategy:
        """What of a plan is a strategy's: ZeRO, the pipeline, recompute, dtypes, microbatches. Its mesh is the model's.

        Raises:
            StrategyError: the plan asks for what no field of a strategy says. Names it.

        Example:
            >>> strategy = Strategy.of_plan(Plan(dp=4, zero=2, parameters="float32", compute="float32", microbatches=8))
            >>> print(strategy)
            Strategy: sharding (stage 2), gradient_merge (k_steps 8)
            >>> strategy.to_plan(Plan(dp=4)).zero
            2
        """
        return Strategy(with_plan.config_of(plan))

    def to_plan(self, base: Plan | None = None) -> Plan:
        """A plan with what this strategy says; the rest (mesh, placements) is that of ``base``.

        Raises:
            PlanError: the two do not go together.
        """
        return with_plan.to_plan(self, base or Plan())

    def __deepcopy__(self, memo: Any) -> Strategy:
        return self.copy()

    def __copy__(self) -> Strategy:
        return self.copy()

    def __str__(self) -> str:
        return f"Strategy: {', '.join(_said(self)) or 'the batch is divided over the ranks'}"


def _said(strategy: Strategy) -> list[str]:
    """What is switched on, with what differs from the defaults."""
    found = []
    for name in strategy.checks:
        part = getattr(strategy, name)
        if isinstance(part, Checked) and part.enable:
            plain = type(part)()
            values = {key: value for key in part.checks if (value := getattr(part, key)) != getattr(plain, key)}
            values |= {"stage": part.stage} if name == "sharding" else {}
            values |= {"dtype": part.dtype} if name == "amp" else {}
            words = ", ".join(f"{key} {value}" for key, value in values.items() if key != "enable")
            found.append(f"{name} ({words})" if words else name)
    return found + ([f"seed {strategy.seed}"] if strategy.seed is not None else [])


__all__ = ["Amp", "FusedPasses", "GradientMerge", "Pipeline", "Recompute", "Sharding", "Strategy"]
