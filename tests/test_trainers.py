"""Other libraries' trainers on two ranks, beside one card: the same numbers, the same files, each written once."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import trainer_programs as programs
from amounts import PROOF
from test_auto import folders, ran, several

import onecard as oc
from onecard.integrations import one_card
from onecard.testing import run_ranks

NUMBER = re.compile(r"\d+\.\d+")
ZERO = {"zero 1": {"dp": 2, "zero": 1}, **({"dp": {"dp": 2}, "zero 2": {"dp": 2, "zero": 2}} if PROOF else {})}
BERT = {**ZERO, "zero 3": {"dp": 2, "zero": 3}, "tp": {"tp": 2, "placements": programs.BERT_TP}}
NET = {**ZERO, "zero 3": {"dp": 2, "zero": 3}, "tp": {"tp": 2, "placements": programs.NET_TP}}
LORA = {**ZERO, "zero 3": BERT["zero 3"], "tp": {"tp": 2, "placements": programs.LORA_TP}}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("transformers_trainer", "transformers accelerate", BERT),
    ("transformers_habits", "transformers accelerate", {"zero 1": BERT["zero 1"], "tp": BERT["tp"]}),
    ("accelerate_loop", "accelerate", NET),
    ("lightning_trainer", "lightning torchmetrics", NET),
    ("lightning_fabric", "lightning", NET),
    ("peft_lora", "peft transformers accelerate", LORA),
    ("torchmetrics_values", "torchmetrics", NET),
    ("dashboards", "tensorboard", NET),
    ("wandb_offline", "wandb", {"zero 1": NET["zero 1"]}),
    ("timm_script", "timm torchvision", ZERO),
]
LONG = (
    "transformers_habits",
    "lightning_fabric",
    "peft_lora",
    "torchmetrics_values",
)  # each rank imports what they take


def needed(libraries: str) -> None:
    for library in libraries.split():
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install 'onecard[test]' brings all but timm and wandb")


def written(folder: Path) -> set[str]:
    """The files below a folder, without what in their names is a time, a process or a count."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {re.sub(r"\d{3,}[\w.]*", "#", re.sub(r"-[a-z0-9]{8}(?=/|\.wandb)", "-#", name)) for name in names}


def on_rank(name: str, plans: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What a program sees on this rank under each plan."""
    os.environ.pop("WANDB_SERVICE", None)  # of the process that started the ranks
    found = {}
    for label, plan in plans.items():
        os.chdir(folder / label)
        with one_card(oc.Plan(per_host=0, **plan)):
            found[label] = getattr(programs, name)()
    return found


def assert_near(found: Any, wanted: Any, where: str = "") -> None:
    """Equal, floats to 1e-5."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            assert_near(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), where
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_near(a, b, f"{where}[{i}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-5, abs=2e-6), where
    else:
        assert found == wanted, where


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "libraries", "plans"),
    [pytest.param(*c, marks=pytest.mark.proof if c[0] in LONG else ()) for c in CASES],
    ids=[name for name, *_ in CASES],
)
def test_as_on_one_card(name, libraries, plans, tmp_path, monkeypatch):
    needed(libraries)
    if not PROOF:  # one plan for each library, of all kinds of plans
        at = [case[0] for case in CASES].index(name) % len(plans)
        plans = dict([[*plans.items()][at]])
    for label in ("one", *plans):
        (tmp_path / label).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    wanted = getattr(programs, name)()
    for found in run_ranks(on_rank, 2, name, plans, tmp_path, timeout=240.0):
        assert_near(found, dict.fromkeys(plans, wanted))
    for label in plans:
        assert written(tmp_path / label) == written(tmp_path / "one")


PAGE = Path(__file__).parents[1] / "docs" / "howto" / "trainers.md"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("title", "libraries"),
    [
        ("transformers' `Trainer`", "transformers accelerate"),
        ("Lightning", "lightning"),
        ("accelerate", "accelerate"),
    ],
)
def test_a_program_of_the_page_without_its_two_lines_under_auto(tmp_path, title, libraries):
    """What `onecard run --auto` makes of a program for one card that leaves its loop to a trainer."""
    needed(libraries)
    section = PAGE.read_text().partition(f"## {title}\n")[2]
    block = section.partition("```diff")[2].partition("\n")[2].partition("```")[0]
    text = "\n".join(line[2:] for line in block.splitlines() if not line.startswith("+"))
    assert "onecard" not in text
    quiet = "import warnings\nwarnings.simplefilter('ignore')  # of the libraries\n"
    one, other = folders(tmp_path, quiet + text, "one", "several")
    wanted = ran(one, "program.py").splitlines()
    found = several(other, {"dp": 2, "zero": 1}).splitlines()
    assert len(wanted) == len(found) > 1
    for mine, theirs in zip(found, wanted, strict=True):
        numbers = ([float(n) for n in NUMBER.findall(line)] for line in (mine, theirs))
        assert next(numbers) == pytest.approx(next(numbers), abs=1.1e-4), (mine, theirs)  # four places are printed
    assert written(other) - {"program.py"} == {name for name in written(one) if name != "program.py"} != set()
