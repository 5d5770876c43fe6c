"""Megatron-LM's arguments as a model and a plan.

Source: ``megatron/training/arguments.py`` of NVIDIA/Megatron-LM, whose defaults count where a script says nothing; of its older
versions and of Megatron-DeepSpeed the names that have others now.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onecard.errors import PlanError
from onecard.planning.audit.arguments import megatron_arguments
from onecard.planning.audit.audit import Audit, Given, audited, microbatches, share
from onecard.planning.audit.megatron_vocabulary import vocabulary
from onecard.planning.audit.needed import missing
from onecard.planning.audit.settings import Ignored, Settings
from onecard.planning.fit import Finding

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary", "none": "none", "alibi": "none"}
_SHARDS = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
NO_EFFECT = (
    "lr", "min-lr", "lr-", "weight-decay", "adam-", "clip-grad", "init-method-std", "train-", "eval-", "save", "load", "log-",
    "tensorboard", "wandb", "data-", "split", "tokenizer", "vocab-file", "merge-file", "master", "node-rank", "rdzv", "seed",
    "exit-", "num-workers", "ckpt-", "distributed-", "timing", "profile", "mock-data", "override", "no-save", "no-load",
)  # fmt: skip
"""Beginnings of names that have nothing to do with time or memory."""


def read_megatron(path: Path, given: Given) -> Audit:
    """A script, or a file of arguments, that starts Megatron-LM."""
    settings, made = megatron_arguments(path, given.define)
    found = missing(settings)
    plan = _degrees(settings, given, found)
    model = _model(settings, plan["tp"], given, found)
    plan |= _stages(settings, plan, model["layers"], found)
    plan |= _precision(settings, found)
    plan |= _recompute(settings, found)
    plan |= _states(settings)
    micro = settings.whole("micro-batch-size", 1, "microbatch={}")
    batch = settings.whole("global-batch-size", micro * plan["dp"], "{} sequences a step")
    if settings.has("rampup-batch-size"):
        settings.says("rampup-batch-size", "smaller batches at first; judged is the full one")
    plan["microbatch"] = micro
    plan["microbatches"] = microbatches(batch, plan["dp"], micro, found, settings.where("global-batch-size"))
    plan |= _messages(settings, plan, found)
    audit = audited("megatron", settings, model, plan, found, given)
    passed = tuple(Ignored(what, where) for what, where in made.passed)
    return Audit(**{**vars(audit), "ignored": (*audit.ignored, *passed)})


def _degrees(settings: Settings, given: Given, found: list[Finding]) -> dict[str, Any]:
    older = settings.whole("model-parallel-size", 1, "tp={}")
    tp = given.degree("tp", settings.whole("tensor-model-parallel-size", older, "tp={}"))
    pp = given.degree("pp", settings.whole("pipeline-model-parallel-size", 1, "pp={}"))
    cp = given.degree("cp", settings.whole("context-parallel-size", 1, "cp={}"))
    per_host = settings.whole("nproc_per_node", 0, "ranks on a host: {}")
    hosts = settings.whole("nnodes", 1, "hosts: {}")
    world = given.world or (per_host * hosts or None)
    inner = {"tp": tp, "cp": cp, "pp": pp}
    dp = share(world, inner, found, "{} ranks have them")
    ranks = dp * tp * cp * pp
    if world is None:
        settings.assumed("world", ranks, "no launcher says how many ranks there are, so the fewest; --world says it")
    elif found:
        found[-1] = _of_hosts(found[-1], per_host, ranks)
    made: dict[str, Any] = {
        "dp": dp,
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "per_host": given.per_host or _hosts(per_host, hosts),
    }
    made["ep"] = settings.whole("expert-model-parallel-size", 1, "ep={}")
    if dp % made["ep"]:
        words = f"expert-model-parallel-size {made['ep']} does not divide dp={dp}"
        found.append(Finding("mistake", "ep", words, "taken as 1", settings.where("expert-model-parallel-size")))
        made["ep"] = 1
    made["sequence_parallel"] = settings.flag("sequence-parallel", means="sequence parallel")
    return made


def _hosts(per_host: int, hosts: int) -> int:
    return per_host if hosts > 1 or per_host > 8 else 8


def _of_hosts(found: Finding, per_host: int, ranks: int) -> Finding:
    hosts = -(-ranks // (per_host or 8))
    change = f"--nnodes {hosts} with --nproc_per_node {per_host or 8} has them; judged as {ranks} ranks"
    return Finding(found.kind, found.about, found.what, change, found.where)


def _model(settings: Settings, tp: int, given: Given, found: list[Finding]) -> dict[str, Any]:
    for name in ("num-layers", "hidden-size", "num-attention-heads"):
        if not settings.has(name):
            raise PlanError(f"{settings.file}: does not say --{name}; write --{name} {dict(_EXAMPLES)[name]}", name)
    hidden = settings.whole("hidden-size", 1, "hidden={}")
    gated = settings.flag("swiglu", means="a gated MLP")
    model: dict[str, Any] = {
        "layers": settings.whole("num-layers", 1, "layers={}"),
        "hidden": hidden,
        "heads": settings.whole("num-attention-heads", 1, "heads={}"),
        "head_dim": settings.whole("kv-channels", 0, "head_dim={}"),
        "ffn": settings.whole("ffn-hidden-size", (4 * hidden * 2 // 3) // 64 * 64 if gated else 0, "ffn={}"),
        "gated": gated,
        "sequence": _sequence(settings, given),
        "norm": settings.choice("normalization", {"LayerNorm": "layer", "RMSNorm": "rms"}, "layer", "norm={}"),
        "tied": not settings.flag("untie-embeddings-and-output-weights", means="the head is a matrix of its own"),
        "bias": not settings.flag("disable-bias-linear", means="linear layers without biases"),
        "qkv_bias": settings.flag("add-qkv-bias", means="biases of queries, keys and values"),
        "qk_norm": settings.flag("qk-layernorm", means="norms of queries and keys"),
        "embedding_norm": settings.flag("embed-layernorm", means="a norm behind the embedding"),
        "positions": settings.choice("position-embedding-type", _POSITIONS, "learned", "positions={}"),
        "dropout": _dropout(settings),
        "attention": _attention(settings),
    }
    if settings.flag("use-rotary-position-embeddings", means="positions=rotary"):
        model["positions"] = "rotary"
    rows = settings.whole("max-position-embeddings", 0, "{} positions")
    model["rows"] = rows if model["positions"] == "learned" else 0
    if 0 < rows < model["sequence"]:
        words = f"{rows} positions for sequences of {model['sequence']} tokens"
        where = settings.where("max-position-embeddings")
        found.append(Finding("mistake", "rows", words, f"--max-position-embeddings {model['sequence']}", where))
        model["rows"] = 0
    grouped = settings.flag("group-query-attention", means="key heads in groups")
    groups = settings.whole("num-query-groups", 1, "kv_heads={}")
    model["kv_heads"] = groups if grouped else 0
    return model | _experts(settings) | {"vocab": vocabulary(settings, tp, given, found)}


_EXAMPLES = (("num-layers", 32), ("hidden-size", 4096), ("num-attention-heads", 32), ("seq-length", 2048))


def _sequence(settings: Settings, given: Given) -> int:
    said = settings.whole("seq-length", settings.whole("encoder-seq-length", 0, "sequence={}"), "sequence={}")
    if not given.sequence and not said and "sequence" not in given.change:
        raise PlanError(f"{settings.file}: does not say --seq-length; write --seq-length 2048", "seq-length")
    return given.sequence or said or 1


def _dropout(settings: Settings) -> float:
    hidden = settings.number("hidden-dropout", 0.1, "dropout={}")
    attention = settings.number("attention-dropout", 0.1, "dropout of attention {}")
    for name, value in (("hidden-dropout", hidden), ("attention-dropout", attention)):
        if not 0 <= value < 1:
            raise settings.stop(name, "want a number from 0 to 1", 0.1)
    return max(hidden, attention)


def _attention(settings: Settings) -> str:
    kinds = {"auto": "flash", "flash": "flash", "fused": "flash", "unfused": "scores", "local": "scores"}
    said = settings.choice("attention-backend", kinds, None, "attention={}")
    if settings.flag("use-flash-attn", means="attention=flash") or said:
        return said or "flash"
    older = "checkpoint-activations" in settings.values or settings.text("position-embedding-type") == "alibi"
    if older:
        settings.assumed("attention", "scores", "of older versions: products, softmax and dropout one by one")
    return "scores" if older else "flash"


def _experts(settings: Settings) -> dict[str, int]:
    experts = settings.whole("num-experts", 0, "{} experts", least=0)
    if not experts:
        return {}
    return {
        "experts": experts,
        "top_k": settings.whole("moe-router-topk", 2, "top_k={}"),
        "expert_ffn": settings.whole("moe-ffn-hidden-size", settings.whole("ffn-hidden-size", 1), "expert_ffn={}"),
        "shared_ffn": settings.whole("moe-shared-expert-intermediate-size", 0, "shared_ffn={}"),
    }


def _stages(settings: Settings, plan: dict[str, Any], layers: int, found: list[Finding]) -> dict[str, Any]:
    """How the pipeline is cut."""
    pp = plan["pp"]
    each = settings.whole("num-layers-per-virtual-pipeline-stage", 0, "{} blocks in a stage")
    virtual = settings.whole("num-virtual-stages-per-pipeline-rank", 1, "virtual={}")
    if pp == 1:
        return {}
    if each:
        virtual = max(1, layers // (pp * each))
        if layers % (pp * each):
            words = f"{layers} layers are no multiple of {pp} ranks x {each} layers of a virtual stage"
            works = next((n for n in range(each, 0, -1) if layers % (pp * n) == 0), 0)
            change = (
                f"--num-layers-per-virtual-pipeline-stage {works}" if works else "a number of layers that pp divides"
            )
            where = settings.where("num-layers-per-virtual-pipeline-stage")
            found.append(Finding("mistake", "virtual", words, change, where))
    layout = settings.text("pipeline-model-parallel-layout")
    if layout is not None:
        stages = _layout(settings, layout, pp)
        settings.says("pipeline-model-parallel-layout", f"{len(stages)} stages with {sum(stages)} blocks")
        return {"stages": stages, "virtual": len(stages) // pp}
    stages = _ends(settings, pp * virtual, pp, layers, virtual)
    method = settings.text("pp-partition-method", "how DeepSpeed cuts the model")
    if method is not None and "embedding" in method and not stages:
        each_ = -(-(layers + 2) // pp)
        stages = _filled(each_ - 1, each_, each_ - 1, pp, layers)
    if not stages and method is None and layers % (pp * virtual) and not each:
        words = f"{layers} layers cannot be divided by pp={pp}" + (f" x {virtual} stages" if virtual > 1 else "")
        near = [n for n in range(1, layers + 1) if layers % n == 0 and n <= 2 * pp]
        found.append(Finding("mistake", "pp", f"{words}: Megatron wants equal stages", f"pp={near[-1]} divides them; or "
                             "--decoder-first-pipeline-num-layers, --pipeline-model-parallel-layout"))  # fmt: skip
    return {"virtual": virtual} | ({"stages": stages} if stages else {})


def _ends(settings: Settings, parts: int, pp: int, layers: int, virtual: int) -> tuple[int, ...]:
    """Stages of which the first or the last has fewer blocks."""
    first = settings.whole("decoder-first-pipeline-num-layers", 0, "{} blocks on the first rank")
    last = settings.whole("decoder-last-pipeline-num-layers", 0, "{} blocks on the last rank")
    embedding = settings.flag("account-for-embedding-in-pipeline-split", means="the embedding counts as a block")
    loss = settings.flag("account-for-loss-in-pipeline-split", means="the loss counts as a block")
    if embedding or loss:
        each = -(-(layers + embedding + loss) // parts)
        return _filled(each - embedding, each, each - loss, parts, layers)
    if not first and not last:
        return ()
    between = pp - bool(first) - bool(last)
    left = layers - first - last
    each = left // between if between > 0 else 0
    ranks = [first] * bool(first) + [each] * between + [last] * bool(last)
    stages = [ranks[r] // virtual for _ in range(virtual) for r in range(pp)] if len(ranks) == pp else []
    if not stages or sum(stages) != layers or min(stages) < 0:
        words = f"{layers} layers with {first} on the first and {last} on the last rank leave no equal number for the others"
        raise settings.stop("decoder-first-pipeline-num-layers" if first else "decoder-last-pipeline-num-layers", words)
    return tuple(stages)


def _filled(first: int, each: int, last: int, parts: int, layers: int) -> tuple[int, ...]:
    stages = (first, *[each] * (parts - 2), last) if parts > 1 else ()
    return stages if stages and sum(stages) == layers and min(stages) >= 0 else ()


def _layout(settings: Settings, text: str, pp: int) -> tuple[int, ...]:
    """Blocks of each stage by Megatron's layout: E embedding, t a block, L the loss, | a cut, *N and brackets repeat."""
    name = "pipeline-model-parallel-layout"
    plain = text.strip("\"'").replace(",", "").replace(" ", "")
    while True:
        found = re.search(r"\(([EtmL|]*)\)(?:\*(\d{1,3}))?", plain)
        if found is None:
            break
        plain = plain[: found.start()] + found[1] * int(found[2] or 1) + plain[found.end() :]
        if len(plain) > 10**5:
            raise settings.stop(name, "has more than 100,000 stages and blocks")
    plain = re.sub(r"([EtmL])\*(\d{1,4})", lambda m: m[1] * int(m[2]), plain)
    if re.search(r"[^EtmL|]", plain) or not plain:
        raise settings.stop(name, "want letters E, t, m, L between |, with (...)*N", "Et*3|t*4|t*4|t*3L")
    stages = tuple(part.count("t") for part in plain.split("|"))
    if len(stages) % pp:
        raise settings.stop(name, f"has {len(stages)} stages, which {pp} ranks cannot share")
    return stages


