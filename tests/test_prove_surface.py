"""prove's ways in: plans, recordings and passes, real ranks, others' layers; its ways out: text, page, data, pytest, status."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import prove_programs as programs
import pytest
import torch
from amounts import share
from browser import CHROMIUM, DRIVER, Page, browser
from torch import nn

import onecard as oc
from onecard.commands import prove as command
from onecard.errors import PlanError, ProofError
from onecard.proof import capacity
from onecard.proof.page import page
from onecard.proof.plain import loss_of
from onecard.proof.small import narrowed
from onecard.testing import proves

TP = (("0.weight", "tp: Shard(0)"), ("0.bias", "tp: Shard(0)"), ("3.weight", "tp: Shard(1)"))
PLANS = [oc.Plan(dp=4), *(oc.Plan(dp=4, zero=n) for n in (1, 2, 3)), oc.Plan(dp=2, tp=2, placements=TP)]


def plain(fault: float = 1.0) -> list[float]:
    """A program for one card."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(2):
        loss = model(torch.randn(8, 8)).square().mean()
        loss.backward()
        if fault != 1.0 and isinstance(model[0].weight, oc.DistTensor):
            model[0].weight.grad *= fault
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# -- plans -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", share(PLANS[::-1], 1), ids=lambda plan: f"dp{plan.dp}-tp{plan.tp}-zero{plan.zero}")
def test_a_program_for_one_card_is_itself_under_a_plan(plan):
    proof = oc.prove(plain, plan=plan, rounding=False)
    assert proof and proof.exact and proof.world == 4, str(proof)
    assert len(proof.results) >= 16


@pytest.mark.proof
def test_what_a_plan_breaks_is_named(tmp_path):
    oc.Plan(dp=2).save(tmp_path / "plan.json")
    proof = oc.prove(plain, 1.01, plan=tmp_path / "plan.json", rounding=False)
    assert not proof and any("0.weight" in result.what for result in proof.wrong), str(proof)


def test_a_model_alone_is_trained():
    assert proves(nn.Linear(4, 2), torch.ones(4, 4), plan=oc.Plan(dp=2, zero=1), rounding=False).world == 2
    with pytest.raises(ProofError, match="no loss is known"):
        loss_of(torch.ones(2, dtype=torch.long))


def test_plans_that_cannot_be_applied_are_refused():
    with pytest.raises(ProofError, match="the plan is for 4 ranks"):
        oc.prove(plain, world=2, plan=oc.Plan(dp=4))
    with pytest.raises(PlanError, match="virtual"):
        oc.prove(plain, plan=oc.Plan(pp=2, virtual=2, microbatches=2))


def test_ranks_that_send_nothing_say_so():
    assert "no rank sent anything: each ran the whole program" in str(oc.prove(plain, world=2, rounding=False))
    assert "no rank sent" not in str(oc.prove(plain, world=2, plan=oc.Plan(dp=2), rounding=False))
    assert "no rank sent" not in str(oc.prove(programs.ddp, world=2, against=programs.one_card, rounding=False))


def test_a_plan_with_stages_is_one_cards():
    proof = oc.prove(plain, world=2, plan=oc.Plan(pp=2))
    assert proof.equal and proof.values


