"""`onecard estimate`: unchanged programs without devices, up to their second step; what it says is what the step is."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import sys
from pathlib import Path

import estimated_programs as programs
import pytest
import torch
from amounts import share
from launching import python

import onecard as oc
from onecard.cli import main
from onecard.commands.find import searched
from onecard.launch.rehearsal import region_recorder, replicated, values
from onecard.pipeline.run.links import HEADER

EXAMPLES = Path(__file__).parents[1] / "examples"
H100 = oc.Machine.preset("H100")
BIG, SMALL = 64 * 256 + 256, 256 * 10 + 10  # parameters of the two layers


def estimated(tmp_path, text, *arguments, name="train.py"):
    """What the JSON says of a program."""
    script, found = tmp_path / name, io.StringIO()
    script.write_text(text)
    with contextlib.redirect_stdout(found):
        assert main(["estimate", str(script), *arguments, "--json"]) == 0
    return json.loads(found.getvalue())


def test_a_plain_program(tmp_path, capsys):
    data = estimated(tmp_path, programs.PLAIN)
    forward = 2 * 10 * (64 * 256 + 256 * 10)
    assert data["flops"] == 2 * forward + 2 * 10 * 256 * 10  # no gradient of the batch
    assert data["sent"] == {}
    assert data["memory"]["parameters"] == 4 * (BIG + SMALL)
    assert data["memory"]["gradients"] <= 4 * (BIG + SMALL)
    assert 8 * (BIG + SMALL) <= data["memory"]["states"] <= 8 * (BIG + SMALL) + 64  # and the counts of steps
    assert sum(data["memory"].values()) == data["peak"]
    assert sum(data["phases"].values()) == pytest.approx(data["seconds"])
    assert sum(data["terms"].values()) == pytest.approx(data["seconds"])
    said = capsys.readouterr()
    assert "train.py:18 reads a value that is not computed here" in said.err
    assert said.err.count("reads a value") == 1
    assert "loss 1.0000" in said.err  # the program's own words: standard output is for the answer
    assert main(["estimate", str(tmp_path / "train.py")]) == 0
    assert capsys.readouterr().out.startswith("a step on H100:")


def test_a_program_that_goes_on_from_its_own_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = estimated(tmp_path, programs.RESUMED)
    assert [*tmp_path.iterdir()] == [tmp_path / "train.py"]  # a rehearsal leaves nothing
    runpy.run_path("train.py")
    assert {p.name for p in tmp_path.iterdir()} == {"train.py", "ckpt.pt", "whole.pt"}
    again = estimated(tmp_path, programs.RESUMED)
    assert again["flops"] == first["flops"]
    for name in ("parameters", "gradients", "states"):
        assert again["memory"][name] == first["memory"][name] > 0


def test_a_loader_that_reads_what_was_computed_before(tmp_path):
    assert estimated(tmp_path, programs.NORMALISED)["flops"] == 2 * 2 * 4 * 48 * 3


def test_it_is_the_recording_of_the_step(tmp_path):
    """Programs by marks: what `oc.record` writes down of the same step."""
    data = estimated(tmp_path, programs.MARKS, "--world", "4", "--rank", "1")
    spec = importlib.util.spec_from_file_location("marks", tmp_path / "train.py")
    with oc.pretend(4, 1, H100, fake=True):
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        batch = [oc.shard_tensor(torch.randn(16, 64), made.mesh, [oc.Shard(0), oc.Replicate()]) for _ in range(2)]
        made.step(batch[0])
        cost = oc.record(made.step)(batch[1]).cost(H100)
    assert data["sent"] == cost.sent != {}
    assert data["flops"] == cost.flops
    assert data["seconds"] == pytest.approx(cost.seconds, rel=1e-6)
    assert data["peak"] == pytest.approx(cost.peak, rel=0.001)


def test_sums_of_ddp(tmp_path):
    data = estimated(tmp_path, programs.DDP, "--world", "8")
    assert data["sent"] == {"dp": 2 * 7 * 4 * (BIG + SMALL) // 8}
    assert data["terms"]["messages along 'dp'"] > 0
    one = estimated(tmp_path, programs.DDP, "--world", "1")
    assert one["sent"] == {}
    assert one["flops"] == data["flops"]


def test_gathers_of_fully_shard(tmp_path):
    data = estimated(tmp_path, programs.FSDP, "--world", "8")
    elements = 4 * (256 * 256 + 256)
    assert data["sent"] == {"dp": 3 * 7 * 4 * elements // 8}  # gathered in forward and backward, gradients scattered
    assert data["memory"]["parameters"] == 4 * elements // 8
    assert 8 * elements // 8 <= data["memory"]["states"] <= 8 * elements // 8 + 64
    assert data["memory"].get("batch and others", 0) < 4 * elements // 4  # what is gathered lives until its last use


def test_accumulation_evaluation_and_numpy(tmp_path):
    data = estimated(tmp_path, programs.NUMPY)
    forward = 2 * 4 * 32 * (64 * 64 + 64 * 256)
    assert data["flops"] == 3 * 3 * forward  # three microbatches, and no evaluation


def test_norms_put_into_a_new_tensor(tmp_path):
    """As Lightning's ``grad_norm`` does: torch reads the list in C++."""
    total = "        torch.tensor([p.grad.norm() for p in model.parameters()]).norm().item()\n"
    at = "        optimizer.step()\n"
    assert programs.PLAIN.count(at) == 1
    assert estimated(tmp_path, programs.PLAIN.replace(at, total + at))["flops"] > 0


