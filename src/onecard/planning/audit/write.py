"""A plan as another library's file, and in words what that library has no setting for.

What it cannot say is not listed by hand: the file is read back, and what differs is said.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from onecard.errors import PlanError
from onecard.planning.audit.audit import Given
from onecard.planning.audit.flavors import FLAVORS, flavor_of
from onecard.planning.audit.read import read
from onecard.planning.audit.torchtitan import SCHEDULES
from onecard.planning.audit.write_megatron import SHORT, hosts_of, write_megatron
from onecard.planning.plan import Plan
from onecard.planning.transformer import Transformer


@dataclass(frozen=True)
class Written:
    """A file of another library.

    Attributes:
        library: whose it is; name: how such files are called.
        text: what it says.
        cannot: what the plan says and the file does not, in words, by field.
        plan: what the file says, read back.
    """

    library: str
    name: str
    text: str
    cannot: dict[str, str]
    plan: Plan


def write(library: str, plan: Plan, model: Transformer | None = None) -> Written:
    """The plan as a file of "megatron", "deepspeed", "torchtitan" or "fsdp" (accelerate).

    Raises:
        PlanError: another library; a model that its file has to say and that is not given.

    Example:
        >>> made = write("deepspeed", Plan(dp=8, tp=2, zero=1, microbatches=4, schedule="ZBH1", pp=2))
        >>> print(made.cannot["schedule"])
        schedule: the plan says ZBH1, which DeepSpeed has no setting for; its file means 1F1B
    """
    if library not in _WRITERS:
        raise PlanError(f"there is no library {library!r} to write for; there are {', '.join(_WRITERS)}")
    title, name, make, wants_model = _WRITERS[library]
    if wants_model and model is None:
        raise PlanError(f"{title}'s file says the model's sizes, too; name them: --model config.json")
    text = make(plan, model)
    back, sizes = _read_back(name, text, plan, model)
    cannot = {}
    for field in fields(Plan):
        mine, theirs = getattr(plan, field.name), getattr(back, field.name)
        if mine != theirs and not _same(field.name, plan, back):
            cannot[field.name] = _words(title, field.name, mine, theirs)
    if model is not None and sizes is not None:
        a, b = _full(model), _full(sizes)
        for name_, value in a.items():
            if value != b[name_]:
                cannot[name_] = _words(title, name_, value, b[name_])
    if library == "torchtitan" and model is not None and flavor_of(asdict(model)) is None:
        known = ", ".join(f"{name_} {flavor}" for name_, flavors in FLAVORS.items() for flavor in flavors)
        cannot["flavor"] = f"flavor: torchtitan has none of these sizes, add one to its tables; it has {known}"
    return Written(library, name, text, cannot, back)


_ALONG = {
    "schedule": "pp", "stages": "pp", "overlap_pp": "pp", "partial_sends": "pp", "overlap_tp": "tp", "sequence_parallel": "tp",
    "overlap": "dp", "zero": "dp",
}  # fmt: skip
"""Fields that mean nothing where there is one rank along an axis."""


def _same(field: str, plan: Plan, back: Plan) -> bool:
    """Whether a difference is one in words only: the order of no pipeline, hosts of which one has all ranks."""
    one_host = all(not p.per_host or p.world <= p.per_host for p in (plan, back))
    if field in _ALONG and all(getattr(p, _ALONG[field]) == 1 for p in (plan, back)):
        return True
    return field == "per_host" and one_host


def _words(title: str, field: str, mine: Any, theirs: Any) -> str:
    def said(value: Any) -> str:
        return ("yes" if value else "no") if isinstance(value, bool) else str(value if value != () else "none")

    return f"{field}: the plan says {said(mine)}, which {title} has no setting for; its file means {said(theirs)}"


def _full(model: Transformer) -> dict[str, Any]:
    """Sizes with what is meant where nothing is said."""
    rows = (model.rows or model.sequence) if model.positions == "learned" else 0
    full = replace(model, kv_heads=model.key_heads, head_dim=model.per_head, ffn=model.inner, rows=rows)
    return asdict(full)


def _read_back(name: str, text: str, plan: Plan, model: Transformer | None) -> tuple[Plan, Transformer | None]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        files = [path]
        flavored = name.endswith(".toml") and model is not None and flavor_of(asdict(model)) is None
        if flavored and model is not None:
            sizes = Path(folder) / "sizes.json"
            sizes.write_text(model.to_json(), encoding="utf-8")
            files.append(sizes)
        audit = read(files, Given(world=plan.world if name.endswith(".toml") else None))
    return audit.plan, audit.transformer


# -- DeepSpeed ---------------------------------------------------------------------------------------------------------


def _deepspeed(plan: Plan, model: Transformer | None) -> str:
    zero: dict[str, Any] = {"stage": plan.zero, "overlap_comm": plan.overlap}
    if plan.replicas > 1:
        zero["mics_shard_size"] = plan.dp // plan.replicas
    if plan.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    data: dict[str, Any] = {
        "train_batch_size": plan.batch,
        "train_micro_batch_size_per_gpu": plan.microbatch,
        "gradient_accumulation_steps": plan.microbatches,
        "zero_optimization": zero,
    }
    if plan.parameters in ("bfloat16", "float16"):
        data[SHORT[plan.parameters]] = {"enabled": True}
    if plan.parameters == "float32" and plan.compute in ("bfloat16", "float16"):
        data["torch_autocast"] = {"enabled": True, "dtype": plan.compute}
    if plan.gradients in SHORT:
        data["data_types"] = {"grad_accum_dtype": SHORT[plan.gradients]}
    if plan.tp > 1:
        data["tensor_parallel"] = {"autotp_size": plan.tp}
    if plan.cp > 1:
        data["sequence_parallel_size"] = plan.cp
    pipeline: dict[str, Any] = {"stages": plan.pp} if plan.pp > 1 else {}
    if plan.recompute == "full":
        pipeline["activation_checkpoint_interval"] = 1
    if pipeline:
        data["pipeline"] = pipeline
    if plan.compiled:
        data["compile"] = {"deepcompile": True}
    return json.dumps(data, indent=2) + "\n"


# -- torchtitan --------------------------------------------------------------------------------------------------------


def _torchtitan(plan: Plan, model: Transformer | None) -> str:
    assert model is not None  # write() has asked
    flavor = flavor_of(asdict(model))
    sharded = plan.zero > 0 and plan.dp > plan.replicas
    parallel: dict[str, Any] = {
        "data_parallel_replicate_degree": plan.replicas if sharded else plan.dp,
        "data_parallel_shard_degree": plan.dp // plan.replicas if sharded else 1,
        "fsdp_reshard_after_forward": "always" if plan.zero == 3 else "never",
        "tensor_parallel_degree": plan.tp,
        "pipeline_parallel_degree": plan.pp,
        "context_parallel_degree": plan.cp,
    }
    if plan.overlap_tp:
        parallel["enable_async_tensor_parallel"] = True
    if plan.ep > 1:
        parallel["expert_parallel_degree"] = plan.ep
    if plan.pp > 1:
        parallel |= _torchtitan_pipeline(plan, model)
    whole = plan.pp == 1
    local = plan.microbatch if whole else plan.microbatch * plan.microbatches
    kept = plan.parameters if plan.parameters == plan.gradients == plan.states == "bfloat16" else "float32"
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": flavor[0] if flavor else "llama3", "flavor": flavor[1] if flavor else "(of these sizes there is none)"},
        "training": {
            "local_batch_size": local, "global_batch_size": plan.batch, "seq_len": model.sequence, "dtype": kept,
            "mixed_precision_param": "float32" if plan.compute == "float32" else "bfloat16",
            "enable_cpu_offload": plan.offload,
        },
        "parallelism": parallel,
        "activation_checkpoint": _torchtitan_again(plan, model),
        "compile": {"enable": plan.compiled, "components": ["model", "loss"]},
    }  # fmt: skip
    if plan.compute.startswith("float8"):
        sections["model"]["converters"] = ["float8"]
    return "\n".join(
        f"[{name}]\n" + "".join(f"{k} = {_toml(v)}\n" for k, v in given.items()) for name, given in sections.items()
    )


def _torchtitan_again(plan: Plan, model: Transformer) -> dict[str, Any]:
    stage = model.layers // (plan.pp * plan.virtual)
    if plan.recompute == "full" and plan.recompute_blocks and stage >= plan.recompute_blocks:
        every = stage // plan.recompute_blocks
        return {"mode": "selective", "selective_ac_option": str(every)} if every > 1 else {"mode": "full"}
    if plan.recompute in ("selective", "operators"):
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": plan.recompute}


def _torchtitan_pipeline(plan: Plan, model: Transformer) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in SCHEDULES.items()}
    made: dict[str, Any] = {
        "pipeline_parallel_schedule": names.get(plan.schedule, "1F1B" if plan.virtual == 1 else "Interleaved1F1B"),
        "pipeline_parallel_microbatch_size": plan.microbatch,
    }
    number = plan.pp * plan.virtual
    each = -(-model.layers // number)
    usual = plan.virtual == (1 if plan.schedule in ("1F1B", "F-then-B") else 2)
    stages = plan.stages
    if not stages and not usual and -(-model.layers // each) != number:
        stages = tuple(model.layers // number + (i < model.layers % number) for i in range(number))
    if stages:
        first, parts = 0, []
        for count in stages:
            parts.append([f"layers.{i}" for i in range(first, first + count)])
            first += count
        parts[0] = ["tok_embeddings", *parts[0]]
        parts[-1] = [*parts[-1], "norm", "output"]
        return made | {"module_fqns_per_model_part": parts}
    made |= {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}
    return made if usual else made | {"pipeline_parallel_layers_per_stage": each}


def _toml(value: Any) -> str:
    return json.dumps(value)  # of texts, numbers, true, false and lists TOML says the same


# -- accelerate --------------------------------------------------------------------------------------------------------


def _fsdp(plan: Plan, model: Transformer | None) -> str:
    each, hosts = hosts_of(plan)
    compute = {"bfloat16": "bf16", "float16": "fp16"}.get(
        plan.compute, "fp8" if plan.compute.startswith("float8") else "'no'"
    )
    lines = [
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {'FSDP' if plan.zero else 'MULTI_GPU'}",
        f"mixed_precision: {compute}",
        f"num_machines: {hosts}",
        f"num_processes: {each * hosts}",
    ]
    if plan.zero:
        lines += [
            "fsdp_config:",
            "  fsdp_version: 2",
            "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            f"  fsdp_reshard_after_forward: {str(plan.zero == 3).lower()}",
            f"  fsdp_activation_checkpointing: {str(plan.recompute == 'full').lower()}",
            f"  fsdp_offload_params: {str(plan.offload).lower()}",
        ]
        lines += ["  fsdp_backward_prefetch: NO_PREFETCH"] * (not plan.overlap)
    copies = plan.replicas if plan.zero else plan.dp
    if plan.tp > 1 or plan.cp > 1 or plan.replicas > 1:
        sizes = {"dp_replicate": copies, "dp_shard": plan.dp // copies, "tp": plan.tp, "cp": plan.cp}
        lines += ["parallelism_config:"]
        lines += [f"  parallelism_config_{name}_size: {size}" for name, size in sizes.items()]
    if plan.compiled:
        lines += ["dynamo_config:", "  dynamo_backend: INDUCTOR"]
    return "\n".join(lines) + "\n"


_WRITERS: dict[str, tuple[str, str, Callable[[Plan, Transformer | None], str], bool]] = {
    "megatron": ("Megatron-LM", "train.sh", write_megatron, True),
    "deepspeed": ("DeepSpeed", "ds_config.json", _deepspeed, False),
    "torchtitan": ("torchtitan", "train.toml", _torchtitan, True),
    "fsdp": ("accelerate", "fsdp.yaml", _fsdp, False),
}
LIBRARIES = tuple(_WRITERS)
