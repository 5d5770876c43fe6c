"""save_pretrained of a model that a plan has divided, in a program that sees one card: the folder that one card writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import onecard as oc
from onecard.auto.tied import stand_ins
from onecard.integrations import one_card
from onecard.testing import run_ranks

PLANS: dict[str, dict[str, Any]] = {
    "ZeRO-3": {"dp": 2, "zero": 3},
    "stages": {"pp": 2, "schedule": "F-then-B"},
    "dp": {"dp": 2},
}


def trained(tied: bool) -> Any:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=12,
        max_position_embeddings=16, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        ids = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    return model


def saved(plan: dict[str, Any], folder: Path) -> None:
    with one_card(oc.Plan(**plan, parameters="float32", compute="float32")):
        for tied in (True, False):
            trained(tied).save_pretrained(folder / str(tied), max_shard_size="1KB")


@pytest.mark.share(1)
@pytest.mark.parametrize("name", PLANS)
def test_a_folder_of_a_divided_model_is_one_cards(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    run_ranks(saved, 2, PLANS[name], tmp_path / "divided", timeout=240)
    for tied in (True, False):
        trained(tied).save_pretrained(tmp_path / "one" / str(tied), max_shard_size="1KB")
        files = [sorted(p.name for p in (tmp_path / where / str(tied)).iterdir()) for where in ("one", "divided")]
        assert files[0] == files[1] and sum(name.endswith(".safetensors") for name in files[0]) > 1
        for file in (tmp_path / "one" / str(tied)).glob("*.safetensors"):
            expected, found = load_file(file), load_file(tmp_path / "divided" / str(tied) / file.name)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


def test_names_of_one_weight_have_one_memory() -> None:
    mesh = oc.ProcessMesh([0], ["dp"])
    a, b = (oc.shard_tensor(torch.ones(4, 2), mesh, [oc.Shard(0)]) for _ in range(2))
    shown = stand_ins({"a": a, "again": a.detach(), "b": b, "plain": torch.ones(2), "step": 3})
    assert set(shown) == {"a", "again", "b"} and all(x.shape == (4, 2) for x in shown.values())
    assert shown["a"].data_ptr() == shown["again"].data_ptr() != shown["b"].data_ptr()
