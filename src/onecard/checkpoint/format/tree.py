"""A nested state as JSON, with the names of tensors in their places; and back. Pure."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onecard.checkpoint.format.index import DTYPES
from onecard.checkpoint.format.portions import Own, Portion, Spread, SpreadNames, encoded
from onecard.errors import CheckpointError

KIND = "$"  # the key that marks what JSON has no word for
OF = "$of"  # the key by which a dict says the class of the object that it was made of
Take = Callable[[str, Any], None]
Give = Callable[[str], Any]

_ADVICE = (
    "a state holds tensors, numbers, strings, None, and dicts, lists and tuples of them; modules, optimizers, schedulers and "
    "whatever else has state_dict() and load_state_dict() may stand in it as they are"
)


class StateOf(dict[str, Any]):
    """The state of an object, which says its class."""

    def __init__(self, owner: Any, state: Mapping[str, Any]) -> None:
        super().__init__(state)
        kind = kind_from(type(owner))
        self.kind = f"{kind.__module__}.{kind.__qualname__}"


def kind_from(cls: type) -> type:
    """The class of torch's optimizers and schedules from which a class is derived; of others it itself."""
    own = (
        c for c in cls.__mro__ if c.__module__.startswith("torch.optim.") and c.__module__ != "torch.optim.optimizer"
    )
    return next((c for c in own if c.__name__ != "LRScheduler"), cls)


def encode(value: Any, path: str, take: Take) -> Any:
    """A value as JSON; each tensor is handed to ``take`` with its name, which is its path.

    Example:
        >>> encode({"a": (1, float("inf")), "w": torch.ones(2)}, "", lambda name, x: print("tensor", name))
        tensor w
        {'a': {'$': 'tuple', 'items': [1, {'$': 'float', 'value': 'inf'}]}, 'w': {'$': 'tensor', 'name': 'w'}}
    """
    if isinstance(value, Tensor | Portion | Own):
        take(path, value)
        return {KIND: "tensor", "name": path}
    if isinstance(value, Spread):
        return {KIND: "spread", "items": list(encoded(value, lambda key, item: encode(item, join(path, key), take)))}
    if isinstance(value, SpreadNames):
        return {KIND: "spread names", "items": [list(item) for item in zip(value, value.order, strict=True)]}
    if value is None or isinstance(value, bool | str | int) or (type(value) is float and math.isfinite(value)):
        return value if type(value) in (type(None), bool, str, int, float) else _base(value)
    if isinstance(value, dict):
        return _encode_dict(value, path, take)
    if isinstance(value, list | tuple | torch.Size):
        items = [encode(item, join(path, i), take) for i, item in enumerate(value)]
        kind = "size" if isinstance(value, torch.Size) else "tuple"
        return items if isinstance(value, list) else {KIND: kind, "items": items}
    return _encode_leaf(value, path, take)


def _base(value: Any) -> Any:
    return str(value) if isinstance(value, str) else int(value)


def _encode_dict(value: dict[Any, Any], path: str, take: Take) -> Any:
    for key in value:
        if not isinstance(key, str | int | float | bool | None):
            raise CheckpointError(
                f"state{_at(path)}: the key {key!r} is a {type(key).__name__}; keys are strings or numbers"
            )
    items = [(key, encode(item, join(path, key), take)) for key, item in value.items()]
    if isinstance(value, Counter):
        return {KIND: "counter", "items": [list(item) for item in items]}
    if all(type(key) is str for key, _ in items) and KIND not in value and OF not in value:
        return dict(items) | ({OF: value.kind} if isinstance(value, StateOf) else {})
    return {KIND: "dict", "items": [list(item) for item in items]}