def test_a_trace(tmp_path):
    trace = tmp_path / "t.json"
    data = estimated(tmp_path, programs.PLAIN, "--trace", str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["cat"] for e in events} == {*data["phases"]}
    assert max(e["ts"] + e["dur"] for e in events) == pytest.approx(data["seconds"] * 1e6)


def test_a_plan_for_a_plain_program(tmp_path):
    plan = tmp_path / "plan.json"
    oc.Plan(dp=8, zero=1, microbatch=4, microbatches=2, parameters="float32", compute="float32").save(plan)
    data = estimated(tmp_path, programs.PLAIN, "--plan", str(plan), "--html", str(tmp_path / "job.html"))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    batch = (torch.zeros(4, 64), torch.zeros(4, dtype=torch.int64))
    job = oc.price(
        model, oc.Plan.load(plan), H100, batch=batch, loss=lambda m, x, y: torch.nn.functional.cross_entropy(m(x), y)
    )
    assert data["seconds"] == pytest.approx(job.seconds)
    assert data["ranks"][0]["memory"] == dict(job.ranks[0].memory)
    assert data["plan"]["dp"] == 8
    assert "<title>train.py on 8 H100</title>" in (tmp_path / "job.html").read_text()


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (oc.Plan(dp=2), ["parameters are float32; priced are the plan's, bfloat16", "has 2 rows, .* batch has 10"]),
        (oc.Plan(dp=2, microbatch=5, parameters="float32", compute="float32"), []),
    ],
)
def test_what_a_plan_says_otherwise_than_its_program_is_told(tmp_path, capsys, plan, told):
    (tmp_path / "train.py").write_text(programs.PLAIN)
    plan.save(tmp_path / "plan.json")
    assert main(["estimate", str(tmp_path / "train.py"), "--plan", str(tmp_path / "plan.json")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("note:") == len(told)
    assert all(re.search(words, out) for words in told), out
    notes = estimated(tmp_path, programs.PLAIN, "--plan", str(tmp_path / "plan.json"))["notes"]
    assert len(notes) == len(told) and all(re.search(words, " ".join(notes)) for words in told)


def test_a_program_that_adds_up_gradients_is_told(tmp_path):
    """One backward of several is priced."""
    program = programs.PLAIN.replace(
        "        loss.backward()", "        loss.backward()\n        loss_fn(model(x), y).backward()"
    )
    assert program != programs.PLAIN
    plan = tmp_path / "plan.json"
    oc.Plan(dp=2, microbatch=5, parameters="float32", compute="float32").save(plan)
    (note,) = estimated(tmp_path, program, "--plan", str(plan))["notes"]
    assert "calls backward() 2 times a step; priced is a step with one" in note
    (tmp_path / "sums.py").write_text(program)
    (tmp_path / "plain.py").write_text(programs.PLAIN)
    assert "calls backward() 2 times" in str(searched(tmp_path / "sums.py", [], 2, H100, 0.0)[0])
    assert "calls backward()" not in str(searched(tmp_path / "plain.py", [], 2, H100, 0.0)[0])


@pytest.mark.parametrize("loss", [torch.nn.CrossEntropyLoss(), torch.nn.functional.mse_loss])
def test_a_loss_of_an_output_and_a_target_is_named(loss):
    with pytest.raises(
        oc.errors.PlanError, match=r"takes an output and a target; .* loss=lambda model, x, y: criterion"
    ):
        oc.price(torch.nn.Linear(4, 2), oc.Plan(), H100, batch=(torch.zeros(2, 4), torch.zeros(2, 2)), loss=loss)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_are_priced_in_the_plans_dtype(dtype):
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    plan = oc.Plan(parameters=dtype, compute=dtype)
    job = oc.price(model, plan, H100, batch=torch.zeros(2, 64), loss=lambda m, x: m(x).sum())
    assert job.ranks[0].memory["parameters"] == 4 * (64 * 64 + 64) * (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("text", programs.STOPS)
def test_what_stops_a_program_is_said_in_a_line(tmp_path, capsys, text):
    script = tmp_path / "stops.py"
    script.write_text(text)
    assert main(["estimate", str(script)]) == 2
    err = capsys.readouterr().err
    assert programs.STOPS[text] in err
    assert f"{Path(oc.__file__).parent}/" not in err  # a traceback is the program's own


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nowhere.py", "nowhere.py does not exist"),
        ("train.py --rank 2 --world 2", "--rank 2 of --world 2: ranks go from 0 below it"),
        ("train.py --html job.html", "give --plan plan.json too"),
        ("train.py --machine B200", "there is no machine 'B200'"),
        ("train.py --plan plan.json", "plan.json: does not exist"),
        ("train.py --plan tp.json", "tp=2, cp=1: how parameters lie is not said"),
        ("train.py --plan tp.json --world 3", "--world 3, but tp.json is for 2 ranks"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(tmp_path, capsys, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(programs.PLAIN)
    oc.Plan(tp=2).save("tp.json")
    assert main(["estimate", *arguments.split()]) == 2
    assert said in capsys.readouterr().err


def test_the_process_is_as_it_was(tmp_path):
    before = dict(os.environ), list(sys.path), list(sys.argv), torch.save, torch.compile, torch.cuda.device_count
    estimated(tmp_path, programs.DDP, "--world", "8")
    assert (
        dict(os.environ),
        list(sys.path),
        list(sys.argv),
        torch.save,
        torch.compile,
        torch.cuda.device_count,
    ) == before
    assert not torch.distributed.is_initialized()
    assert torch.nn.Linear(2, 2).weight.sum().item() != 1.0  # values are values again
    assert torch.ones(2, device="cpu").tolist() == [1.0, 1.0]


# -- the examples, as they are typed ---------------------------------------------------------------------------------------

SEEDS = {
    "data_parallel_002.py": (4, "--seq_len 8 --hidden 64 --inner 128"),
    "pipeline_parallel_002.py": (8, "--seq_len 8 --hidden 64 --inner 128"),
    "single_card_003.py": (1, ""),
    "model_parallel_000.py": (2, "--program static"),
    "manual_classifier_001.py": (2, ""),
    "manual_group_sharded_003.py": (2, "--level os_g"),
}


def in_a_process(tmp_path, script, world, *arguments):
    """`onecard estimate` as it is typed."""
    done = python(tmp_path, "-m", "onecard", "estimate", script, "--world", world, "--json", "--", *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.share(2)
@pytest.mark.parametrize("name", share(SEEDS, 2))
def test_seeds(tmp_path, name):
    world, arguments = SEEDS[name]
    data = in_a_process(tmp_path, EXAMPLES / "seeds" / name, world, *arguments.split())
    assert {"forward", "backward", "optimizer"} <= {*data["phases"]}
    assert data["memory"]["parameters"] > 0


@pytest.mark.proof
def test_sends_of_a_pipeline(tmp_path):
    """The same model in two stages, by hand and by marks: the first stage sends the same, and by hand its form."""
    by_hand, by_marks = (
        in_a_process(tmp_path, EXAMPLES / "seeds" / f"{name}_pipeline_parallel_003.py", 2)
        for name in ("manual", "semi_auto")
    )
    assert by_hand["sent"] == {"pp": by_marks["sent"]["between meshes"] + HEADER} != {"pp": HEADER}
    assert by_hand["terms"]["messages along 'pp'"] > 0


@pytest.mark.proof
def test_the_gpt_example(tmp_path):
    small = ["--dropout", "0", "--n_layer", "1"]
    whole = in_a_process(tmp_path, EXAMPLES / "gpt" / "train.py", 1, *small)
    parts = in_a_process(tmp_path, EXAMPLES / "gpt" / "train.py", 4, "--mesh", "dp=2,tp=2", *small)
    assert {*parts["sent"]} == {"dp", "tp"}
    assert parts["flops"] == pytest.approx(whole["flops"] / 4, rel=0.01)
    assert parts["memory"]["parameters"] < 0.6 * whole["memory"]["parameters"]


@pytest.mark.proof  # half a minute of imports
def test_the_hugging_face_example(tmp_path):
    whole = in_a_process(tmp_path, EXAMPLES / "huggingface.py", 1, "--one-card")
    parts = in_a_process(tmp_path, EXAMPLES / "huggingface.py", 2)
    assert parts["flops"] == whole["flops"] / 2
    assert parts["sent"]["dp"] >= whole["memory"]["parameters"]  # an all-reduce of all gradients among two ranks


# -- deliberate faults -----------------------------------------------------------------------------------------------------


def test_a_message_left_out_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(region_recorder.RegionRecorder, "_message", lambda self, *rest: None)
    with pytest.raises(AssertionError):
        test_sums_of_ddp(tmp_path)


def test_gradients_that_nobody_sums_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(replicated.Replicated, "_ready", lambda self, p: None)
    with pytest.raises(AssertionError):
        test_sums_of_ddp(tmp_path)


def test_memory_that_is_never_given_up_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(region_recorder.RegionRecorder, "filled", lambda self, x: None)
    with pytest.raises(AssertionError):
        test_gathers_of_fully_shard(tmp_path)


def test_indices_without_data_are_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(values, "MOST", -1)
    with pytest.raises(AssertionError):
        test_accumulation_evaluation_and_numpy(tmp_path)
