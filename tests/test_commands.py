"""All commands of `onecard`: one style of help, errors, exit codes and JSON; their page is true; shells complete them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
from pathlib import Path

import estimated_programs as programs
import pytest
import torch
from launching import python

import onecard as oc
from onecard.cli import main
from onecard.commands import here
from onecard.commands.completion import options_of
from onecard.commands.front import scripts_traceback
from onecard.commands.listed import COMMANDS
from onecard.commands.options import plan_file
from onecard.launch.rehearsal import region_recorder
from onecard.reports.step_messages import ASKED

ROOT = Path(__file__).parents[1]
SCRIPTS = ("estimate", "explain", "draw", "plan")
"""Commands that run a script without devices."""


def called(*words):
    """Status, standard output and standard error of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([*map(str, words)])
        except SystemExit as end:  # as tyro ends
            status = end.code
    return status, out.getvalue(), err.getvalue()


def written(folder, text, name="train.py"):
    path = folder / name
    path.write_text(text)
    return path


# -- help --------------------------------------------------------------------------------------------------------------------


def bare(text):
    """Words of a help, however its boxes are drawn and its lines are broken."""
    return re.sub(r"[^\w\-.,:;|/]+", " ", re.sub(r"[─-╿]", " ", text)).split()


def test_the_page_is_what_the_commands_say(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    import commands

    page = commands.PAGE.read_text(encoding="utf-8")
    assert bare(page) == bare(commands.page(commands.doctor_rows())), "run python docs/commands.py"
    assert all(f"## onecard {name}\n" in page for name in COMMANDS)
    assert bare(page) != bare(page.replace("--forbid", "--forbids"))  # the comparison sees a word


def test_help_ends_with_0_and_says_every_option():
    for name in COMMANDS:
        if name != "prove":
            status, out, _ = called(name, "--help")
            assert status == 0 and out.startswith(f"usage: onecard {name}"), name
        assert (options_of(name).__doc__ or "").strip(), name
    status, out, _ = called("--help")
    assert status == 0 and all(name in out for name in COMMANDS)
    assert called()[:2] == (2, out)  # nothing was asked for


def test_each_command_has_a_module_and_no_other_is_one():
    folder = ROOT / "src" / "onecard" / "commands"
    shared = {"__init__", "find", "front", "here", "listed", "options", "waiting"}
    assert {path.stem for path in folder.glob("*.py")} - shared == {*COMMANDS}


# -- errors ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimat"], "there is no command 'estimat'; did you mean estimate?"),
        (["train.py"], "to run a script: onecard run train.py"),
        (["xyz"], "there is no command 'xyz'. All of them: onecard --help"),
        ([], ""),
        (["draw"], "name a script, or --schedule with one of 1F1B"),
        (["draw", "--schedule", "ZBW"], "schedule_mode is 'ZBW'"),
        (["draw", "--schedule", "1F1B", "-o", "s.gif"], "want one of .txt, .svg, .png, .pdf, .json"),
        (["draw", "--schedule", "1F1B", "-o", "nowhere/s.svg"], "there is no folder nowhere"),
        (["draw", "--schedule", "1F1B", "--stages", "0"], "--stages 0: want a number from 1"),
        (["explain", "x.py", "--rank", "2"], "x.py does not exist"),
        (["plan", "gpt5"], "there is no model 'gpt5'"),
        (["plan", "gpt2", "--fixed", "pt=2"], "there is no field 'pt'"),
        (["plan", "gpt2", "--fixed", "tpp=2"], "there is no field 'tpp'; did you mean tp=2? All: attention,"),
        (["plan", "gpt2", "--fixed", "tp"], "want NAME=VALUE, such as --fixed tp=2"),
        (["plan", "x.py", "--batch", "4"], "a script has its own batch"),
        *(
            ([name, "x.py", "--world", "0"], "--world 0: want a number from 1")
            for name in ("explain", "draw", "plan", "prove", "estimate")
        ),
        (["plan", "x.py", "--objective", "speed"], "--objective speed: want one of time, memory"),
        (["plan", "gpt2", "--memory", "-1"], "--memory -1: want a number above 0"),
        (["plan", "gpt2", "--batch", "0"], "--batch 0: want 1 or more"),
        (["plan", "x.py", "--fixed", "zero=9"], "plan: --fixed zero=9: want one of 0, 1, 2, 3"),
        (["plan", "x.py", "--fixed", "tp=x"], "plan: --fixed tp='x': want a whole number"),
        (["plan", "gpt2", "--fixed", "layers=2"], "--fixed layers=2: that is the model's"),
        (["plan", "gpt2", "-o", "nowhere/p.json"], "--output nowhere/p.json: there is no folder nowhere"),
        (["prove", "x.py", "--html", "nowhere/p.html"], "--html nowhere/p.html: there is no folder nowhere"),
        (["estimate", "x.py", "--trace", "."], "--trace . is a folder; name a file in it"),
        (["prove", "x.py", "--steps", "-1"], "prove: --steps -1: want 0 or more"),
        (["explain", "x.py", "--at_most", "-1"], "--at_most -1: want 0 or more"),
        (["simulate", "gpt2"], "the model is an option here: onecard simulate --model gpt2"),
        (["audit", "x.py"], "x.py is a program, and audit reads settings"),
        (["run", "--nnodes", "0", "x.py"], "--nnodes is 0"),
        (["prove", "nowhere.py"], "nowhere.py does not exist; looked in"),
        (["prove", "x.py", "--against", "nowhere.py"], "nowhere.py does not exist; looked in"),
        (["convert", "nowhere", "x"], "nowhere does not exist"),
        (["run", "nowhere.py"], "nowhere.py does not exist"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not {"run", "explain --rank"} & {words[0] if words else "", " ".join(words[::2])}:
        written(tmp_path, "", "x.py")
    status, out, err = called(*words)
    assert status == 2
    assert said in err and "Traceback" not in err
    assert out == "" or not words


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["estimate"], "estimate: missing from onecard estimate: PATH the program, unchanged (required)."),
        (["estimate", "x.py", "--world", "two"], "estimate: --world two: want a whole number."),
        (["plan", "gpt2", "--memory=lots"], "plan: --memory lots: want a number."),
        (["simulate", "--tp", "x"], "simulate: --tp x: want a whole number."),
        (["estimate", "x.py", "y"], "estimate: unrecognized options: y."),
        (
            ["completion", "fish"],
            "completion: invalid choice 'fish' for argument 'shell'. Expected one of ('bash', 'zsh').",
        ),
        (["doctor", "--jsn"], "doctor: unrecognized options: --jsn; perhaps --json all facts and findings as JSON"),
    ],
)
def test_words_that_cannot_be_read_are_one_line(words, said):
    status, out, err = called(*words)
    assert (status, out) == (2, "") and err.startswith(f"onecard {said}")
    assert err.count("\n") == 1 and err.endswith(f" All options: onecard {words[0]} --help\n")


