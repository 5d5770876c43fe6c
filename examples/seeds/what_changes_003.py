"""Seed 003's last tables: what of the one-card program must be modified, for each level and strategy, by comparing the programs.

python examples/seeds/what_changes_003.py  # prints docs/what-must-be-modified.md's tables
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ONE_CARD = "single_card_003"
LEVELS = {
    "Manual": "manual",
    "Semi-automatic": "semi_auto",
    "Static": "static",
}
STRATEGIES = {
    "data parallel": "data_parallel",
    "model parallel": "model_parallel",
    "pipeline": "pipeline_parallel",
    "group sharded": "group_sharded",
}
COLUMNS = {
    "`__init__`": "",
    "`forward`": "",
    "model and optimizer": r"distributed_model|distributed_optimizer|shard_layer|shard_optimizer|group_sharded_parallel|Engine\("
    r"|prepare\(|Accuracy",
    "data": r"Sampler|shard_dataloader|engine\.dataloader|RandomDataset",
    "environment and strategy": r"fleet\.init|strategy|Strategy|ProcessMesh|new_group|micro_batch|stages",
    "loop": r".",
}
"""The seed's columns, and how a changed line that is not the network's is known to be one's: the first that fits."""
_THE_SAME = (
    r"super\(\)\.__init__\(|return super\(\)\.forward\(x\)$"
    r"|return \w*train\w*\(|return auto_strategy$|model = SimpleNet\([^=]*\)$"
)
"""Lines that another program needs to take up the one-card one."""


@dataclass(frozen=True)
class Line:
    """A statement, without what is within it, and the method of the network that it is in; "" elsewhere."""

    text: str
    method: str = ""


def lines(module: str, names: set[str] | None = None) -> Iterator[Line]:
    """The statements that make up a program: its own, and what it takes from other programs than the one-card one.

    Args:
        names: of the functions and classes that are wanted; all if None.
    """
    tree = ast.parse((HERE / f"{module}.py").read_text(encoding="utf-8"))
    if names is not None:  # and what those use
        wanted = [node for node in tree.body if getattr(node, "name", None) in names]
        names = names | {each.id for node in wanted for each in ast.walk(node) if isinstance(each, ast.Name)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and (HERE / f"{node.module}.py").exists():
            if node.module != ONE_CARD:
                yield from lines(node.module, {alias.name for alias in node.names})
        elif isinstance(node, ast.Import | ast.ImportFrom) or _is_main(node):
            continue
        elif names is None or names & _names(node):
            yield from _within(node)


def _names(node: ast.stmt) -> set[str]:
    """What a statement of a module defines."""
    if isinstance(node, ast.Assign | ast.Expr):
        targets = node.targets if isinstance(node, ast.Assign) else []
        return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
    return {getattr(node, "name", "")}


def _is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _within(node: ast.AST, method: str = "", network: bool = False) -> Iterator[Line]:
    """A statement and those in it; docstrings, headers of functions and of classes are none."""
    if isinstance(node, ast.ClassDef):
        network = node.name == "SimpleNet"
        if not network:
            return  # arguments on a command line, data sets
    elif isinstance(node, ast.FunctionDef):
        method = node.name if network else ""
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield Line(_header(node), method)
    for child in getattr(node, "body", []):
        yield from _within(child, method, network)


def _header(node: ast.AST) -> str:
    text = ast.unparse(node)
    return (text.splitlines()[0] if hasattr(node, "body") else " ".join(text.split())).replace("args.", "")


def changed(module: str, known: list[Line] | None = None) -> dict[str, list[str]]:
    """The lines of a program that the one-card program does not have, by column.

    Args:
        known: the one-card program's lines, read from its file if left out.
    """
    theirs = {line.text for line in (known or lines(ONE_CARD))}
    found: dict[str, list[str]] = {name: [] for name in COLUMNS}
    for line in lines(module):
        if line.text in theirs or re.match(_THE_SAME, line.text):
            continue
        if line.method:
            name = "`__init__`" if line.method == "__init__" else "`forward`"
        else:
            name = next(name for name, pattern in COLUMNS.items() if pattern and re.search(pattern, line.text))
        if line.text not in found[name]:
            found[name].append(line.text)
    return found


def tables() -> str:
    """The page's tables, and the lines behind each of their cells."""
    made = []
    for level, prefix in LEVELS.items():
        made += [f"### {level}", "", f"| {level.lower()} | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
        details = []
        for strategy, suffix in STRATEGIES.items():
            module = f"{prefix}_{suffix}_003"
            found = changed(module)
            cells = [f"**{len(rows)} line{'s' * (len(rows) > 1)}**" if rows else "as it is" for rows in found.values()]
            made.append(f"| [{strategy}](../examples/seeds/{module}.py) | {' | '.join(cells)} |")
            details += [f"{strategy}, {name.strip('`')}: {text}" for name, rows in found.items() for text in rows]
        made += ["", "<details><summary>The lines</summary>", "", "```text", *details, "```", "", "</details>", ""]
    return "\n".join(made).rstrip()


if __name__ == "__main__":
    print(tables())