def _precision(settings: Settings, found: list[Finding]) -> dict[str, Any]:
    half = settings.flag("fp16", means="parameters and products in float16")
    brain = settings.flag("bf16", means="parameters and products in bfloat16")
    if half and brain:
        where = settings.where("fp16")
        found.append(
            Finding("mistake", "parameters", "--fp16 and --bf16 go against each other", "leave --fp16 out", where)
        )
    kept = "bfloat16" if brain else "float16" if half else "float32"
    in_32 = settings.flag("accumulate-allreduce-grads-in-fp32", means="gradients in float32")
    short = settings.flag("grad-reduce-in-bf16", means="gradients in bfloat16")
    gradients = "bfloat16" if short else "float32" if brain or in_32 else kept
    made = {"parameters": kept, "compute": kept, "gradients": gradients, "master": kept != "float32"}
    if settings.choice("fp8-format", {"e4m3": "e4m3", "hybrid": "hybrid"}, None, "products in float8 ({})"):
        made["compute"] = "float8_e4m3fn"
    made["gradients"] = settings.choice("main-grads-dtype", _DTYPES, made["gradients"], "gradients in {}")
    made["states"] = settings.choice("exp-avg-dtype", _DTYPES, "float32", "states in {}")
    if half and settings.number("loss-scale", 0.0, "losses are scaled by {}") == 1:
        words = "float16 with a loss scale of 1: small gradients become zero"
        found.append(
            Finding(
                "mistake", "compute", words, "leave --loss-scale out: it is adapted then", settings.where("loss-scale")
            )
        )
    return made