def test_help_is_a_word_too():
    assert called("help") == called("--help")
    assert called("help", "doctor") == called("doctor", "--help")


def test_auto_of_what_is_no_python_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "import torch\ndef f(:\n", "x.py")
    status, _, err = called("run", "--auto", "--nproc_per_node", "2", "x.py")
    assert status == 2 and "onecard: x.py:2: no Python: invalid syntax; nothing was started" in err
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "run"])
def test_a_flag_that_is_not_there(name):
    status, _, err = called(name, *["x.py"] * {"convert": 2, "prove": 1}.get(name, name in SCRIPTS), "--jsn")
    assert status == 2 and "Traceback" not in err
    if any(field == "json" for field in getattr(options_of(name), "__dataclass_fields__", {})):
        assert "--json" in err  # the nearest


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_missing_script_and_one_that_fails(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = called(name, "nowhere.py")
    assert (status, out) == (2, "") and f"onecard {name}: nowhere.py does not exist; looked in {tmp_path}" in err
    fails = "import torch\ndef inner():\n    return torch.ones(2, 3) @ torch.ones(2, 3)\ninner()\n"
    status, out, err = called(name, written(tmp_path, fails, "fails.py"))
    assert (status, out) == (2, "")
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert [line for line in lines if "fails.py" in line and "File" in line] != []
    assert lines[-1].startswith(f"onecard {name}: fails.py:3: RuntimeError")
    assert str(ROOT / "src") not in err  # none of our frames


def test_a_traceback_without_our_frames():
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("def f():\n    return 1 / 0\nf()", "script.py", "exec"), {})
    text = scripts_traceback(caught.value)
    assert 'File "script.py", line 2, in f' in text and text.endswith("ZeroDivisionError: division by zero\n")


