"""torchtitan's TOML as a model and a plan.

Source: ``torchtitan/config/job_config.py`` and ``torchtitan/distributed/pipeline_parallel.py`` of pytorch/torchtitan, whose
defaults count where a file says nothing; of older versions the names that have others now.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecard.errors import PlanError
from onecard.planning.audit.audit import Audit, Given, audited, share
from onecard.planning.audit.flavors import FLAVORS
from onecard.planning.audit.settings import TOML, Settings, flat
from onecard.planning.fit import Finding
from onecard.planning.json_text import text_of

SCHEDULES = {
    "1F1B": "1F1B", "GPipe": "F-then-B", "Interleaved1F1B": "VPP", "LoopedBFS": "BFS", "InterleavedZeroBubble": "ZBH1",
    "ZBVZeroBubble": "ZBV", "DualPipeV": "DualPipeV",
}  # fmt: skip
_ONE_STAGE = ("1F1B", "F-then-B")
_SECTIONS = ("model", "training", "parallelism", "activation_checkpoint", "compile", "experimental", "float8", "job")
_ROOT = {"bfloat16": "bfloat16", "float32": "float32"}


def toml_settings(path: Path) -> Settings:
    """The values of a TOML file by their names, each with its line."""
    text = text_of(path)
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        why = re.sub(r" \(at .*\)$", "", str(error))
        count = int(line[1]) if line else text.count("\n") + 1
        raise PlanError(f"{path}:{count}: no TOML: {why[:1].lower()}{why[1:]}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}:1: no TOML: {str(error).partition(';')[0]}") from None
    for name in _SECTIONS:
        if name in found and not isinstance(found[name], dict):
            raise PlanError(f"{path}:{_lines(text, str(path)).get(name, f'{path}:1').rpartition(':')[2]}: {name} is "
                            f"{found[name]!r}; want a section, [{name}]", name)  # fmt: skip
    return Settings(str(path), flat(found), _lines(text, str(path)), TOML)


def _lines(text: str, name: str) -> dict[str, str]:
    """``file:line`` of each setting that is written as ``name = value`` under its section."""
    found: dict[str, str] = {}
    section = ""
    for number, line in enumerate(text.split("\n"), 1):
        head = re.match(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$", line)
        setting = re.match(r"\s*([\w\-.\"']+)\s*=", line)
        if head is not None:
            section = head[1].strip().replace('"', "")
            found.setdefault(section, f"{name}:{number}")
        elif setting is not None:
            key = setting[1].strip("\"'")
            found.setdefault(f"{section}.{key}" if section else key, f"{name}:{number}")
    return found


def read_torchtitan(path: Path, model: Mapping[str, Any] | None, given: Given) -> Audit:
    """A torchtitan TOML; ``model``: sizes that another file says, in place of its flavor's."""
    settings = toml_settings(path)
    if not {name.partition(".")[0] for name in settings.values} & {"model", "training", "parallelism"}:
        raise PlanError(
            f"{path}:1: is no configuration of torchtitan: it has no section [model], [training] or [parallelism]"
        )
    found: list[Finding] = []
    sizes = _model(settings, model, given)
    plan = _degrees(settings, given, found)
    plan |= _pipeline(settings, plan["pp"], sizes["layers"], found)
    plan |= _batch(settings, plan, found)
    plan |= _precision(settings)
    plan |= _recompute(settings, sizes["layers"], plan)
    compiled = settings.flag("training.compile", means="kernels fused")
    parts = settings.take("compile.components") or ["model"]
    enabled = settings.flag("compile.enable", means="kernels fused") and isinstance(parts, list) and "model" in parts
    offload = settings.flag("training.enable_cpu_offload", means="states in the host's memory")
    plan |= {"compiled": compiled or enabled, "offload": offload, "overlap": True}
    return audited("torchtitan", settings, sizes, plan, found, given)


