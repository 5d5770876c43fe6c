"""The documentation is true: its programs run and print what it says, its links lead somewhere, its commands exist.

A fenced block is run if its info string says so:

    ```python run                         one process; blocks of one page share their names, from top to bottom
    ```python run ranks=2 file=train.py   a program of its own on real ranks; what rank 0 prints counts
    ```diff run ranks=2                   with its + lines on ranks and in a world of one, and, if it has no - lines, without
                                          them on one card; all must print the same
    ... needs=lightning,peft              skipped where one of these libraries is not installed
    ```python run tests                   a test file; its test functions are called

If the next fenced block is a ```text, that is what it prints: the words exactly, the numbers to a relative 1e-4.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import linecache
import math
import os
import re
import shlex
import warnings
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest
import torch.distributed as dist
import tyro

import onecard as oc
from onecard import elsewhere
from onecard.commands import estimate, prove
from onecard.launch._options import read, split
from onecard.rules.registry import rows
from onecard.testing import run_ranks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?")
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block; `prints` is the text block that follows it, None if another block does."""

    page: Path
    line: int
    language: str
    options: dict[str, str]
    body: str
    prints: str | None

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def read_blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    found = list(_FENCE.finditer(source))
    blocks = []
    for match, after in zip_longest(found, found[1:]):
        words = match["info"].split()
        prints = after["body"] if after is not None and after["info"].strip() == "text" else None
        options = dict(word.partition("=")[::2] for word in words[1:])
        line = source.count("\n", 0, match.start()) + 2
        blocks.append(Block(page, line, words[0] if words else "", options, match["body"], prints))
    return blocks


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
RUN = [block for block in BLOCKS if "run" in block.options]
ON_RANKS = [block for block in RUN if "ranks" in block.options]
TESTS = [block for block in RUN if "tests" in block.options]
HERE = [block for block in RUN if block not in ON_RANKS and block not in TESTS]


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def run_program(source: str, name: str) -> str:
    """Run a program as a script called `name` and return what it prints; a rank of `run_ranks` calls this too."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, name, "exec", dont_inherit=True), {"__name__": "__main__"})
    return printed.getvalue()


def run_on_rank(source: str, name: str, store: str, others: bool = False) -> str:
    """``run_program`` where no process group is there yet, as under ``onecard run``: the program's first message makes it.

    ``others``: it uses other libraries, whose warnings are theirs.
    """
    if others:
        warnings.simplefilter("ignore")
    dist.destroy_process_group()
    os.chdir(Path(store).parent)  # what a program writes is gone with the test
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    begin, here = dist.init_process_group, {"init_method": f"file://{store}", "rank": rank, "world_size": size}
    dist.rendezvous = lambda *args, **kwargs: iter([(dist.FileStore(store, size), rank, size)])  # type: ignore[assignment]
    dist.init_process_group = lambda *args, **kwargs: begin(  # type: ignore[assignment]
        *args, **kwargs if "store" in kwargs else {**here, **kwargs}
    )
    return run_program(source, name)


def run_alone(source: str, name: str, folder: str) -> str:
    """``run_program`` as ``python train.py`` does: no launcher has been here."""
    dist.destroy_process_group()
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    warnings.simplefilter("ignore")
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    return run_program(source, name)


def difference(printed: str, expected: str) -> str | None:
    """What differs between two texts, words exactly and numbers nearly; None if nothing does."""
    mine, wanted = ([line.rstrip() for line in t.strip("\n").splitlines()] for t in (printed, expected))
    for left, right in zip(mine, wanted, strict=False):
        if _NUMBER.sub("#", left) != _NUMBER.sub("#", right):
            return f"printed {left!r}, the page says {right!r}"
        for a, b in zip(_NUMBER.findall(left), _NUMBER.findall(right), strict=True):
            if not math.isclose(float(a), float(b), rel_tol=1e-4, abs_tol=1e-6):
                return f"printed {a}, the page says {b}, in {right!r}"
    if len(mine) != len(wanted):
        return f"printed {len(mine)} lines, the page has {len(wanted)}; printed:\n{printed}"
    return None


def without_marks(diff: str, added: bool) -> str:
    """The program before (or, with `added`, after) a diff whose lines start with two characters of margin."""
    lines = [line for line in diff.splitlines() if not line.startswith("-" if added else "+")]
    return "\n".join(line[2:] for line in lines) + "\n"


@pytest.fixture
def registry():
    """The table of rules; rows that a page adds are gone after it."""
    before = dict(rows)
    yield rows
    rows.clear()
    rows.update(before)


@pytest.mark.parametrize("page", [p for p in PAGES if any(b.page == p for b in HERE)], ids=relative)
def test_programs_of_a_page_run_in_one_process(page, registry, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a page writes is gone with the test
    names: dict[str, object] = {"__name__": "docs"}
    for block in (b for b in HERE if b.page == page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.body, block.name, "exec", dont_inherit=True), names)
        if block.prints is not None:
            found = difference(printed.getvalue(), block.prints)
            assert found is None, f"{block.name}: {found}"


@pytest.mark.parametrize("block", ON_RANKS, ids=lambda b: b.name)
def test_programs_run_on_ranks(block, tmp_path):
    for library in filter(None, block.options.get("needs", "").split(",")):
        pytest.importorskip(library, reason=f"{library} is not installed: pip install 'onecard[trainers]'")
    diff = block.language == "diff"
    source = without_marks(block.body, added=True) if diff else block.body
    name, ranks = block.options.get("file", "train.py"), int(block.options["ranks"])
    printed = run_ranks(run_on_rank, ranks, source, name, str(tmp_path / "store"), "needs" in block.options)[0]
    if diff:
        alone = {"a world of one": source}
        if not re.search(r"^-", block.body, re.MULTILINE):
            alone["one card"] = without_marks(block.body, added=False)
        for where, program in alone.items():
            if "needs" in block.options:  # what one_card() makes of a process stays so
                said = run_ranks(run_alone, 1, program, name, str(tmp_path / "alone"))[0]
            else:
                said = run_program(program, "train.py")
            found = difference(said, printed)
            assert found is None, f"{block.name}: {where} and {block.options['ranks']} ranks differ: {found}"
    if block.prints is not None:
        found = difference(printed, block.prints)
        assert found is None, f"{block.name}: {found}"


@pytest.mark.parametrize("block", TESTS, ids=lambda b: b.name)
def test_test_files_pass(block, tmp_path, monkeypatch):
    name = f"page_{block.page.stem.replace('-', '_')}_{block.line}"
    (tmp_path / f"{name}.py").write_text(block.body, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    tests = [f for word, f in vars(importlib.import_module(name)).items() if word.startswith("test_")]
    assert tests
    for test in tests:
        test()


def test_the_comparison_of_texts_sees_faults():
    assert difference("loss 1.00001 on x\n", "loss 1.0 on x") is None
    assert difference("loss 1.1", "loss 1.0") and difference("a 1.0", "b 1.0") and difference("a\nb", "a")
    marked = "  a\n+ b\n- c\n"
    assert without_marks(marked, added=False) == "a\nc\n" and without_marks(marked, added=True) == "a\nb\n"


def headings(page: Path) -> set[str]:
    """The anchors of a page, made as GitHub makes them."""
    plain = _FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def dead_links(page: Path) -> list[str]:
    dead = []
    for match in _LINK.finditer(_FENCE.sub("", page.read_text(encoding="utf-8"))):
        target, _, anchor = match["target"].partition("#")
        if target.startswith(("http://", "https://")):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in headings(file)):
            dead.append(f"{relative(page)}: {match['target']}")
    return dead


def test_links_lead_somewhere(tmp_path, monkeypatch):
    assert [link for page in PAGES for link in dead_links(page)] == []
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("# A title\n[a](#a-title) [b](no.md) [c](page.md#none)", encoding="utf-8")
    assert dead_links(tmp_path / "page.md") == ["page.md: no.md", "page.md: page.md#none"]


def commands(language: str = "bash") -> list[tuple[str, list[str]]]:
    """(where, words) of every command line in the pages' shell blocks."""
    found = []
    for block in BLOCKS:
        if block.language == language:
            lines = block.body.replace("\\\n", " ").splitlines()
            found += [(block.name, shlex.split(line, comments=True)) for line in lines]
    return [(where, words) for where, words in found if words]


