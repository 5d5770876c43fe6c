"""Plans and sizes of models: what is refused and with which words, JSON and back, what does not fit, counts of parameters."""

from __future__ import annotations

import json
import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import onecard as oc
from onecard.errors import PlanError
from onecard.planning import json_text
from onecard.planning.plan import Plan
from onecard.planning.transformer import Transformer

LLAMA: dict[str, Any] = {
    "vocab": 128256, "sequence": 8192, "kv_heads": 8, "gated": True, "norm": "rms", "positions": "rotary", "bias": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dp": 0}, "Plan: dp=0: want 1 or more"),
        ({"tp": "8"}, "Plan: tp='8': want a whole number, not a string; write tp=8"),
        ({"tp": 8.0}, "tp=8.0: want a whole number, not a number with a point"),
        ({"tp": True}, "tp=True: want a whole number, not a yes-or-no value"),
        ({"pp": 2**50}, "is beyond any machine"),
        ({"dp": 8, "replicas": 3, "zero": 3}, "replicas=3: does not divide dp=8; 1, 2, 4, 8 do"),
        ({"dp": 8, "replicas": 2}, "zero=0 divides nothing"),
        ({"dp": 8, "ep": 3}, "ep=3: does not divide dp=8"),
        ({"zero": 4}, "zero=4: want one of 0, 1, 2, 3"),
        ({"zero": True}, "zero=True: want one of"),
        ({"schedule": "2F2B"}, "schedule='2F2B': there is none of this name; there are 1F1B"),
        ({"schedule": 3}, "schedule=3: want a name"),
        ({"pp": 2, "virtual": 2, "schedule": "ZB1P"}, "virtual=2: schedule ZB1P has one stage on each rank"),
        ({"pp": 2, "schedule": "ZBV"}, "schedule='ZBV': folds the model in two"),
        ({"pp": 2, "schedule": "VPP"}, "schedule='VPP': has several stages"),
        ({"virtual": 2}, "virtual=2: there is no pipeline"),
        ({"pp": 2, "stages": (4,)}, "stages=(4,): are 1, but pp x virtual = 2 x 1 = 2"),
        ({"pp": 2, "stages": [4, 4]}, "want whole numbers: how many blocks each stage has"),
        ({"pp": 2, "stages": (0, 0)}, "no stage has a block"),
        ({"compute": "int8"}, "compute='int8': want one of"),
        ({"parameters": "tfloat32"}, "parameters='tfloat32': want one of"),
        ({"recompute": "some"}, "recompute='some': want one of 'none', 'selective', 'operators', 'full'"),
        ({"recompute_blocks": 2}, "recompute_blocks=2: nothing is computed again"),
        ({"placements": (("*", "tp: Shard"),)}, "'tp: Shard' (of '*') does not say how parameters lie"),
        ({"placements": (("*", "xx: Shard(0)"),)}, "does not say how parameters lie"),
        ({"placements": (("*", "tp: Shard(0), tp: Shard(1)"),)}, "does not say how parameters lie"),
        ({"placements": ("*",)}, "want pairs of a pattern and placements"),
        ({"overlap": 1}, "overlap=1: want True or False, not a number"),
    ],
)
def test_a_plan_that_cannot_be_is_refused_by_field(given: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as error:
        Plan(**given)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert error.value.field in given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"heads": 7}, "heads=7: hidden=768 is no multiple of it"),
        ({"kv_heads": 5}, "kv_heads=5: heads=12 is no multiple"),
        ({"layers": 0}, "layers=0: want 1 or more"),
        ({"vocab": "50257"}, "vocab='50257': want a whole number, not a string; write vocab=50257"),
        ({"dropout": 2.0}, "dropout=2.0: want a number from 0 to 1"),
        ({"dropout": "0"}, "dropout='0': want a number from 0 to 1, not a string"),
        ({"norm": "batch"}, "norm='batch': want one of 'layer', 'rms'"),
        ({"rows": 10}, "rows=10: a sequence has 1024 tokens"),
        ({"experts": 8}, "top_k=0: each token goes to 1 to 8"),
        ({"experts": 8, "top_k": 2}, "expert_ffn=0: experts need"),
        ({"top_k": 2}, "top_k=2: there are no experts"),
    ],
)
def test_sizes_that_cannot_be_are_refused_by_field(given: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as error:
        Transformer(**{"layers": 2, "hidden": 768, "heads": 12, "vocab": 50257, "sequence": 1024, **given})
    assert says in str(error.value) and error.value.field


def test_spellings_of_one_plan_are_equal() -> None:
    assert Plan(pp=2, schedule="f-then-b") == Plan(pp=2, schedule="GPipe") == Plan(pp=2, schedule="F-then-B")
    assert (
        Plan(pp=2, virtual=2) == Plan(pp=2, virtual=2, schedule="vpp") == Plan(pp=2, virtual=2, schedule="interleaved")
    )
    assert not Plan(parameters="float32").master and Plan(parameters="bfloat16").master


def any_plan(draw: random.Random) -> Plan:
    """A plan that can be, any one of them."""
    dp, pp, schedule = (
        draw.choice([1, 2, 4, 8, 12]),
        draw.choice([1, 2, 3, 8]),
        draw.choice(["1F1B", "GPipe", "ZBH1", "ZBV"]),
    )
    virtual = 1 if pp == 1 else 2 if schedule == "ZBV" else draw.choice([1, 2, 3])
    zero, recompute = draw.randrange(4), draw.choice(["none", "selective", "full"])
    return Plan(
        dp=dp, pp=pp, schedule=schedule, virtual=virtual, tp=draw.choice([1, 2, 8]), cp=draw.choice([1, 2]), zero=zero,
        replicas=draw.choice([n for n in (1, 2, 4) if dp % n == 0]) if zero else 1, recompute=recompute,
        ep=draw.choice([n for n in (1, 2) if dp % n == 0]), per_host=draw.choice([0, 4, 8]),
        stages=draw.choice([(), tuple(draw.randint(1, 5) for _ in range(pp * virtual))]),
        placements=draw.choice([(), (("*.q", "tp: Shard(0)"), ("é\"*", "dp: Replicate(), tp: Shard(1)"))]),
        outputs=draw.choice([(), (("é\"*", "tp: Replicate()"), ("*.up", "tp: Shard(1)"))]),
        recompute_blocks=draw.choice([0, 2]) if recompute != "none" else 0, microbatch=draw.randint(1, 9),
        microbatches=draw.randint(1, 99), sequence_parallel=draw.random() < 0.5, parameters=draw.choice(["float32", "bfloat16"]),
        gradients=draw.choice(["float32", "bfloat16"]), compute=draw.choice(["float8_e4m3fn", "bfloat16", "tfloat32"]),
        master=draw.random() < 0.5, offload=draw.random() < 0.5, compiled=draw.random() < 0.5, overlap=draw.random() < 0.5,
    )  # fmt: skip


def test_json_and_back_is_the_same_plan(tmp_path) -> None:
    draw = random.Random(0)
    plans = [any_plan(draw) for _ in range(300)]
    assert len({*plans}) > 290
    for plan in plans:
        assert Plan.from_json(plan.to_json()) == plan == Plan.from_json(json.loads(plan.to_json()))
        assert str(plan).startswith("Plan for ") and plan.diff(plan) == ()
    plans[0].save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == Plan.from_json(str(tmp_path / "plan.json")) == plans[0]
    model = Transformer(layers=2, hidden=64, heads=4, **{**LLAMA, "kv_heads": 2})
    assert Transformer.from_json(model.to_json()) == model


def test_every_field_is_written_told_apart_and_described() -> None:
    other: dict[str, Any] = {
        "dp": 8, "tp": 2, "cp": 2, "pp": 4, "ep": 2, "per_host": 4, "placements": (("*", "tp: Shard(0)"),),
        "outputs": (("*.up", "tp: Shard(1)"),), "sequence_parallel": True, "schedule": "BFS", "virtual": 2,
        "stages": (1,) * 8, "microbatch": 2, "microbatches": 8, "zero": 1, "replicas": 2, "recompute": "full",
        "recompute_blocks": 1, "parameters": "float16", "gradients": "float16", "states": "bfloat16", "compute": "float16",
        "master": False, "offload": True, "compiled": True, "overlap": False, "overlap_tp": True, "overlap_pp": False,
        "partial_sends": True,
    }  # fmt: skip
    assert [*other] == [field.name for field in fields(Plan)]
    told = Plan().diff(Plan(**other))
    assert [line.partition(":")[0] for line in told] == [*other, "so world", "so batch"]
    assert "dp: 1 -> 8 (ranks of data parallelism)" in told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"onecard": "Plan"}', ":1: Plan: the key 'version' is missing; write \"version\": 1"),
        ('{"onecard": "Plan", "version": 2}', ":1: Plan: version 2 is newer than this onecard"),
        ('{"onecard": "Plan", "version": "1"}', ":1: Plan: version '1' is not one"),
        ('{"version": 1}', ":1: the key 'onecard' is missing; a Plan has"),
        ('{"onecard": "Mesh", "version": 1}', "'onecard' is 'Mesh'; a Plan has"),
        ('{"onecard": "Plan", "version": 1,\n"tpp": 8}', ":2: Plan has no field 'tpp'; did you mean 'tp'?"),
        ('{"onecard": "Plan", "version": 1,\n\n"tp":\n "8"}', ":3: Plan: tp='8': want a whole number, not a string; write tp=8"),
        ('{"onecard": "Plan", "version": 1,\n"tp": 8,\n"tp": 9}', ":3: the key 'tp' is there twice (first on line 2)"),
        ('{"onecard": "Plan", "version": 1,\n"tp": 8,,}', ":2: no JSON: "),
        ('{"onecard": "Plan", "version": 1, "tp": NaN}', ":1: NaN is no number of JSON"),
        ("[1, 2]", ":1: want an object with the key 'onecard'"),
        ('{"onecard": "Plan", "version": 1, "stages": {"a": 1}}', "stages={'a': 1}: want whole numbers"),
        ("{" * 9000, "objects or lists within each other"),
        ('{"onecard": "Plan", "version": 1, "tp": ' + "9" * 9000 + "}", "Exceeds the limit"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_line_and_field(text: str, says: str, tmp_path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError) as error:
        Plan.load(tmp_path / "plan.json")
    assert str(error.value).startswith(f"{tmp_path}/plan.json:") and says in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path) -> None:
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for path, says in (
        (tmp_path, "is a folder"),
        (tmp_path / "no", "does not exist"),
        (tmp_path / "bytes.json", "is no text"),
    ):
        with pytest.raises(PlanError, match=says):
            Plan.load(path)
    with pytest.raises(PlanError, match="want a JSON text, the path of a file, or a dict, not int"):
        Plan.from_json(3)  # type: ignore[arg-type]


