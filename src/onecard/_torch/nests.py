"""Tensors within lists, tuples and dicts: torch's pytree, with a short way for those three, which nearly all arguments are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree
from torch.utils._pytree import SUPPORTED_NODES

_PLAIN = frozenset((tuple, list, dict))
_NESTS = _PLAIN | {immutable_list, immutable_dict}  # those of a graph's nodes are taken apart as others are
_DICTS = frozenset((dict, immutable_dict))


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a nest, in order, as ``torch.utils._pytree.tree_leaves`` has them.

    Example:
        >>> tree_leaves((1, [2, {"a": 3}], None))
        [1, 2, 3, None]
    """
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind not in _NESTS:
        if _is_leaf(tree, kind):
            found.append(tree)
        else:
            found += _pytree.tree_leaves(tree)
        return
    for part in tree.values() if kind in _DICTS else tree:
        inner = type(part)
        if inner in _NESTS or not _is_leaf(part, inner):
            _collect(part, found)
        else:
            found.append(part)


def tree_map(function: Callable[[Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The same nest of what a function gives for each leaf, as ``torch.utils._pytree.tree_map`` has it.

    ``is_leaf``: what more is not taken apart.

    Example:
        >>> tree_map(str, (1, [2, {"a": 3}]))
        ('1', ['2', {'a': '3'}])
    """
    if is_leaf is not None:
        return _pytree.tree_map(function, tree, is_leaf=is_leaf)
    kind = type(tree)
    if kind is tuple:
        return tuple([tree_map(function, part) for part in tree])
    if kind is list:
        return [tree_map(function, part) for part in tree]
    if kind is dict:
        return {key: tree_map(function, part) for key, part in tree.items()}
    return function(tree) if _is_leaf(tree, kind) else _pytree.tree_map(function, tree)


def _is_leaf(tree: Any, kind: type) -> bool:
    """Of what is neither tuple, list nor dict; a tuple's kin may have names for its parts, which pytree then takes apart."""
    return kind not in SUPPORTED_NODES and not isinstance(tree, tuple)