def _whole(settings: Settings, names: tuple[str, ...], default: int, means: str, least: int = 1) -> int:
    """A number under the name that it has now, or one that it had."""
    there = next((name for name in names if settings.has(name)), names[0])
    return settings.whole(there, default, means, least)


def _model(settings: Settings, model: Mapping[str, Any] | None, given: Given) -> dict[str, Any]:
    sequence = given.sequence or settings.whole("training.seq_len", 2048, "sequence={}")
    name = settings.text("model.name") or "llama3"
    flavor = settings.text("model.flavor") or "debugmodel"
    if model is not None:
        settings.says("model.name", "another file says the sizes")
        return {**model, "sequence": sequence}
    hint = "; or name a Hugging Face config.json beside it"
    if name not in FLAVORS:
        raise PlanError(
            f"{settings.where('model.name')}: the model {name!r} is not known here; known are {', '.join(FLAVORS)}{hint}",
            "name",
        )
    if flavor not in FLAVORS[name]:
        known = ", ".join(FLAVORS[name])
        raise PlanError(
            f"{settings.where('model.flavor')}: {name} has no flavor {flavor!r} here; known are {known}{hint}", "flavor"
        )
    sizes = {**FLAVORS[name][flavor], "sequence": sequence}
    words = (
        f"{sizes['layers']} blocks of {sizes['hidden']} features, {sizes['heads']} heads, {sizes['kv_heads']} key heads"
    )
    settings.says("model.name", f"{name} {flavor}")
    settings.says("model.flavor", words)
    return sizes


def _degrees(settings: Settings, given: Given, found: list[Finding]) -> dict[str, Any]:
    at, old = "parallelism.", "experimental."
    replicate = _whole(
        settings, (at + "data_parallel_replicate_degree", "training.data_parallel_replicate_degree"), 1, "copies: {}"
    )
    shard_name = next((n for n in (at + "data_parallel_shard_degree", "training.data_parallel_shard_degree") if settings.has(n)),
                      at + "data_parallel_shard_degree")  # fmt: skip
    shard = settings.whole(shard_name, -1, least=-1)
    if shard == 0:
        raise settings.stop(shard_name, "want 1 or more, or -1 for all ranks that are left", -1)
    tp = given.degree(
        "tp", _whole(settings, (at + "tensor_parallel_degree", "training.tensor_parallel_degree"), 1, "tp={}")
    )
    pp = given.degree(
        "pp", _whole(settings, (at + "pipeline_parallel_degree", old + "pipeline_parallel_degree"), 1, "pp={}")
    )
    cp = given.degree(
        "cp", _whole(settings, (at + "context_parallel_degree", old + "context_parallel_degree"), 1, "cp={}")
    )
    ep = settings.whole(at + "expert_parallel_degree", 1, "ep={}")
    inner = {"replicate": replicate, "tp": tp, "cp": cp, "pp": pp}
    if shard < 0 and given.world is None:
        raise PlanError(f"{settings.where(shard_name)}: data_parallel_shard_degree takes all ranks that are left, but no"
                        " file says how many there are; say --world 64", "world")  # fmt: skip
    if shard < 0:
        shard = share(given.world, inner, found, "--world {} can")
        settings.says(shard_name, f"ranks of FSDP: {shard}, of {given.world} in all")
    else:
        settings.says(shard_name, f"ranks of FSDP: {shard}")
        share(given.world, {**inner, "shard": shard}, found, "--world {} can")
        ranks = math.prod(inner.values()) * shard
        if given.world not in (None, ranks) and given.world % ranks == 0:
            words = f"the degrees say {ranks} ranks, not {given.world}"
            found.append(
                Finding(
                    "mistake", "world", words, "data_parallel_shard_degree = -1 takes all", settings.where(shard_name)
                )
            )
    reshard = {"default": None, "always": 3, "never": 2}
    policy = settings.choice(at + "fsdp_reshard_after_forward", reshard, None, "ZeRO {}")
    zero = 0 if shard == 1 else policy or (2 if pp > 1 else 3)
    if shard > 1 and policy is None:
        settings.assumed("fsdp_reshard_after_forward", "default", f"ZeRO {zero}: parameters are {'kept' if pp > 1 else 'freed'} "
                         "between forward and backward" + (" where there is a pipeline" if pp > 1 else ""))  # fmt: skip
    dp = replicate * shard
    beside = settings.flag(at + "enable_async_tensor_parallel", means="messages along tp beside products")
    made = {
        "dp": dp,
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "zero": zero,
        "replicas": replicate if zero else 1,
        "sequence_parallel": tp > 1,
        "overlap_tp": beside and tp > 1,
        "overlap_pp": pp == 1,  # torch's pipelines wait for what they send and are sent
    }
    return made | {"ep": ep if dp % ep == 0 else 1, "per_host": given.per_host or 8}