def _recompute(settings: Settings, found: list[Finding]) -> dict[str, Any]:
    kinds = {"full": "full", "selective": "selective"}
    kind = settings.choice("recompute-granularity", kinds, None, "recompute={}")
    older = settings.flag("checkpoint-activations", means="recompute=full") or settings.flag(
        "deepspeed-activation-checkpointing", means="recompute=full"
    )
    if settings.flag("recompute-activations", means="recompute=selective") and kind == "full":
        where = settings.where("recompute-activations")
        found.append(Finding("mistake", "recompute", "--recompute-activations is selective, but --recompute-granularity is full",
                             "leave one of them out", where))  # fmt: skip
    kind = kind or ("selective" if "recompute-activations" in settings.values else "full" if older else "none")
    method = settings.choice(
        "recompute-method", {"uniform": "uniform", "block": "block"}, None, "blocks are chosen: {}"
    )
    count = settings.whole("recompute-num-layers", 0, "of {} blocks")
    where = settings.where("recompute-method")
    if kind == "selective" and method:
        found.append(Finding("mistake", "recompute", f"--recompute-method {method} is for full recomputation, but it is"
                             " selective", "leave --recompute-method out, or --recompute-granularity full", where))  # fmt: skip
    if kind == "none" and method:
        found.append(Finding("idle", "recompute", f"--recompute-method {method} without a granularity recomputes nothing",
                             "--recompute-granularity full", where))  # fmt: skip
    if kind == "full" and not method and not older:
        words = "--recompute-granularity full does not say of which blocks"
        change = "--recompute-method uniform --recompute-num-layers 1"
        found.append(Finding("mistake", "recompute", words, change, settings.where("recompute-granularity")))
    return {"recompute": kind, "recompute_blocks": count if kind == "full" and method == "block" else 0}