# -- explain -----------------------------------------------------------------------------------------------------------------


def test_explain_of_marks(tmp_path):
    script = written(tmp_path, programs.MARKS)
    status, out, _ = called("explain", script, "--world", "4", "--json")
    data = json.loads(out)
    assert (status, data["world"]) == (0, 4)
    found = {(m["operator"], m["collective"], m["axis"]): m for m in data["messages"]}
    assert {*found} == {("pow", "all_reduce", "tp"), ("gradients", "all_reduce", "dp")}
    forward = found["pow", "all_reduce", "tp"]
    assert (
        forward["implicit"]
        and forward["line"].endswith("train.py:15")
        and "needs the pending sum whole" in forward["why"]
    )
    estimate = json.loads(called("estimate", script, "--world", "4", "--json")[1])
    assert data["sent"] == estimate["sent"]  # one truth
    status, out, err = called("explain", script, "--world", "4", "--forbid")
    assert status == 1 and "train.py:15: pow needs all_reduce of 1,024 bytes along 'tp'" in err
    assert "all_reduce" in out
    most = sum(data["sent"].values())
    assert called("explain", script, "--world", "4", "--at_most", most)[0] == 0
    assert called("explain", script, "--world", "4", "--at_most", most - 1)[0] == 1


def test_explain_of_torchs_own(tmp_path):
    script = written(tmp_path, programs.DDP)
    status, out, _ = called("explain", script, "--world", "8", "--forbid", "--json")
    [message] = json.loads(out)["messages"]
    assert (status, message["why"], message["implicit"], message["phase"]) == (0, ASKED, False, "backward")
    assert "sends nothing" in called("explain", written(tmp_path, programs.PLAIN), "--world", "2")[1]


def test_a_reason_that_is_not_found_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(region_recorder.RegionRecorder, "tell", lambda self, message: None)
    with pytest.raises((AssertionError, KeyError)):
        test_explain_of_marks(tmp_path)


# -- draw, plan, convert -----------------------------------------------------------------------------------------------------


def test_draw(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = written(tmp_path, programs.MARKS)
    assert called("draw", script, "--world", "4", "-o", "graph.svg")[:2] == (0, "")
    assert "all_reduce" in Path("graph.svg").read_text()
    status, out, _ = called("draw", script, "--world", "4")
    assert status == 0 and ">>> all_reduce" in out
    data = json.loads(called("draw", script, "--world", "4", "--json")[1])
    sent = [s["kind"] for blocks in data["phases"].values() for block in blocks for s in block["sent"]]
    assert sent == re.findall(r">>> (\w+)", out) and {*data["phases"]} == {"forward", "backward", "optimizer"}
    timed = json.loads(called("draw", "--schedule", "ZBV", "--stages", "2", "--microbatches", "4", "--json")[1])
    assert [len(rank) for rank in timed["ranks"]] == [2 * 3 * 4] * 2  # stages of a rank x (F, I, W) x microbatches
    status, out, _ = called("draw", "--schedule", "ZBV", "--stages", "2", "--microbatches", "4")
    assert status == 0 and out.startswith("ZB-V: 2 ranks, 4 microbatches")
    for file, begins in (("s.svg", "<?xml"), ("s.json", "{"), ("s.txt", "1F1B: 4 ranks, 8 microbatches")):
        assert called("draw", "--schedule", "1F1B", "-o", file)[0] == 0
        assert Path(file).read_text().startswith(begins)


def test_plan_of_a_script_is_run_autos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, programs.PLAIN)
    status, out, _ = called("plan", "train.py", "--world", "4", "--machine", "A100", "-o", "plan.json", "--json")
    data = json.loads(out)
    assert status == 0 and data["plan"] == data["choices"][0]["plan"]
    assert {choice["name"] for choice in data["obvious"]} <= {"pure dp", "ZeRO-3", "Megatron's recipe"}
    assert plan_file("plan.json") == oc.Plan.from_json(data["plan"])
    dry = ["run", "--auto", "--dry_run", "auto.json", "--machine", "A100", "--nproc_per_node", "4", "train.py"]
    done = python(tmp_path, "-m", "onecard", *dry)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(Path("auto.json").read_text())["plan"] == data["plan"]
    estimated = json.loads(called("estimate", "train.py", "--plan", "plan.json", "--machine", "A100", "--json")[1])
    assert estimated["plan"] == data["plan"]