def test_lines_of_every_value() -> None:
    text = '{"a": [1,\n {"b": "x, y] }"},\n\n 3],\n"c\\n": {\n}}'
    lines = json_text.located(text, "x").lines
    assert lines == {(): 1, ("a",): 1, ("a", 0): 1, ("a", 1): 2, ("a", 1, "b"): 2, ("a", 2): 4, ("c\n",): 5}


def test_what_does_not_fit_a_model() -> None:
    model = Transformer(layers=80, hidden=8192, heads=64, ffn=28672, **LLAMA)

    def said(plan: Plan, kind: str = "mistake", **sizes: int) -> list[str]:
        return [str(found) for found in plan.check(model, **sizes) if found.kind == kind]

    assert said(Plan(tp=8, pp=8, dp=4, microbatches=32)) == []
    assert said(Plan(tp=16)) == ["tp=16 does not divide 8 key heads; tp=8 does"]
    assert said(Plan(tp=16), "cost") == [
        "tp=16 is more than the 8 ranks of a host: sums of each block go between hosts; tp=8 and a larger pp stay on a host"
    ]
    assert said(Plan(tp=8), vocab=50257) == [
        "tp=8 does not divide 50,257 rows of the vocabulary; vocab=51200 (943 rows of "
                                             "padding) does"]  # fmt: skip
    assert said(Plan(pp=2, stages=(40, 39))) == [
        "stages have 79 blocks together, the model has 80; leave stages empty, or count again"
    ]
    assert said(Plan(pp=64, virtual=2)) == ["80 blocks cannot fill 64 x 2 stages; pp=64, virtual=1 do"]
    assert "14 have 3" not in said(Plan(pp=16, microbatches=64), "cost")
    assert said(Plan(pp=12, microbatches=64), "cost") == [
        "12 stages do not divide 80 blocks: 8 have 7, 4 have 6, and all wait for the largest (5% more); 10, 16, 20 stages have "
        "equal ones"
    ]  # fmt: skip
    assert said(Plan(pp=8), "cost") == ["1 microbatch for 8 ranks of a pipeline: under 1F1B they wait 88% of a step; "
                                        "microbatches=32 or more"]  # fmt: skip
    assert (
        "gathers the parameters for every microbatch, 64 times"
        in said(Plan(pp=8, dp=2, zero=3, microbatches=64), "cost")[0]
    )
    assert said(Plan(cp=3))[0].startswith("a sequence of 8192 tokens has no 6 equal parts")
    assert said(Plan(tp=8, sequence_parallel=True), sequence=8190)[0].startswith("sequence parallel: 8190 tokens")
    assert said(Plan(pp=8, recompute="full", recompute_blocks=11))[0].startswith(
        "recompute_blocks=11, but a rank has at most 10"
    )
    assert said(Plan(sequence_parallel=True), "idle") and said(Plan(zero=1), "idle")
    assert said(Plan(parameters="float16", compute="float16", master=False))
    with pytest.raises(PlanError, match="no size 'blocks'"):
        Plan().check(blocks=3)


