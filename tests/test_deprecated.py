"""What goes away: told at the user's line with the call that works, until the version that has it no more."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

import onecard as oc
from onecard import _deprecated
from onecard._deprecated import TABLE, Old

ROOT = Path(__file__).parents[1]


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def faults(table: tuple[Old, ...], now: str, changelog: str) -> list[str]:
    """What is wrong with a table at a version: each row by its name."""
    deprecated = "\n".join(re.findall(r"^### Deprecated\n(.*?)(?=^##)", changelog, re.MULTILINE | re.DOTALL))
    said = []
    for old in table:
        since, gone = version(old.since), version(old.gone)
        if version(now) >= gone:
            said.append(f"{old.name} is gone in {old.gone}: take out its row, and list it under Removed")
        if gone < (since[0], since[1] + 1, 0) and gone < (since[0] + 1, 0, 0):
            said.append(f"{old.name} works for less than a minor version")
        if since > version(now):
            said.append(f"{old.name} warns since a version that is not there yet")
        if old.name not in deprecated:
            said.append(f"{old.name} is not under Deprecated")
    return said


def test_no_row_outlives_its_version():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert TABLE and faults(TABLE, oc.__version__, changelog) == []
    gone = max(old.gone for old in TABLE)
    assert len(faults(TABLE, gone, changelog)) == len(TABLE)  # then this test fails, until the rows are taken out
    row = Old("onecard.x", "onecard.y", "0.1.0", "0.2.0")
    listed = "### Deprecated\n\n- `onecard.x`\n\n## [0.1.0]\n"
    assert faults((row,), "0.1.9", listed) == []
    assert len(faults((replace(row, gone="0.1.1"),), "0.1.0", listed)) == 1
    assert len(faults((replace(row, since="0.2.0", gone="0.3.0"),), "0.1.0", listed)) == 1
    assert len(faults((row,), "0.1.0", "### Added\n- `onecard.x`\n## x\n")) == 1


@pytest.mark.proof
def test_modules_by_old_addresses(tmp_path):
    """By attribute, by import, from a file of the user's: the warning stands at that file's line."""
    lines = [
        "import onecard as oc",
        "oc.graph",
        "from onecard import message_report",
        "import onecard.parallel.zero",
        "import onecard.modules",
    ]
    (tmp_path / "program.py").write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    told = re.findall(r"program\.py:(\d+): DeprecationWarning: (\S+) is deprecated .* write (\S+)", done.stderr)
    assert told == [
        ("2", "onecard.graph", "onecard.static"), ("3", "onecard.message_report", "onecard.reports.messages"),
        ("4", "onecard.parallel", "onecard.train"), ("5", "onecard.modules", "onecard.train.modules"),
    ]  # fmt: skip
    for old in _deprecated.modules().values():
        importlib.import_module(old.new)


def made() -> types.ModuleType:
    """A module as one of ours, with what a table may name."""
    module = types.ModuleType("onecard.made_up")
    exec(
        "def lay(x, *, axis=0): return x, axis\n"
        "class Job:\n    def fit(self, x, epochs=1): return x, epochs\n"
        "def __getattr__(name): raise AttributeError('refused: ' + name)\n",
        module.__dict__,
    )
    return module


def test_names_and_arguments(monkeypatch):
    monkeypatch.setitem(sys.modules, "onecard.made_up", module := made())
    _deprecated.install([
        Old("onecard.made_up.put", "onecard.made_up.lay", "0.1.0", "0.2.0", "onecard.made_up.lay(x, axis=0)"),
        Old("onecard.made_up.lay(dim=)", "onecard.made_up.lay(axis=)", "0.1.0", "0.2.0"),
        Old("onecard.made_up.Job.fit(rounds=)", "onecard.made_up.Job.fit(epochs=)", "0.1.0", "0.2.0"),
    ])  # fmt: skip
    with pytest.warns(
        DeprecationWarning,
        match=r"put is deprecated since onecard 0\.1\.0, and gone in 0\.2\.0; write .*lay\(x, axis=0\)",
    ) as told:
        assert module.put is module.lay
    assert told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=r"lay\(dim=\) is .*; write onecard\.made_up\.lay\(axis=\)"):
        assert module.lay(1, dim=2) == (1, 2)
    with pytest.warns(DeprecationWarning, match=r"fit\(rounds=\)"):
        assert module.Job().fit(1, rounds=3) == (1, 3)
    assert module.lay(1, axis=2) == (1, 2) and module.Job().fit(1, 4) == (1, 4)  # nothing is told
    with pytest.raises(TypeError, match="dim= and axis= are one argument: leave dim= out"):
        module.lay(1, dim=2, axis=3)
    with pytest.raises(AttributeError, match="refused: nothing"):
        _ = module.nothing


def test_a_value_by_its_old_name():
    with pytest.warns(DeprecationWarning, match="without='common_subexpressions'"):
        assert _deprecated.value("onecard.to_static", "without", "equal") == "common_subexpressions"
    assert _deprecated.value("onecard.to_static", "without", "inplace") == "inplace"
    assert _deprecated.value("onecard.record", "without", "equal") == "equal"