def test_plan_of_a_model(tmp_path):
    status, out, _ = called("plan", "gpt2", "--world", "2", "--batch", "4", "--fixed", "pp=1", "--fixed", "tp=1")
    assert status == 0 and out.startswith("dp=2") and "the plan to take" in out and "plans looked at" in out
    status, out, err = called("plan", "gpt2", "--world", "1", "--batch", "2", "--memory", "0.5")
    assert (status, out) == (1, "") and "nothing fits into 0.50 GiB" in err


def test_convert_there_and_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    for step in (1, 2):
        oc.checkpoint.save({"model": model, "step": step}, "run", step=step)
    assert called("convert", "run", "hf", "--to", "huggingface", "--only", "model")[0] == 0
    assert called("convert", "run/step-00000001", "one.pt")[0] == 0
    assert torch.load("one.pt", weights_only=True)["step"] == 1
    assert called("convert", "run", "newest.pt")[0] == 0
    assert torch.load("newest.pt", weights_only=True)["step"] == 2
    assert called("convert", "one.pt", "dcp", "--to", "dcp")[0] == 0
    status, out, _ = called("convert", "dcp", "back.pt")
    assert status == 0 and out.startswith("back.pt: torch, ")
    status, out, _ = called("convert", "dcp", "there.pt", "--json")
    size = (tmp_path / "there.pt").stat().st_size
    assert json.loads(out) == {"target": "there.pt", "format": "torch", "bytes": size, "files": 1, "source": "dcp"}
    assert torch.equal(torch.load("back.pt", weights_only=True)["model"]["weight"], model.weight)
    assert called("convert", "hf", "other", "--rename", "w*=v*")[0] == 0
    into = {"veight": torch.empty(2, 3), "bias": torch.empty(2)}
    oc.load_state_dict(into, "other")
    assert torch.equal(into["veight"], model.weight)
    status, _, err = called("convert", "hf", "other")
    assert status == 2 and "other exists already" in err
    status, _, err = called("convert", "hf", "x", "--to", "hugginface")
    assert status == 2 and "want one of onecard, huggingface, torch, dcp" in err


# -- completion --------------------------------------------------------------------------------------------------------------


def test_bash_completes_commands_options_and_files(tmp_path):
    status, script, _ = called("completion", "bash")
    assert status == 0
    written(tmp_path, script, "completion.bash")
    lines = {
        "es": "estimate",
        "explain --fo": "--forbid",
        "run --au": "--auto",
        "plan --obj": "--objective",
        "doctor --": "--json",
    }
    asked = "".join(
        f'COMP_WORDS=(onecard {line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _tyro_onecard; echo "${{COMPREPLY[@]}}"\n'
        for line in lines
    )
    text = f"source {tmp_path}/completion.bash\n{asked}complete -p onecard\n"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=60, check=True)
    *found, how = done.stdout.splitlines()
    assert all(word in words.split() for word, words in zip(lines.values(), found, strict=True))
    assert "-o default" in how  # names of files, where no word fits
    status, script, _ = called("completion", "zsh")
    assert status == 0 and script.startswith("#compdef onecard")


def test_a_cpu_is_measured_with_as_many_ranks_at_work_as_it_has_cores_for(monkeypatch):
    asked, found = [], oc.Machine()
    monkeypatch.setattr(here, "run_ranks", lambda work, nproc, **_: asked.append((work, nproc)) or [found])
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert [here.measured_for(ranks)() is found for ranks in (2, 1024)] == [True, True]
    assert asked == [(oc.Machine.measure, 2), (oc.Machine.measure, 4)]
    assert here.measured_for(1) is oc.Machine.measure
