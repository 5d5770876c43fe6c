"""Folders that transformers saved, into its models: their names differ from the model's, and experts are apart in them.

transformers says for each model what becomes of a tensor when it is loaded: other names, and operations (experts are stacked,
gate and up are joined). Here the same is said of tensors that can be read in parts, so that a rank reads its experts alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onecard.checkpoint.reader.changes import Change, Fuse, Split, Stack, Tensors, Transpose
from onecard.errors import CheckpointError

Several = dict[str, list[str]]
"""Names of tensors, by the pattern of transformers that they fit."""


@dataclass
class _Group:
    """Tensors of the folder that are made into one of the model, or several."""

    converter: Any
    sources: Several = field(default_factory=dict)


class _Conversion:
    """What becomes of the tensors of a folder in a model of transformers."""

    def __init__(self, groups: dict[str, _Group]) -> None:
        self.groups = groups
        self.new = {
            name: target for target, group in groups.items() for each in group.sources.values() for name in each
        }

    def names(self, name: str) -> list[str]:
        """What becomes of a name."""
        return [self.new.get(name, name)]

    def apply(self, tensors: Tensors) -> Tensors:
        """The tensors after it."""
        made: Tensors = {}
        for target, group in self.groups.items():
            if group.converter is None:
                (names,) = group.sources.values()
                if len(names) > 1:
                    raise CheckpointError(f"{' and '.join(names)} would both be {target!r} of the model")
                made[target] = tensors[names[0]]
            else:
                made |= _converted(target, group, tensors)
        return made


def conversion(state: Any, names: Sequence[str]) -> list[Change]:
    """The change that a folder of Hugging Face's needs for a state: none, but for models of transformers (from 5 on).

    Args:
        names: of the folder's tensors.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(state, transformers.PreTrainedModel):
        return []
    own = {name for name, _ in state.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in state.named_buffers(remove_duplicate=False)}
    if all(name in own for name in names):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key
    except ImportError:  # before 5 a model has the names of its folder
        return []
    known: Any = get_model_conversion_mapping(state)
    converters = [t for t in known if isinstance(t, WeightConverter)]
    renamings = [t for t in known if not isinstance(t, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    there, prefix = dict.fromkeys(own, True), state.base_model_prefix
    ignored = [re.compile(text) for text in getattr(state, "_keys_to_ignore_on_load_unexpected", None) or ()]
    groups: dict[str, _Group] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, there)
        if target not in own and name in own:
            target, pattern = name, None
        if target not in own and any(text.search(target) for text in ignored):
            continue
        if target not in own:  # named as the folder names it, where it is told to have no place
            target, pattern = name, None
        group = groups.setdefault(target, _Group(by_pattern.get(pattern or "")))
        group.sources.setdefault(pattern or "", []).append(name)
    return [_Conversion(groups)]


def _converted(target: str, group: _Group, tensors: Tensors) -> Tensors:
    """What the operations of a converter make of a group."""
    patterns = list(group.converter.target_patterns)
    targets = [target.replace(patterns[0], each, 1) for each in patterns]
    order = [p for p in group.converter.source_patterns if p in group.sources]
    held, now = dict(tensors), [group.sources[p] for p in order]
    for number, operation in enumerate(group.converter.operations):
        how = _OPERATIONS.get(type(operation).__name__)
        if how is None or not _plain(operation):
            raise CheckpointError(
                f"{target!r} is made of {now[0][0]!r} by {operation!r} of transformers, which cannot be read in parts: "
                "load the folder with from_pretrained once, and save it with onecard.checkpoint.save"
            )
        last = number == len(group.converter.operations) - 1
        now, changes = how(operation, now, targets if last else [f"{names[0]} and the like" for names in now])
        for change in changes:
            held = change.apply(held)
    return {name: held[name] for names in now for name in names}


def _plain(operation: Any) -> bool:
    """Whether an operation is the same for each tensor: not by a number of the config, nor by shapes."""
    return not getattr(operation, "num_shards_attribute", None) and not getattr(operation, "check_dims", False)


Made = tuple[list[list[str]], list[Change]]


def _stacked(operation: Any, given: list[list[str]], targets: list[str]) -> Made:
    pairs = list(zip(given, targets, strict=True))
    return [[new] for _, new in pairs], [Stack(names, new, operation.dim) for names, new in pairs]


def _joined(operation: Any, given: list[list[str]], targets: list[str]) -> Made:
    names = [name for each in given for name in each]
    return [[targets[0]]], [Fuse(names, targets[0], operation.dim)]


def _in_parts(operation: Any, given: list[list[str]], targets: list[str]) -> Made:
    return [list(targets)], [Split(given[0][0], targets, operation.dim)]


def _turned(operation: Any, given: list[list[str]], targets: list[str]) -> Made:
    name = given[0][0]
    return [[targets[0]]], [Transpose(name, (operation.dim0, operation.dim1)), Fuse([name], targets[0])]


_OPERATIONS: dict[str, Callable[[Any, list[list[str]], list[str]], Made]] = {
    "MergeModulelist": _stacked, "Concatenate": _joined, "Chunk": _in_parts, "Transpose": _turned,
}  # fmt: skip
