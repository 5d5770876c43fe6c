"""How arguments and results are put together (a pytree's spec), as JSON: of tuples, lists and dicts, and of classes by leave.

torch's own text for it names modules, which its reader imports.
"""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from collections.abc import Collection
from typing import Any

import torch

from onecard._torch.names import SUPPORTED_NODES, tree_flatten, tree_unflatten
from onecard.errors import RecordingError
from onecard.static.file.encoding import decode, encode, one_of, whole

_TORCHS = [kind for kind in vars(torch.return_types).values() if isinstance(kind, type)]
"""What operators of torch return: ``x.max(0)``."""


class _Leaf:
    """In the place of a value."""


def encode_tree(tree: Any) -> Any:
    """The form as nested lists.

    Example:
        >>> encode_tree(tree_flatten((1, {"a": 2}))[1])
        ['tuple', None, [None, ['dict', ['a'], [None]]]]
    """
    return _encode(tree_unflatten([_Leaf() for _ in range(tree.num_leaves)], tree))


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind is _Leaf:
        return None
    if kind in (tuple, list):
        return [kind.__name__, None, [*map(_encode, value)]]
    if kind in (dict, OrderedDict):
        return [kind.__name__, encode([*value]), [*map(_encode, value.values())]]
    if kind is deque:
        return ["deque", value.maxlen, [*map(_encode, value)]]
    parts, context = _known(kind).flatten_fn(value)
    try:
        return [name_of(kind), encode(_told(context, kind)), [*map(_encode, parts)]]
    except RecordingError as fault:
        raise RecordingError(
            f"a recording that returns a {kind.__name__} cannot be saved: {fault}. Return a tuple or a dict"
        ) from None


def _known(kind: type) -> Any:
    """How torch was told to take objects of a class apart."""
    nodes: Any = SUPPORTED_NODES
    if kind not in nodes and not hasattr(kind, "_fields"):
        raise RecordingError(
            f"a recording that returns a {kind.__name__} cannot be saved: a file holds no classes. Return a tuple or a dict"
        )
    return nodes[namedtuple if kind not in nodes else kind]


def name_of(kind: type) -> str:
    """What a class is called in a file."""
    return f"{kind.__module__}:{kind.__qualname__}"


_ITSELF = "the class itself"


def _told(context: Any, kind: type) -> Any:
    """A context, with a class that names itself (of named tuples, of results of transformers) as a word."""
    if context is kind:
        return {"word": _ITSELF}
    return type(context)(_told(c, kind) for c in context) if type(context) in (tuple, list) else context


def _meant(context: Any, kind: type) -> Any:
    if type(context) is dict and context == {"word": _ITSELF}:
        return kind
    return type(context)(_meant(c, kind) for c in context) if type(context) in (tuple, list) else context


def decode_tree(held: Any, trust: Collection[type] = ()) -> Any:
    """The form again. ``trust``: classes that it may name besides.

    Raises:
        RecordingError: it is none, or names another class.
    """
    return tree_flatten(_decode(held, {name_of(kind): kind for kind in (*trust, *_TORCHS)}))[1]


def _decode(held: Any, trust: dict[str, type]) -> Any:
    if held is None:
        return _Leaf()
    name, context, parts = whole(held, (list,), 3)
    values = [_decode(part, trust) for part in whole(parts, (list,))]
    if name == "tuple":
        return tuple(values)
    if name == "list":
        return values
    if name in ("dict", "OrderedDict"):
        keys = whole(decode(context, {}), (list,), len(values))
        return {"dict": dict, "OrderedDict": OrderedDict}[name](zip(keys, values, strict=True))
    if name == "deque":
        return deque(values, None if context is None else whole(context, (int,)))
    if name not in trust:
        raise RecordingError(
            f"a recording that returns a {str(name)[:80]} is not loaded unless you give the class: "
            "load_recording(path, trust=[TheClass])"
        )
    kind = one_of(trust, name, "class")
    return _known(kind).unflatten_fn(values, _meant(decode(context, {}), kind))
