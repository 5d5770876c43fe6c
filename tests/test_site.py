"""The site: its navigation names every page, words are spelled, how-tos begin with the task; in a proof it is built and seen."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from browser import CHROMIUM, DRIVER, browser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TEXTS = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = load(DOCS / "theme" / "hooks.py")


def pages_of(nav: Any) -> list[str]:
    """The pages that a navigation names, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(entry)]


def faults_of_navigation(named: list[str], pages: set[str]) -> list[str]:
    twice = {page for page in named if named.count(page) > 1}
    return [
        *(
            f"{page} is in no navigation: name it in mkdocs.yml, or a how-to in docs/howto/README.md"
            for page in pages - {*named}
        ),
        *(f"the navigation names {page}, and there is none" for page in sorted({*named} - pages)),
        *(f"the navigation names {page} twice" for page in sorted(twice)),
    ]


def test_the_navigation_names_every_page():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    named = [page for page in pages_of(config["nav"]) if page != "api/"] + pages_of(hooks.tasks())
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert faults_of_navigation(named, pages | {*hooks.PAGES.values()}) == []
    assert all((ROOT / origin).exists() for origin in hooks.PAGES)
    assert len(faults_of_navigation(["a.md", "a.md", "b.md"], {"a.md", "c.md"})) == 3


def test_the_api_has_every_name_of_the_reference():
    import onecard as oc

    listed = [name for _, _, module, names in hooks.api() if module == "onecard" for name in names]
    assert sorted(listed) == sorted(oc.__all__)
    addresses = [uri for uri, *_ in hooks.api()]
    assert len(set(addresses)) == len(addresses) > 10
    assert "multirank" in hooks.public("testing") and "OnecardError" in hooks.public("errors")


def test_links_and_blocks_are_led_to_the_site():
    hooks._know("howto/start.md", "docs/howto/start.md")
    hooks._know("source/src/a.py.md", "src/a.py")
    hooks._know("index.md", "README.md")
    assert hooks.links("[a](../../src/a.py)", "howto/start.md", "docs/howto/start.md") == "[a](../source/src/a.py.md)"
    assert hooks.links("[a](docs/howto/start.md#x)", "index.md", "README.md") == "[a](howto/start.md#x)"
    assert hooks.links("[a](https://b) [c](#d)", "index.md", "README.md") == "[a](https://b) [c](#d)"
    block = hooks.FENCE.search("```python run ranks=2 file=a.py\nx\n```")
    assert hooks.fence(block) == '```python { title="a.py" }\nx\n```'
    block = hooks.FENCE.search("   ```text\n   x\n   ```")
    assert hooks.fence(block) == "    ```text\n    x\n    ```"


def test_docstrings_are_shown_as_code():
    text = (DOCS / "theme" / "docstrings.py").read_text(encoding="utf-8").replace("import griffe\n", "")
    names: dict[str, Any] = {}
    exec(text.partition("class Examples")[0], names)
    shown = names["as_sections"]("One ``x``.\n\n>>> 1\n1\n\nSource: a.\n\nExample:\n    >>> 2\n    2\n")
    assert (
        "```pycon\n>>> 1\n1\n```" in shown
        and "**Source:** a." in shown
        and "\nExamples:\n    >>> 2" in shown
        and "`x`" in shown
    )


# -- words and forms -------------------------------------------------------------------------------------------------------


def misspelled(*paths: Path) -> str:
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words", str(DOCS / "theme" / "words.txt")]
    return subprocess.run([*command, *map(str, paths)], capture_output=True, text=True).stdout


