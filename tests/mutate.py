"""``python tests/mutate.py --count 60``: faults planted at random in the library, and whether the tests that touch it see them.

A fault is another operator, comparison, constant or branch, or a statement that is left out, in a function of a random module.
The tree is copied, and one fault at a time is planted in the copy, with a mark beside it that says whether a test came by. The
tests that run are those that name the module or what it defines, what names most of it first. What fails, or has no end, is run
again without the fault, and is caught only if it passes then. The rest is listed: "MISSED", tests came by and saw nothing: it
wants a test, or is no fault; "not reached", none of these tests came by.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
AT_ONCE = 3
"""Files of tests in one process."""
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot,
    ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


def sites(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Where a fault may be, and which: within functions, but in what is raised as an error, whose words are for people."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for statement in function.body:
                yield from _sites(statement)


def _sites(node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.FunctionDef | ast.AnnAssign):
        return
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in SWAPS:
        yield node, "operator"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield node, "comparison"
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield node, "constant"
    if isinstance(node, ast.If | ast.IfExp):
        yield node, "condition"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, "dropped"
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.keyword) and child.arg == "strict"):  # of a zip: it is a check itself
            yield from _sites(child)


def planted(text: str, number: int, mark: Path) -> tuple[str, str]:
    """The module with its ``number``-th fault, beside which the file ``mark`` is made, and what it is.

    Raises:
        IndexError: there are not so many.
    """
    tree = ast.parse(text)
    node, kind = [*sites(tree)][number]
    line, before = node.lineno, ast.unparse(node).partition("\n")[0]
    _marked(tree, node, mark)
    if isinstance(node, ast.BinOp | ast.BoolOp):
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Compare):
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.Constant):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.If | ast.IfExp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    after = ast.unparse(ast.fix_missing_locations(node)).partition("\n")[0]
    return ast.unparse(ast.fix_missing_locations(tree)), f"line {line}, {kind}: {before} -> {after}"


def _marked(tree: ast.Module, node: ast.AST, mark: Path) -> None:
    """Ahead of the statement with a node: it makes a file."""
    note = ast.parse(f"__import__('os').close(__import__('os').open({str(mark)!r}, 65))").body[0]
    lists = [x for each in ast.walk(tree) for _, x in ast.iter_fields(each) if isinstance(x, list)]
    within = [(x, i) for x in lists for i, s in enumerate(x) if isinstance(s, ast.stmt) and node in ast.walk(s)]
    # The innermost one is the one of which the fewest nodes are a part.
    body, at = min(within, key=lambda found: sum(1 for _ in ast.walk(found[0][found[1]])))
    body.insert(at, note)


def tests_of(module: Path) -> list[Path]:
    """The module itself, for its doctests; then files of tests that name it, or what it defines: what names most of it first."""
    dotted = ".".join(module.relative_to(ROOT / "src").with_suffix("").parts)
    room, _, stem = dotted.rpartition(".")
    tree = ast.parse(module.read_text())
    made = [x.name for x in tree.body if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name[0] != "_"]
    words = [re.compile(rf"\b{name}\b") for name in made if len(name) > 5]
    imports = re.compile(rf"from {re.escape(room)} import .*\b{stem}\b|{re.escape(dotted)}\b")
    parts = {*dotted.replace(".", "_").split("_")} - {"onecard"}

    def names(path: Path) -> int:
        text = path.read_text()
        of_file = len(parts & {*path.stem.split("_")})
        return 4 * bool(imports.search(text)) + 2 * of_file + sum(bool(word.search(text)) for word in words)

    found = {path: much for path in (ROOT / "tests").glob("test_*.py") if (much := names(path))}
    own = [module] if ">>> " in module.read_text() else []
    return [*own, *sorted(found, key=lambda path: (-found[path], path.stat().st_size))]


@dataclass
class Tried:
    """The copy of the tree in which faults are planted."""

    copy: Path
    seconds: float
    ends: dict[tuple[str, ...], bool] = field(
        default_factory=dict
    )  # files of tests that had no end with a fault: without it

    def run(self, *names: str) -> tuple[str, str]:
        """Run files of tests, up to the first that fails: "passes", "fails" or "no end", and what is said."""
        environment = {**os.environ, "PYTHONPATH": f"{self.copy / 'src'}:{self.copy / 'tests'}", "OMP_NUM_THREADS": "1"}
        environment["PYTHONDONTWRITEBYTECODE"] = ""
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-x", "-p", "no:cacheprovider", "-rfE", *names]
        with subprocess.Popen(
            command, cwd=self.copy, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as running:  # fmt: skip
            try:
                said, _ = running.communicate(timeout=self.seconds)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                return "no end", ""
        return ("passes" if running.returncode in (0, 5) else "fails"), said  # 5: no tests in it

    def seen_by(self, module: Path, changed: str, mark: Path, files: int) -> tuple[str, str]:
        """ "caught", "MISSED" or "not reached", and the test that saw it."""
        place, ran = self.copy / module.relative_to(ROOT), 0
        whole = place.read_text()
        left = [str(path.relative_to(ROOT)) for path in tests_of(module)[: 3 * files]]
        while left and ran < files:
            some, left = tuple(left[:AT_ONCE]), left[AT_ONCE:]
            place.write_text(changed)
            try:
                ended, said = self.run(*some)
            finally:
                place.write_text(whole)
            failing = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)[:1]
            if ended == "fails" and self.run(*(failing or some))[0] == "passes":
                return "caught", (failing or some)[0]
            if ended == "fails":  # without the fault, too: it is left out, and the others run
                left = [name for name in some if not failing or name != failing[0].partition("::")[0]][
                    : len(some) - 1
                ] + left
            elif ended == "no end" and self._ends(some):
                return "caught", f"{', '.join(some)}: no end"
            else:
                ran += len(some) * mark.exists()
        return ("MISSED" if mark.exists() else "not reached"), ""

    def _ends(self, some: tuple[str, ...]) -> bool:
        if some not in self.ends:
            self.ends[some] = self.run(*some)[0] != "no end"
        return self.ends[some]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of a seed's faults; else all of them")
    parser.add_argument("--room", default="", help="one folder or file of src/onecard")
    parser.add_argument("--seconds", type=float, default=300.0, help=f"that {AT_ONCE} files of tests may take")
    parser.add_argument("--files", type=int, default=6, help="of tests that come by, for a fault, at most")
    asked = parser.parse_args()
    draw, counts = random.Random(asked.seed), Counter[str]()
    modules = [p for p in sorted((ROOT / "src" / "onecard").rglob("*.py")) if asked.room in str(p)]
    modules = [p for p in modules if any(sites(ast.parse(p.read_text()))) and "samples" not in p.parts]
    rooms = sorted({p.relative_to(ROOT / "src" / "onecard").parts[0] for p in modules})
    with tempfile.TemporaryDirectory() as folder:
        tried, mark = Tried(Path(folder) / "tree", asked.seconds), Path(folder) / "reached"
        shutil.copytree(ROOT, tried.copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "logs"))
        for number in range(asked.count):
            room = rooms[number % len(rooms)]
            module = draw.choice([p for p in modules if p.relative_to(ROOT / "src" / "onecard").parts[0] == room])
            text = (tried.copy / module.relative_to(ROOT)).read_text()
            changed, what = planted(text, draw.randrange(len([*sites(ast.parse(text))])), mark)
            if asked.only and number not in asked.only:
                continue
            mark.unlink(missing_ok=True)
            began = time.monotonic()
            found, by = tried.seen_by(module, changed, mark, asked.files)
            counts[found] += 1
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{number}: {found} {module.relative_to(ROOT)}: {what}{f' ({by})' if by else ''} {took}", flush=True)
    print(", ".join(f"{counts[kind]} {kind}" for kind in ("caught", "MISSED", "not reached")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