def _pipeline(settings: Settings, pp: int, layers: int, found: list[Finding]) -> dict[str, Any]:
    """The schedule, and how the model is cut: torchtitan takes blocks from the first and the last stage."""
    at = "parallelism.pipeline_parallel_"
    there = next(
        (n for n in (at + "schedule", "experimental.pipeline_parallel_schedule") if settings.has(n)), at + "schedule"
    )
    schedule = settings.choice(there, SCHEDULES, "1F1B", "schedule={}")
    first = settings.whole(at + "first_stage_less_layers", 1, "{} blocks less in the first stage", least=0)
    last = settings.whole(at + "last_stage_less_layers", 1, "{} blocks less in the last stage", least=0)
    each = settings.whole(at + "layers_per_stage", 0, "{} blocks in a stage")
    parts = settings.take("parallelism.module_fqns_per_model_part")
    if pp == 1:
        return {}
    if parts is not None:
        stages = _named(settings, parts)
        if len(stages) % pp:
            raise settings.stop(
                "parallelism.module_fqns_per_model_part", f"{len(stages)} parts, which {pp} ranks cannot share"
            )
        return {"schedule": schedule, "virtual": len(stages) // pp, "stages": stages}
    virtual = 1 if schedule in _ONE_STAGE else 2
    if each:
        count = math.ceil((layers + first + last) / each)
        if count % pp:
            words = f"{layers} + {first} + {last} layers with {each} in a stage are {count} stages, which {pp} ranks cannot share"
            found.append(
                Finding(
                    "mistake",
                    "stages",
                    words,
                    "leave pipeline_parallel_layers_per_stage out",
                    settings.where(at + "layers_per_stage"),
                )
            )
        elif schedule in _ONE_STAGE and count > pp:
            words = f"schedule {schedule} has one stage on each rank, but {each} layers in a stage make {count // pp}"
            change = 'pipeline_parallel_schedule = "Interleaved1F1B"'
            found.append(Finding("mistake", "virtual", words, change, settings.where(at + "layers_per_stage")))
        else:
            virtual = count // pp
    stages = _cut(pp * virtual, layers, first, last)
    if min(stages) < 1 and layers >= pp * virtual:
        found.append(
            Finding("mistake", "stages", f"{layers} blocks leave a stage of {pp * virtual} empty", "fewer stages")
        )
    equal = not first and not last
    return {"schedule": schedule, "virtual": virtual, "stages": () if equal or min(stages) < 0 else stages}


def _cut(parts: int, layers: int, first: int, last: int) -> tuple[int, ...]:
    """Blocks of each stage: as equal as can be, with so many less in the first and the last.

    Example:
        >>> _cut(8, 126, 1, 1), _cut(4, 32, 1, 1)
        ((15, 16, 16, 16, 16, 16, 16, 15), (8, 9, 8, 7))
    """
    each, more = divmod(layers + first + last, parts)
    sizes = [each + (i < more) for i in range(parts)]
    sizes[0] -= first
    sizes[-1] -= last
    return tuple(sizes)


def _named(settings: Settings, parts: Any) -> tuple[int, ...]:
    name = "parallelism.module_fqns_per_model_part"
    if (
        not isinstance(parts, list)
        or not all(isinstance(p, list) and all(isinstance(n, str) for n in p) for p in parts)
        or not parts
    ):
        raise settings.stop(
            name, "want a list of lists of names", '[["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]'
        )
    stages = tuple(sum(n.startswith("layers.") for n in part) for part in parts)
    settings.says(name, f"{len(stages)} stages with {sum(stages)} blocks")
    return stages


def _batch(settings: Settings, plan: Mapping[str, Any], found: list[Finding]) -> dict[str, int]:
    local = _whole(settings, ("training.local_batch_size", "training.batch_size"), 8, "{} sequences on each rank of dp")
    whole = settings.whole("training.global_batch_size", -1, least=-1)
    micro = (
        settings.whole("parallelism.pipeline_parallel_microbatch_size", 1, "microbatch={}") if plan["pp"] > 1 else local
    )
    older = settings.whole("experimental.pipeline_parallel_microbatches", 0, "microbatches={}") if plan["pp"] > 1 else 0
    if older and local % older == 0:
        micro = local // older
    if local % micro:
        where = settings.where("parallelism.pipeline_parallel_microbatch_size")
        works = max(n for n in range(1, micro + 1) if local % n == 0)
        words = f"a local batch of {local} sequences is no multiple of the microbatch {micro}"
        found.append(Finding("mistake", "microbatch", words, f"pipeline_parallel_microbatch_size = {works}", where))
        micro = works
    steps = 1
    if whole > 0:
        once = local * plan["dp"]
        settings.says("training.global_batch_size", f"{whole} sequences a step")
        if whole % once:
            works = max(1, whole // once) * once
            words = f"a batch of {whole} sequences is no multiple of local_batch_size x dp = {local} x {plan['dp']} = {once}"
            where = settings.where("training.global_batch_size")
            found.append(Finding("mistake", "microbatches", words, f"global_batch_size = {works}", where))
        steps = max(1, whole // once)
    return {"microbatch": micro, "microbatches": local // micro * steps}


def _precision(settings: Settings) -> dict[str, Any]:
    kept = settings.choice("training.dtype", _ROOT, "float32", "parameters, gradients and states in {}")
    compute = settings.choice("training.mixed_precision_param", _ROOT, "bfloat16", "products in {}")
    settings.choice("training.mixed_precision_reduce", _ROOT, "float32", "gradients are summed in {}")
    converters = settings.take("model.converters")
    said = converters if isinstance(converters, list) else [converters or ""]
    if any("float8" in str(name) for name in said):
        compute = "float8_e4m3fn"
        settings.says("model.converters", "products in float8")
    return {"parameters": kept, "gradients": kept, "states": kept, "compute": compute, "master": False}


def _recompute(settings: Settings, layers: int, plan: Mapping[str, Any]) -> dict[str, Any]:
    modes = {"none": "none", "selective": "selective", "full": "full", "memory_budget": "operators"}
    mode = settings.choice("activation_checkpoint.mode", modes, "selective", "recompute={}")
    option = settings.take("activation_checkpoint.selective_ac_option")
    option = str(option) if option is not None else "2"
    if mode != "selective":
        return {"recompute": mode}
    if option == "op":
        settings.says(
            "activation_checkpoint.selective_ac_option",
            "recompute=operators",
        )
        return {"recompute": "operators"}
    if not option.isdecimal() or not 0 < int(option[:9]) < 10**6:
        raise settings.stop("activation_checkpoint.selective_ac_option", "want 'op', or a number as a text", "'2'")
    blocks = layers // (plan["pp"] * plan.get("virtual", 1)) // int(option)
    settings.says(
        "activation_checkpoint.selective_ac_option", f"recompute=full of every {option}th block: {blocks} of a stage"
    )
    return {"recompute": "full", "recompute_blocks": blocks} if blocks else {"recompute": "none"}
