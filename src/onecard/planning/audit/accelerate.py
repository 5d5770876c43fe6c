"""The YAML that ``accelerate config`` writes, as a plan: FSDP, DeepSpeed, Megatron-LM or plain data parallelism.

Source: ``accelerate/utils/dataclasses.py`` and ``accelerate/commands/config`` of huggingface/accelerate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecard.errors import PlanError
from onecard.planning.audit.audit import Audit, Given, audited, share
from onecard.planning.audit.deepspeed import deepspeed_plan, deepspeed_settings
from onecard.planning.audit.settings import YAML, Settings, flat
from onecard.planning.audit.yaml_text import read_yaml
from onecard.planning.fit import Finding
from onecard.planning.json_text import Located, located, text_of

_KINDS = {"FSDP": "fsdp", "MULTI_GPU": "plain", "DEEPSPEED": "deepspeed", "MEGATRON_LM": "megatron", "NO": "plain"}
_SHARDS = {
    "FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 13, "HYBRID_SHARD_ZERO2": 12,
    "1": 3, "2": 2, "3": 0, "4": 13, "5": 12,
}  # fmt: skip
_SECTIONS = ("fsdp_config", "parallelism_config", "deepspeed_config", "megatron_lm_config", "dynamo_config")
_AT = "parallelism_config.parallelism_config_"


def accelerate_settings(path: Path) -> tuple[Settings, Located]:
    """The values of a YAML file by their names."""
    found = read_yaml(text_of(path), str(path))
    if not isinstance(found.value, dict):
        raise PlanError(f"{path}:1: want 'name: value' lines, as accelerate config writes them")
    for name in _SECTIONS:
        if found.value.get(name) is not None and not isinstance(found.value[name], dict):
            raise PlanError(
                f"{found.where((name,))}: {name} is {found.value[name]!r}; want a section with lines below it", name
            )
    values = flat(found.value)
    return Settings(str(path), values, {name: found.where(tuple(name.split("."))) for name in values}, YAML), found


def read_accelerate(path: Path, model: Mapping[str, Any] | None, given: Given) -> Audit:
    """An accelerate YAML, with the sizes of the model that it trains."""
    settings, _ = accelerate_settings(path)
    if not settings.has("distributed_type"):
        raise PlanError(
            f"{path}:1: is no configuration of accelerate: it has no distributed_type; write distributed_type: FSDP"
        )
    if settings.values["distributed_type"] is False:  # NO, which is a yes-or-no word in YAML
        settings.values = {**settings.values, "distributed_type": "NO"}
    kind = settings.choice("distributed_type", _KINDS)
    settings.says("distributed_type", f"{settings.values['distributed_type']}")
    found: list[Finding] = []
    hosts = settings.whole("num_machines", 1, "hosts: {}")
    ranks = settings.whole("num_processes", 1, "ranks: {}")
    if ranks % hosts:
        words = f"{ranks} processes cannot be divided by {hosts} machines"
        where = settings.where("num_processes")
        found.append(Finding("mistake", "per_host", words, f"num_processes: {-(-ranks // hosts) * hosts}", where))
    per_host = given.per_host or (
        ranks // hosts if hosts > 1 and ranks >= hosts else max(8, ranks if hosts == 1 else 8)
    )
    world = given.world or ranks
    plan: dict[str, Any] = {"per_host": per_host, "compiled": _compiled(settings), "microbatch": 1, "microbatches": 1}
    if kind == "deepspeed":
        plan |= _deepspeed(settings, path, given, world, found)
    elif kind == "megatron":
        plan |= _megatron(settings, given, world, found)
    else:
        plan |= _parallel(settings, given, world, found)
        plan |= _precision(settings)
        plan |= _fsdp(settings, plan, hosts, found) if kind == "fsdp" else {"zero": 0, "replicas": 1}
    for name in ("microbatch", "microbatches"):
        if name not in given.change and plan[name] == 1:
            settings.assumed(name, 1, f"no file says it; --set {name}=...")
    return audited("fsdp", settings, model, plan, found, given)


def _compiled(settings: Settings) -> bool:
    backend = settings.take("dynamo_config.dynamo_backend")
    if backend is None or backend is False or str(backend).upper() == "NO":
        return False
    settings.says("dynamo_config.dynamo_backend", "kernels fused")
    return True


def _parallel(settings: Settings, given: Given, world: int, found: list[Finding]) -> dict[str, Any]:
    tp = given.degree("tp", settings.whole(f"{_AT}tp_size", 1, "tp={}"))
    cp = given.degree("cp", settings.whole(f"{_AT}cp_size", 1, "cp={}"))
    replicate = settings.whole(f"{_AT}dp_replicate_size", 1, "copies: {}")
    shard = settings.whole(f"{_AT}dp_shard_size", 0, "ranks of FSDP: {}")
    dp = share(world, {"tp": tp, "cp": cp}, found, "num_processes: {} can")
    if shard and replicate * shard != dp:
        words = f"copies x shards x tp x cp = {replicate} x {shard} x {tp} x {cp}, but there are {world} ranks"
        where = settings.where(f"{_AT}dp_shard_size")
        works = dp // replicate if dp % replicate == 0 else dp
        found.append(Finding("mistake", "dp", words, f"parallelism_config_dp_shard_size: {works}", where))
    return {"tp": tp, "cp": cp, "dp": dp, "replicas": replicate if dp % replicate == 0 else 1}


def _precision(settings: Settings) -> dict[str, Any]:
    kinds = {"no": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
    if settings.values.get("mixed_precision") is False:  # a plain no
        settings.says("mixed_precision", "products in float32")
        compute = "float32"
    else:
        compute = settings.choice(
            "mixed_precision", kinds, "float32", "products in {}; parameters, gradients and states in float32"
        )
    return {"parameters": "float32", "gradients": "float32", "states": "float32", "compute": compute, "master": False}


def _fsdp(settings: Settings, plan: Mapping[str, Any], hosts: int, found: list[Finding]) -> dict[str, Any]:
    at = "fsdp_config.fsdp_"
    version = settings.whole(f"{at}version", 1, "FSDP{}")
    name = f"{at}sharding_strategy"
    if isinstance(settings.values.get(name), int) and not isinstance(settings.values.get(name), bool):
        settings.values = {**settings.values, name: str(settings.values[name])}
    strategy = settings.choice(name, _SHARDS, 3)
    reshard = settings.values.get(f"{at}reshard_after_forward")
    if isinstance(reshard, str):
        strategy = settings.choice(f"{at}reshard_after_forward", _SHARDS)
    elif reshard is not None:
        strategy = 3 if settings.flag(f"{at}reshard_after_forward") else 2
    elif version >= 2 and name in settings.values:
        words = f"{name.rpartition('.')[2]} is of FSDP1, but fsdp_version is 2"
        found.append(Finding("idle", "zero", words, "fsdp_reshard_after_forward: true", settings.where(name)))
        strategy = 3
    hybrid, zero = strategy > 10, strategy % 10
    for said in (name, f"{at}reshard_after_forward"):
        settings.says(said, f"ZeRO {zero}" + (", in a copy for each host" if hybrid else ""))
    copies = hosts if hybrid and plan["dp"] % hosts == 0 else plan["replicas"]
    prefetch = settings.take(f"{at}backward_prefetch")
    overlap = prefetch is None or str(prefetch).upper() in ("BACKWARD_PRE", "BACKWARD_POST")
    settings.says(f"{at}backward_prefetch", "gathers beside computation" if overlap else "gathers are waited for")
    again = settings.flag(f"{at}activation_checkpointing", means="recompute=full")
    offload = settings.flag(f"{at}offload_params", means="states, gradients and parameters in the host's memory")
    made = {"zero": zero, "replicas": copies if zero else 1, "overlap": overlap, "offload": offload}
    return made | {"recompute": "full" if again else "none"}


def _megatron(settings: Settings, given: Given, world: int, found: list[Finding]) -> dict[str, Any]:
    at = "megatron_lm_config.megatron_lm_"
    tp = given.degree("tp", settings.whole(f"{at}tp_degree", 1, "tp={}"))
    pp = given.degree("pp", settings.whole(f"{at}pp_degree", 1, "pp={}"))
    zero = settings.flag(f"{at}use_distributed_optimizer", means="ZeRO 1")
    again = settings.flag(f"{at}recompute_activations", means="recompute=selective")
    kept = {False: "float32", "no": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(
        settings.take("mixed_precision"), "float32"
    )
    settings.says("mixed_precision", f"parameters and products in {kept}")
    return {
        "tp": tp, "pp": pp, "dp": share(world, {"tp": tp, "pp": pp}, found, "num_processes: {} can"), "zero": int(zero),
        "microbatches": settings.whole(f"{at}num_micro_batches", 1, "microbatches={}"), "parameters": kept, "compute": kept,
        "sequence_parallel": settings.flag(f"{at}sequence_parallelism", means="sequence parallel"),
        "recompute": "selective" if again else "none", "gradients": "float32",
    }  # fmt: skip


def _deepspeed(settings: Settings, path: Path, given: Given, world: int, found: list[Finding]) -> dict[str, Any]:
    """DeepSpeed's settings in the YAML itself, or in the JSON that it names."""
    at = "deepspeed_config."
    name = settings.text(f"{at}deepspeed_config_file")
    if name is None:
        return _inline(settings, world)
    where = settings.where(f"{at}deepspeed_config_file")
    place = path.parent / name
    if len(name) > 4000 or "\0" in name or not place.is_file():
        raise PlanError(
            f"{where}: deepspeed_config_file {name[:100]}: there is no such file beside {path.name}; give its path"
        )
    if place.resolve() == path.resolve():
        raise PlanError(f"{where}: deepspeed_config_file {name} leads back to itself; name a JSON of DeepSpeed's")
    inner = deepspeed_settings(located(text_of(place), str(place)))
    plan = deepspeed_plan(inner, Given(world=world, per_host=given.per_host, change=given.change), found)
    if inner.is_auto("bf16.enabled") or inner.is_auto("fp16.enabled"):
        kept = {"bf16": "bfloat16", "fp16": "float16"}.get(str(settings.take("mixed_precision")), "float32")
        plan |= {"parameters": kept, "compute": kept, "master": kept != "float32"}
        settings.says("mixed_precision", f"parameters and products in {kept}")
    settings.says(f"{at}deepspeed_config_file", "read")
    settings.understood += inner.understood
    plan.pop("per_host")
    return plan


def _inline(settings: Settings, world: int) -> dict[str, Any]:
    at = "deepspeed_config."
    zero = settings.whole(f"{at}zero_stage", 0, "ZeRO {}", least=0)
    if zero > 3:
        raise settings.stop(f"{at}zero_stage", "want 0, 1, 2 or 3", 3)
    devices = {"none": False, "cpu": True, "nvme": True}
    kept = {"bf16": "bfloat16", "fp16": "float16"}.get(str(settings.take("mixed_precision")), "float32")
    settings.says("mixed_precision", f"parameters and products in {kept}")
    return {
        "dp": world, "zero": zero, "parameters": kept, "compute": kept, "overlap": zero == 3,
        "gradients": "float32" if kept == "bfloat16" and zero < 2 else kept,
        "microbatches": settings.whole(f"{at}gradient_accumulation_steps", 1, "microbatches={}"),
        "offload": settings.choice(f"{at}offload_optimizer_device", devices, False, "states in the host's memory: {}"),
    }  # fmt: skip
