"""A plan and a model as a script that starts Megatron-LM."""

from __future__ import annotations

import math
from typing import Any

from onecard.planning.plan import Plan
from onecard.planning.transformer import Transformer

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
Named = list[tuple[str, Any]]


def hosts_of(plan: Plan) -> tuple[int, int]:
    """Ranks on a host, and hosts: equal ones, as launchers want them."""
    each = plan.world if not plan.per_host or plan.world <= plan.per_host else math.gcd(plan.world, plan.per_host)
    return each, plan.world // each


def write_megatron(plan: Plan, model: Transformer | None) -> str:
    """The plan and the model as a script that starts Megatron-LM."""
    assert model is not None  # write() has asked
    each, hosts = hosts_of(plan)
    parts = {
        "DISTRIBUTED_ARGS": [("nproc_per_node", each), ("nnodes", hosts)],
        "MODEL_ARGS": _megatron_model(plan, model),
        "TRAINING_ARGS": _megatron_training(plan, model),
        "PARALLEL_ARGS": _megatron_parallel(plan),
    }
    arrays = "\n".join(
        f"{name}=(\n" + "".join(f"    --{a}{_value(v)}\n" for a, v in given) + ")" for name, given in parts.items()
    )
    call = " \\\n".join(f"    ${{{name}[@]}}" for name in list(parts)[1:])
    return f"#!/bin/bash\n{arrays}\n\ntorchrun ${{DISTRIBUTED_ARGS[@]}} pretrain_gpt.py \\\n{call}\n"


def _value(value: Any) -> str:
    return "" if value is True else f' "{value}"' if isinstance(value, str) and "|" in value else f" {value}"


def _megatron_model(plan: Plan, model: Transformer) -> Named:
    made: Named = [
        ("num-layers", model.layers), ("hidden-size", model.hidden), ("ffn-hidden-size", model.inner),
        ("num-attention-heads", model.heads), ("kv-channels", model.per_head), ("seq-length", model.sequence),
        ("max-position-embeddings", model.rows or model.sequence), ("vocab-size", model.vocab),
    ]  # fmt: skip
    if model.vocab % (128 * plan.tp) and model.vocab % plan.tp == 0:
        made += [("make-vocab-size-divisible-by", 1)]
    if model.key_heads != model.heads:
        made += [("group-query-attention", True), ("num-query-groups", model.key_heads)]
    positions = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
    made += [("position-embedding-type", positions[model.positions])]
    made += [("normalization", "RMSNorm" if model.norm == "rms" else "LayerNorm")]
    made += [("swiglu", True)] * model.gated + [("disable-bias-linear", True)] * (not model.bias)
    made += [("untie-embeddings-and-output-weights", True)] * (not model.tied)
    made += [("add-qkv-bias", True)] * model.qkv_bias + [("qk-layernorm", True)] * model.qk_norm
    made += [("embed-layernorm", True)] * model.embedding_norm
    made += [("hidden-dropout", model.dropout), ("attention-dropout", model.dropout)]
    if model.experts:
        made += [
            ("num-experts", model.experts),
            ("moe-router-topk", model.top_k),
            ("moe-ffn-hidden-size", model.expert_ffn),
        ]
        made += [("moe-shared-expert-intermediate-size", model.shared_ffn)] * bool(model.shared_ffn)
    return [*made, ("attention-backend", "flash" if model.attention == "flash" else "unfused")]


def _megatron_training(plan: Plan, model: Transformer) -> Named:
    made: Named = [("micro-batch-size", plan.microbatch), ("global-batch-size", plan.batch)]
    kept = {"bfloat16": "bf16", "float16": "fp16"}.get(plan.parameters, "")
    made += [(kept, True)] * bool(kept)
    if plan.compute.startswith("float8"):
        made += [("fp8-format", "hybrid")]
    if plan.gradients == "bfloat16" and kept == "bf16":
        made += [("grad-reduce-in-bf16", True)]
    elif plan.gradients == "float32" and kept == "fp16":
        made += [("accumulate-allreduce-grads-in-fp32", True)]
    elif plan.gradients in SHORT and plan.gradients != ("float32" if kept != "fp16" else "float16"):
        made += [("use-precision-aware-optimizer", True), ("main-grads-dtype", SHORT[plan.gradients])]
    if plan.states in SHORT and plan.states != "float32":
        made += [("use-precision-aware-optimizer", True), ("exp-avg-dtype", SHORT[plan.states])]
        made += [("exp-avg-sq-dtype", SHORT[plan.states])]
    if plan.recompute != "none":
        made += [("recompute-granularity", plan.recompute)]
    if plan.recompute == "full":
        block = ("block", plan.recompute_blocks) if plan.recompute_blocks else ("uniform", 1)
        made += [("recompute-method", block[0]), ("recompute-num-layers", block[1])]
    if not plan.compiled:
        made += [(f"no-bias-{'swiglu' if model.gated else 'gelu'}-fusion", True), ("no-bias-dropout-fusion", True)]
    return list(dict(made).items())


def _megatron_parallel(plan: Plan) -> Named:
    made: Named = [("tensor-model-parallel-size", plan.tp), ("pipeline-model-parallel-size", plan.pp)]
    made += [("context-parallel-size", plan.cp)] * (plan.cp > 1) + [("expert-model-parallel-size", plan.ep)] * (
        plan.ep > 1
    )
    made += [("sequence-parallel", True)] * plan.sequence_parallel
    made += [("no-async-tensor-model-parallel-allreduce", True)] * (plan.tp > 1 and not plan.overlap_tp)
    made += [("no-overlap-p2p-communication", True)] * (plan.virtual > 1 and not plan.overlap_pp)
    if plan.stages and plan.pp > 1:
        ends = ["E"] + [""] * (len(plan.stages) - 1)
        blocks = [f"{end}{f't*{count}' if count else ''}" for end, count in zip(ends, plan.stages, strict=True)]
        made += [("pipeline-model-parallel-layout", "|".join(blocks) + "L")]
    elif plan.virtual > 1:
        made += [("num-virtual-stages-per-pipeline-rank", plan.virtual)]
    if plan.zero:
        made += [("use-distributed-optimizer", True)]
        made += [("num-distributed-optimizer-instances", plan.replicas)] * (plan.replicas > 1)
    if plan.zero > 1:
        made += [("use-megatron-fsdp", True), ("data-parallel-sharding-strategy", _STRATEGIES[plan.zero])]
    made += [("overlap-grad-reduce", True)] * plan.overlap + [("overlap-param-gather", True)] * (
        plan.overlap and plan.zero > 0
    )
    return made + [("optimizer-cpu-offload", True)] * plan.offload
