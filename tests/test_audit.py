"""What other libraries' files say of a job: public examples, mistakes with the change that works, bad input in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from onecard import cli
from onecard.errors import PlanError
from onecard.planning.audit.audit import Audit, Given
from onecard.planning.audit.read import read
from onecard.planning.plan import Plan

DATA = Path(__file__).parent / "data" / "audit"


def audit(*names: str, **given: Any) -> Audit:
    return read([DATA / name for name in names], Given(**given))


def mistakes(found: Audit) -> list[str]:
    return [str(finding) for finding in found.mistakes]


# -- public examples ---------------------------------------------------------------------------------------------------


def test_gpt3_175b_of_megatron() -> None:
    """The public script starts 8 ranks, on which it cannot run."""
    found = audit("gpt3_175b.sh")
    assert mistakes(found) == [
        "8 ranks cannot be divided by tp=8 x pp=16 = 128; --nnodes 16 with --nproc_per_node 8 has them; judged as 128 ranks"
    ]
    found = audit("gpt3_175b.sh", define={"HOSTS": "128"})
    assert mistakes(found) == []
    half = {"parameters": "float16", "gradients": "float16", "compute": "float16"}
    assert found.plan == Plan(
        tp=8, pp=16, dp=8, microbatches=192, compiled=True, overlap=False, overlap_tp=True, overlap_pp=False, **half
    )  # type: ignore[arg-type]
    assert found.transformer is not None and found.transformer.parameters == 174_615_846_912
    assert str(found.findings[0]).startswith("50,257 rows of the vocabulary are padded to 51,200: 943 rows (1.9%)")
    lines = {said.name: said.where.rpartition(":")[2] for said in found.understood if said.where}
    text = (DATA / "gpt3_175b.sh").read_text().splitlines()
    assert all(f"--{name}" in text[int(line) - 1] for name, line in lines.items())
    assert {"tensor-model-parallel-size", "micro-batch-size", "fp16"} <= lines.keys()


def test_llama3_8b_of_megatron() -> None:
    found = audit("llama3_8b.sh")
    assert (
        found.transformer is not None and found.transformer.parameters == 8_030_261_248 + 65 * 4096
    )  # LayerNorm has a bias
    assert found.plan == Plan(dp=8, microbatches=16, zero=1, sequence_parallel=True, gradients="bfloat16", compiled=True,
                              compute="float8_e4m3fn")  # fmt: skip
    assert [finding.kind for finding in found.findings] == ["idle"]
    assert [name for name, _ in ((i.name, i.where) for i in found.ignored) if name.startswith("if")] == [
        'if [ ! -f "pretrain_gpt.py" ]'
    ]
    assert "pipeline-model-parallel-size" not in {said.name for said in found.understood}  # it is a comment


def test_bloom_of_megatron_deepspeed() -> None:
    found = audit("bloom.slurm")
    assert found.transformer is not None and found.transformer.parameters == 176_247_271_424
    assert mistakes(found) == []
    assert found.plan == Plan(tp=4, pp=12, dp=8, microbatch=2, microbatches=128, zero=1, recompute="full", compiled=True,
                              overlap=False, overlap_tp=True, overlap_pp=False, stages=(5, *[6] * 10, 5))  # fmt: skip


def test_bloom_of_deepspeed() -> None:
    found = audit("bloom_ds.json", "bloom_config.json", world=384, change={"tp": 4, "pp": 12})
    assert found.transformer is not None and found.transformer.parameters == 176_247_271_424
    assert (found.plan.dp, found.plan.microbatch, found.plan.microbatches) == (8, 2, 128)
    assert mistakes(found) == []
    assert {ignored.name for ignored in found.ignored} == {
        "gradient_clipping",
        "steps_per_print",
        "wall_clock_breakdown",
    }


def test_llama3_of_torchtitan() -> None:
    sizes = {"8b": (8_030_261_248, 64), "70b": (70_553_706_496, 256), "405b": (405_853_388_800, 512)}
    plans = {}
    for name, (count, world) in sizes.items():
        found = audit(f"llama3_{name}.toml", world=world)
        assert found.transformer is not None and found.transformer.parameters == count and mistakes(found) == []
        plans[name] = found.plan
    full = {"parameters": "float32", "zero": 3}
    assert plans["8b"] == Plan(dp=64, recompute="operators", **full)  # type: ignore[arg-type]
    assert plans["70b"] == Plan(dp=32, tp=8, sequence_parallel=True, microbatch=8, recompute="full", **full)  # type: ignore[arg-type]
    assert plans["405b"] == Plan(dp=64, tp=8, sequence_parallel=True, microbatch=2, recompute="full", compiled=True, overlap_tp=True,
                                 compute="float8_e4m3fn", **full)  # type: ignore[arg-type]  # fmt: skip


def test_examples_of_accelerate() -> None:
    full = {"parameters": "float32", "zero": 3}
    assert audit("fsdp.yaml").plan == Plan(dp=2, **full)  # type: ignore[arg-type]
    assert audit("nd.yaml", "llama3_8b.json").plan == Plan(dp=2, cp=4, **full)  # type: ignore[arg-type]
    assert audit("tp_hsdp.yaml").plan == Plan(dp=4, replicas=2, tp=2, **full)  # type: ignore[arg-type]
    found = audit("deepspeed.yaml", "llama2_7b.json", change={"microbatch": 4})
    assert found.plan == Plan(dp=2, zero=1, microbatch=4) and found.transformer is not None
    assert found.transformer.parameters == 6_738_415_616


def test_a_plan_of_ours(tmp_path) -> None:
    Plan(tp=16, pp=5).save(tmp_path / "plan.json")
    found = read([tmp_path / "plan.json", DATA / "llama3_8b.json"])
    assert mistakes(found) == ["tp=16 does not divide 8 key heads; tp=8 does"]
    assert any("5 stages do not divide 32 blocks" in str(finding) for finding in found.findings)


# -- mistakes ----------------------------------------------------------------------------------------------------------

ARGUMENTS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --vocab-size 32000 --bf16 --swiglu"
)


@pytest.mark.parametrize(
    ("more", "kind", "says"),
    [
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4 --global-batch-size 3", "mistake",
         "interleaved stages take at least pp=4 microbatches, of which there are 3; --global-batch-size 4"),
        ("--vocab-size 50257 --tensor-model-parallel-size 8", "cost", "50,257 rows of the vocabulary are padded to 51,200"),
        ("--group-query-attention --num-query-groups 4 --tensor-model-parallel-size 8", "mistake",
         "tp=8 does not divide 4 key heads; tp=4 does"),
        ("--pipeline-model-parallel-size 6", "mistake", "32 layers cannot be divided by pp=6: Megatron wants equal stages; pp=8"),
        ("--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3", "mistake",
         "32 layers are no multiple of 4 ranks x 3 layers of a virtual stage; --num-layers-per-virtual-pipeline-stage 2"),
        ("--nproc_per_node 8 --micro-batch-size 4 --global-batch-size 100", "mistake",
         "a batch of 100 sequences is no multiple of dp x microbatch = 8 x 4 = 32; 96 or 128 is"),
        ("--nproc_per_node 8 --tensor-model-parallel-size 3", "mistake", "8 ranks cannot be divided by tp=3 = 3"),
        ("--pipeline-model-parallel-size 8 --global-batch-size 4", "cost", "4 microbatches for 8 ranks of a pipeline"),
        ("--sequence-parallel", "idle", "sequence parallel divides along tp, but tp=1; leave it out"),
        ("--fp16", "mistake", "--fp16 and --bf16 go against each other; leave --fp16 out"),
        ("--recompute-granularity selective --recompute-method uniform", "mistake",
         "--recompute-method uniform is for full recomputation, but it is selective; leave --recompute-method out"),
        ("--recompute-granularity full", "mistake", "does not say of which blocks; --recompute-method uniform"),
        ("--recompute-method block", "idle", "recomputes nothing; --recompute-granularity full"),
        ("--recompute-activations --recompute-granularity full --recompute-method uniform", "mistake", "leave one of them out"),
        ("--max-position-embeddings 2048", "mistake", "2048 positions for sequences of 4096 tokens; --max-position-embeddings 4096"),
        ("--max-position-embeddings 2048 --position-embedding-type rope", "mistake", "2048 positions for sequences of 4096 tokens"),
        ("--overlap-param-gather --overlap-grad-reduce", "mistake",
         "--overlap-param-gather without --use-distributed-optimizer: Megatron-LM stops at its start; add --use-distributed"),
        ("--use-distributed-optimizer --overlap-param-gather", "mistake", "--overlap-param-gather without --overlap-grad-reduce"),
        ("--tensor-model-parallel-size 4 --tp-comm-overlap", "mistake", "--tp-comm-overlap without --sequence-parallel"),
        ("--nproc_per_node 8 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
         "--pipeline-model-parallel-size 2 --global-batch-size 64", "cost", "gathers the parameters for every microbatch, 16 times"),
        ("--tensor-model-parallel-size 16 --nproc_per_node 8 --nnodes 2", "cost", "tp=16 is more than the 8 ranks of a host"),
        ("--tensor-model-parallel-size 4 --sequence-parallel --seq-length 4098", "mistake",
         "4098 tokens are no multiple of cp x tp = 4; sequence=4100"),
    ],
)  # fmt: skip
def test_mistakes_of_megatron_arguments(more: str, kind: str, says: str, tmp_path) -> None:
    (tmp_path / "a.args").write_text(f"{ARGUMENTS}\n{more}\n")
    found = read([tmp_path / "a.args"])
    assert any(finding.kind == kind and says in str(finding) for finding in found.findings), [*map(str, found.findings)]
    (tmp_path / "b.args").write_text(ARGUMENTS + " --max-position-embeddings 4096")
    assert not any(says in str(finding) for finding in read([tmp_path / "b.args"]).findings)


@pytest.mark.parametrize(
    ("change", "world", "says"),
    [
        ({"train_batch_size": 65}, 8, "train_batch_size 65 is not 2 x 4 x dp=8 = 64"),
        (
            {"train_batch_size": 65, "gradient_accumulation_steps": "auto"},
            8,
            "train_batch_size 65 is no multiple of dp=8 x 2",
        ),
        ({"pipeline": {"stages": 4}, "zero_optimization": {"stage": 3}}, 8, "DeepSpeed's pipelines refuse ZeRO 3"),
        ({"fp16": {"enabled": True}}, 8, "fp16 and bf16 go against each other"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": True, "loss_scale": 1}}, 8, "a loss scale of 1"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 3}}, 8, "mics_shard_size 3 does not divide dp=8"),
        ({"tensor_parallel": {"autotp_size": 3}}, 8, "8 ranks cannot be divided by tp=3"),
        ({"tensor_parallel": {"autotp_size": 64}}, 64, "tp=64 does not divide 32 query heads; tp=32 does"),
    ],
)
def test_mistakes_of_deepspeed(change: dict[str, Any], world: int, says: str, tmp_path) -> None:
    good = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
    }
    for name, data in (("good.json", good), ("bad.json", good | change)):
        (tmp_path / name).write_text(json.dumps(data))
    assert read([tmp_path / "good.json", DATA / "llama2_7b.json"], Given(world=8)).findings == ()
    assert read([tmp_path / "good.json"]).plan.dp == 8  # what the three numbers say
    assert any(
        says in said for said in mistakes(read([tmp_path / "bad.json", DATA / "llama2_7b.json"], Given(world=world)))
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (
            "pipeline_parallel_degree = 8\npipeline_parallel_layers_per_stage = 5",
            "are 7 stages, which 8 ranks cannot share",
        ),
        (
            "pipeline_parallel_degree = 4\npipeline_parallel_layers_per_stage = 3",
            "schedule 1F1B has one stage on each rank",
        ),
        ("tensor_parallel_degree = 3", "64 ranks cannot be divided by tp=3"),
        ("tensor_parallel_degree = 16", "tp=16 does not divide 8 key heads"),
        ("data_parallel_shard_degree = 8", "the degrees say 8 ranks, not 64"),
        (
            "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3",
            "a local batch of 8 sequences is no multiple",
        ),
    ],
)
def test_mistakes_of_torchtitan(line: str, says: str, tmp_path) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 8\nseq_len = 8192\n[parallelism]\n'
    (tmp_path / "a.toml").write_text(text + line + "\n")
    assert any(says in said for said in mistakes(read([tmp_path / "a.toml"], Given(world=64))))
    (tmp_path / "b.toml").write_text(text)
    assert mistakes(read([tmp_path / "b.toml"], Given(world=64))) == []


def test_stages_of_torchtitan_have_fewer_blocks_at_the_ends(tmp_path) -> None:
    text = '[model]\nflavor = "405B"\n[parallelism]\npipeline_parallel_degree = 8\npipeline_parallel_schedule = "Interleaved1F1B"\n'
    (tmp_path / "a.toml").write_text(text)
    plan = read([tmp_path / "a.toml"], Given(world=64)).plan
    assert plan.stages == (7, *[8] * 14, 7) and plan.virtual == 2 and plan.schedule == "VPP" and plan.zero == 2


def test_layouts_of_megatron(tmp_path) -> None:
    def stages(more: str) -> tuple[tuple[int, ...], int]:
        (tmp_path / "a.args").write_text(f"{ARGUMENTS} --pipeline-model-parallel-size 4 {more}")
        plan = read([tmp_path / "a.args"]).plan
        return plan.stages, plan.virtual

    assert stages("--pipeline-model-parallel-layout 'Et*7|t*9|t*9|t*7L'") == ((7, 9, 9, 7), 1)
    assert stages("--pipeline-model-parallel-layout 'Ett|(tttt|)*6,t*6L'") == ((2, *[4] * 6, 6), 2)
    assert stages("--num-layers-per-virtual-pipeline-stage 4") == ((), 2)
    assert stages("--num-virtual-stages-per-pipeline-rank 8") == ((), 8)
    assert stages("--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 7") == ((5, 10, 10, 7), 1)
    assert stages("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 30") == (
        (7, 8, 8, 7), 1)  # fmt: skip


@pytest.mark.parametrize(
    ("says", "rows"),
    [
        ("--tokenizer-type Llama2Tokenizer", 32000),
        ("--merge-file m.txt", 50257),
        ("--tokenizer-type X --vocab-size 99", 99),
    ],
)
def test_a_tokenizer_says_how_large_its_vocabulary_is(tmp_path, says, rows):
    script = tmp_path / "train.sh"
    script.write_text(f"{ARGUMENTS.replace('--vocab-size 32000', says)} --make-vocab-size-divisible-by 1\n")
    made = read([script], Given())
    assert made.transformer is not None and made.transformer.vocab == rows
    assert [u.value for u in made.understood if u.name == "vocab-size"] == [str(rows)]


# -- bad input: one line, with file, line and what works ----------------------------------------------------------------
# ruff: noqa: E501

CONFIG = (DATA / "llama2_7b.json").read_text()
BAD: list[tuple[str, str, str]] = [
    ("a.sh", "echo hello", "a.sh:1: starts nothing with arguments of Megatron-LM"),
    ("a.sh", "", "a.sh:1: starts nothing"),
    ("a.sh", f"{ARGUMENTS}\n--num-layers x8", "a.sh:2: num-layers is 'x8': want a whole number; write --num-layers 8"),
    ("a.sh", "X=$FOO\n" + ARGUMENTS + "\n--num-layers $X", "num-layers is $FOO, which is not known here; say it: --define FOO=..."),
    ("a.sh", "--num-layers 3 --hidden-size 8", "a.sh: does not say --num-attention-heads; write --num-attention-heads 32"),
    ("a.sh", ARGUMENTS.replace("--vocab-size 32000", ""), "does not say how many rows the vocabulary has; write --vocab-size"),
    ("a.sh", f"{ARGUMENTS}\n--normalization Batch", "a.sh:2: normalization is 'Batch': want one of LayerNorm, RMSNorm"),
    ("a.sh", f"{ARGUMENTS} --attention-dropout 3", "attention-dropout is '3': want a number from 0 to 1"),
    ("a.sh", f"{ARGUMENTS} --num-attention-heads 7", "heads=7: hidden=4096 is no multiple of it"),
    ("a.sh", "A=(1 2\n", "a.sh:1: the array's bracket is not closed"),
    ("a.sh", "A='1\n", "a.sh:1: the quote ' is not closed"),
    ("a.sh", "if [ 1 = 1 ]; then\n", "a.sh:1: if is not closed; write fi at its end"),
    ("a.sh", "\nfi", "a.sh:2: fi closes nothing that is open"),
    ("a.sh", "source a.sh", "a.sh:1: source a.sh leads back to itself"),
    ("a.sh", f"{ARGUMENTS} --yaml-cfg no.yaml", "--yaml-cfg no.yaml: there is no such file"),
    ("a.sh", f"{ARGUMENTS} --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout x|y", "want letters E, t, m, L"),
    ("a.sh", "--num-layers 8 \0", "has a zero byte"),
    ("a.sh", "A=1\n" + "A=$A$A$A$A\n" * 30 + ARGUMENTS, "grows beyond"),
    ("a.json", "{", "a.json:1: no JSON: expecting property name"),
    ("a.json", "{}", "a.json:1: is neither a configuration of DeepSpeed nor of a model"),
    ("a.json", "[]", "a.json:1: is neither"),
    ("a.json", '{"train_batch_size": 8,\n"bf16": true}', "a.json:2: bf16 is True; want an object"),
    ("a.json", '{"train_batch_size":\n"8"}', "a.json:1: train_batch_size is '8': a string; want a whole number; write \"train_batch_size\": 8"),
    ("a.json", '{"train_batch_size": -8}', "train_batch_size is -8: want 1 or more"),
    ("a.json", '{"train_batch_size": 8}', "a.json: does not say how many ranks there are; say --world 8"),
    ("a.json", '{"zero_optimization":\n {"stage": 4}}', "a.json:2: stage is 4: want 0, 1, 2 or 3; write \"stage\": 3"),
    ("a.json", '{"zero_optimization": {"stage": 1,\n"offload_optimizer": {"device": "disk"}}}', "a.json:2: device is 'disk': want one of none, cpu, nvme"),
    ("a.json", CONFIG, "says a model's sizes, but nothing of how it is trained"),
    ("a.toml", "[model", "a.toml:1: no TOML: "),
    ("a.toml", "[owner]\nx = 1", "a.toml:1: is no configuration of torchtitan"),
    ("a.toml", "model = 3", "a.toml:1: model is 3; want a section, [model]"),
    ("a.toml", '[model]\nname = "t5"', "a.toml:2: the model 't5' is not known here; known are llama3, qwen3"),
    ("a.toml", '[model]\nflavor = "9B"', "a.toml:2: llama3 has no flavor '9B' here; known are debugmodel, 8B, 70B, 405B"),
    ("a.toml", "[parallelism]\ntensor_parallel_degree = '8'", "a.toml:2: tensor_parallel_degree is '8': a string; want a whole number; write tensor_parallel_degree = 8"),
    ("a.toml", "[parallelism]\ntensor_parallel_degree = true", "a.toml:2: tensor_parallel_degree is True: a yes-or-no value"),
    ("a.toml", "[parallelism]\n\ndata_parallel_shard_degree = -1", "a.toml:3: data_parallel_shard_degree takes all ranks that are left"),
    ("a.toml", "[parallelism]\ndata_parallel_shard_degree = 0", "want 1 or more, or -1"),
    ("a.toml", "[parallelism]\npipeline_parallel_schedule = 'x'\ndata_parallel_shard_degree = 1", "a.toml:2: pipeline_parallel_schedule is 'x': want one of 1F1B"),
    ("a.toml", "[activation_checkpoint]\nmode = 'selective'\nselective_ac_option = 'x'\n[parallelism]\ndata_parallel_shard_degree = 1", "a.toml:3: selective_ac_option is 'x'"),
    ("a.toml", "x = " + "[" * 5000, "a.toml:1: no TOML"),
    ("a.yaml", "a: 1", "a.yaml:1: is no configuration of accelerate: it has no distributed_type"),
    ("a.yaml", "- a", "a.yaml:1: want 'name: value' lines"),
    ("a.yaml", "distributed_type: TPU", "a.yaml:1: distributed_type is 'TPU': want one of FSDP"),
    ("a.yaml", "distributed_type: FSDP\nnum_processes: '8'", "a.yaml:2: num_processes is '8': a string; want a whole number; write num_processes: 8"),
    ("a.yaml", "distributed_type: FSDP\nfsdp_config: 3", "a.yaml:2: fsdp_config is 3; want a section"),
    ("a.yaml", "distributed_type: FSDP\na: &x 1", "a.yaml:2: '&x 1' is an anchor, which is not read here"),
    ("a.yaml", "distributed_type: FSDP\n  a: 1", "a.yaml:2: the line is indented further"),
    ("a.yaml", "a: 1\n\ta: 2", "a.yaml:2: a tab begins the line"),
    ("a.yaml", "a: 1\na: 2", "a.yaml:2: the key 'a' is there twice (first on line 1)"),
    ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: a.yaml", "a.yaml:3: deepspeed_config_file a.yaml leads back to itself"),
    ("a.yaml", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: no.json", "a.yaml:3: deepspeed_config_file no.json: there is no such file"),
    ("plan.json", '{"onecard": "Plan", "version": 1,\n"tp": "8"}', "plan.json:2: Plan: tp='8'"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "says"), BAD, ids=lambda value: re.sub(r"\W+", " ", value)[:30])
def test_bad_input_ends_in_one_line(name: str, text: str, says: str, tmp_path, capsys) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PlanError) as error:
        read([tmp_path / name])
    assert says in str(error.value)
    assert cli.main(["audit", "--no-price", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err == f"onecard audit: {error.value}\n" and err.count("\n") == 1


def test_circles_over_two_files(tmp_path) -> None:
    (tmp_path / "a.sh").write_text("\nsource b.sh\n" + ARGUMENTS)
    (tmp_path / "b.sh").write_text("A=1\n. ./a.sh")
    with pytest.raises(PlanError, match=r"b\.sh:2: source \./a\.sh leads back to itself"):
        read([tmp_path / "a.sh"])
    (tmp_path / "b.sh").write_text("A='--micro-batch-size 3'")
    (tmp_path / "a.sh").write_text(f"source b.sh\n{ARGUMENTS} $A")
    assert read([tmp_path / "a.sh"]).plan.microbatch == 3
    (tmp_path / "a.yaml").write_text("model:\n  num_layers: 3\nyaml_cfg: b.yaml")
    (tmp_path / "b.yaml").write_text("yaml_cfg: a.yaml")
    (tmp_path / "a.sh").write_text(f"{ARGUMENTS} --yaml-cfg a.yaml")
    with pytest.raises(PlanError, match=r"b\.yaml:1: yaml-cfg a\.yaml leads back to itself"):
        read([tmp_path / "a.sh"])
    (tmp_path / "b.yaml").write_text("tensor_model_parallel_size: 4\nsequence_parallel: true")
    assert read([tmp_path / "a.sh"]).plan == read([tmp_path / "a.sh"], Given(world=4)).plan
    assert read([tmp_path / "a.sh"]).plan.tp == 4 and read([tmp_path / "a.sh"]).plan.sequence_parallel


def test_files_that_do_not_go_together(tmp_path) -> None:
    for names, says in (
        (("llama3_8b.toml", "fsdp.yaml"), "says how a job runs, and so does"),
        (("fsdp.yaml", "llama2_7b.json", "llama3_8b.json"), "says a model's sizes, and so does"),
        (("gpt3_175b.sh", "llama2_7b.json"), "leave the other one out"),
    ):
        with pytest.raises(PlanError, match=says):
            audit(*names)
    with pytest.raises(PlanError, match="does not exist"):
        audit("nothing.sh")


def test_a_name_that_is_nearly_one_that_is_known(tmp_path) -> None:
    (tmp_path / "a.args").write_text(ARGUMENTS + " --tensor-model-paralel-size 8")
    near = {ignored.name: ignored.near for ignored in read([tmp_path / "a.args"]).ignored}
    assert near == {"tensor-model-paralel-size": "tensor-model-parallel-size"}


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_page(capsys) -> None:
    assert cli.main(["audit", "--no-price", str(DATA / "gpt3_175b.sh")]) == 1
    text = capsys.readouterr().out
    for words in (
        "174.6 billion parameters",
        "Plan for 128 ranks: pp 16 x tp 8",
        "mistakes",
        "cannot be divided",
        "vocab-size",
    ):
        assert words in text
    assert cli.main(["audit", "--no-price", str(DATA / "llama3_8b.toml"), "--world", "64", "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "no mistakes found" in text and "llama3_8b.toml:13" in text and "sequence=8192" in text


def test_json_of_the_command(capsys) -> None:
    assert (
        cli.main(
            [
                "audit",
                "--no-price",
                str(DATA / "fsdp.yaml"),
                str(DATA / "llama3_8b.json"),
                "--set",
                "microbatch=4",
                "--json",
            ]
        )
        == 0
    )
    data = json.loads(capsys.readouterr().out)
    assert (
        data["plan"]["microbatch"] == 4
        and data["plan"]["batch"] == 8
        and data["transformer"]["parameters"] == 8_030_261_248
    )
    assert {"name": "microbatch", "value": "4", "means": "said on the command line", "where": ""} in data["understood"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name a file"),
        (["--world", "0"], "--world is 0"),
        (["--set", "x"], "want NAME=VALUE, such as --set microbatch=4"),
        (["--set", "x=3"], "there is no field 'x'"),
        (["--set", "tp=x"], "tp='x': want a whole number"),
        (["--to", "megatron"], "Megatron-LM's file says the model's sizes, too; name them: --model config.json"),
    ],
)
def test_wrong_command_lines(arguments: list[str], says: str, capsys) -> None:
    files = [str(DATA / "fsdp.yaml")] if arguments else []
    assert cli.main(["audit", "--no-price", *files, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_writing_on_the_command_line(tmp_path, capsys) -> None:
    plan = Plan(dp=8, tp=2, sequence_parallel=True, zero=1, recompute="full")
    plan.save(tmp_path / "plan.json")
    assert (
        cli.main(
            [
                "audit",
                "--no-price",
                "--to",
                "megatron",
                str(tmp_path / "plan.json"),
                "--model",
                str(DATA / "llama3_8b.json"),
            ]
        )
        == 0
    )
    out, err = capsys.readouterr()
    (tmp_path / "train.sh").write_text(out)
    assert err == ""
    assert read([tmp_path / "train.sh"]).plan == plan
    assert cli.main(["audit", "--no-price", "--to", "fsdp", str(tmp_path / "plan.json")]) == 0
    assert "zero: the plan says 1, which accelerate has no setting for; its file means 2" in capsys.readouterr().err


def test_any_library_as_any_other(capsys) -> None:
    assert cli.main(["audit", "--no-price", "--to", "megatron", str(DATA / "llama3_70b.toml"), "--world", "256"]) == 0
    out, err = capsys.readouterr()
    assert "--tensor-model-parallel-size 8" in out and "--num-layers 80" in out and "parameters" not in err
