"""Mixtures of transformers, unmodified, experts cut along "ep": five steps of AdamW with clipping, beside one card."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from amounts import share
from torch import Tensor, nn

import onecard as oc
from onecard.testing import run_ranks

pytest.importorskip("transformers", reason="pip install onecard[test]")

WORDS, BATCH, TIME, STEPS = 48, 4, 6, 5
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 44, "max_position_embeddings": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_EIGHT = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": True}
_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
_DEEPSEEK = {
    "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", _FOUR),
    "Qwen2-MoE": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_EIGHT, "shared_expert_intermediate_size": 24}),
    "Qwen3-MoE": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_EIGHT, "head_dim": 8}),
    "OLMoE": ("OlmoeConfig", "OlmoeForCausalLM", {k: v for k, v in _EIGHT.items() if k[0] != "m"}),
    "Granite-MoE": ("GraniteMoeConfig", "GraniteMoeForCausalLM", _FOUR),
    "DeepSeek-V2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**_DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "DeepSeek-V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _DEEPSEEK),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", {**_FOUR, "head_dim": 8, "sliding_window": 8}),
    "Llama-4": ("Llama4TextConfig", "Llama4ForCausalLM", {
        **_FOUR, "num_experts_per_tok": 1, "intermediate_size_mlp": 44, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 0,
        "eos_token_id": 0, "interleave_moe_layer_step": 1, "no_rope_layers": [1, 1], "attention_chunk_size": 8}),
}  # fmt: skip
R, S = oc.Replicate(), oc.Shard
LAYOUTS: dict[str, tuple[tuple[int, ...], list[str], list[Any]]] = {
    "ep=2": ((2,), ["ep"], [S(0)]),
    "ep=4": ((4,), ["ep"], [S(0)]),
    "ep in dp": ((2, 2), ["dp", "ep"], [S(0), S(0)]),
    "ep beside dp": ((2, 2), ["dp", "ep"], [S(0), R]),
    "ep beside tp": ((2, 2), ["ep", "tp"], [S(0), R]),
}


def model_of(name: str) -> nn.Module:
    import transformers

    config, model, more = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**(SIZES | more))).train()


def batch_of(step: int) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (BATCH, TIME), generator=torch.Generator().manual_seed(step))
    mask = torch.ones(BATCH, TIME, dtype=torch.long)
    mask[1, 4:] = mask[3, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def cut_experts(name: str, module: nn.Module, mesh: oc.ProcessMesh) -> None:
    """Experts along "ep"; their inner dim along "tp", if there is one."""
    for key, weight in list(module.named_parameters(recurse=False)):
        if not name.endswith("experts") or weight.dim() < 2:
            continue
        turned = type(module).__name__.startswith(("GptOss", "Llama4"))  # (experts, in, out)
        inner = (1 + turned) if "gate_up" in key else (2 - turned)
        along = {"ep": S(0), "tp": S(inner) if weight.dim() == 3 else R}
        setattr(module, key, oc.shard_tensor(weight, mesh, [along.get(axis, R) for axis in mesh.dim_names]))


def step(model: nn.Module, optimizer: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    made = model(**batch)
    made.loss.backward()
    found = {"loss": made.loss, "auxiliary loss": getattr(made, "aux_loss", None)}
    found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    found = {n: oc.unshard(x.detach()).clone() for n, x in found.items() if isinstance(x, Tensor)}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return found


def differences(name: str, how: str, experts: str = "grouped_mm") -> list[str]:
    """On a rank: what differs from one card by more than 1e-5 of a value's largest element."""
    shape, axes, placements = LAYOUTS[how]
    mesh = oc.ProcessMesh(torch.arange(math.prod(shape)).view(shape), axes)
    plain = model_of(name)
    if experts != "grouped_mm":  # what transformers takes by itself
        plain.set_experts_implementation(experts)
    twin = copy.deepcopy(plain)
    oc.shard_layer(twin, mesh, cut_experts)
    cut = [p for p in twin.parameters() if S(0) in p.placements]
    if not cut or any(p._local.shape[0] >= p.shape[0] for p in cut):
        return ["no experts are cut"]
    # An eps well above the rounding of gradients that are zero but for it (a key's bias): else AdamW blows that up.
    first, second = (torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-5) for m in (plain, twin))
    found = []
    for number in range(STEPS):
        batch = batch_of(number)
        wanted = step(plain, first, batch)
        made = step(twin, second, {n: oc.shard_tensor(x, mesh, placements) for n, x in batch.items()})
        found += [f"{n}: only on one side" for n in wanted.keys() ^ made.keys()]
        for n in wanted.keys() & made.keys():
            error, scale = (made[n] - wanted[n]).abs().max(), wanted[n].abs().max()
            if not error <= 1e-5 * scale + 1e-7:
                found.append(f"step {number}, {n}: {error:.3g} of {scale:.3g}")
    return found


def all_differences(cases: Sequence[tuple[str, ...]]) -> dict[str, list[str]]:
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)  # which tokens an expert has depends on data
    return {", ".join(case): differences(*case) for case in cases}


CASES: list[tuple[str, ...]] = [
    (model, layout) for i, model in enumerate(MODELS) for layout in [*LAYOUTS][i % 5 :] + [*LAYOUTS][: i % 5]
]
# Transformers' other ways to run experts: a loop over them, and one matrix for each token.
CASES += [
    (model, layout, how) for model in ("Mixtral", "gpt-oss") for layout in LAYOUTS for how in ("eager", "batched_mm")
]


def recorded_differences(cases: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """On a rank: the same of losses, with the step recorded; and that rows are calls of their own there."""
    warnings.simplefilter("ignore")  # gathered operators; a step that asks for values of data
    return {", ".join(case): recorded_apart(*case) for case in cases}


def recorded_apart(name: str, how: str) -> list[str]:
    shape, axes, placements = LAYOUTS[how]
    mesh = oc.ProcessMesh(torch.arange(math.prod(shape)).view(shape), axes)
    plain = model_of(name)
    twin = copy.deepcopy(plain)
    oc.shard_layer(twin, mesh, cut_experts)

    def steps_of(model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)

        def run(batch: dict[str, Any]) -> Tensor:
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return run

    run, recorded, found = steps_of(plain), oc.to_static(steps_of(twin), ask=True), []
    for number in range(STEPS + 1):
        batch = batch_of(number)
        wanted, made = run(batch), recorded({n: oc.shard_tensor(x, mesh, placements) for n, x in batch.items()})
        if not abs(oc.unshard(made) - wanted) <= 1e-5 * wanted:
            found.append(f"step {number}: {float(oc.unshard(made))} in place of {float(wanted)}")
    rows = "rows: aten._grouped_mm" in str(recorded.recordings[0])
    return found + (
        [] if rows or name == "Llama-4" else ["rows go to all ranks"]
    )  # Llama-4 gives each expert all tokens


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_recorded_steps_are_those_of_one_card(ranks):
    layouts = [layout for layout, (shape, *_) in LAYOUTS.items() if math.prod(shape) == ranks]
    cases = [(model, layouts[i % len(layouts)]) for i, model in enumerate(MODELS)]
    for found in run_ranks(recorded_differences, ranks, share(cases, 2), timeout=900):
        assert {case: differ for case, differ in found.items() if differ} == {}


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_five_steps_are_those_of_one_card(ranks):
    cases = [case for case in CASES if math.prod(LAYOUTS[case[1]][0]) == ranks]
    for found in run_ranks(all_differences, ranks, share(cases, ranks // 2), timeout=900):
        assert {case: differ for case, differ in found.items() if differ} == {}
