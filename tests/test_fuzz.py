"""The generator of random programs: a part of ``make fuzz``, and planted faults that it finds and cuts down."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from amounts import amount, seeds

from onecard.comm.agree import claims
from onecard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))
from fuzz import manual, stages
from fuzz.crew import run_many
from fuzz.cut_down import cut_down, runnable
from fuzz.draw import draw
from fuzz.plants import PLANTS
from fuzz.program import MESHES, Program, size_of
from fuzz.twin import Outcome, one_card
from fuzz.wide import is_rounding, width

TANH = Program(
    seed=0,
    ranks=(0, 1),
    setup=("model = nn.ModuleDict()", "model['m1'] = nn.Linear(3, 4)", "lay(model, cuts)"),
    body=(
        "x1 = put(normal(1 + step, 5, 3), Partial())",
        "v1 = model['m1'](x1)",
        "v2 = x1 * 2.0",
        "v3 = torch.tanh(v2)",
        "v4 = v3.sum() + v1.sum()",
        "loss = v4 * 0.5",
        "loss.backward()",
    ),
    steps=2,
    look=False,
)


@pytest.mark.proof
def test_random_programs_are_those_of_one_card():
    programs = [draw(seed) for seed in seeds(0, 14, 300)]
    assert {p.ranks for p in programs} == set(MESHES)
    failed = [(p, o) for p, o in run_many(programs) if o.kind not in ("right", "refused")]
    assert not failed, "\n\n".join(f"seed {p.seed}: {o.why}\n{runnable(p, o)}" for p, o in failed)


@pytest.mark.proof
def test_a_planted_fault_is_found_and_cut_down_to_its_line():
    plant = "a pending sum passes tanh"
    ((_, right),) = run_many([TANH])
    assert right.kind == "right", right
    ((program, outcome),) = run_many([TANH], plant=plant)
    assert outcome.kind == "wrong" and "differs" in outcome.why
    small, why = cut_down(program, outcome, plant=plant)
    assert why.kind == "wrong" and small.lines[why.at].startswith("v3 = torch.tanh(v2)")
    assert small.lines == ("x1 = put(normal(1 + step, 5, 3), Partial())", "v2 = x1 * 2.0", "v3 = torch.tanh(v2)")
    text = runnable(small, why)
    compile(text, "cut down", "exec")
    assert "v3 = torch.tanh(v2)  # rank 0: v3 [5, 3] differs" in text


def test_the_digest_takes_any_strides():
    """Found with ONECARD_CHECK=1: one element of a larger tensor is contiguous, whatever its stride."""
    for x in (torch.ones(()).expand(1), torch.arange(6.0)[2::5], torch.ones(0, 3), torch.arange(6.0).view(2, 3).T):
        assert claims.digest(x) == claims.digest(x.clone(memory_format=torch.contiguous_format))


def test_a_seed_is_a_program():
    one, again, other = draw(5), draw(5), draw(6)
    assert one == again and one.lines != other.lines
    assert size_of(draw(5, (0, 1)).ranks) == 2
    assert len(set(PLANTS)) >= 5


def test_statements_are_left_out_where_they_stand():
    cut = TANH.without([0, 3, 9])
    assert cut.setup == TANH.setup[1:] and cut.body == TANH.body[1:6]
    assert one_card(replace(cut, setup=()))[0] == Outcome("void", "NameError: name 'model' is not defined", 0, 0)


@pytest.mark.parametrize("seed", range(3))
def test_programs_train(seed):
    program = draw(seed)
    assert any(".backward(" in line for line in program.body) and any("opt.step(" in line for line in program.body)


@pytest.mark.proof
def test_random_programs_of_the_manual_level_are_those_of_one_card():
    chosen, count = [], {}  # one of each mix of axes, or several
    for seed in seeds(0, 100, 200):
        degrees = str(manual.draw(seed).degrees)
        count[degrees] = count.get(degrees, 0) + 1
        chosen += [seed] * (count[degrees] <= amount(1, 8))
    assert not manual.run(chosen)


@pytest.mark.share(1)
@pytest.mark.parametrize("plant", manual.PLANTS)
def test_a_planted_fault_of_the_manual_level_is_found(plant):
    seed = next(
        s for s in range(100) if manual.draw(s).parallel and manual.draw(s).ranks == 2 and manual.draw(s).head == "tied"
    )
    assert list(manual.run([seed], plant)) == [seed]


def nearly(given: list[int], fault: float, wide: bool = False) -> dict[int, str]:
    """A sum that cancels: rounding in float32; and a fault on top of it."""
    with width(wide) as finer:
        x = torch.ones(()) * 1e5
        found = ((x + 0.1) - x) * (1 + fault)
        return {given[0]: "off"} if (found - 0.1).abs() > 1e-5 * finer else {}


def test_rounding_is_told_from_a_fault():
    assert any(run_ranks(nearly, 1, [3], 0.0)) and any(run_ranks(nearly, 1, [3], 0.01))
    assert is_rounding(nearly, 1, [3], 0.0, True) and not is_rounding(nearly, 1, [3], 0.01, True)
    assert stages.main(stages.Options(seed=9030, count=1)) == 0  # a norm of equal numbers: wrong in float32 alone
