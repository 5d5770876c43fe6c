"""What an audited job takes, on which ranks it does not fit, and the change that gains most."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from test_plan import any_plan

import onecard as oc
from onecard import cli
from onecard.planning.audit import worth as worths
from onecard.planning.audit.audit import Audit, Given
from onecard.planning.audit.read import read
from onecard.planning.audit.worth import neighbours, worth
from onecard.planning.audit.write import write

DATA = Path(__file__).parent / "data" / "audit"
A100 = oc.Machine.preset("A100")
SMALL = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --vocab-size 2048 --bf16 --nproc_per_node 4 "
    "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 32"
)


def audit(tmp_path: Path, more: str = "") -> Audit:
    (tmp_path / "a.args").write_text(f"{SMALL} {more}")
    return read([tmp_path / "a.args"])


@pytest.mark.proof
def test_the_best_change_is_the_best_of_all_that_megatron_can_say(tmp_path: Path) -> None:
    found = audit(tmp_path)
    assert found.transformer is not None
    priced = worth(found, A100)
    assert priced.cost is not None and priced.best is not None and priced.all_of_it and priced.tried >= 9
    assert priced.cost.seconds == oc.price(found.transformer, found.plan, A100).seconds
    sayable = [
        p
        for p in neighbours(found.plan, found.transformer)
        if not {"schedule"} & {*write("megatron", p, found.transformer).cannot}
    ]
    costs = {p: oc.price(found.transformer, p, A100).seconds for p in sayable}
    assert priced.best.cost.seconds == min(costs.values()) and priced.best.plan in costs
    assert priced.best.plan.world == 4 and priced.best.plan.batch == 32
    (tmp_path / "b.sh").write_text(
        write("megatron", priced.best.plan, found.transformer).text
    )  # the advice can be followed
    assert read([tmp_path / "b.sh"]).plan == priced.best.plan
    assert priced.best.what and priced.best.says.startswith("--")


def test_where_a_job_does_not_fit(tmp_path: Path) -> None:
    found = audit(tmp_path)
    plain = worth(found, A100, search=False)
    assert plain.cost is not None and plain.too_large == () and plain.tried == 0
    peaks = [rank.peak for rank in plain.cost.ranks]
    between = replace(A100, capacity=sum(sorted(peaks)[:2]) // 2)
    tight = worth(found, between)
    assert [rank.name for rank in tight.too_large] == [
        rank.name for rank in plain.cost.ranks if rank.peak > between.capacity
    ]
    assert len(tight.too_large) == 1 and tight.best is not None and tight.best.cost.fits
    none = worth(found, replace(A100, capacity=1000))
    assert len(none.too_large) == 2 and none.best is not None and not none.best.cost.fits
    assert none.cost is not None and none.best.cost.peak < none.cost.peak


def test_why_a_job_is_not_priced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no file says the model's sizes" in worth(read([DATA / "fsdp.yaml"]), A100).why_not
    bad = worth(audit(tmp_path, "--group-query-attention --num-query-groups 1 --tensor-model-parallel-size 2"), A100)
    assert bad.why_not == "the plan cannot be priced as it is: tp=2 does not divide 1 key heads; tp=1 does"
    many = worth(audit(tmp_path, "--global-batch-size 4000000"), A100)
    assert "more than are simulated" in many.why_not
    monkeypatch.setattr(worths, "price", lambda *given: [][1])
    assert (
        worth(audit(tmp_path), A100).why_not
        == "the price failed: IndexError: list index out of range; please report it"
    )


def test_changes_stop_when_time_is_up(tmp_path: Path) -> None:
    said: list[str] = []
    found = worth(audit(tmp_path), A100, say=said.append, limit=0.0)
    assert found.cost is not None and not found.all_of_it and found.tried <= 1 and said[0] == "pricing 4 ranks"


def test_neighbours_have_as_many_ranks_and_sequences() -> None:
    draw, model = random.Random(3), oc.Transformer(layers=24, hidden=256, heads=8, vocab=2048, sequence=256)
    count = 0
    for _ in range(200):
        plan = replace(any_plan(draw), stages=(), placements=())
        for other in neighbours(plan, model):
            count += 1
            assert other != plan and (other.world, other.batch) == (plan.world, plan.batch)
            assert not [finding for finding in other.check(model) if finding.kind == "mistake"]
    assert count > 1000


def test_a_library_is_not_advised_what_it_cannot_say() -> None:
    found = read([DATA / "fsdp.yaml", DATA / "llama3_8b.json"])
    assert found.transformer is not None
    every = [*neighbours(found.plan, found.transformer)]
    sayable = [other for other in every if worths._can_say("fsdp", found.plan, other, found.transformer)]
    assert {other.zero for other in every} == {0, 1, 2, 3} and {other.zero for other in sayable} == {0, 2, 3}
    assert {other.pp for other in sayable} == {1} and {other.pp for other in every} == {1, 2}


def test_the_page_and_json_with_the_price(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.args").write_text(SMALL)
    command = ["audit", str(tmp_path / "a.args"), "--machine", "A100"]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    for words in ("MFU", "messages along 'dp'", "memory at its peak", "the change that gains most: ", "changes tried"):
        assert words in text
    assert cli.main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["price"]
    assert data["cost"]["seconds"] == pytest.approx(sum(data["cost"]["terms"].values()))
    assert (
        data["cost"]["peak"] == max(sum(rank["memory"].values()) for rank in data["cost"]["ranks"])
        and data["cost"]["fits"]
    )
    assert data["best"]["cost"]["seconds"] < data["cost"]["seconds"]
    small = tmp_path / "small.json"
    small.write_text('{"onecard": "Machine", "version": 1, "like": "A100", "capacity": 10000000}')
    assert cli.main([*command[:2], "--machine", str(small), "--no-search"]) == 0
    assert "does not fit on pp 0 (2 ranks): " in capsys.readouterr().out


def test_a_model_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", str(DATA / "fsdp.yaml"), "--model", "llama3-8b", "--no-price"]) == 0
    assert "8.03 billion parameters" in capsys.readouterr().out
    assert cli.main(["audit", str(DATA / "fsdp.yaml"), "--model", "llama9", "--no-price"]) == 2
    assert cli.main(["audit", str(DATA / "fsdp.yaml"), str(DATA / "llama3_8b.json"), "--model", "llama3-8b"]) == 2
    assert "name one of them" in capsys.readouterr().err
    assert Given().model is None


@pytest.mark.proof
def test_plans_that_a_neighbour_leads_to_are_priced() -> None:
    """Fields that recordings do not depend on: none of them may stand in the way of a price."""
    model = oc.Transformer(layers=4, hidden=64, heads=4, vocab=128, sequence=512)
    plain = oc.price(model, oc.Plan(dp=2), A100)
    assert oc.price(model, oc.Plan(dp=2, ep=2), A100).seconds == plain.seconds
    assert oc.price(model, oc.Plan(dp=2, schedule="ZBV"), A100).seconds == plain.seconds
    full = oc.price(model, oc.Plan(dp=2, recompute="full", microbatch=4), A100)
    some = oc.price(model, oc.Plan(dp=2, recompute="full", recompute_blocks=2, microbatch=4), A100)
    none = oc.price(model, oc.Plan(dp=2, microbatch=4), A100)
    assert none.seconds < some.seconds < full.seconds and none.peak > some.peak > full.peak
    with pytest.raises(oc.errors.PlanError, match="compute='tfloat32' is not priced"):
        oc.price(model, oc.Plan(compute="tfloat32"), A100)