def test_make_targets_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {words[1] for _, words in commands() if words[0] == "make"}
    named |= set(re.findall(r"`make (\w+)`", "".join(p.read_text(encoding="utf-8") for p in PAGES)))
    assert {"train", "test"} <= named
    assert named <= targets


def test_commands_parse():
    said = [(where, words) for where, words in commands() if "onecard" in " ".join(words[:4]) and words[0] != "pip"]
    assert said
    for where, words in said:
        parse(where, words)


def parse(where: str, words: list[str]) -> None:
    if words == ["onecard", "--version"]:
        return
    if words[:3] == ["python", "-m", "onecard.rules.verify"]:
        from onecard.rules.verify.__main__ import VerifyOptions

        tyro.cli(VerifyOptions, args=words[3:])
        return
    if words[:2] == ["onecard", "audit"]:  # tests/test_audit_docs.py runs them
        from onecard.commands import audit

        tyro.cli(audit.Asked, args=words[2:])
        return
    if words[:2] == ["onecard", "simulate"]:
        from onecard.commands import simulate

        assert simulate.read(words[2:])[3].world > 1
        return
    if words[:2] == ["onecard", "estimate"]:
        tyro.cli(estimate.Asked, args=estimate.divided(words[2:])[0])
        return
    if words[:2] == ["onecard", "prove"]:
        tyro.cli(prove.Asked, args=estimate.divided(words[2:])[0])
        return
    assert words[:2] == ["onecard", "run"] or words[:3] == ["python", "-m", "onecard.launch"], (where, words)
    words = words[2 if words[0] == "onecard" else 3 :]
    if "--auto" in words:
        from onecard.commands.run import Asked

        words = Asked(words).rest
    ours, theirs = split(words)
    read(ours)
    assert theirs, f"{where}: no script"


