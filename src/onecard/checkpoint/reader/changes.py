"""Changes at load, declared: what is called otherwise, joined, cut, stacked or turned. Checked before a byte moves. Pure.

Names are patterns in which each ``*`` stands for any text; in the names that come out, the first ``*`` is what the first one
stood for, and so on. ``*.q.weight*`` is so the weights and what an optimizer holds of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from onecard.checkpoint.format.index import name_of
from onecard.checkpoint.reader.virtual import Virtual, joined
from onecard.errors import CheckpointError

Tensors = dict[str, Virtual]


class Change(Protocol):
    """What is otherwise in a checkpoint than in the state."""

    def names(self, name: str) -> list[str]:
        """What becomes of a name."""

    def apply(self, tensors: Tensors) -> Tensors:
        """The tensors after it."""


@dataclass(frozen=True)
class Rename:
    """Tensors that have another name in the checkpoint (``old``) than in the state (``new``).

    Example:
        >>> Rename("model.*", "*").names("model.0.weight")
        ['0.weight']
    """

    old: str
    new: str

    def names(self, name: str) -> list[str]:
        """What becomes of a name."""
        found = matched(self.old, name)
        return [name] if found is None else [_filled(self.new, found)]

    def apply(self, tensors: Tensors) -> Tensors:
        """The tensors after it."""
        _some(self, self.old, tensors)
        made: Tensors = {}
        for name, tensor in tensors.items():
            _put(self, made, self.names(name)[0], tensor)
        return made


@dataclass(frozen=True)
class Fuse:
    """Several tensors of the checkpoint that are one in the state, after one another along ``dim``: q, k and v; gate and up.

    What has no dims (an optimizer's count of steps) is taken from the first; where the others' is another, a warning says so.

    Example:
        >>> Fuse(["*.q.weight", "*.k.weight", "*.v.weight"], "*.qkv.weight").names("0.k.weight")
        ['0.qkv.weight']
    """

    sources: Sequence[str]
    target: str
    dim: int = 0

    def names(self, name: str) -> list[str]:
        """What becomes of a name."""
        for source in self.sources:
            found = matched(source, name)
            if found is not None:
                return [_filled(self.target, found)]
        return [name]

    def apply(self, tensors: Tensors) -> Tensors:
        """The tensors after it."""
        _some(self, self.sources[0], tensors)
        made, taken = dict(tensors), []
        for name in tensors:
            found = matched(self.sources[0], name)
            if found is None:
                continue
            parts = []
            for source in self.sources:
                other = _filled(source, found)
                if other not in tensors:
                    raise CheckpointError(f"{self}: there is {name!r}, but no {other!r}{nearest(other, tensors)}")
                parts.append((other, tensors[other]))
                made.pop(other, None)
            taken.append((_filled(self.target, found), self._joined(parts)))
        for name, tensor in taken:
            _put(self, made, name, tensor)
        return made

    def _joined(self, parts: Sequence[tuple[str, Virtual]]) -> Virtual:
        name, first = parts[0]
        if not first.shape:
            return _first(parts)
        dim = _dim(self, name, first, self.dim)
        _alike(self, parts, dim)
        return joined([part for _, part in parts], dim)


def _first(parts: Sequence[tuple[str, Virtual]]) -> Virtual:
    first = parts[0][1]
    return replace(first, beside=(*first.beside, *parts[1:]))


@dataclass(frozen=True)
class Stack(Fuse):
    """Several tensors of the checkpoint that are one in the state, in a new dim ``dim``: experts that were modules of a list.

    What has no dims (an optimizer's count of steps) is taken from the first; where the others' is another, a warning says so.

    Example:
        >>> Stack([f"*.experts.{e}.up.*" for e in range(8)], "*.experts.up.*").names("0.experts.3.up.weight")
        ['0.experts.up.weight']
    """

    def _joined(self, parts: Sequence[tuple[str, Virtual]]) -> Virtual:
        first = parts[0][1]
        if not first.shape:
            return _first(parts)
        _alike(self, parts, None)
        raised = [part.raised(self.dim % (len(first.shape) + 1)) for _, part in parts]
        return joined(raised, self.dim % (len(first.shape) + 1))


@dataclass(frozen=True)
class Split:
    """One tensor of the checkpoint that is several in the state: along ``dim``, in parts of ``sizes``, or equal ones.

    Example:
        >>> Split("*.qkv.weight", ["*.q.weight", "*.k.weight", "*.v.weight"]).names("0.qkv.weight")
        ['0.q.weight', '0.k.weight', '0.v.weight']
    """

    source: str
    targets: Sequence[str]
    dim: int = 0
    sizes: Sequence[int] | None = None

    def names(self, name: str) -> list[str]:
        """What becomes of a name."""
        found = matched(self.source, name)
        return [name] if found is None else [_filled(target, found) for target in self.targets]

    def apply(self, tensors: Tensors) -> Tensors:
        """The tensors after it."""
        _some(self, self.source, tensors)
        made: Tensors = {}
        for name, tensor in tensors.items():
            found = matched(self.source, name)
            if found is None:
                _put(self, made, name, tensor)
                continue
            parts = self._parts(name, tensor) if tensor.shape else [tensor] * len(self.targets)
            for target, part in zip(self.targets, parts, strict=True):
                _put(self, made, _filled(target, found), part)
        return made

    def _parts(self, name: str, tensor: Virtual) -> list[Virtual]:
        dim = _dim(self, name, tensor, self.dim)
        whole, count = tensor.shape[dim], len(self.targets)
        sizes = list(self.sizes) if self.sizes is not None else [whole // count] * count
        if len(sizes) != count or sum(sizes) != whole:
            raise CheckpointError(
                f"{self}: {name!r} {list(tensor.shape)} has {whole} indices in dim {dim}, not {' + '.join(map(str, sizes))}"
            )
        return [tensor.cut(dim, sum(sizes[:i]), size) for i, size in enumerate(sizes)]


@dataclass(frozen=True)
class Unstack(Split):
    """One tensor of the checkpoint whose indices in ``dim`` are tensors of the state: the opposite of ``Stack``.

    Example:
        >>> Unstack("*.experts.up.*", ["*.experts.0.up.*", "*.experts.1.up.*"]).names("0.experts.up.weight")
        ['0.experts.0.up.weight', '0.experts.1.up.weight']
    """

    def _parts(self, name: str, tensor: Virtual) -> list[Virtual]:
        dim = _dim(self, name, tensor, self.dim)
        if tensor.shape[dim] != len(self.targets) or self.sizes is not None:
            raise CheckpointError(
                f"{self}: {name!r} {list(tensor.shape)} has {tensor.shape[dim]} indices in dim {dim}; want "
                f"{len(self.targets)} targets of one each, and no sizes"
            )
        return [tensor.one(dim, i) for i in range(len(self.targets))]


@dataclass(frozen=True)
class Transpose:
    """Tensors that are stored with two dims exchanged, as ``x.transpose(*dims)``. Those with fewer dims stay as they are."""

    name: str
    dims: tuple[int, int] = (0, 1)

    def names(self, name: str) -> list[str]:
        """What becomes of a name."""
        return [name]

    def apply(self, tensors: Tensors) -> Tensors:
        """The tensors after it."""
        _some(self, self.name, tensors)
        made = dict(tensors)
        for name, tensor in tensors.items():
            if matched(self.name, name) is not None and len(tensor.shape) > 1:
                a, b = (_dim(self, name, tensor, d) for d in self.dims)
                order = list(range(len(tensor.shape)))
                order[a], order[b] = b, a
                made[name] = tensor.turned(order)
        return made


def apply(changes: Iterable[Change], tensors: Mapping[str, Virtual]) -> Tensors:
    """The tensors of a checkpoint after all changes, in their order."""
    made = dict(tensors)
    for change in changes:
        made = change.apply(made)
    return made


def follow(changes: Iterable[Change], name: str) -> list[str]:
    """What becomes of a name."""
    names = [name]
    for change in changes:
        names = [new for old in names for new in change.names(old)]
    return names


def matched(pattern: str, name: str) -> tuple[str, ...] | None:
    """What each ``*`` of a pattern stands for in a name; None if they do not fit.

    >>> matched("*.q.*", "0.attn.q.weight"), matched("*.q", "0.k")
    (('0.attn', 'weight'), None)
    """
    found = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name, re.DOTALL)
    return None if found is None else found.groups()


def _filled(pattern: str, found: Sequence[str]) -> str:
    parts = pattern.split("*")
    if len(parts) - 1 > len(found):
        raise CheckpointError(f"the pattern {pattern!r} has more * than the one that it is made from")
    return "".join(part + text for part, text in zip(parts, [*found[: len(parts) - 1], ""], strict=True))


def nearest(name: str, names: Iterable[str]) -> str:
    """The names that are most like one, as the end of an error."""
    near = difflib.get_close_matches(name, list(names), 3, 0.5)
    return f"; the nearest names: {', '.join(near)}" if near else ""


def _some(change: Change, pattern: str, tensors: Tensors) -> None:
    if not any(matched(pattern, name) is not None for name in tensors):
        raise CheckpointError(f"{change}: no tensor of the checkpoint is called {pattern!r}{nearest(pattern, tensors)}")


def _put(change: Change, made: Tensors, name: str, tensor: Virtual) -> None:
    if name in made:
        raise CheckpointError(f"{change}: two tensors would be called {name!r}")
    made[name] = tensor


def _alike(change: Change, parts: Sequence[tuple[str, Virtual]], dim: int | None) -> None:
    """Whether tensors can be joined: they are of one dtype, and of one shape but for ``dim``."""
    first_name, first = parts[0]
    for name, part in parts:
        rest = [p.shape if dim is None else (*p.shape[:dim], *p.shape[dim + 1 :]) for p in (first, part)]
        if len(part.shape) != len(first.shape) or rest[0] != rest[1] or part.dtype != first.dtype:
            where = "stacked" if dim is None else f"joined along dim {dim}"
            raise CheckpointError(
                f"{change}: {first_name!r} {name_of(first.dtype)} {list(first.shape)} and {name!r} {name_of(part.dtype)} "
                f"{list(part.shape)} cannot be {where}"
            )


def _dim(change: Change, name: str, tensor: Virtual, dim: int) -> int:
    if not -len(tensor.shape) <= dim < len(tensor.shape):
        raise CheckpointError(f"{change}: {name!r} {list(tensor.shape)} has no dim {dim}")
    return dim % len(tensor.shape)
