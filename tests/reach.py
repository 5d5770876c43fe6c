"""Which blocks of src each test runs: what a test that leaves `make test` would leave unseen there.

``python tests/reach.py FOLDER -n 2 ...`` runs pytest and notes for each test the blocks (bodies of functions, branches and loops)
that it, its ranks and the programs that it starts come through. ``python tests/reach.py FOLDER --against SMALLER`` lists
the blocks that the run noted in FOLDER reached and the one in SMALLER did not.

Each block begins with a store into memory that all processes of a test share; so it costs a few percent, not a tracer's ten
times. (PYTEST_DONT_REWRITE)
"""

from __future__ import annotations

import ast
import builtins
import json
import mmap
import os
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

TESTS = Path(__file__).resolve().parent
SRC = TESTS.parent / "src"
FOLDER = "ONECARD_REACH"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def blocks(tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    """The name of the function and the statements of each block in a function."""

    def walk(node: ast.AST, name: str, inside: bool) -> Iterator[tuple[str, list[ast.stmt]]]:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            name = f"{name}.{node.name}" if name else node.name
            inside = isinstance(node, FUNCTIONS)
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            if inside and isinstance(statements, list) and statements:
                yield name, statements
        for child in ast.iter_child_nodes(node):
            yield from walk(child, name, inside)

    yield from walk(tree, "", False)


def _marked(source: bytes, path: str, first: int) -> ast.Module:
    tree = ast.parse(source, path)
    for number, (_, statements) in enumerate(list(blocks(tree)), first):
        head = statements[0]
        mark = ast.parse(f"__reach__[{number}] = 1").body[0]
        for node in ast.walk(mark):
            ast.copy_location(node, head)
            node.end_lineno, node.end_col_offset = head.lineno, head.col_offset
        said = isinstance(head, ast.Expr) and isinstance(head.value, ast.Constant)  # a docstring stays first
        statements.insert(1 if said else 0, mark)
    return tree


def install() -> None:
    """In each process of the run: marks what is imported from src from here on."""
    folder = Path(os.environ[FOLDER])
    table = json.loads((folder / "table.json").read_text())
    sys.pycache_prefix = str(folder / "pycache")
    _share(os.environ.get("PYTEST_XDIST_WORKER", "main"))
    plain = SourceFileLoader.source_to_code

    def source_to_code(self: SourceFileLoader, data: bytes, path: str, **options: int) -> object:
        if path in table:
            return compile(_marked(data, path, table[path]), path, "exec", dont_inherit=True)
        return plain(self, data, path, **options)

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]


def _share(name: str) -> None:
    folder = Path(os.environ[FOLDER])
    file = folder / f"{name}.map"
    if not file.exists():
        file.write_bytes(bytes((folder / "size").stat().st_size))
    with file.open("r+b") as opened:
        builtins.__reach__ = mmap.mmap(opened.fileno(), 0)  # type: ignore[attr-defined]


class Noting:
    """The plugin of pytest."""

    def __init__(self, worker: str) -> None:
        self.out = (Path(os.environ[FOLDER]) / f"{worker}.tests").open("a")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seen = builtins.__reach__  # type: ignore[attr-defined]
        self.out.write(f"{nodeid}\t{int(bytes(seen).translate(_DIGITS), 2):x}\n")
        self.out.flush()
        seen[:] = bytes(len(seen))


_DIGITS = bytes([48, *[49] * 255])


def pytest_configure(config) -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
    if worker != "main" or not config.getoption("numprocesses", None):
        _share(worker)
        config.pluginmanager.register(Noting(worker))


def read(folder: Path) -> dict[str, int]:
    """For each test, the blocks as bits; the first block is the highest of as many bits as there are blocks."""
    found: dict[str, int] = {}
    for file in sorted(folder.glob("*.tests")):
        for line in file.read_text().splitlines():
            test, _, bits = line.rpartition("\t")
            found[test] = found.get(test, 0) | int(bits, 16)
    return found


def names() -> list[tuple[str, str, int]]:
    """File, function and line of each block."""
    listed = []
    for path in sorted(SRC.rglob("*.py")):
        for name, statements in blocks(ast.parse(path.read_bytes())):
            listed.append((str(path.relative_to(SRC)), name, statements[0].lineno))
    return listed


def begin(folder: Path) -> None:
    folder.mkdir(parents=True)
    table, size = {}, 0
    for path in sorted(SRC.rglob("*.py")):
        table[str(path)] = size
        size += sum(1 for _ in blocks(ast.parse(path.read_bytes())))
    (folder / "table.json").write_text(json.dumps(table))
    (folder / "size").write_bytes(bytes(size))
    (folder / "sitecustomize.py").write_text("import reach\n\nreach.install()\n")
    (folder / "reach.py").symlink_to(__file__)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    if sys.argv[2:3] == ["--against"]:
        wide, narrow = (read(Path(f)) for f in (sys.argv[1], sys.argv[3]))
        listed = names()
        lost = _union(wide) & ~_union(narrow)
        for i, (file, name, line) in enumerate(listed):
            if lost >> (len(listed) - 1 - i) & 1:
                print(f"{file}:{line} {name}")
        return
    begin(folder)
    path = os.pathsep.join([str(folder), str(SRC)])
    environment = {**os.environ, FOLDER: str(folder), "PYTHONPATH": path}
    os.execve(sys.executable, [sys.executable, "-m", "pytest", "-p", "reach", *sys.argv[2:]], environment)


def _union(noted: dict[str, int]) -> int:
    total = 0
    for bits in noted.values():
        total |= bits
    return total


if __name__ == "__main__":
    main()
