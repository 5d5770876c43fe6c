"""What a step returns besides tensors, lists and dicts: objects that hold its tensors are taken apart, and built again."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from onecard._torch.names import register_pytree_node, tree_leaves, tree_map, tree_unflatten
from onecard.errors import RecordingError
from onecard.static.guards.before import STILL
from onecard.static.guards.lookup import held_by
from onecard.static.guards.numbers import Number

_DEPTH = 8  # objects within objects


class Apart:
    """An object that is to be taken apart."""

    def __init__(self, x: Any, attributes: dict[str, Any]) -> None:
        self.kind, self.attributes = type(x), attributes


def _built(values: Any, how: Any) -> Any:
    kind, names = how
    made = kind.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


register_pytree_node(
    Apart,
    lambda x: ([*x.attributes.values()], (x.kind, tuple(x.attributes))),
    _built,
)


def taken_apart(
    result: Any, name: str, was_there: Callable[[Any], bool], had: Callable[[Tensor], bool], depth: int = _DEPTH
) -> Any:
    """A result with its objects in parts, as far as they hold tensors or numbers of the step.

    Raises:
        RecordingError: one holds them and cannot be built again.
    """

    def made(x: Tensor) -> bool:
        return isinstance(x, Number) or not had(x)

    def part(x: Any) -> Any:
        if isinstance(x, (Tensor, Number, *STILL)) or not any(map(made, tensors_inside(x, set()))):
            return x
        if was_there(x) or not depth:
            raise _kept(name, x)
        attributes = _attributes(x)
        if attributes is None:
            raise _kept(name, x)
        return Apart(x, {k: taken_apart(v, name, was_there, had, depth - 1) for k, v in attributes.items()})

    return tree_map(part, result)


def in_parts(result: Any, name: str) -> Any:
    """A result with its objects in parts, as ``taken_apart``, where nobody knows what was there before; but modules were."""
    return taken_apart(result, name, lambda x: isinstance(x, nn.Module), lambda _: False)


def apart_as(result: Any, tree: Any) -> Any:
    """A later result of the step, in parts as the one that was recorded (``tree``)."""
    kinds = _kinds(tree_unflatten([None] * tree.num_leaves, tree))

    def part(x: Any) -> Any:
        return Apart(x, {k: tree_map(part, v) for k, v in _held(x).items()}) if type(x) in kinds else x

    return tree_map(part, result) if kinds else result


def _kinds(built: Any) -> set[type]:
    """The classes of objects that were taken apart, from a result without values."""
    found = set[type]()
    for x in tree_leaves(built):
        if x is not None:
            found |= {type(x), *(kind for v in _held(x).values() for kind in _kinds(v))}
    return found


def _attributes(x: Any) -> dict[str, Any] | None:
    """All that an object of a class in Python holds; None of other ones."""
    kind = type(x)
    plain = all(base.__flags__ & 1 << 9 or base in (object, types.SimpleNamespace) for base in kind.__mro__)
    new: Any = kind.__new__
    if not plain or (new is not object.__new__ and new is not types.SimpleNamespace.__new__):
        return None
    return _held(x)


def _held(x: Any) -> dict[str, Any]:
    found = dict(held_by(x) or {})
    for base in type(x).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and name != "__weakref__" and base.__flags__ & 1 << 9:
                try:
                    found[name] = slot.__get__(x)
                except AttributeError:
                    continue
    return found


def tensors_inside(x: Any, seen: set[int]) -> Iterator[Any]:
    """The tensors and numbers that an object holds, at any depth; ``seen``: objects that were looked at."""
    if isinstance(x, Tensor | Number):
        yield x
    elif not isinstance(x, (*STILL, type, types.ModuleType)) and id(x) not in seen:
        seen.add(id(x))
        parts = [p for p in tree_leaves(x) if p is not x]
        if isinstance(x, set | frozenset):
            parts += x
        elif isinstance(x, types.FunctionType):
            parts += [c.cell_contents for c in x.__closure__ or () if _is_filled(c)]
        elif isinstance(x, types.MethodType):
            parts.append(x.__self__)
        else:
            parts += _held(x).values()
        for p in parts:
            yield from tensors_inside(p, seen)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _kept(name: str, x: Any) -> RecordingError:
    return RecordingError(
        f"{name} returns a {type(x).__name__} that holds tensors of the step, which a replay could not make again: return the "
        "tensors themselves, in a dict, a tuple or a dataclass"
    )