def test_counts_of_parameters_that_are_published() -> None:
    def count(**sizes: Any) -> int:
        return Transformer(**{**LLAMA, **sizes}).parameters

    assert count(layers=32, hidden=4096, heads=32, ffn=14336) == 8_030_261_248  # LLaMA-3 8B
    assert count(layers=80, hidden=8192, heads=64, ffn=28672) == 70_553_706_496
    assert count(layers=126, hidden=16384, heads=128, ffn=53248) == 405_853_388_800
    assert count(layers=32, hidden=4096, heads=32, ffn=14336, vocab=32000) == 7_241_732_096  # Mistral 7B
    bloom = Transformer(layers=70, hidden=14336, heads=112, vocab=250880, sequence=2048, tied=True, positions="none",
                        embedding_norm=True)  # fmt: skip
    assert bloom.parameters == 176_247_271_424


def test_operations_of_a_token_are_those_of_the_formula() -> None:
    model = Transformer(layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048)
    h, s, v, layers = 12288, 2048, 51200, 96
    assert model.flops_per_token == pytest.approx(
        72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h)), rel=1e-12
    )
    grouped = replace(model, kv_heads=8, gated=True)
    assert grouped.flops_per_token - model.flops_per_token == 6 * 96 * (4 * h * h - 2 * h * 88 * 128)


