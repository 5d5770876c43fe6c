"""examples/gpt: the data, the check against one card, and the whole program on one process and on two ranks."""

from __future__ import annotations

import csv
import math
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import launch_forked, python
from safetensors.torch import load_file
from torch.testing import assert_close

import onecard as oc
from onecard.testing import run_ranks

ROOT = Path(__file__).parents[1]
GPT_FOLDER = ROOT / "examples" / "gpt"
MODULES = ("data", "model", "meshes", "placements", "outputs", "train")
TINY = {
    "steps": 6,
    "batch_size": 4,
    "seq_len": 32,
    "d_model": 32,
    "eval_every": 3,
    "eval_batches": 2,
    "sample_bytes": 8,
}


@pytest.fixture(scope="module")
def gpt() -> Iterator[SimpleNamespace]:
    """The modules of the example; their names are common ones, so they are forgotten afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(GPT_FOLDER)
        loaded = {name: __import__(name) for name in MODULES}
        yield SimpleNamespace(**loaded)
        for name in MODULES:
            sys.modules.pop(name)


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty small files, of which some are held out."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (folder / f"module{i}.py").write_text(f"def function{i}(x):\n    return x * {i}\n" * 4)
    return folder


# data


def test_files_are_sorted_and_tests_and_packages_left_out(gpt: Any, tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "c/d.py", "site-packages/x.py", "c/test/y.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass\n")
    names = [path.relative_to(tmp_path).as_posix() for path in gpt.data.stdlib_files(tmp_path)]
    assert names == ["a.py", "b.py", "c/d.py"]


@pytest.mark.proof
def test_standard_library_is_split_by_file(gpt: Any) -> None:
    corpus = gpt.data.load_corpus()
    again = gpt.data.load_corpus()
    assert torch.equal(corpus.train, again.train) and torch.equal(corpus.validation, again.validation)
    share = len(corpus.validation) / (len(corpus.train) + len(corpus.validation))
    assert len(corpus.train) > 1e6
    assert 0.005 < share < 0.2


def test_split_of_a_file_does_not_depend_on_the_others(gpt: Any, corpus_folder: Path, tmp_path: Path) -> None:
    held_out = [path for path in corpus_folder.glob("*.py") if gpt.data.is_validation(path.name)]
    assert 0 < len(held_out) < 15
    text = bytes(gpt.data.load_corpus(corpus_folder).validation.tolist())
    assert all(path.read_bytes() in text for path in held_out)
    for path in sorted(corpus_folder.glob("*.py"))[:50]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    fewer = bytes(gpt.data.load_corpus(tmp_path).validation.tolist())
    assert all(path.read_bytes() in fewer for path in held_out if (tmp_path / path.name).exists())


def test_a_folder_without_python_files_is_an_error_that_says_what_to_do(gpt: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--corpus"):
        gpt.data.load_corpus(tmp_path)
    (tmp_path / "only.py").write_text("pass")
    with pytest.raises(ValueError, match="too few to split"):
        gpt.data.load_corpus(tmp_path)


def test_a_batch_is_a_function_of_seed_and_step(gpt: Any) -> None:
    text = torch.arange(1000).to(torch.uint8)
    inputs, targets = gpt.data.sample_batch(text, 4, 16, seed=1, step=2)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal((inputs + 1) % 256, targets)  # of this text, the next byte is one more
    torch.manual_seed(5)  # nothing but the arguments may matter
    assert torch.equal(inputs, gpt.data.sample_batch(text, 4, 16, seed=1, step=2)[0])
    for seed, step in ((1, 3), (2, 2), (2, 1)):
        assert not torch.equal(inputs, gpt.data.sample_batch(text, 4, 16, seed=seed, step=step)[0])


def test_the_last_window_is_reached_and_no_more(gpt: Any) -> None:
    text = torch.arange(17).to(torch.uint8)
    inputs, targets = gpt.data.sample_batch(text, 8, 16, seed=0, step=0)
    assert torch.equal(targets[0], torch.arange(1, 17)) and torch.equal(inputs[7], torch.arange(16))
    with pytest.raises(ValueError, match="smaller --seq-len"):
        gpt.data.sample_batch(text, 8, 17, seed=0, step=0)


# model


def test_greedy_generation_repeats_the_likeliest_byte(gpt: Any) -> None:
    torch.manual_seed(0)
    model = gpt.model.GPT(gpt.model.GPTConfig(max_seq_len=8, n_layer=1, n_head=2, d_model=16))
    prompt = torch.tensor([[1, 2, 3]])
    ids = gpt.model.generate(model, prompt, 7, temperature=0)
    assert ids.shape == (1, 10)  # longer than max_seq_len: the window moves
    for end in range(3, 10):
        assert ids[0, end] == model(ids[:, max(0, end - 8) : end])[0, -1].argmax()


def test_a_byte_sees_only_those_before_it(gpt: Any) -> None:
    torch.manual_seed(0)
    model = gpt.model.GPT(gpt.model.GPTConfig(max_seq_len=8, n_layer=2, n_head=2, d_model=16))
    ids = torch.arange(8)[None]
    changed = ids.clone()
    changed[0, 5] = 99
    before, after = model(ids), model(changed)
    assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_heads_that_do_not_divide_the_width_are_an_error(gpt: Any) -> None:
    with pytest.raises(ValueError, match="take d_model 33"):
        gpt.model.GPTConfig(n_head=3, d_model=32)


# the mesh option


def test_mesh_option(gpt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpt.meshes.parse_mesh("single") == {}
    assert gpt.meshes.parse_mesh("dp=2,tp=4") == {"dp": 2, "tp": 4}
    for wrong in ("tp", "pp=2", "tp=0", "tp=2,tp=2", "tp=-1", ""):
        with pytest.raises(SystemExit, match="single, tp=2"):
            gpt.meshes.parse_mesh(wrong)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match=r"4 rank.*has 3.*\n.*--nproc_per_node 4 .* --mesh dp=2,tp=2"):
        gpt.meshes.make_mesh("dp=2,tp=2")


# the check


def records(gpt: Any, losses: list[float]) -> list[Any]:
    return [gpt.train.StepRecord(i + 1, loss, 0.1, 1.0) for i, loss in enumerate(losses)]


@pytest.mark.parametrize(
    ("losses", "passes"),
    [([5.0, 4.0], True), ([5.0, 4.0 * (1 + 5e-6)], True), ([5.0, 4.0 * (1 + 2e-5)], False), ([5.0, math.nan], False)],
)
def test_check_compares_relatively(gpt: Any, losses: list[float], passes: bool) -> None:
    assert gpt.outputs.check([5.0, 4.0], records(gpt, losses), 1e-5) is passes


def test_check_names_the_first_wrong_step(gpt: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gpt.outputs.check([3.0, 3.0, 3.0], records(gpt, [3.0, 3.1, 3.0]), 1e-5)
    assert "1 of 3 steps, first of step 2" in " ".join(capsys.readouterr().out.split())


def test_a_run_from_other_weights_fails_the_check(
    gpt: Any, corpus_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = gpt.train.TrainArgs(corpus=corpus_folder, out=tmp_path / "out", check=3, **TINY)
    right = gpt.train.one_card_losses

    def from_other_weights(model: Any, *rest: Any) -> list[float]:
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1.0
        losses = right(model, *rest)
        with torch.no_grad():
            model.lm_head.weight[0, 0] -= 1.0
        return list(losses)

    monkeypatch.setattr(gpt.train, "one_card_losses", from_other_weights)
    assert gpt.train.main(args) == 1
    assert not args.out.exists()
    monkeypatch.setattr(gpt.train, "one_card_losses", right)
    assert gpt.train.main(args) == 0


# the whole program


def command_line(corpus: Path, out: Path, mesh: str) -> list[str]:
    sizes = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return [
        str(GPT_FOLDER / "train.py"),
        "--mesh",
        mesh,
        "--check",
        "5",
        "--corpus",
        str(corpus),
        "--out",
        str(out),
        *sizes,
    ]


def on_two_ranks(folder: Path, program: list[str]) -> tuple[int, str]:
    """Exit status and output of the launcher."""
    [found] = run_ranks(launch_forked, 1, folder, ["--nproc_per_node", "2", *program], {})
    return found


def assert_results(gpt: Any, status: int, printed: str, out: Path) -> None:
    assert status == 0, printed
    assert "check passed: 5 losses" in printed
    with (out / "losses.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, TINY["steps"] + 1))
    assert [row["step"] for row in rows if row["validation_loss"]] == ["1", "3", "6"]
    assert float(rows[-1]["validation_loss"]) < float(rows[0]["validation_loss"])
    assert len((out / "sample.txt").read_text()) > len(gpt.outputs.PROMPT)
    config = gpt.train.TrainArgs(**TINY).model
    weights = load_file(out / "model.safetensors")
    gpt.model.GPT(config).load_state_dict(weights)  # all names, whole shapes


@pytest.mark.proof
def test_single(gpt: Any, corpus_folder: Path, tmp_path: Path) -> None:
    done = python(tmp_path, *command_line(corpus_folder, tmp_path / "out", "single"))
    assert_results(gpt, done.returncode, done.stdout + done.stderr, tmp_path / "out")


@pytest.mark.proof
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
def test_two_ranks_end_at_the_weights_of_one_card(gpt: Any, corpus_folder: Path, tmp_path: Path, mesh: str) -> None:
    program = command_line(corpus_folder, tmp_path / "out", mesh)
    # Without dropout: Adam turns the round-off of a gradient that is next to nothing into a visible step.
    status, printed = on_two_ranks(tmp_path, [*program, "--dropout", "0"])
    assert_results(gpt, status, printed, tmp_path / "out")
    assert "Messages of one training step" in printed
    args = gpt.train.TrainArgs(corpus=corpus_folder, out=tmp_path / "single", dropout=0.0, **TINY)
    assert gpt.train.main(args) == 0
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "single"))
    assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2"])
def test_dropout_draws_the_numbers_of_one_card(gpt: Any, corpus_folder: Path, tmp_path: Path, mesh: str) -> None:
    program = command_line(corpus_folder, tmp_path / "out", mesh)
    assert_results(gpt, *on_two_ranks(tmp_path, [*program, "--dropout", "0.1"]), tmp_path / "out")


def test_a_mesh_that_does_not_fit_names_the_call_that_works(corpus_folder: Path, tmp_path: Path) -> None:
    done = python(tmp_path, *command_line(corpus_folder, tmp_path / "out", "tp=2"))
    assert done.returncode != 0
    assert "onecard run --nproc_per_node 2 examples/gpt/train.py --mesh tp=2" in done.stderr


def test_a_run_goes_on_from_its_checkpoint(gpt: Any, corpus_folder: Path, tmp_path: Path) -> None:
    """Dropout included, bit for bit; and after a SIGTERM, which ends it with a checkpoint of its own."""
    args = gpt.train.TrainArgs(corpus=corpus_folder, out=tmp_path / "out", save_every=3, dropout=0.2, **TINY)

    def losses(args: Any) -> list[float]:
        corpus = gpt.data.load_corpus(corpus_folder)
        torch.manual_seed(7)
        model = gpt.model.GPT(args.model)
        folder = args.out / "checkpoints"
        return [record.loss for record in gpt.train.run_steps(model, corpus, None, args, args.steps, folder)]

    whole = losses(args)
    oc.checkpoint.writer.saving.finish()
    kept = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert kept == ["step-00000003", "step-00000006"]
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "step-00000006")
    again = replace(args, resume=True)
    assert losses(again) == whole[3:]
    other = replace(args, out=tmp_path / "other", save_every=100)
    before = signal.getsignal(signal.SIGTERM)
    stopping = iter([False, False, True])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(oc.checkpoint, "preempted", lambda: next(stopping))
        assert losses(other) == whole[:3]
    signal.signal(signal.SIGTERM, before)
    assert losses(replace(other, resume=True)) == whole[3:]
