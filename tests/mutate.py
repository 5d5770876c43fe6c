"""``python tests/mutate.py --count 60``: faults planted at random in the library, and whether the tests that touch it see them.

A fault is another operator, comparison, constant or branch, or a statement that is left out, in a function of a random module.
The tree is copied, and one fault at a time is planted in the copy. The tests that run are those that name the module or what it
defines, the shortest first, each with a time-out. What no test sees is listed: it wants a test, or is no fault.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
        yield from _sites(child)


def planted(text: str, number: int) -> tuple[str, str]:
    """The module with its ``number``-th fault, and what it is.

    Raises:
        IndexError: there are not so many.
    """
    tree = ast.parse(text)
    node, kind = [*sites(tree)][number]
    line, before = node.lineno, ast.unparse(node).partition("\n")[0]
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
    return ast.unparse(tree), f"line {line}, {kind}: {before} -> {after}"


def tests_of(module: Path) -> list[Path]:
    """Files of tests that name a module, or a class or function of it; and the module itself, for its doctests."""
    dotted = ".".join(module.relative_to(ROOT / "src").with_suffix("").parts)
    tree = ast.parse(module.read_text())
    made = [x.name for x in tree.body if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name[0] != "_"]
    words = re.compile("|".join([re.escape(dotted), *(rf"\b{name}\b" for name in made if len(name) > 5)]))
    found = [path for path in (ROOT / "tests").glob("test_*.py") if words.search(path.read_text())]
    room = module.relative_to(ROOT / "src" / "onecard").parts[0].removesuffix(".py")
    near = [path for path in (ROOT / "tests").glob(f"test_*{room}*.py") if path not in found]
    size = lambda path: path.stat().st_size  # noqa: E731
    return [module, *sorted(found, key=size), *sorted(near, key=size)]


def caught(copy: Path, module: Path, seconds: float, most: int) -> str:
    """Which test sees the fault that is planted in the copy; "" for none."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy / "src"),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    for path in tests_of(module)[:most]:
        name = str(path.relative_to(ROOT))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", name]
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, timeout=seconds, start_new_session=True
            )
        except subprocess.TimeoutExpired:
            return f"{name}: no end within {seconds:g} s"
        if done.returncode not in (0, 5):  # 5: no tests in it
            return name
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", default="", help="one folder or file of src/onecard")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each file of tests; longer is seen, too")
    parser.add_argument("--files", type=int, default=6, help="of tests for a fault, at most")
    asked = parser.parse_args()
    draw, missed = random.Random(asked.seed), 0
    modules = [p for p in sorted((ROOT / "src" / "onecard").rglob("*.py")) if asked.room in str(p)]
    modules = [p for p in modules if any(sites(ast.parse(p.read_text()))) and "samples" not in p.parts]
    rooms = sorted({p.relative_to(ROOT / "src" / "onecard").parts[0] for p in modules})
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "logs"))
        for number in range(asked.count):
            room = rooms[number % len(rooms)]
            module = draw.choice([p for p in modules if p.relative_to(ROOT / "src" / "onecard").parts[0] == room])
            text, place = module.read_text(), module.relative_to(ROOT)
            changed, what = planted(text, draw.randrange(len([*sites(ast.parse(text))])))
            (copy / place).write_text(changed)
            by = caught(copy, module, asked.seconds, asked.files)
            (copy / place).write_text(text)
            missed += not by
            print(f"{'caught' if by else 'MISSED'} {place}: {what}{f' ({by})' if by else ''}", flush=True)
    print(f"{asked.count - missed} of {asked.count} faults are seen")
    return 0


if __name__ == "__main__":
    sys.exit(main())
