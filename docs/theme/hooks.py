"""What the site has beside the pages of docs/: the README as its front page, the files that pages link to, the API reference.

A link of a page is written as it works in the repository. Here each is led to what the site has in the place of that file.
"""

from __future__ import annotations

import ast
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples.md",
}
"""Pages outside docs/, and what they are called here."""
PACKAGES = ["checkpoint", "testing", "pipeline", "fleet", "fleet/meta_parallel", "errors"]
"""Modules with names of their own; those of `onecard` come in the groups of docs/reference.md."""
TORCHS = {"Shard", "Replicate", "Partial"}
FENCE = re.compile(r"^(?P<space> *)(?P<marks>```+)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=space)(?P=marks) *$", re.M | re.S)
LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".json": "json", ".md": "markdown", ".yml": "yaml"}
_origin: dict[str, str] = {}  # a page of the site -> the file of the repository that it shows
_place: dict[str, str] = {}  # and back
_api: dict[str, str] = {}  # a public name -> the page that describes it


def on_files(files: Files, config: Any) -> Files:
    from mkdocs.structure.files import File  # the tests read this file where mkdocs is not installed

    for store in (_origin, _place, _api):
        store.clear()
    for file in files.documentation_pages():
        _know(file.src_uri, f"docs/{file.src_uri}")
    for origin, uri in PAGES.items():
        _know(uri, origin)
        files.append(File.generated(config, uri, content=(ROOT / origin).read_text(encoding="utf-8")))
    for uri, title, module, names in api():
        files.append(File.generated(config, uri, content=api_page(title, module, names)))
        _api.update(dict.fromkeys(names, uri) if module == "onecard" else {})
    for origin in sorted(set(linked())):
        uri = f"source/{origin.strip('/')}.md"
        _know(uri, origin)
        files.append(File.generated(config, uri, content=source_page(origin)))
    return files


def _know(uri: str, origin: str) -> None:
    _origin[uri], _place[origin] = origin, uri


def linked() -> Iterator[str]:
    """The files and folders of the repository that pages link to and that are no pages themselves."""
    for origin in list(_place):
        for target in targets((ROOT / origin).read_text(encoding="utf-8")):
            path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
            if path not in _place and not path.startswith(("docs/", "..")) and (ROOT / path).exists():
                yield path


def targets(markdown: str) -> list[str]:
    """Where links of a page lead in the repository, without anchors."""
    found = (match["target"].partition("#")[0] for match in LINK.finditer(FENCE.sub("", markdown)))
    return [target for target in found if target and "://" not in target and not target.startswith("mailto:")]


def source_page(origin: str) -> str:
    path = ROOT / origin
    head = f"---\nsearch: {{exclude: true}}\nhide: [navigation, toc]\n---\n\n# {origin}\n\n"
    if path.is_dir():
        return head + "\n".join(f"- `{child.name}`" for child in sorted(path.iterdir()) if child.suffix) + "\n"
    language = LANGUAGES.get(path.suffix, "text")
    return f'{head}````{language} {{ linenums="1" }}\n{path.read_text(encoding="utf-8")}\n````\n'


def groups() -> Iterator[tuple[str, list[str]]]:
    """The groups of public names in docs/reference.md."""
    text = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    part = text.split("<!-- names of onecard -->")[1].split("<!-- end -->")[0]
    for title, body in re.findall(r"^\*\*(.+?)\*\*(.*?)(?=^\*\*|\Z)", part, re.M | re.S):
        yield title, re.findall(r"^\| \[`(\w+)`\]", body, re.M)


def public(module: str) -> list[str]:
    """What a module says is public; without such a list, its classes."""
    path = ROOT / "src/onecard" / f"{module}.py"
    path = path if path.exists() else ROOT / "src/onecard" / module / "__init__.py"
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return [node.name for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def api() -> Iterator[tuple[str, str, str, list[str]]]:
    """The pages of the API: address, title, module, names."""
    for title, names in groups():
        yield f"api/{re.sub(r'[^a-z]+', '-', title.lower())}.md", title, "onecard", names
    for module in PACKAGES:
        dotted = f"onecard.{module.replace('/', '.')}"
        yield f"api/{dotted}.md", dotted, dotted, public(module)


def api_page(title: str, module: str, names: list[str]) -> str:
    lines = [f"# {title}", ""]
    for name in names:
        if name in TORCHS:
            lines += [f"## {name}", "", f"torch's class: `from torch.distributed.tensor import {name}`.", ""]
        else:
            lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


def tasks() -> list[dict[str, list[dict[str, str]]]]:
    """The navigation of the tasks: the tables of docs/howto/README.md."""
    text = (ROOT / "docs/howto/README.md").read_text(encoding="utf-8")
    sections = []
    for title, body in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        rows = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\)", body, re.M)
        sections.append({title: [{name: posixpath.normpath(f"howto/{page}")} for name, page in rows]})
    return sections


def on_config(config: Any) -> Any:
    """The navigation with what is listed elsewhere: tasks, and the pages of the API."""
    for section in config.nav:
        (entries,) = section.values()
        for place in entries if isinstance(entries, list) else ():
            if place == "howto/README.md":
                entries += tasks()
                break
            if isinstance(place, dict) and place.get("API") == "api/":
                place["API"] = [{title: uri} for uri, title, *_ in api()]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    uri = page.file.src_uri
    if uri.startswith(("source/", "api/")):
        return markdown
    origin = _origin[uri]
    out, last = [], 0
    for match in FENCE.finditer(markdown):
        out += [links(markdown[last : match.start()], uri, origin), fence(match)]
        last = match.end()
    return "".join(out) + links(markdown[last:], uri, origin)


def fence(match: re.Match[str]) -> str:
    """A block with its language and its file's name; what tells the tests how to run it is left out."""
    words = match["info"].split()
    options = dict(word.partition("=")[::2] for word in words[1:])
    language = {"sh": "bash"}.get(words[0], words[0]) if words else "text"
    info = f'{language} {{ title="{options["file"]}" }}' if "file" in options else language
    lines = [match["marks"] + info, *match["body"].rstrip("\n").split("\n"), match["marks"]]
    if match["space"]:  # within a list, which wants four spaces
        lines = ["    " + line.removeprefix(match["space"]) for line in lines]
    return "\n".join(lines)


def links(text: str, uri: str, origin: str) -> str:
    def led(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        name = re.fullmatch(r"\[`(\w+)`\]", match["text"])
        if origin == "docs/reference.md" and name and name[1] in _api and target.startswith("../src/"):
            heading = name[1].lower() if name[1] in TORCHS else f"onecard.{name[1]}"
            return f"{match['text']}({_api[name[1]]}#{heading})"
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        there = _place.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if there is None:
            return match[0]
        return f"{match['text']}({os.path.relpath(there, posixpath.dirname(uri) or '.')}{'#' if anchor else ''}{anchor})"

    text = re.sub(r"^ {3}(?=\S)", "    ", text, flags=re.M)
    return LINK.sub(led, text)