def _encode_leaf(value: Any, path: str, take: Take) -> Any:
    if isinstance(value, float):
        return {KIND: "float", "value": repr(float(value))}
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        take(path, torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape)))
        return {KIND: "array", "name": path}
    if isinstance(value, np.generic) and value.dtype.kind in "fiub":
        return encode(value.item(), path, take)
    if isinstance(value, bytes):
        return {KIND: "bytes", "hex": value.hex()}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {KIND: "device", "value": str(value)}
    raise CheckpointError(f"state{_at(path)} is a {type(value).__name__}, which no checkpoint holds: {_ADVICE}")


def decode(node: Any, give: Give) -> Any:
    """The value that JSON says; ``give`` has the tensor of a name.

    Example:
        >>> decode({"a": {"$": "tuple", "items": [1, {"$": "float", "value": "inf"}]}}, lambda name: None)
        {'a': (1, inf)}
    """
    if isinstance(node, list):
        return [decode(item, give) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get(KIND)
    if kind is None:
        return {key: decode(item, give) for key, item in node.items() if key != OF}
    if kind == "tensor":
        return give(node["name"])
    if kind == "array":
        return give(node["name"]).numpy()
    if kind in ("tuple", "size"):
        made = (decode(item, give) for item in node["items"])
        return tuple(made) if kind == "tuple" else torch.Size(made)
    if kind in ("dict", "counter"):
        found = {key: decode(item, give) for key, item in node["items"]}
        return Counter(found) if kind == "counter" else found
    if kind == "float":
        return float(node["value"])
    if kind == "bytes":
        return bytes.fromhex(node["hex"])
    if kind == "dtype":
        return DTYPES[node["value"]]
    if kind == "device":
        return torch.device(node["value"])
    raise CheckpointError(f"the index has a value of the kind {kind!r}, which this onecard does not know")


def children(node: Any) -> dict[Any, Any] | None:
    """The items of a dict, list or tuple by key or number; None for a leaf."""
    if isinstance(node, list):
        return dict(enumerate(node))
    if not isinstance(node, dict):
        return None
    kind = node.get(KIND)
    if kind is None:
        return {key: item for key, item in node.items() if key != OF} if OF in node else node
    if kind in ("tuple", "size"):
        return dict(enumerate(node["items"]))
    return {key: item for key, item in node["items"]} if kind in ("dict", "counter") else None


def kind_of(node: Any) -> str:
    """The class of the object that a dict was made of, or "": unknown."""
    return str(node.get(OF, "")) if isinstance(node, dict) else ""


def values(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All that is no tensor, with its path; what is empty counts as a value.

    Example:
        >>> list(values({"a": [1, {"$": "tensor", "name": "a.1"}], "b": {}}))
        [('a.0', 1), ('b', {})]
    """
    for where, item in _leaves(node, path):
        if tensor_name(item) is None and not is_spread(item):
            yield where, item


def tensors(node: Any) -> Iterator[tuple[str, Any]]:
    """The names of the tensors that all ranks have."""
    for _, item in _leaves(node, ""):
        name = tensor_name(item)
        if name is not None:
            yield name, item


def is_spread(node: Any) -> bool:
    """Whether a node is a rank's part of what no rank has all of."""
    return isinstance(node, dict) and node.get(KIND) in ("spread", "spread names")


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    below = children(node)
    if not below:
        yield path, node
    for key, item in (below or {}).items():
        yield from _leaves(item, join(path, key))


def tensor_name(node: Any) -> str | None:
    """The name of the tensor that a node stands for."""
    return node["name"] if isinstance(node, dict) and node.get(KIND) in ("tensor", "array") else None


def flat(names: list[str]) -> Any:
    """The node of a flat dict of tensors."""
    return OrderedDict((name, {KIND: "tensor", "name": name}) for name in names)


def join(path: str, key: Any) -> str:
    """The name of what lies under a key.

    >>> join("", "model"), join("model", "0.weight")
    ('model', 'model.0.weight')
    """
    return f"{path}.{key}" if path else str(key)


def _at(path: str) -> str:
    return f" {path!r}" if path else ""
