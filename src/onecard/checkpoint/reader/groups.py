"""The groups of a saved optimizer: which names are in each, before and after the changes of a load. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from onecard.checkpoint.format import tree
from onecard.checkpoint.reader.changes import Change, follow
from onecard.errors import CheckpointError


def by_text(node: Any) -> dict[str, Any]:
    """The children of a node, with numbers as text."""
    return {str(key): item for key, item in (tree.children(node) or {}).items()}


def group_names(node: Any, path: str, changes: Sequence[Change], target: Optimizer | dict[str, Any]) -> list[list[str]]:
    """The names in each group of a saved optimizer, as far as there are any.

    Args:
        target: the optimizer, or its state dict, that is to be filled.

    Raises:
        CheckpointError: the saved one was of another class.
    """
    groups: Any = (tree.children(node) or {}).get("param_groups")
    _check_class(groups, target, path, tree.kind_of(node))
    try:
        saved = [{"params": list((tree.children(group["params"]) or {}).values())} for group in groups]
        return members(saved, path, changes)
    except (KeyError, TypeError):
        return []


def _check_class(groups: Any, target: Optimizer | dict[str, Any], path: str, was: str) -> None:
    """Whether an optimizer has options that the saved one had not, and the other way round; versions and schedulers add some."""
    if isinstance(target, Optimizer):
        kind, own, options = type(target).__name__, target.param_groups, target.defaults
    else:
        kind, own = "the optimizer of the state dict", target["param_groups"]
        options = own[0] if own else {}
    if not isinstance(groups, list) or not groups or not isinstance(groups[0], Mapping) or not own:
        return
    lacks = [key for key in options if key not in (*groups[0], *_NO_OPTIONS)]
    foreign = [key for key in groups[0] if key not in (*own[0], *_NO_OPTIONS)]
    # One of torch's, and one that is not derived from them: no version of one class.
    mixed = (
        bool(was) and isinstance(target, Optimizer) and _torchs(was) != _torchs(tree.kind_from(type(target)).__module__)
    )
    if (lacks and foreign) or (mixed and (lacks or foreign)):
        raise CheckpointError(
            f"{path}: the saved optimizer has the options {', '.join(foreign) or 'of it'}, which {kind} has not, and {kind} has "
            f"{', '.join(lacks) or 'no others'}: it was of another class, whose states and options would be taken for {kind}'s. "
            "Make the one that was saved, or load without it: oc.checkpoint.load(path, {'model': model})"
        )


def _torchs(name: str) -> bool:
    return name.startswith("torch.optim")


def check_kind(target: Any, node: Any, path: str) -> None:
    """Whether a saved optimizer or schedule was of a class whose states are those of this one: the same, or torch's base of it.

    Raises:
        CheckpointError: of another class of torch's.
    """
    (module, _, was), own = tree.kind_of(node).rpartition("."), tree.kind_from(type(target))
    known = vars(torch.optim).get(was) or vars(lr_scheduler).get(was) if _torchs(module) else None
    if known is None or not _torchs(own.__module__) or issubclass(own, known) or issubclass(known, own):
        return
    raise CheckpointError(
        f"{path}: the checkpoint has {was}, and {type(target).__name__} is to be filled, which has other states, or takes them "
        "otherwise. Make the one that was saved, or load without it: oc.checkpoint.load(path, {'model': model})"
    )


_NO_OPTIONS = ("params", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
"""Parameters, their names, and what schedulers put into groups."""


def taker_of(target: Any, node: Any, path: str) -> Callable[[Any], Any]:
    """How an object takes its saved state; a schedule takes whatever it is given into its attributes.

    Raises:
        CheckpointError: a schedule was of another class: by its name, or by attributes that the saved one had not, and the
            other way round.
    """
    if isinstance(target, LRScheduler):
        own, saved = dict(target.state_dict()), by_text(node)
        lacks, foreign = ([key for key in a if key not in b] for a, b in ((own, saved), (saved, own)))
        if saved and lacks and foreign:
            kind = type(target).__name__
            raise CheckpointError(
                f"{path}: the saved schedule has {', '.join(foreign)}, which {kind} has not, and {kind} has {', '.join(lacks)}: "
                "it was of another class. Make the one that was saved, or load without it and set its last_epoch"
            )
        check_kind(target, node, path)
    found: Callable[[Any], Any] = target.load_state_dict
    return found


def members(groups: Sequence[Mapping[str, Any]], path: str, changes: Sequence[Change]) -> list[list[str]]:
    """The names of each group's parameters, after the changes."""
    start = tree.join(path, "state.")
    return [
        [new.removeprefix(start) for name in group["params"] for new in follow(changes, f"{start}{name}")]
        for group in groups
    ]


def options_of(
    saved: Sequence[Mapping[str, Any]], numbers: Collection[int], who: str, names: Sequence[str]
) -> dict[str, Any]:
    """The options of a group whose parameters were in these saved ones.

    Raises:
        CheckpointError: they are not the same.
    """
    found = [{k: v for k, v in saved[i].items() if k not in ("params", "param_names")} for i in sorted(numbers)]
    if any(options != found[0] for options in found):
        raise CheckpointError(
            f"{who} of the optimizer has parameters of the saved groups {sorted(numbers)}, whose options differ: {names[:3]}... "
            "Make the groups as they were, or split this one"
        )
    return found[0] if found else {}
