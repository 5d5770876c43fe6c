"""The groups of a saved optimizer: which names are in each, before and after the changes of a load. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onecard.checkpoint.format import tree
from onecard.checkpoint.reader.changes import Change, follow


def by_text(node: Any) -> dict[str, Any]:
    """The children of a node, with numbers as text."""
    return {str(key): item for key, item in (tree.children(node) or {}).items()}


def group_names(node: Any, path: str, changes: Sequence[Change]) -> list[list[str]]:
    """The names in each group of a saved optimizer, as far as there are any."""
    groups: Any = (tree.children(node) or {}).get("param_groups")
    try:
        saved = [{"params": list((tree.children(group["params"]) or {}).values())} for group in groups]
        return members(saved, path, changes)
    except (KeyError, TypeError):
        return []


def members(groups: Sequence[Mapping[str, Any]], path: str, changes: Sequence[Change]) -> list[list[str]]:
    """The names of each group's parameters, after the changes."""
    start = tree.join(path, "state.")
    return [
        [new.removeprefix(start) for name in group["params"] for new in follow(changes, f"{start}{name}")]
        for group in groups
    ]