def test_reference_lists_every_public_name_once():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    part = text.split("<!-- names of onecard -->")[1].split("<!-- end -->")[0]
    listed = re.findall(r"^\| \[`(\w+)`\]\(", part, re.MULTILINE)
    assert sorted(listed) == sorted(oc.__all__)
    for name in listed:
        (target,) = re.findall(rf"^\| \[`{name}`\]\(([^)]+)\)", part, re.MULTILINE)
        source = (ROOT / "docs" / target).resolve().read_text(encoding="utf-8")
        if name not in ("Shard", "Replicate", "Partial"):
            assert re.search(rf"^(class|def) {name}\b", source, re.MULTILINE), f"{name} is not defined in {target}"


@pytest.mark.parametrize(
    ("page", "library"),
    [
        ("from-paddle", "paddle.distributed"),
        ("from-torch", "torch.distributed.tensor"),
        ("from-torch", "torch.distributed"),
        ("from-torch", "deepspeed"),
        ("from-torch", "megatron.core"),
    ],
)
def test_pages_show_the_table_of_names_elsewhere(page, library):
    text = (ROOT / f"docs/howto/coming-{page}.md").read_text(encoding="utf-8")
    shown = text.split(f"<!-- names of {library} -->")[1].split("<!-- end -->")[0].strip()
    assert shown == elsewhere.table(elsewhere.ALL[library])
    for name in elsewhere.ALL[library]:
        assert name not in oc.__all__
        with pytest.raises(AttributeError, match=rf"onecard has no '{name}' \({library}|torch.distributed"):
            getattr(oc, name)


def test_names_in_the_place_of_others_exist():
    for names in elsewhere.ALL.values():
        for instead in names.values():
            for called in re.findall(r"\boc\.(\w+)", instead):
                assert called in oc.__all__ or called in ("checkpoint", "fleet", "differentiable"), instead


def test_figures_are_those_that_the_script_draws():
    names: dict[str, object] = {"__name__": "make", "__file__": str(ROOT / "docs/figures/make.py")}
    exec(compile((ROOT / "docs/figures/make.py").read_text(encoding="utf-8"), "make.py", "exec"), names)
    for name, draw in names["FIGURES"].items():  # type: ignore[attr-defined]
        assert (ROOT / "docs/figures" / name).read_text(encoding="utf-8") == draw(), f"run docs/figures/make.py: {name}"
