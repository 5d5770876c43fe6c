"""examples/moe: a mixture on real text prints the same on one card and on two ranks, and its balance is drawn."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch.testing import assert_close

from onecard.testing import run_ranks

FOLDER = Path(__file__).parents[1] / "examples" / "moe"
TINY = {"steps": 6, "batch_size": 4, "time": 16, "every": 2}


def trained(out: str) -> list[float]:
    sys.path.insert(0, str(FOLDER))
    try:
        program = runpy.run_path(str(FOLDER / "train.py"))
        return program["train"](program["TrainArgs"](**TINY, out=Path(out)))
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.proof
def test_two_ranks_print_what_one_card_prints(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    printed: list[list[str]] = []
    losses: list[Any] = []
    for ranks in (1, 2):
        losses.append(run_ranks(trained, ranks, str(tmp_path)))
        said = capfd.readouterr().out
        printed.append(re.findall(r"\[rank 0\] (step .*|  expert .*)", said))
    for of_rank in losses[1]:
        assert_close(torch.tensor(of_rank), torch.tensor(losses[0][0]), rtol=1e-5, atol=0)
    assert printed[0] == printed[1] and len(printed[0]) == 4 + 2 * 8
    picture = ElementTree.parse(tmp_path / "balance.svg").getroot()
    areas = picture.findall("{http://www.w3.org/2000/svg}polygon")
    assert len(areas) == 2 * 8 and all(len(area.get("points", "").split()) == 2 * TINY["steps"] for area in areas)