@pytest.mark.proof
def test_words_are_spelled_right(tmp_path):
    pytest.importorskip("codespell_lib")
    assert misspelled(*TEXTS, ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md", ROOT / "src") == ""
    (tmp_path / "a.md").write_text("teh recieved tensor")
    assert misspelled(tmp_path / "a.md").count("==>") == 2


LONG = 25
LATE = 40
"""Lines of a how-to's first program, and the line in which it begins, at most."""
OTHERWISE: dict[str, str] = {"words.md": "a look-up: each word has its answer"}
"""How-tos that begin otherwise, with the reason."""


def faults_of_beginning(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```", text, re.MULTILINE | re.DOTALL)
    if found is None:
        return [f"{page.name}: no program"]
    line, length = text.count("\n", 0, found.start()) + 1, found["body"].count("\n")
    before = text[: found.start()]
    return [
        *([f"{page.name}: the first program has {length} lines"] if length > LONG else []),
        *([f"{page.name}: the first program is in line {line}"] if line > LATE or before.count("\n## ") > 1 else []),
    ]


def test_how_tos_begin_with_the_task_and_a_short_program(tmp_path):
    pages = [p for p in sorted((DOCS / "howto").glob("*.md")) if p.name not in ("README.md", *OTHERWISE)]
    assert [fault for page in pages for fault in faults_of_beginning(page)] == []
    (tmp_path / "a.md").write_text("# A\n```python\n" + "x\n" * 26 + "```\n")
    assert faults_of_beginning(tmp_path / "a.md") == ["a.md: the first program has 26 lines"]


def test_pictures_say_what_they_show():
    for path in (DOCS / "figures").glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert 'role="img"' in text and re.search(r"<title>[^<]{10,}</title>", text), f"{path.name} has no title"
    for page in TEXTS:
        for alternative, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert len(alternative) > 10, f"{page.name}: {target} has no alternative"


# -- built and seen --------------------------------------------------------------------------------------------------------

SEEN = ["index.html", "tutorial.html", "howto/start.html", "api/tensors.html", "reference.html"]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def look(page: Any, address: str, width: int, dark: bool) -> dict[str, Any]:
    """Opens a page and says what came of it."""
    page.size(width, 900)
    page.dark(dark)
    page.call("/url", {"url": address})
    end = time.monotonic() + 60
    while page.run("return document.readyState") != "complete":
        assert time.monotonic() < end, f"{address} is not loaded"
        time.sleep(0.05)
    scheme = "return document.body.getAttribute('data-md-color-scheme')"
    while page.run(scheme) != ("slate" if dark else "default") and time.monotonic() < end:
        time.sleep(0.1)  # a script chooses it
    time.sleep(0.5)
    outside = (
        "return performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith(location.origin))"
    )
    return {
        "errors": page.errors(),
        "outside": page.run(outside),
        "too wide": page.run("return document.documentElement.scrollWidth > innerWidth"),
        "dark": page.run(scheme) == "slate",
        "title": page.run("return document.querySelector('h1').innerText"),
        "raw": page.run(
            "return [...document.querySelectorAll('article p, article li')].map(e => e.innerText).filter(t => t.includes('```'))"
        ),
    }


RESULTS = "return [...document.querySelectorAll('.md-search-result h1, .md-search-result h2')].map(e => e.innerText)"


def found(page: Any, word: str) -> list[str]:
    """The first results of the site's search."""
    page.run("document.querySelector('label[for=__search]').click(); const q = document.querySelector('input[name=query]');"
             "q.focus(); q.value = arguments[0]; q.dispatchEvent(new Event('keyup'))", word)  # fmt: skip
    end = time.monotonic() + 30
    while time.monotonic() < end:
        results = page.run(RESULTS)
        if results:
            return [str(result) for result in results]
        time.sleep(0.2)
    return []


@pytest.mark.proof
def test_the_site_is_built_and_seen(tmp_path):
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        pytest.importorskip(module, reason="`make site` installs what builds the site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr
    texts = {path: path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.html")}
    assert len(texts) > 50
    loads = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["'](?:https?:)?//[^"']+""")
    assert [
        (path.name, found) for path, text in texts.items() for found in loads.findall(text) if "canonical" not in found
    ] == []
    if not (CHROMIUM and DRIVER):
        pytest.skip("the site is built; no Chromium with its driver is installed to look at it")
    with served(tmp_path) as base, browser() as page:
        for width, dark in ((1300, False), (390, True)):
            page.call("/url", {"url": "about:blank"})  # where no script keeps the choice of the reader before
            page.cdp("Storage.clearDataForOrigin", origin=base.rstrip("/"), storageTypes="local_storage")
            for name in SEEN:
                seen = look(page, base + name, width, dark)
                title = seen.pop("title")
                assert title, name
                assert seen == {"errors": [], "outside": [], "too wide": False, "dark": dark, "raw": []}, (name, width)
        page.size(1300, 900)
        page.call("/url", {"url": base + "index.html"})
        assert any("reshard" in result.lower() for result in found(page, "reshard"))
