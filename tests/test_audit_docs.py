"""The page on audits is true: its commands, run on its files, print what it says."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from test_docs import ROOT, difference, read_blocks

from onecard import cli

PAGE = ROOT / "docs" / "howto" / "audit.md"
BLOCKS = read_blocks(PAGE)
FILES = {block.options["file"]: block.body for block in BLOCKS if "file" in block.options}
COMMANDS = [(block.body.strip(), after) for block, after in pairwise(BLOCKS) if block.language == "bash"]


def test_the_page_has_files_and_commands() -> None:
    assert {*FILES} == {"train.sh", "fsdp.yaml"} and len(COMMANDS) >= 4


@pytest.mark.share(1)
@pytest.mark.parametrize(("command", "after"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_commands_print_what_the_page_says(
    command: str, after, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    status = cli.main(words[1:])
    out, err = capsys.readouterr()
    assert status == (1 if "train.sh" in words else 0), err
    if after.language != "text":
        return
    said = err if "errors" in after.options else out
    if "GiB at its peak" in after.body:  # figures of prices are held elsewhere
        said, after = figures_left_out(said), figures_left_out(after.body)
        assert said == after
        return
    assert difference(said, after.body) is None


def figures_left_out(text: str) -> list[str]:
    """Lines without numbers and what pads them."""
    return [re.sub(r"[\d.,]+|m?s\b|[ ━─]+", " ", line).strip() for line in text.strip().splitlines()]
