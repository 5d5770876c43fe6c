"""The groups of a saved optimizer: which names are in each, before and after the changes of a load. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from onecard.checkpoint.format import tree
from onecard.checkpoint.reader.changes import Change, follow
from onecard.errors import CheckpointError


def by_text(node: Any) -> dict[str, Any]:
    """The children of a node, with numbers as text."""
    return {str(key): item for key, item in (tree.children(node) or {}).items()}


def group_names(node: Any, path: str, changes: Sequence[Change], optimizer: Optimizer | None = None) -> list[list[str]]:
    """The names in each group of a saved optimizer, as far as there are any.

    Raises:
        CheckpointError: it was of another class than the optimizer that is to be filled.
    """
    groups: Any = (tree.children(node) or {}).get("param_groups")
    _check_class(groups, optimizer, path)
    try:
        saved = [{"params": list((tree.children(group["params"]) or {}).values())} for group in groups]
        return members(saved, path, changes)
    except (KeyError, TypeError):
        return []


def _check_class(groups: Any, optimizer: Optimizer | None, path: str) -> None:
    """Whether an optimizer has options that the saved one had not, and the other way round; versions and schedulers add some."""
    if optimizer is None or not isinstance(groups, list) or not groups or not isinstance(groups[0], Mapping):
        return
    lacks = [key for key in optimizer.defaults if key not in groups[0]]
    foreign = [k for k in groups[0] if k not in optimizer.param_groups[0] and k not in _OF_SCHEDULERS and k != "params"]
    if lacks and foreign:
        kind = type(optimizer).__name__
        raise CheckpointError(
            f"{path}: the saved optimizer has the options {', '.join(foreign)}, which {kind} has not, and {kind} has "
            f"{', '.join(lacks)}: it was of another class, whose states and options would be taken for {kind}'s. Make the one "
            "that was saved, or load without it: oc.checkpoint.load(path, {'model': model})"
        )


_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names")
"""Options that schedulers and names of parameters put into groups."""


def members(groups: Sequence[Mapping[str, Any]], path: str, changes: Sequence[Change]) -> list[list[str]]:
    """The names of each group's parameters, after the changes."""
    start = tree.join(path, "state.")
    return [
        [new.removeprefix(start) for name in group["params"] for new in follow(changes, f"{start}{name}")]
        for group in groups
    ]