def dropped(p: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(p)) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(8, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_dropout_in_microbatches_is_one_cards():
    assert oc.prove(dropped, 0.2, world=2, plan=oc.Plan(pp=2, microbatches=2, schedule="F-then-B"), rounding=False)


# -- others' layers ----------------------------------------------------------------------------------------------------------


@pytest.mark.share(1)
@pytest.mark.parametrize("program", share([programs.ddp, programs.functional, programs.torch_tp, programs.fsdp2], 2))
def test_layers_of_others_are_one_cards(program):
    proves(program, world=2, against=programs.one_card, rounding=False)


@pytest.mark.proof
def test_dtensors_are_one_cards():
    proves(programs.dtensor, world=2, against=programs.dtensor_one_card, rounding=False)


@pytest.mark.proof
def test_a_sum_that_others_forget_is_named():
    proof = oc.prove(programs.forgotten, world=2, against=programs.one_card, rounding=False)
    assert not proof and proof.wrong[0].what.endswith("2.weight in step 1"), str(proof)
    assert "missing" in str(proof)


# -- recordings and passes, on real ranks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("k_steps", share([1, 2], 1))
def test_replays_are_one_cards(k_steps):
    proof = oc.prove(programs.recorded, k_steps, world=4, recorded=True, rounding=False)
    assert proof and proof.exact and proof.values == 0 and len(proof.results) >= 12, str(proof)


@pytest.mark.proof
def test_the_pass_at_fault_is_named():
    proof = oc.prove(programs.broken, "buckets", world=4, bisect=True, rounding=False)
    assert not proof and "the pass 'buckets' is at fault" in proof.passes, str(proof)


@pytest.mark.proof
def test_real_ranks_give_the_same_report():
    proof = oc.prove(programs.forgotten, world=2, against=programs.one_card, rounding=False, processes=True)
    assert not proof and proof.wrong[0].what.endswith("2.weight in step 1"), str(proof)
    with pytest.raises(ProofError, match="defined inside a function"):
        oc.prove(lambda: 0, world=2, processes=True)


@pytest.mark.proof
@pytest.mark.parametrize("how", share(programs.SUMS, 2))
def test_messages_of_real_ranks_are_values(how):
    """A sum that is made twice, a stale part that is gathered or sent: named as by ranks of one process."""
    prove = partial(oc.prove, programs.tensor_parallel, how, world=2, rounding=False)
    found = [
        prove(wrong, against=programs.tensor_parallel_one_card, processes=processes)
        for wrong, processes in ((False, True), (True, True), (True, False))
    ]
    right, real, joined = found
    assert right and right.share == 1, str(right)
    assert not real and real.first is not None and joined.first is not None
    assert real.first.operator == {"functional": "all_reduce", "recv": "send"}.get(how, how), str(real)
    words = [
        (one.operator, one.line, one.ranks, one.why, [*map(str, one.messages)]) for one in (real.first, joined.first)
    ]
    assert words[0] == words[1]


@pytest.mark.proof
@pytest.mark.parametrize(
    ("forgets", "operator", "code"),
    [
        ("forward", "add", "Summed.apply(y, self.forgets"), ("backward", "native_layer_norm_backward", "self.up)"),
    ],
)  # fmt: skip
def test_a_sum_that_megatrons_layers_forget_on_real_ranks_is_named(forgets, operator, code):
    """Plain collectives by hand, each rank a process: the operator, its line and what is missing."""
    prove = partial(oc.prove, programs.megatron, world=2, rounding=False, processes=True)
    if forgets == "forward":
        assert (right := prove()) and right.share == 1, str(right)
    proof = prove(forgets)
    first = proof.first
    assert not proof and first is not None, str(proof)
    assert first.operator == operator and first.ranks == (0, 1), str(proof)
    assert "prove_programs.py" in first.line and "sum" in first.why and "missing" in first.why, str(proof)
    assert code in str(proof).partition("First value")[2], str(proof)


# -- what is said ------------------------------------------------------------------------------------------------------------


def wrong(scale: float = 2.0) -> torch.Tensor:
    torch.manual_seed(0)
    mesh = oc.ProcessMesh(range(oc.get_world_size()), ["tp"])
    x = oc.shard_tensor(torch.randn(4, 8), mesh, [oc.Shard(1)])
    return torch.tanh(x * (scale if oc.get_world_size() > 1 else 1.0))


@pytest.fixture(scope="module")
def found() -> oc.Proof:
    return oc.prove(wrong, world=2)


def test_the_largest_difference_is_said_with_its_place():
    assert "ulp, at what is returned" in str(proves(wrong, 1.0, world=2))


def test_a_test_fails_with_the_report():
    with pytest.raises(AssertionError, match=r"Not equal: 1 of 1 results"):
        proves(wrong, world=2)


def test_the_page_has_all_of_it_and_no_network(found):
    text = page(found, "a <b>")
    assert "a &lt;b&gt;: not equal on 2 ranks" in text and "<b>" not in text
    assert "<script" not in text and "://" not in text
    assert "First value that is not one card" in text and "worst element" in text


def test_the_data_are_json(found):
    data = json.loads(json.dumps(found.data(), allow_nan=False))
    assert data["equal"] is False and data["world"] == 2 and data["first"]["ranks"] == [0, 1]
    assert [result["equal"] for result in data["results"]] == [False]


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as opened:
        yield opened


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with its driver is installed")
def test_the_page_is_read_by_keyboard(tab, tmp_path, found):
    found.html(tmp_path / "proof.html", "train.py")
    tab.size(1100, 900)
    tab.open(tmp_path / "proof.html")
    assert tab.errors() == []
    assert tab.run("return document.querySelector('h1').textContent") == "train.py: not equal on 2 ranks"
    tab.press("Tab")
    assert tab.run("return document.activeElement.className") == "skip"
    tab.press("Tab")
    assert tab.run("return document.activeElement.getAttribute('role')") == "region"
    rows = tab.run("return [...document.querySelectorAll('#results tbody tr')].map((r) => r.innerText)")
    assert len(rows) == 1 and "not equal" in rows[0]


# -- the command -------------------------------------------------------------------------------------------------------------


SCRIPT = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser(); parser.add_argument("--hidden", type=int, default=64)
asked = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, asked.hidden), nn.ReLU(), nn.Linear(asked.hidden, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(8, 4)).square().mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def test_the_command_under_a_plan(tmp_path, capsys):
    script, plan = tmp_path / "train.py", tmp_path / "plan.json"
    script.write_text(SCRIPT)
    oc.Plan(dp=2, zero=1).save(plan)
    words = [str(script), "--plan", str(plan), "--narrow", "hidden", "--html", str(tmp_path / "out.html")]
    status = command.main([*words, "--", "--hidden", "4097"])
    said = capsys.readouterr().out
    assert status == 0 and said.startswith("Equal"), said
    assert command.main([*words, "--json", "--", "--hidden", "4097"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["equal"] and data["world"] == 2
    assert "equal on 2 ranks" in (tmp_path / "out.html").read_text()


def test_what_cannot_be_proved_has_a_status_of_its_own(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no data')")
    assert command.main([str(script)]) == 2
    said = capsys.readouterr().err
    assert 'train.py", line 1' in said and "ValueError: no data" in said  # the script's own traceback
    assert command.main([str(script), "--narrow", "hidden"]) == 2
    assert "does not say how large it is" in capsys.readouterr().err


def test_nothing_is_not_equal():
    with pytest.raises(ProofError, match="nothing was compared"):
        oc.prove(lambda: None, world=2)


def test_tensors_without_data_are_no_values():
    def train() -> torch.Tensor:
        shape = (torch.empty(3, 4, device="meta") @ torch.empty(4, 2, device="meta")).shape
        loss = (torch.ones(shape) * 2).mean()
        return loss if oc.get_world_size() == 1 else loss + 1e-3

    assert not oc.prove(train, world=2)


def _steps_of_rounding(fault: float = 0.0) -> torch.Tensor:
    """A bias before a norm: its gradient is zero but for rounding, and Adam makes a step of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 2, bias=False))
    nn.init.zeros_(model[0].bias)
    oc.shard_layer(model, mesh := oc.ProcessMesh(range(oc.get_world_size()), ["dp"]))
    optimizer = oc.shard_optimizer(torch.optim.Adam(model.parameters(), 1e-2, eps=1e-18))
    for _ in range(3):
        x = oc.shard_tensor(torch.randn(12, 4), mesh, [oc.Shard(0)])
        loss = model(x).square().mean()
        loss.backward()
        if oc.get_world_size() > 1:
            with torch.no_grad():
                model[2].weight.grad.mul_(1 + fault)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


@pytest.mark.proof
def test_steps_that_adam_makes_of_rounding_are_told_apart():
    proof = oc.prove(_steps_of_rounding, world=2, rounding=False)
    assert proof and "rounding: one card's own move as far" in str(proof) and "0.bias" in str(proof)
    assert not oc.prove(_steps_of_rounding, 1e-2, world=2, rounding=False)


def test_memory_that_runs_out_is_told(monkeypatch):
    def train() -> torch.Tensor:
        return (torch.ones(2**22) + 1).sum()

    monkeypatch.setattr(capacity, "LOOK", 2**24)
    assert oc.prove(train, world=2)
    monkeypatch.setattr(capacity, "available", lambda: 2**20)
    with pytest.raises(ProofError, match=r"keeps all values of one card .* 0\.0 GiB of memory are left"):
        oc.prove(train, world=2)
    monkeypatch.undo()
    assert (capacity.available() or 2**40) > 2**20


def test_widths_keep_their_remainders():
    assert narrowed(["--d_model=4100"], ["d_model"], 8) == ["--d_model=20"]
    assert narrowed(["--d-model", "12"], ["d_model"], 8) == ["--d-model", "12"]


@pytest.mark.proof
def test_widths_are_made_small_by_themselves(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT + "print(asked.hidden)\n")
    run = [str(script), "--show", "--steps", "1"]
    plan = tmp_path / "plan.json"
    oc.Plan(dp=2).save(plan)
    assert command.main([*run, "--plan", str(plan), "--", "--hidden", "4097"]) == 0
    assert "widths made small: hidden 4097 -> 5" in capsys.readouterr().out
    assert command.main([*run, "--plan", str(plan), "--wide", "--", "--hidden", "97"]) == 0
    assert "widths" not in capsys.readouterr().out
    script.write_text(
        SCRIPT.replace("torch.manual_seed(0)", "assert asked.hidden > 20, 'too small'; torch.manual_seed(0)")
    )
    assert command.main([*run, "--plan", str(plan), "--", "--hidden", "97"]) == 0
    assert (
        "widths as they are: with smaller ones the program fails on one card: AssertionError" in capsys.readouterr().out
    )


class Config:
    def __init__(self) -> None:
        self.hidden_size, self.num_attention_heads, self.vocab_size = 96, 6, 65


SEEN: list[tuple[int, int]] = []


def of_a_config(config: Config, least: int = 0) -> torch.Tensor:
    SEEN.append((config.hidden_size, config.vocab_size))
    if config.hidden_size < least:
        raise ValueError("too narrow")
    torch.manual_seed(0)
    return torch.randn(config.hidden_size).sum() * config.vocab_size


def test_configs_are_made_small():
    proof = oc.prove(of_a_config, Config(), world=4, rounding=False)
    assert proof and SEEN[-1] == (12, 9), SEEN[-1]
    assert "hidden_size 96 -> 12, vocab_size 65 -> 9" in str(proof)
    assert oc.prove(of_a_config, Config(), world=4, rounding=False, wide=True) and SEEN[-1] == (96, 65)
    kept = oc.prove(of_a_config, Config(), 50, world=4, rounding=False)
    assert kept and SEEN[-1] == (96, 65) and "widths as they are" in str(kept) and "too narrow" in str(kept)


def test_a_proof_writes_no_files_and_its_runs_begin_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one card's run left a checkpoint, the ranks' run went on from it, and nothing was left to compare."""
    monkeypatch.chdir(tmp_path)
    begun = []

    def train() -> None:
        torch.manual_seed(0)
        mesh = oc.ProcessMesh(range(oc.get_world_size()), dim_names=["dp"])
        state = {"model": oc.shard_layer(torch.nn.Linear(4, 2), mesh), "step": 0}
        optimizer = oc.shard_optimizer(torch.optim.SGD(state["model"].parameters(), lr=0.1))
        if oc.checkpoint.latest("steps") is not None:
            oc.checkpoint.load("steps", state)
        begun.append((state["step"], os.path.exists("best.pt")))
        for step in range(state["step"], 2):
            state["model"](oc.shard_tensor(torch.randn(6, 4), mesh, [oc.Shard(0)])).square().mean().backward()
            optimizer.step()
            state["step"] = step + 1
            oc.checkpoint.save(state, "steps", step=step)
            if oc.get_rank() == 0:
                torch.save(step, "best.pt")
                assert torch.load("best.pt") == step  # its own file is there

    proof = oc.prove(train, world=2, steps=0)
    assert proof and len(begun) >= 6 and {*begun} == {(0, False)}, begun
    assert [*tmp_path.iterdir()] == []
