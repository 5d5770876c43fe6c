"""`onecard simulate`: sizes and plans from files and flags, its outputs, and what it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from dataclasses import fields, replace

import pytest
from launching import python

import onecard as oc
from onecard.cli import COMMANDS, main
from onecard.planning.known_models import MODELS
from onecard.planning.machine_file import load_machine, save_machine

SMALL = ["--layers", "4", "--hidden", "64", "--heads", "4", "--vocab", "256", "--sequence", "32"]
SIZES = oc.Transformer(layers=4, hidden=64, heads=4, vocab=256, sequence=32)
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip


def simulated(*arguments):
    """What the JSON says of it."""
    found = io.StringIO()
    with contextlib.redirect_stdout(found):
        assert main(["simulate", *arguments, "--json"]) == 0
    return json.loads(found.getvalue())


def test_flags_are_the_price_of_python(tmp_path, capsys):
    data = simulated(*SMALL, *["--dp", "2", "--tp", "2", "--pp", "2", "--microbatches", "4", "--machine", "A100"])
    job = oc.price(SIZES, oc.Plan(dp=2, tp=2, pp=2, microbatches=4), oc.Machine.preset("A100"))
    assert data["seconds"] == job.seconds
    assert data["terms"] == dict(job.terms)
    assert [rank["memory"] for rank in data["ranks"]] == [dict(rank.memory) for rank in job.ranks]
    assert [rank["sent"] for rank in data["ranks"]] == [dict(rank.sent) for rank in job.ranks]
    assert (data["mfu"], data["fits"], data["peak"]) == (job.mfu, job.fits, job.peak)
    assert (
        main(["simulate", *SMALL, "--dp", "2", "--tp", "2", "--pp", "2", "--microbatches", "4", "--machine", "A100"])
        == 0
    )
    assert "8 ranks (pp=2 x dp=2 x tp=2), A100" in capsys.readouterr().out


def test_world_and_batch_say_dp_and_microbatches(tmp_path):
    plan = simulated(*SMALL, *["--world", "8", "--tp", "2", "--batch", "32", "--microbatch", "2"])["plan"]
    assert (plan["dp"], plan["microbatches"]) == (4, 4)


def test_flags_go_before_a_file(tmp_path):
    path = tmp_path / "plan.json"
    oc.Plan(dp=4, zero=1, microbatches=2, sequence_parallel=False).save(path)
    plan = simulated(*SMALL, "--plan", str(path), "--dp", "2")["plan"]
    assert (plan["dp"], plan["zero"], plan["microbatches"]) == (2, 1, 2)
    path.write_text('{"onecard": "Plan", "version": 1, "tp": 2, "sequence_parallel": true}')
    plan = simulated(*SMALL, f"--plan={path}", "--no_sequence_parallel")["plan"]
    assert (plan["tp"], plan["sequence_parallel"]) == (2, False)


def test_a_hugging_face_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    data = simulated("--model", str(path), "--sequence", "64")
    sizes = oc.Transformer.from_config(LLAMA, 64)
    assert data["seconds"] == oc.price(sizes, oc.Plan(), oc.Machine.preset("H100")).seconds
    assert simulated("--model", str(tmp_path), "--sequence", "64")["seconds"] == data["seconds"]
    path.write_text(sizes.to_json())
    assert simulated("--model", str(path))["seconds"] == data["seconds"]


@pytest.mark.parametrize(
    ("name", "count"), [("gpt2", 124.4e6), ("gpt3-175b", 175e9), ("llama2-7b", 6.74e9), ("llama2-70b", 69.0e9),
                        ("llama3-8b", 8.03e9), ("llama3-70b", 70.6e9), ("llama3-405b", 405.9e9), ("mistral-7b", 7.24e9)],
)  # fmt: skip
def test_known_models_have_their_published_number_of_parameters(name, count):
    assert MODELS[name].parameters == pytest.approx(count, rel=0.01)


def test_trace_and_page(tmp_path):
    trace, page = tmp_path / "t.json", tmp_path / "job.html"
    data = simulated(*SMALL, *f"--pp 2 --microbatches 2 --trace {trace} --html {page}".split())
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    assert len([e for e in events if e["cat"] in ("forward", "backward")]) == 8  # two ranks, two microbatches
    assert max(e["ts"] + e["dur"] for e in events) <= data["seconds"] * 1e6
    assert "</html>" in page.read_text()


def test_machines_are_written_and_read(tmp_path):
    path = tmp_path / "machine.json"
    machine = oc.Machine(name="ours", flops=1e12, curves={"mm": ((1.0, 1e-6), (10.0, 1e-5))}, dtypes={"bfloat16": 2e12})
    save_machine(machine.with_links(dp=oc.Link(1e-5, 1e9)), path)
    read = load_machine(path)
    names = ("name", "flops", "memory", "curves", "dtypes", "links", "per_host", "capacity")
    assert [getattr(read, n) for n in names] == [getattr(machine.with_links(dp=oc.Link(1e-5, 1e9)), n) for n in names]
    data = simulated(*SMALL, "--machine", str(path))
    assert data["machine"]["name"] == "ours"


def test_a_measured_gpu_keeps_what_its_kernels_reach(tmp_path):
    path, measured = tmp_path / "gpu.json", replace(oc.Machine.preset("H100"), name="NVIDIA H100 80GB HBM3")
    save_machine(measured, path)
    assert load_machine(path).kernels == measured.kernels
    data = json.loads(path.read_text())
    for change, said in (
        ({"start": None}, "'start'"), ({"memory": {"": "0.9"}}, "memory"), ({"products": {"bfloat16": 0.8}}, 'a share ""'),
    ):  # fmt: skip
        wrong = {k: v for k, v in (data["kernels"] | change).items() if v is not None}
        path.write_text(json.dumps(data | {"kernels": wrong}))
        with pytest.raises(oc.errors.PlanError, match=r"gpu\.json") as caught:
            load_machine(path)
        assert said in str(caught.value)


@pytest.mark.parametrize(
    "machine",
    [
        oc.Machine.preset("H100"),
        oc.Machine.preset("H100", peak=True),
        replace(oc.Machine.preset("A100"), name="H100"),
        replace(oc.Machine.preset("H100"), flops=1e12),
    ],
)
def test_a_machine_under_a_presets_name_stays_itself(tmp_path, machine):
    save_machine(machine, tmp_path / "machine.json")
    read = load_machine(tmp_path / "machine.json")
    assert {f.name: getattr(read, f.name) for f in fields(machine)} == {
        f.name: getattr(machine, f.name) for f in fields(machine)
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"onecard": "Machine", "version": 1,\n "like": "B200"}', ":2: there is no machine 'B200'"),
        ('{"onecard": "Machine", "version": 1,\n\n "memory": "2.4e12"}', ":3: memory is a string"),
        ('{"onecard": "Machine", "version": 1, "memory": 0}', "want a number above 0"),
        ('{"onecard": "Machine", "version": 1, "speed": 1}', "no field 'speed'"),
        ('{"onecard": "Machine", "version": 2}', "version 2"),
        ('{"onecard": "Plan", "version": 1}', "is no file of a machine"),
        ('{"onecard": "Machine", "version": 1, "curves": {"mm": [[2, 1], [1, 1]]}}', "sizes of a curve go upwards"),
        ('{"onecard": "Machine", "version": 1, "capacity": 1.5}', "want a whole number"),
        ('{"onecard": "Machine", "version": 1, "links": {"dp": 3}}', "a link is"),
        ("[1", "no JSON"),
    ],
)
def test_a_machines_file_that_cannot_be(tmp_path, text, said):
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(oc.errors.OnecardError, match=r"machine\.json") as caught:
        load_machine(path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "of which model? --layers, --hidden, --heads, --vocab, --sequence are not there"),
        ("--layers 4 --hidden 64 --heads 4 --vocab 256", "--sequence is not there"),
        ("--model gpt5", "there is no model 'gpt5'; near are gpt2"),
        ("--model nowhere/config.json", "nowhere/config.json: does not exist"),
        ("--model gpt2 --machine B200", "there is no machine 'B200'; there are A100"),
        ("--model gpt2 --machine nowhere.json", "nowhere.json: does not exist"),
        ("--model gpt2 --plan nowhere.json", "nowhere.json: does not exist"),
        ("--model gpt2 --tp 5", "tp=5 does not divide 12 query heads; tp=4 does"),
        ("--model gpt2 --world 10 --tp 4", "--world 10 is no multiple of tp x cp x pp = 4; 8 is"),
        ("--model gpt2 --batch 3 --dp 2", "--batch 3 is no multiple of dp x microbatch = 2; 2 is"),
        ("--model gpt2 --world 0", "--world 0 is no multiple of tp x cp x pp = 1; 1 is"),
        ("--model gpt2 --world 8 --tp 2 --dp 2", "--dp 2, but --world 8 makes it 4: leave one of both out"),
        (
            "--model gpt2 --batch 8 --microbatches=2",
            "--microbatches 2, but --batch 8 makes it 8: leave one of both out",
        ),
        ("train.py --tp 2", "train.py is a program, and simulate prices a model's sizes: onecard estimate train.py"),
        ("--model gpt2 --schedule 1B1F", "Plan: schedule='1B1F'"),
        ("--model gpt2 --sequence 2048", "gpt2 has learned positions, for 1024 tokens"),
        (
            "--model gpt2 --layers 2 --sequence 32 --trace nowhere/job.json",
            "--trace nowhere/job.json: there is no folder nowhere",
        ),
    ],
)
def test_what_cannot_be_is_said_in_a_line(capsys, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


@pytest.mark.proof
def test_progress_where_there_is_a_terminal(tmp_path):
    terminal, ours = pty.openpty()
    command = [sys.executable, "-m", "onecard", "simulate", *SMALL]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=ours, timeout=300, env=os.environ | {"TERM": "xterm"})
    os.close(ours)
    shown = os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert done.returncode == 0
    assert "recording blocks and pricing them on 1 ranks" in shown
    assert "a step" in done.stdout.decode()
    assert python(tmp_path, *command[1:]).stderr == ""


@pytest.mark.proof
def test_help_loads_no_command():
    code = (
        "import sys; from onecard.cli import main; main(['--help']); print([m for m in sys.modules if 'commands' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert done.stdout.rstrip().endswith("['onecard.commands', 'onecard.commands.listed']")  # their names
    assert all(name in done.stdout for name in COMMANDS)