def _messages(settings: Settings, plan: Mapping[str, Any], found: list[Finding]) -> dict[str, Any]:
    """What runs beside computation along tp and pp; interleaved stages alone go on while they send."""
    alone = settings.flag("no-async-tensor-model-parallel-allreduce", means="messages along tp are waited for")
    waited = settings.flag("no-overlap-p2p-communication", means="stages wait for what they send")
    virtual = plan.get("virtual", 1)
    if virtual > 1 and plan["microbatches"] < plan["pp"]:
        words = (
            f"interleaved stages take at least pp={plan['pp']} microbatches, of which there are {plan['microbatches']}"
        )
        change = f"--global-batch-size {plan['pp'] * plan['microbatch'] * plan['dp']}"
        found.append(Finding("mistake", "microbatches", words, change, settings.lines.get("global-batch-size", "")))
    if settings.flag("tp-comm-overlap"):
        settings.says("tp-comm-overlap", "messages along tp beside products")
    return {"overlap_tp": plan["tp"] > 1 and not alone, "overlap_pp": plan["pp"] == 1 or (virtual > 1 and not waited)}


def _states(settings: Settings) -> dict[str, Any]:
    """What dp divides, and where states lie."""
    zero = int(settings.flag("use-distributed-optimizer", means="ZeRO 1: states over dp"))
    sharded = settings.flag("use-torch-fsdp2", means="ZeRO 3") or settings.flag("use-megatron-fsdp", means="FSDP")
    sharded = settings.flag("use-custom-fsdp", means="FSDP") or sharded
    how = settings.choice("data-parallel-sharding-strategy", _SHARDS, 3 if sharded else zero, "ZeRO {}")
    zero = how if sharded else zero
    stage = settings.whole("zero-stage", 0, "ZeRO {}", least=0)
    if settings.flag("deepspeed", means="DeepSpeed's engine"):
        zero = stage
        if stage == 0 and "bf16" in settings.values:
            zero = 1
            settings.says("zero-stage", "ZeRO 1: DeepSpeed's optimizer for bfloat16 divides its states at stage 0")
    copies = settings.whole("num-distributed-optimizer-instances", 1, "replicas={}")
    overlap = settings.flag("overlap-grad-reduce", means="gradients are summed beside backward")
    settings.flag("overlap-param-gather", means="parameters are gathered beside forward")
    plain = settings.flag("no-bias-gelu-fusion", means="kernels not fused") or settings.flag("no-bias-swiglu-fusion")
    settings.flag("no-bias-dropout-fusion", means="kernels not fused")
    return {
        "zero": zero,
        "replicas": copies if zero else 1,
        "overlap": overlap,
        "compiled": not plain,
        "offload": settings.flag("optimizer-cpu-offload", means="states in the host's memory"),
    }
