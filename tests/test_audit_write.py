"""Plans written for other libraries: what is read back is the plan, and what cannot be said is said."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from test_plan import any_plan

from onecard.errors import PlanError
from onecard.planning.audit.audit import Given
from onecard.planning.audit.flavors import FLAVORS
from onecard.planning.audit.read import read
from onecard.planning.audit.write import _ALONG, LIBRARIES, write
from onecard.planning.plan import Plan
from onecard.planning.transformer import Transformer

MODEL = Transformer(sequence=8192, **FLAVORS["llama3"]["8B"])
# What a library's file can say, each with values that it can have.
ANY: dict[str, list[Any]] = {
    "dp": [1, 2, 4, 8], "tp": [1, 2, 8], "cp": [1, 2], "microbatch": [1, 2, 3], "microbatches": [1, 4, 24],
    "overlap": [True, False], "compiled": [True, False], "offload": [True, False], "pp": [1, 2, 4],
}  # fmt: skip
HALF: list[dict[str, Any]] = [
    {"parameters": "bfloat16", "compute": "bfloat16", "gradients": "float32"},
    {"parameters": "bfloat16", "compute": "bfloat16", "gradients": "bfloat16"},
    {"parameters": "float16", "compute": "float16", "gradients": "float16"},
    {"parameters": "float16", "compute": "float16", "gradients": "float32"},
    {"parameters": "float32", "compute": "float32", "gradients": "float32"},
]


def one_of(draw: random.Random, choices: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: draw.choice(values) for name, values in choices.items()}


def for_megatron(draw: random.Random) -> Plan:
    more = {"ep": [1, 2], "sequence_parallel": [True, False], "zero": [0, 1, 2, 3], "overlap_tp": [True, False],
            "overlap_pp": [True, False], "recompute": ["none", "selective", "full"], "virtual": [1, 2, 3]}  # fmt: skip
    given = one_of(draw, {**ANY, **more}) | draw.choice(HALF)
    if given["parameters"] == "bfloat16" and draw.random() < 0.3:
        given["compute"] = "float8_e4m3fn"
    return made(draw, given, True)


def for_deepspeed(draw: random.Random) -> Plan:
    given = one_of(draw, {**ANY, "zero": [0, 1, 2, 3], "recompute": ["none", "full"]}) | draw.choice(HALF)
    return made(draw, given, False)


def for_torchtitan(draw: random.Random) -> Plan:
    schedules = ["1F1B", "GPipe", "VPP", "BFS", "ZBV", "DualPipeV"]
    given = one_of(draw, {**ANY, "overlap": [True], "zero": [0, 2, 3], "schedule": schedules,
                          "recompute": ["none", "operators", "full"],
                          "overlap_tp": [True, False], "compute": ["bfloat16", "float32", "float8_e4m3fn"]})  # fmt: skip
    kept = draw.choice(["float32", "bfloat16"])
    given |= {
        "parameters": kept,
        "gradients": kept,
        "states": kept,
        "master": False,
        "sequence_parallel": given["tp"] > 1,
    }
    if given["schedule"] in ("VPP", "BFS", "ZBV", "DualPipeV"):
        given["virtual"] = 2
    given["zero"] = 0 if given["dp"] == 1 else given["zero"]
    return made(draw, given, True)


def for_fsdp(draw: random.Random) -> Plan:
    given = one_of(draw, {**ANY, "pp": [1], "microbatch": [1], "microbatches": [1], "zero": [2, 3], "recompute": ["none", "full"],
                          "compute": ["bfloat16", "float16", "float32", "float8_e4m3fn"]})  # fmt: skip
    return made(draw, given | {"parameters": "float32"}, False)


def made(draw: random.Random, given: dict[str, Any], stages: bool) -> Plan:
    """The plan, with what depends on other fields."""
    if given["pp"] == 1:
        given["virtual"] = 1
    if given.get("zero") and given["dp"] >= 4 and draw.random() < 0.3:
        given["replicas"] = 2
    given["ep"] = given.get("ep", 1) if given["dp"] > 1 else 1
    if not (given["pp"] > 1 and given.get("virtual", 1) > 1 and "overlap_pp" in given):
        given["overlap_pp"] = given["pp"] == 1
    if given["tp"] == 1:
        given.pop("overlap_tp", None)
    number = given["pp"] * given.get("virtual", 1)
    if stages and given["pp"] > 1 and draw.random() < 0.3:
        given["stages"] = tuple([32 // number + (i == 1) * (32 % number) for i in range(number)])
    if given.get("schedule") not in (None, "1F1B", "GPipe") and given["pp"] == 1:
        given["schedule"] = "1F1B"
    return Plan(**given)


MAKE = {"megatron": for_megatron, "deepspeed": for_deepspeed, "torchtitan": for_torchtitan, "fsdp": for_fsdp}


@pytest.mark.share(1)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_library_can_say_is_read_back(library: str, tmp_path: Path) -> None:
    draw = random.Random(7)
    seen = set()
    for _ in range(150):
        plan = MAKE[library](draw)
        written = write(library, plan, MODEL)
        assert written.cannot == {}, (plan, written.text, written.cannot)
        seen.add(plan)
    assert len(seen) > 90
    (tmp_path / written.name).write_text(written.text)  # not by the writer's own way
    world = {"world": plan.world} if library == "torchtitan" else {}
    back = read([tmp_path / written.name], Given(**world)).plan
    assert replace(back, schedule=plan.schedule) == plan if plan.pp == 1 else back == plan


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_a_library_cannot_say_is_said(library: str) -> None:
    """Of any plan: the file and the words together are the plan."""
    draw = random.Random(5)
    words: set[str] = set()
    for _ in range(150):
        plan = any_plan(draw)
        if plan.stages:
            number = plan.pp * plan.virtual
            plan = replace(plan, stages=tuple(32 // number + (i < 32 % number) for i in range(number)))
        written = write(library, plan, MODEL)
        told = {field: getattr(plan, field) for field in written.cannot if field in Plan.__dataclass_fields__}
        differ = {f.name for f in fields(Plan) if getattr(plan, f.name) != getattr(written.plan, f.name)}
        assert differ - {*_ALONG, "per_host"} <= told.keys() <= differ
        assert all(text.startswith(f"{field}: the plan says ") for field, text in written.cannot.items())
        words |= written.cannot.keys()
    assert "placements" in words and "master" in words


def test_sizes_of_models_are_written_for_megatron(tmp_path: Path) -> None:
    gpt = Transformer(
        layers=12, hidden=768, heads=12, vocab=50304, sequence=1024, tied=True, dropout=0.1, attention="scores"
    )
    qwen = replace(MODEL, qkv_bias=True, qk_norm=True, head_dim=64, tied=True, vocab=128000)
    mixtral = replace(MODEL, experts=8, top_k=2, expert_ffn=14336)
    for model in (gpt, qwen, mixtral, replace(MODEL, norm="layer", positions="none", gated=False, bias=True)):
        assert write("megatron", Plan(overlap=False), model).cannot == {}
    odd = write("megatron", Plan(tp=8), replace(gpt, vocab=50257, heads=16))
    assert odd.cannot == {
        "vocab": "vocab: the plan says 50257, which Megatron-LM has no setting for; its file means 51200"
    }


def test_a_model_without_a_flavor_is_said_in_words() -> None:
    written = write("torchtitan", Plan(dp=8, zero=3, parameters="float32"), replace(MODEL, layers=31))
    assert "of these sizes there is none" in written.text
    assert written.cannot["flavor"].startswith(
        "flavor: torchtitan has none of these sizes, add one to its tables; it has llama3 debug"
    )
    padded = write("torchtitan", Plan(dp=8, zero=3, parameters="float32"), replace(MODEL, vocab=129024))
    assert 'flavor = "8B"' in padded.text
    assert padded.cannot["vocab"].startswith(
        "vocab: the plan says 129024, which torchtitan has no setting for; its file means 128256"
    )


def test_what_cannot_be_written() -> None:
    with pytest.raises(PlanError, match="no library 'jax' to write for; there are megatron"):
        write("jax", Plan())
    with pytest.raises(PlanError, match="says the model's sizes, too"):
        write("torchtitan", Plan())
