"""Models that nobody here wrote: Hugging Face transformers, random weights, one step of AdamW on two ranks and on one card."""

from __future__ import annotations

import copy
import re
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecard as oc
from onecard.tensor.dispatch import fallback
from onecard.testing import run_ranks

pytest.importorskip("transformers", reason="pip install onecard[test]")

EXAMPLE = Path(__file__).parents[1] / "examples" / "huggingface.py"
BATCH, TIME, WIDTH, WORDS = 4, 6, 32, 48
NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "vit": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}


def words(seed: int, *shape: int) -> Tensor:
    return torch.randint(WORDS, shape, generator=torch.Generator().manual_seed(seed))


def text_batch() -> dict[str, Tensor]:
    """Token ids with padding at the end of two rows, whose labels do not count."""
    ids = words(1, BATCH, TIME)
    mask = torch.ones(BATCH, TIME, dtype=torch.long)
    mask[1, 4:] = mask[3, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        **NO_DROPOUT["gpt2"],
    )  # fmt: skip
    return GPT2LMHeadModel(config), text_batch()


def _llama(model: str, heads: int, kv_heads: int, **more: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 44, "max_position_embeddings": 16} | more
    config = getattr(transformers, f"{model}Config")(
        num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=kv_heads, **sizes
    )
    return getattr(transformers, f"{model}ForCausalLM")(config), text_batch()


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """One KV head, on two ranks."""
    return _llama("Llama", 4, 1)


def llama_odd_heads() -> tuple[nn.Module, dict[str, Tensor]]:
    """Three heads, on two ranks; embeddings tied."""
    return _llama("Llama", 3, 3, hidden_size=36, tie_word_embeddings=True)


def mixtral(experts: str = "grouped_mm") -> tuple[nn.Module, dict[str, Tensor]]:
    """Four experts, two for each token."""
    model, batch = _llama("Mixtral", 4, 2, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    model.set_experts_implementation(experts)
    return model, batch


def mixtral_eager() -> tuple[nn.Module, dict[str, Tensor]]:
    """The loop over the experts that were chosen: shapes depend on data."""
    return mixtral("eager")


def mixtral_batched() -> tuple[nn.Module, dict[str, Tensor]]:
    return mixtral("batched_mm")


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, **NO_DROPOUT["bert"],
    )  # fmt: skip
    return BertForMaskedLM(config), text_batch()


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu", **NO_DROPOUT["t5"],
    )  # fmt: skip
    batch = text_batch()
    return T5ForConditionalGeneration(config), {**batch, "labels": words(2, BATCH, 5)}


def vit() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=8, patch_size=4,
        num_labels=5, **NO_DROPOUT["vit"],
    )  # fmt: skip
    pixels = torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    return ViTForImageClassification(config), {"pixel_values": pixels, "labels": words(4, BATCH) % 5}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    f.__name__: f for f in (gpt2, llama, llama_odd_heads, bert, t5, vit, mixtral, mixtral_eager, mixtral_batched)
}

# Column parallel: the output features are cut. Row parallel: the input features are.
COLUMN = r"(q|k|v|gate|up|q_proj|k_proj|v_proj|gate_proj|up_proj|c_attn|c_fc|query|key|value|wi(_\d)?|intermediate\.dense|fc1)$"
ROW = r"(o_proj|down_proj|c_proj|o|wo|output\.dense|fc2)$"
EXPERTS = r"mlp\.experts$"  # one weight for all: (experts, out, in)


def column_row(name: str, module: nn.Module, mesh: oc.ProcessMesh) -> None:
    """Megatron's placements for any model, by the names of its linears. GPT-2's Conv1D keeps its weight as (in, out)."""
    if re.search(EXPERTS, name):
        module.gate_up_proj = oc.shard_tensor(module.gate_up_proj, mesh, [oc.Shard(1)])
        module.down_proj = oc.shard_tensor(module.down_proj, mesh, [oc.Shard(2)])
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return
    turned = type(module).__name__ == "Conv1D"
    if re.search(COLUMN, name):
        module.weight = oc.shard_tensor(weight, mesh, [oc.Shard(1 if turned else 0)])
        if getattr(module, "bias", None) is not None:
            module.bias = oc.shard_tensor(module.bias, mesh, [oc.Shard(0)])
    elif re.search(ROW, name):
        module.weight = oc.shard_tensor(weight, mesh, [oc.Shard(0 if turned else 1)])


def experts_apart(name: str, module: nn.Module, mesh: oc.ProcessMesh) -> None:
    """Expert parallel: each rank holds some of the experts, whole."""
    if re.search(EXPERTS, name):
        module.gate_up_proj = oc.shard_tensor(module.gate_up_proj, mesh, [oc.Shard(0)])
        module.down_proj = oc.shard_tensor(module.down_proj, mesh, [oc.Shard(0)])


