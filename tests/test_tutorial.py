"""The tutorial, walked: in an empty folder, with the launcher, also past its Ctrl-C."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import tutorial


@pytest.mark.proof
def test_the_tutorial_is_walked(tmp_path):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = tutorial.walk(tmp_path, {"PATH": path})
    print("\n".join(said))
    assert len(said) >= 8 and sum(line.endswith("(stopped)") for line in said) == 1
    assert (tmp_path / "logs" / "rank1.log").exists()


def test_what_a_walk_prints_is_compared():
    page = "epoch  2  loss 2.636\nepoch  5  loss 0.647\nTyger\n"
    assert tutorial.alike("a plan\nepoch  2  loss 2.636\nepoch  5  loss 0.648\nTyger\n", page)
    assert tutorial.alike("epoch  5  loss 0.647\nTyger\n", page)  # resumed
    assert not tutorial.alike("epoch  5  loss 0.657\nTyger\n", page)
    assert not tutorial.alike("epoch  5  loss 0.647\nTiger\n", page)
    assert not tutorial.alike("Tyger\n", page)
