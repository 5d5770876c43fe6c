"""The page of what must be modified is what the programs say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "seeds"))
import what_changes_003 as what  # noqa: E402 - beside the programs


def test_the_page_has_the_tables():
    page = (ROOT / "docs" / "what-must-be-modified.md").read_text(encoding="utf-8")
    shown = page.split("<!-- tables -->")[1].split("<!-- end -->")[0].strip()
    assert shown == what.tables(), "python examples/seeds/what_changes_003.py prints the tables anew"


@pytest.mark.parametrize("strategy", what.STRATEGIES.values())
def test_forward_stays_at_the_static_level(strategy):
    assert what.changed(f"static_{strategy}_003")["`forward`"] == []


def test_the_one_card_program_is_itself():
    assert not any(what.changed(what.ONE_CARD).values())


@pytest.mark.parametrize(
    ("old", "new", "column"),
    [
        ("        x = self.relu(x)", "        x = self.relu(x) * 2", "`forward`"),
        ("        self.relu = nn.ReLU()", "        self.relu = nn.GELU()", "`__init__`"),
        ("            avg_loss.backward()", "            (avg_loss * 2).backward()", "loop"),
        ("    loss_func =", "    mesh = ProcessMesh([0])\n    loss_func =", "environment and strategy"),
    ],
)
def test_a_change_is_seen(tmp_path, monkeypatch, old, new, column):
    text = (what.HERE / "single_card_003.py").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "single_card_003.py").write_text(text)
    (tmp_path / "other.py").write_text(text.replace(old, new))
    monkeypatch.setattr(what, "HERE", tmp_path)
    found = what.changed("other")
    assert [name for name, rows in found.items() if rows] == [column]