def step(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Forward, backward, one step of AdamW: the loss, gradients and new parameters, whole."""
    # An eps well above the rounding of gradients that are zero but for it (a key's bias): else AdamW blows that up.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)
    loss = model(**inputs).loss
    loss.backward()
    found = {"loss": oc.unshard(loss.detach())}
    found |= {f"gradient of {n}": oc.unshard(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return found | {n: oc.unshard(p.detach()) for n, p in model.named_parameters()}


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """What differs by more than 1e-4 of the tensor's largest value."""
    found = [f"{n}: only on one side" for n in actual.keys() ^ expected.keys()]
    for name in actual.keys() & expected.keys():
        error, scale = (actual[name] - expected[name]).abs().max(), expected[name].abs().max()
        if not error <= 1e-4 * scale + 1e-6:
            found.append(f"{name}: {error:.3g} of {scale:.3g}")
    return sorted(found)


def compare(model: str, attention: str, how: str) -> tuple[list[str], list[str]]:
    """On a rank: differences between this rank's one-card step and the distributed one, and the operators gathered.

    ``how``: "dp" cuts the batch; "tp" cuts the linears, and "ep" the experts; "recompute" is "tp" with checkpointing.
    """
    mesh = oc.ProcessMesh([0, 1], ["x"])
    torch.manual_seed(0)
    plain, inputs = MODELS[model]()
    plain.set_attn_implementation(attention)
    plain.train()
    twin = copy.deepcopy(plain)
    if how == "recompute":
        getattr(twin, "activation_checkpointing_enable", twin.gradient_checkpointing_enable)()  # renamed in 5.23
    oc.shard_layer(twin, mesh, {"dp": None, "ep": experts_apart}.get(how, column_row))
    cut = [n for n, p in twin.named_parameters() if p.placements != (oc.Replicate(),)]
    placements = [oc.Shard(0)] if how == "dp" else [oc.Replicate()]
    expected = step(plain, inputs)
    fallback._warned.here.clear()
    with warnings.catch_warnings(record=True) as caught, oc.explain() as report:
        warnings.simplefilter("always", oc.GatheredOperatorWarning)
        actual = step(twin, {name: oc.shard_tensor(t, mesh, placements) for name, t in inputs.items()})
    gathered = [str(w.message) for w in caught if w.category is oc.GatheredOperatorWarning]
    if bool(cut) != (how != "dp") or not report.bytes:
        raise AssertionError(f"{model} {how}: cut {cut}, sent {report.bytes} bytes: this is no distributed run")
    return differences(actual, expected), gathered


def compare_all(models: tuple[str, ...]) -> dict[str, Any]:
    """``compare`` of an architecture's models with all placements, in one start of the ranks."""
    cases = [(m, a, how) for m in models for a in ("eager", "sdpa") for how in ("dp", "tp", *MORE.get(m, ()))]
    return {", ".join(case): compare(*case) for case in cases}


MORE = {"llama": ("recompute",), "mixtral": ("ep",)}
ARCHITECTURES = {
    "GPT-2": ("gpt2",), "LLaMA": ("llama", "llama_odd_heads"), "BERT": ("bert",), "T5": ("t5",), "ViT": ("vit",),
    "Mixtral": ("mixtral", "mixtral_eager", "mixtral_batched"),
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.share(2)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_step_on_two_ranks_is_that_of_one_card(architecture):
    for rank, cases in enumerate(run_ranks(compare_all, 2, ARCHITECTURES[architecture])):
        for case, (differ, gathered) in cases.items():
            assert differ == [], f"{case}, rank {rank}"
            # How many tokens an expert gets is known from data alone: no row can say it.
            assert [g for g in gathered if not ("mixtral_eager" in case and "nonzero.default" in g)] == [], case


def test_the_comparison_sees_a_fault():
    torch.manual_seed(0)
    model, inputs = bert()
    expected = step(copy.deepcopy(model), inputs)
    assert differences(step(copy.deepcopy(model), inputs), expected) == []
    with torch.no_grad():
        model.bert.encoder.layer[1].output.dense.weight[0, 0] += 1e-2
    assert any(found.startswith("gradient of bert") for found in differences(step(model, inputs), expected))
    assert differences({}, {"loss": torch.ones(())}) == ["loss: only on one side"]


def example(one_card: bool) -> list[float]:
    return runpy.run_path(str(EXAMPLE))["train"](one_card)


@pytest.mark.proof
def test_the_example_trains_as_on_one_card(capfd):
    expected = example(one_card=True)
    capfd.readouterr()
    for losses in run_ranks(example, 2, one_card=False):
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-5)
    assert expected[-1] < 0.8 * expected[0]
    printed = capfd.readouterr().out
    assert f"step 7  loss {expected[7]:.5f}" in printed and "all_reduce" in printed and "bytes, about" in printed
