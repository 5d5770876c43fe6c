"""What is released: the README of an index has no dead links, one place has the version, and what the pages name is there."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import onecard

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/wheel.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("hatchling")
    sys.path.insert(0, str(ROOT))
    try:
        import hatch_build
    finally:
        sys.path.remove(str(ROOT))
    return hatch_build


def relative_links(text: str) -> list[str]:
    return [t for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]


@pytest.mark.parametrize("address", ["", "https://forge.example/onecard"])
def test_the_readme_of_an_index_has_no_relative_links(hook, address):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(relative_links(readme)) > 10
    text = hook.for_an_index(readme, address, "0.1.0")
    assert relative_links(text) == [] and "run ranks=" not in text
    assert ("![A one-card program" in text) is bool(address)
    assert text.count(hook.PAGES) == (not address)  # else nobody could find them
    assert text.count(f"]({address}/blob/v0.1.0/docs/") > 10 if address else "](" not in text
    assert hook.for_an_index("```\n[a](b)\n```\n[a](b)", "", "1") == "```\n[a](b)\n```\na"


def test_urls_are_made_of_one_address(hook):
    assert hook.addresses("", "0.1.0") == {}
    assert all(
        url.startswith("https://forge.example/onecard")
        for url in hook.addresses("https://forge.example/onecard", "1").values()
    )
    assert PROJECT["tool"]["onecard"]["repository"] == "" or "://" in PROJECT["tool"]["onecard"]["repository"]


def test_the_version_has_one_place():
    assert {"version", "readme", "urls"} <= {*PROJECT["project"]["dynamic"]} and "version" not in PROJECT["project"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[?([^\]\s]+)\]?(?: - (\d{4}-\d{2}-\d{2}))?$", changes, re.MULTILINE)
    assert headings[0] == ("Unreleased", "") and all(date for _, date in headings[1:])
    assert [version for version, _ in headings[1:2]] in ([], [onecard.__version__])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {*re.findall(r"^### (.+)$", changes, re.MULTILINE)} <= kinds


def test_a_job_proves_the_wheel_on_every_python_that_is_named():
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert WORKFLOW["jobs"]["wheel"]["strategy"]["matrix"]["python"] == named
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"


def test_issue_templates_are_read():
    templates = [p for p in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if p.name != "config.yml"]
    assert len(templates) >= 3
    for path in templates:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form["name"] and form["description"] and any(part["type"] == "textarea" for part in form["body"]), (
            path.name
        )


def test_paths_that_contributors_are_told_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"(?:src|tests)/[\w/.]+", text)
    assert len(paths) > 8 and [path for path in paths if not (ROOT / path.rstrip(".")).exists()] == []
