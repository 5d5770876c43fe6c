"""DeepSpeed's JSON as a plan.

Source: DeepSpeed's configuration (``deepspeed/runtime/config.py``, ``zero/config.py``); "auto" is what
Hugging Face's Trainer fills in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onecard.errors import PlanError
from onecard.planning.audit.audit import Audit, Given, audited, share
from onecard.planning.audit.settings import JSON, Settings, flat
from onecard.planning.fit import Finding
from onecard.planning.json_text import Located

MARKS = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization", "bf16", "fp16",
    "gradient_clipping", "zero_allow_untested_optimizer", "bfloat16",
}  # fmt: skip
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}
_DEVICES = {"none": False, "cpu": True, "nvme": True}
_SECTIONS = (
    "zero_optimization",
    "bf16",
    "fp16",
    "bfloat16",
    "pipeline",
    "tensor_parallel",
    "data_types",
    "compile",
    "torch_autocast",
)


def deepspeed_settings(found: Located) -> Settings:
    """The values of a DeepSpeed JSON by their names."""
    if not isinstance(found.value, dict):
        raise PlanError(f"{found.where()}: want an object, as DeepSpeed's configuration is")
    for name in _SECTIONS:
        section = found.value.get(name)
        if section is not None and not isinstance(section, dict):
            raise PlanError(
                f'{found.where((name,))}: {name} is {section!r}; want an object, such as "{name}": {{...}}', name
            )
    values = flat(found.value)
    lines = {name: found.where(tuple(name.split("."))) for name in values}
    return Settings(found.name, values, lines, JSON)


def read_deepspeed(found: Located, model: Mapping[str, Any] | None, given: Given) -> Audit:
    """A DeepSpeed JSON, with the sizes of the model that it trains."""
    settings = deepspeed_settings(found)
    said: list[Finding] = []
    plan = deepspeed_plan(settings, given, said)
    return audited("deepspeed", settings, model, plan, said, given)


def deepspeed_plan(settings: Settings, given: Given, found: list[Finding]) -> dict[str, Any]:
    """The arguments of ``Plan``."""
    plan: dict[str, Any] = {
        "tp": given.degree("tp", settings.whole("tensor_parallel.autotp_size", 1, "tp={}", least=0) or 1),
        "pp": given.degree("pp", settings.whole("pipeline.stages", 1, "pp={}")),
        "cp": given.degree(
            "cp", settings.whole("sequence_parallel_size", 1, "cp={}: attention over parts of a sequence")
        ),
        "compiled": settings.flag("compile.deepcompile", means="kernels fused"),
    }
    plan["per_host"] = given.per_host or 8
    plan["overlap_pp"] = plan["pp"] == 1  # DeepSpeed's pipelines wait for what they send and are sent
    plan |= _precision(settings, found) | _zero(settings)
    plan |= _batch(settings, given, plan, found)
    plan["replicas"] = _copies(settings, plan, found)
    if plan["pp"] > 1 and plan["zero"] > 1:
        where = settings.where("zero_optimization.stage")
        found.append(
            Finding("mistake", "zero", f"DeepSpeed's pipelines refuse ZeRO {plan['zero']}", '"stage": 1', where)
        )
    interval = settings.whole("pipeline.activation_checkpoint_interval", 0, "recompute=full", least=0)
    if "activation_checkpointing" in {name.partition(".")[0] for name in settings.values}:
        name = next(name for name in settings.values if name.startswith("activation_checkpointing"))
        settings.says(
            name, "how blocks are computed again, if the program asks for it; --set recompute=full says that it does"
        )
        settings.taken |= {name for name in settings.values if name.startswith("activation_checkpointing")}
    return plan | {"recompute": "full" if interval else "none"}


def _batch(settings: Settings, given: Given, plan: Mapping[str, int], found: list[Finding]) -> dict[str, int]:
    """dp, and how a batch is cut: two of the three numbers say the third."""
    batch = settings.whole("train_batch_size", 0, "{} sequences a step")
    micro = settings.whole("train_micro_batch_size_per_gpu", 0, "microbatch={}")
    steps = settings.whole("gradient_accumulation_steps", 0, "microbatches={}")
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        if settings.is_auto(name):
            settings.says(name, "the program's arguments say it; --set microbatch=... and microbatches=... say it here")
    inner = {"tp": plan["tp"], "cp": plan["cp"], "pp": plan["pp"]}
    world = given.world
    if world is None and batch and micro and steps and batch % (micro * steps) == 0:
        dp = batch // (micro * steps)
        settings.assumed(
            "world", dp * plan["tp"] * plan["cp"] * plan["pp"], f"dp = {batch} / ({micro} x {steps}) = {dp}"
        )
    elif world is None:
        raise PlanError(
            f"{settings.file}: does not say how many ranks there are; say --world 8, or all of train_batch_size, "
            "train_micro_batch_size_per_gpu and gradient_accumulation_steps", "world",
        )  # fmt: skip
    else:
        dp = share(world, inner, found, "--world {} can")
    if batch and micro and steps and batch != micro * steps * dp:
        where = settings.where("train_batch_size")
        words = f"train_batch_size {batch} is not {micro} x {steps} x dp={dp} = {micro * steps * dp}"
        found.append(Finding("mistake", "microbatches", words, f'"train_batch_size": {micro * steps * dp}', where))
        return {"dp": dp, "microbatch": micro, "microbatches": steps}
    if batch and (micro or steps):
        once = dp * (micro or steps)
        if batch % once:
            works = max(1, batch // once) * once
            words = f"train_batch_size {batch} is no multiple of dp={dp} x {micro or steps}"
            where = settings.where("train_batch_size")
            found.append(Finding("mistake", "microbatches", words, f'"train_batch_size": {works}', where))
        other = max(1, batch // once)
        return {"dp": dp, "microbatch": micro or other, "microbatches": steps or other}
    if batch:
        if batch % dp:
            where = settings.where("train_batch_size")
            words = f"train_batch_size {batch} is no multiple of dp={dp}"
            found.append(Finding("mistake", "microbatch", words, f'"train_batch_size": {-(-batch // dp) * dp}', where))
        return {"dp": dp, "microbatch": max(1, batch // dp), "microbatches": 1}
    if not micro and "microbatch" not in given.change:
        settings.assumed("microbatch", 1, "no file says it; --set microbatch=...")
    return {"dp": dp, "microbatch": micro or 1, "microbatches": steps or 1}


def _precision(settings: Settings, found: list[Finding]) -> dict[str, Any]:
    brain = settings.flag("bf16.enabled", settings.flag("bfloat16.enabled"), "parameters and products in bfloat16")
    half = settings.flag("fp16.enabled", means="parameters and products in float16")
    if settings.is_auto("bf16.enabled") and not half:
        brain = True
        settings.says("bf16.enabled", "the program's arguments say it; taken as true")
    if brain and half:
        where = settings.where("fp16.enabled")
        found.append(
            Finding("mistake", "parameters", "fp16 and bf16 go against each other", '"fp16": {"enabled": false}', where)
        )
    kept = "bfloat16" if brain else "float16" if half else "float32"
    stage = settings.whole("zero_optimization.stage", 0, least=0)
    gradients = "float32" if brain and stage < 2 else kept
    gradients = settings.choice("data_types.grad_accum_dtype", _DTYPES, gradients, "gradients in {}")
    if half and not brain and settings.number("fp16.loss_scale", 0.0, "losses are scaled by {} (0: adapted)") == 1:
        where = settings.where("fp16.loss_scale")
        words = "float16 with a loss scale of 1: small gradients become zero"
        found.append(Finding("mistake", "compute", words, '"loss_scale": 0 is adapted', where))
    compute = kept
    if settings.flag("torch_autocast.enabled"):
        compute = settings.choice("torch_autocast.dtype", _DTYPES, "bfloat16", "products in {}")
        settings.says("torch_autocast.enabled", f"products in {compute}")
    return {"parameters": kept, "compute": compute, "gradients": gradients, "master": kept != "float32"}


def _zero(settings: Settings) -> dict[str, Any]:
    stage = settings.whole("zero_optimization.stage", 0, "ZeRO {}", least=0)
    if stage > 3:
        raise settings.stop("zero_optimization.stage", "want 0, 1, 2 or 3", 3)
    offload = settings.choice(
        "zero_optimization.offload_optimizer.device", _DEVICES, False, "states in the host's memory: {}"
    )
    offload = settings.flag("zero_optimization.cpu_offload", means="states in the host's memory") or offload
    if settings.choice("zero_optimization.offload_param.device", _DEVICES, False):
        settings.says(
            "zero_optimization.offload_param.device", "parameters in the host's memory, which is not priced here"
        )
    overlap = settings.flag("zero_optimization.overlap_comm", stage == 3, "messages along dp beside computation")
    return {"zero": stage, "offload": offload, "overlap": overlap}


def _copies(settings: Settings, plan: Mapping[str, Any], found: list[Finding]) -> int:
    """In how many copies ZeRO divides the state."""
    stage, dp = plan["zero"], plan["dp"]
    shard = settings.whole("zero_optimization.mics_shard_size", 0, "over {} ranks", least=-1)
    copies = dp // shard if stage and shard > 0 and dp % shard == 0 else 1
    if stage and shard > 0 and dp % shard:
        where = settings.where("zero_optimization.mics_shard_size")
        works = max(n for n in range(1, min(shard, dp) + 1) if dp % n == 0)
        words = f"mics_shard_size {shard} does not divide dp={dp}"
        found.append(Finding("mistake", "replicas", words, f'"mics_shard_size": {works}', where))
    return copies
