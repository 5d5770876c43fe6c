"""Strategy: checked as it is set, JSON, plans, names of Paddle's, and what does not go together."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from torch import nn
from torch.optim import SGD

import onecard as oc
from onecard.engine import refused, strategy
from onecard.engine.fields import Checked
from onecard.errors import PlanError, StrategyError

SECTIONS = {
    name: getattr(oc.Strategy(), name)
    for name in ("sharding", "pipeline", "recompute", "amp", "gradient_merge", "fused_passes")
}

WRONG = [
    ("sharding.enable", 1, "want True or False, not a number"),
    ("sharding.stage", 4, "want one of 1, 2, 3"),
    ("sharding.stage", True, "want one of 1, 2, 3"),
    ("sharding.degree", 0, "want 1 or more (or -1: all that there are)"),
    ("sharding.overlap", "yes", "want one of None, True, False"),
    ("pipeline.schedule_mode", "1F2B", "there is no such schedule; there are 1F1B, F-then-B"),
    ("pipeline.accumulate_steps", 2.0, "want a whole number, not a number with a point"),
    ("pipeline.at", [1], "want a list of names of modules"),
    ("recompute.memory_limit", -1, "want 1 or more (or None)"),
    ("recompute.checkpoints", [""], "want a list of names of modules"),
    ("amp.dtype", "float64", "want one of 'bfloat16', 'float16'"),
    ("amp.level", "O3", "want one of 'O1', 'O2'"),
    ("amp.init_loss_scaling", 0, "want a number above 0"),
    ("amp.incr_ratio", 1.0, "want a number above 1"),
    ("gradient_merge.k_steps", "4", "want a whole number, not a string; write 4"),
    ("fused_passes.enable", None, "want True or False, not a nothing"),
    ("auto_mode", "manual", "want one of 'semi', 'full'"),
    ("seed", -1, "want 0 or more (or None)"),
    ("sharding", True, "want a dict of enable, stage, degree"),
]


@pytest.mark.parametrize(("path", "value", "why"), WRONG, ids=lambda x: str(x)[:24])
def test_a_field_is_checked_when_it_is_set(path: str, value: object, why: str) -> None:
    made = oc.Strategy()
    before = made.copy()
    section, _, name = path.rpartition(".")
    with pytest.raises(StrategyError, match=re.escape(f"Strategy: {path}={value!r}: {why}")) as caught:
        setattr(getattr(made, section) if section else made, name, value)
    assert caught.value.field == path and made == before
    with pytest.raises(StrategyError, match=re.escape(f"{path}={value!r}")):
        oc.Strategy({section: {name: value}} if section else {name: value})


def test_unknown_names_are_answered() -> None:
    made = oc.Strategy()
    with pytest.raises(StrategyError, match=r"has no 'sharding\.stag'; did you mean 'stage'\?"):
        made.sharding.stag = 2
    with pytest.raises(AttributeError, match=r"has no 'shardings'; did you mean 'sharding'\?"):
        _ = made.shardings
    with pytest.raises(StrategyError, match=r"In its place: pipeline\.degree"):
        made.pipeline = {"pp_degree": 2}
    said = [made, *SECTIONS.values()]
    assert sum(len(part.elsewhere) for part in said) > 40
    for part in said:
        for name in part.elsewhere:
            with pytest.raises(StrategyError, match=f"has no '{re.escape(part.path + name)}'. In its place: "):
                setattr(part, name, True)


def test_what_takes_the_place_of_other_names_exists() -> None:
    for part in [oc.Strategy(), *SECTIONS.values()]:
        for instead in part.elsewhere.values():
            for section, name in re.findall(
                r"\b(sharding|pipeline|recompute|amp|gradient_merge|fused_passes)\.(\w+)", instead
            ):
                assert hasattr(SECTIONS[section], name), instead
            for name in re.findall(r"\boc\.(\w+)", instead):
                assert hasattr(oc, name), instead
            for name in re.findall(r"\bengine\.(\w+)", instead):
                assert hasattr(oc.Engine, name), instead


def test_several_fields_are_set_all_or_none() -> None:
    made = oc.Strategy({"sharding": {"enable": True, "stage": 2}}, seed=3)
    with pytest.raises(StrategyError):
        made.update({"seed": 4, "amp": {"dtype": "int8"}})
    assert made.seed == 3 and made.sharding.stage == 2
    made.sharding = {"enable": True}  # the rest of a dict are the defaults
    assert made.sharding.stage == 1


def test_copies_are_apart_and_an_engines_cannot_be_changed() -> None:
    made = oc.Strategy(sharding={"enable": True})
    for other in (made.copy(), copy.copy(made), copy.deepcopy(made), oc.Strategy(made)):
        assert other == made and other.sharding is not made.sharding
        other.sharding.stage = 3
        assert made.sharding.stage == 1 and other != made
    section = strategy.Sharding(enable=True)
    made.sharding = section
    section.stage = 2
    assert made.sharding.stage == 1
    model = nn.Linear(2, 2)
    engine = oc.Engine(model, nn.MSELoss(), SGD(model.parameters(), lr=0.1), strategy=made)
    with pytest.raises(StrategyError, match="is set too late: the strategy belongs to an Engine"):
        engine.strategy.amp.enable = True
    made.amp.enable = True  # which is the user's own
    assert not engine.strategy.amp.enable


def test_json(tmp_path: Path) -> None:
    made = oc.Strategy(
        sharding={"enable": True, "stage": 3, "degree": 4}, recompute={"enable": True, "checkpoints": ("a", "b.*")},
        amp={"enable": True, "init_loss_scaling": 8}, pipeline={"schedule_mode": "zb-v", "vpp_degree": 2}, seed=1,
    )  # fmt: skip
    (tmp_path / "strategy.json").write_text(made.to_json())
    for given in (made.to_json(), tmp_path / "strategy.json", str(tmp_path / "strategy.json")):
        assert oc.Strategy.from_json(given) == made
    assert made.pipeline.schedule_mode == "ZBV" and made.amp.init_loss_scaling == 8.0
    faults = {
        '"stage": 9': ('"stage": 3', r"strategy\.json:6: Strategy: sharding\.stage=9: want one of 1, 2, 3"),
        '"stge": 3': ('"stage": 3', r"strategy\.json:6: .*has no 'sharding\.stge'; did you mean 'stage'"),
        '"version": 2': ('"version": 1', r"strategy\.json:3: .*version 2 is newer"),
        '"sed": 1': ('"seed": 1', r"has no field 'sed'; did you mean 'seed'\?"),
        '"onecard": "Plan"': ('"onecard": "Strategy"', "'onecard' is 'Plan'"),
    }
    for wrong, (right, said) in faults.items():
        (tmp_path / "strategy.json").write_text(made.to_json().replace(right, wrong))
        with pytest.raises(PlanError, match=said):
            oc.Strategy.from_json(tmp_path / "strategy.json")


PLANS = [
    oc.Plan(),
    oc.Plan(dp=4, zero=2, parameters="float32", compute="float32"),
    oc.Plan(
        dp=8, zero=3, replicas=2, tp=2, pp=4, schedule="ZBV", virtual=2, microbatches=8, microbatch=2, recompute="full"
    ),
    oc.Plan(dp=2, microbatches=8, compute="bfloat16", parameters="float32", compiled=True, recompute="operators"),
    oc.Plan(dp=2, zero=1, offload=True, parameters="float16", compute="float16"),
    oc.Plan(pp=2, schedule="F-then-B", microbatches=4, placements=(("*.weight", "tp: Shard(0)"),), tp=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_a_plan_and_a_strategy_say_the_same(plan: oc.Plan) -> None:
    made = oc.Strategy.of_plan(plan)
    assert made.to_plan(plan) == plan
    assert oc.Strategy.of_plan(made.to_plan(plan)) == made


def test_what_a_strategy_cannot_say_of_a_plan() -> None:
    for plan, field in (
        (oc.Plan(cp=2), "cp"),
        (oc.Plan(recompute="selective"), "recompute"),
        (oc.Plan(recompute="full", recompute_blocks=2), "recompute_blocks"),
        (oc.Plan(pp=2, stages=(1, 2)), "stages"),
        (oc.Plan(master=False), "parameters"),
        (oc.Plan(parameters="float8_e4m3fn"), "parameters"),
        (oc.Plan(parameters="float32", compute="tfloat32"), "compute"),
    ):
        with pytest.raises(StrategyError, match=rf"Strategy\.of_plan: {field}=") as caught:
            oc.Strategy.of_plan(plan)
        assert caught.value.field == field
    with pytest.raises(StrategyError, match=r"pipeline\.degree=-1: how many ranks"):
        oc.Strategy(pipeline={"enable": True}).to_plan()
    with pytest.raises(StrategyError, match=r"sharding\.degree=3: does not divide dp=4"):
        oc.Strategy(sharding={"enable": True, "degree": 3}).to_plan(oc.Plan(dp=4))


# One strategy for each row of the table of refusals.
TOGETHER = [
    {"pipeline": {"enable": True}, "gradient_merge": {"enable": True, "k_steps": 4}},
    {"amp": {"enable": True, "level": "O2"}},
    {"amp": {"enable": True, "level": "O2", "dtype": "float16"}, "sharding": {"enable": True}},
    {"amp": {"enable": True, "custom_white_list": ["softmax"], "custom_black_list": ["softmax", "linear"]}},
    {"fused_passes": {"enable": True}, "recompute": {"enable": True, "memory_limit": 1000}},
    {"pipeline": {"enable": True, "schedule_mode": "ZBV"}},
    {"fused_passes": {"without": ["glue"]}},
]


@pytest.mark.parametrize(
    ("config", "refusal"), [*zip(TOGETHER, refused.REFUSALS, strict=True)], ids=range(len(TOGETHER))
)
def test_what_does_not_go_together_is_refused_by_name(config: dict[str, object], refusal: refused.Refusal) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(StrategyError, match=re.escape(refusal.why)) as caught:
        oc.Engine(model, nn.MSELoss(), SGD(model.parameters(), lr=0.1), strategy=config)
    assert all(field in str(caught.value) for field in refusal.fields) and caught.value.field == refusal.fields[0]
    for field in refusal.fields:  # each is a field
        part, _, name = field.rpartition(".")
        assert name in (SECTIONS[part].checks if part else oc.Strategy.checks)


def test_the_page_lists_every_refusal() -> None:
    page = (Path(__file__).parents[1] / "docs" / "howto" / "engine.md").read_text(encoding="utf-8")
    shown = page.split("<!-- refusals -->")[1].split("<!-- end -->")[0].strip()
    assert shown == refused.table()


def test_every_field_has_a_check() -> None:
    for part in [oc.Strategy(), *SECTIONS.values()]:
        assert isinstance(part, Checked) and set(part.as_dict()) == set(part.checks)