HUGGING_FACE: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"num_key_value_heads": 2, "intermediate_size": 352},
    "MistralConfig": {"num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 352},
    "Qwen2Config": {"num_key_value_heads": 2, "intermediate_size": 352, "tie_word_embeddings": True},
    "Qwen3Config": {"num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 352},
    "GPT2Config": {},
    "GPTNeoXConfig": {"intermediate_size": 352},
    "BloomConfig": {},
    "MixtralConfig": {"num_key_value_heads": 2, "intermediate_size": 352, "num_local_experts": 4},
    "Qwen3MoeConfig": {"num_key_value_heads": 2, "head_dim": 24, "num_experts": 4, "num_experts_per_tok": 2,
                       "moe_intermediate_size": 96},
    "DeepseekV3Config": {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                         "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                         "moe_intermediate_size": 96, "intermediate_size": 352, "first_k_dense_replace": 1},
    "DeepseekV2Config": {"q_lora_rank": None, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
                         "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
                         "moe_intermediate_size": 96, "intermediate_size": 352, "first_k_dense_replace": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_sizes_of_hugging_face_models_count_their_parameters(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name)(**HUGGING_FACE[name])
    for attribute, value in {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "vocab_size": 1000,
    }.items():
        setattr(config, attribute, value)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    count = sum({p: p.numel() for p in model.parameters()}.values())
    sizes = Transformer.from_config(json.loads(config.to_json_string()), sequence=512)
    assert sizes.parameters == count and sizes.layers == 3 and sizes.sequence == 512


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "t5"}, "model_type 't5' is not known here; known are llama"),
        ({"model_type": None}, "the key 'model_type' is missing"),
        ({"model_type": "deepseek_v3", "v_head_dim": 64}, "v_head_dim is 64, qk_nope_head_dim 128; other than equal"),
        ({"hidden_size": "4096"}, "hidden_size is '4096', a string; want a whole number; write 4096"),
        ({"num_hidden_layers": None}, "the key 'num_hidden_layers' is missing"),
        ({"num_attention_heads": 7}, "heads=7: hidden=4096 is no multiple"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', a string; want true or false"),
        ({"max_position_embeddings": None}, "does not say how long sequences are"),
    ],
)
def test_a_configuration_that_cannot_be_read(change: dict[str, Any], says: str) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
              "intermediate_size": 11008, "max_position_embeddings": 4096}  # fmt: skip
    assert Transformer.from_config(config).parameters == 6_738_415_616  # Llama 2 7B
    with pytest.raises(PlanError) as error:
        Transformer.from_config(config | change)
    assert says in str(error.value)


def test_public_names() -> None:
    assert oc.Plan is Plan and oc.Transformer is Transformer


@pytest.mark.parametrize(
    ("name", "meant"), [("tensor_parallel", "tp"), ("accumulate_steps", "microbatches"), ("recomptue", "recompute")]
)
def test_a_field_as_others_call_it(name: str, meant: str) -> None:
    with pytest.raises(PlanError, match=rf"Plan has no field '{name}'; did you mean '{meant}'\?"):
        oc.Plan(**{name: 2})
