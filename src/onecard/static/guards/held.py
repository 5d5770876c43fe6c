"""What a step can reach of its program's containers, and what they held: what a look at the step leaves there is taken out.

A step that is looked at without being done runs its Python: it counts, and puts what it makes into dicts, lists, attributes and
variables of enclosing functions. So what was there is put back: tensors, which have no values; all of it, where the step will
run again.
"""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onecard._torch.fakes import is_fake
from onecard.static.guards.lookup import installed, users
from onecard.static.guards.unchanged import copied

_MOST = 200_000  # containers; a program that reaches more is followed so far
_MOST_BYTES = 1 << 20
_PUT_BACK = ("state", "param_groups")
_COUNTING = GradScaler | LRScheduler
"""Objects of torch that a step calls and that keep counts in Python."""
NOTHING = object()
Lost = list[tuple[Any, Any]]
Changes = dict[tuple[int, Any], tuple[Any, Any]]
"""(which container, key) -> what was there, and what is."""


class HeldValues:
    """Containers that can be reached from some values, with what they hold now.

    Args:
        roots: functions, their arguments, what they are called on.

    Example:
        >>> log, counts = [1, 2], {"steps": 0}
        >>> held = HeldValues([log, counts])
        >>> log.append(3)
        >>> counts["steps"] += 1
        >>> held.all_back()
        >>> log, counts
        ([1, 2], {'steps': 0})
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._parts: list[_Kept] = []
        self._names = set[str]()  # what functions look up
        self._spaces: list[tuple[Any, set[str]]] = []  # modules and classes that they know, and of which names
        self._owners: dict[int, str] = {}  # of dicts that are an object's attributes: its type
        self._seen = set[int]()
        self._follow(roots)
        while self._in_spaces():  # a method that is found there looks up more
            pass

    def _in_spaces(self) -> bool:
        before = len(self._parts)
        for space, known in [*self._spaces]:
            if names := (self._names | (set(vars(space)) if isinstance(space, type) else set())) - known:
                known |= names
                self._follow(self._noted(_Attributes(space, names)))
        return before < len(self._parts) < _MOST

    def _follow(self, values: Iterable[Any]) -> None:
        waiting = [*values]
        while waiting and len(self._parts) < _MOST:
            x = waiting.pop()
            if id(x) not in self._seen:
                self._seen.add(id(x))
                waiting += self._within(x)

    def _within(self, x: Any) -> Iterable[Any]:
        """What a value leads to; what it holds is noted."""
        if isinstance(x, dict):
            return self._noted(_Entries(x))
        if isinstance(x, list | deque):
            return self._noted(_Sequence(x))
        if isinstance(x, set):
            return self._noted(_Set(x))
        if isinstance(x, np.ndarray | bytearray):
            size = x.nbytes if isinstance(x, np.ndarray) else len(x)
            return self._noted(_Array(x)) if size <= _MOST_BYTES else ()  # data, which a step reads
        if isinstance(x, tuple | frozenset):
            return x
        if isinstance(x, types.FunctionType):
            return self._of_function(x)
        if isinstance(x, types.MethodType):
            return [x.__self__, x.__func__]
        if isinstance(x, functools.partial):
            return [x.func, x.args, x.keywords]
        if isinstance(x, Optimizer):
            return self._of_optimizer(x)
        if isinstance(x, types.ModuleType | type):
            module = str(x.__name__ if isinstance(x, types.ModuleType) else x.__module__)
            if users(module) and not installed(module):  # libraries keep no counts there
                self._spaces.append((x, set()))
            return []
        if isinstance(x, nn.Module | types.SimpleNamespace | _COUNTING) or users(str(type(x).__module__)):
            return self._of_object(x)
        return []

    def _of_object(self, x: Any) -> Iterator[Any]:
        yield from type(x).__mro__
        if hasattr(x, "__dict__"):
            self._owners[id(vars(x))] = type(x).__name__
            yield vars(x)
        if slots := [name for base in type(x).__mro__ for name in _slots(base)]:
            yield from self._noted(_Attributes(x, slots))

    def _of_optimizer(self, x: Any) -> Iterator[Any]:
        yield from (*x._optimizer_step_pre_hooks.values(), *x._optimizer_step_post_hooks.values())
        if users(str(type(x).__module__)):
            # A count of its own (``self.k += 1``). States and groups are put back elsewhere.
            self._noted(own := _Entries(vars(x)))
            yield from (value for name, value in own.held.items() if name not in _PUT_BACK)

    def _of_function(self, x: types.FunctionType) -> Iterator[Any]:
        yield from (x.__defaults__ or (), x.__kwdefaults__ or {}, x.__dict__)
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            yield from self._noted(_Attributes(cell, ("cell_contents",), name))
        if users(str(x.__module__)):
            names = _names(x.__code__)
            self._names |= names
            yield from self._noted(_Entries(x.__globals__, names))

    def _noted(self, part: _Kept) -> Iterable[Any]:
        self._parts.append(part)
        return part.values()

    def all_back(self) -> None:
        """Everything that a step has put in, or in the place of something, is out again: numbers and texts, too."""
        for part in reversed(self._parts):
            part.all_back()

    def back(self) -> Lost:
        """Take tensors without data out again; their keys, and what had been there before, or ``NOTHING``."""
        return [lost for part in self._parts for lost in part.back()]

    def changes(self) -> Changes:
        """What is another object than it was, or holds others."""
        return {(i, key): pair for i, part in enumerate(self._parts) for key, pair in part.changes().items()}

    def path(self, change: tuple[int, Any]) -> str:
        """Where a change is, as the program has it: ``Net.calls``, ``seen['rows']``."""
        i, key = change
        return self._path(self._parts[i], key, 4)

    def _path(self, part: _Kept, key: Any, depth: int) -> str:
        if (owner := self._owners.get(id(part.holder))) is not None:
            return f"{owner}.{key}"
        if isinstance(part, _Attributes) or (isinstance(part, _Entries) and part.names is not None):
            return f"{getattr(part.holder, '__name__', '')}.{key}".lstrip(".") if not part.said else part.said
        above = ((p, k) for p in self._parts if isinstance(p, _ByName) for k, x in p.held.items() if x is part.holder)
        where, k = next(above, (None, None)) if depth else (None, None)
        name = f"a {type(part.holder).__name__}" if where is None else self._path(where, k, depth - 1)
        return f"{name}[{key!r}]" if isinstance(part, _Entries) else name


class _Kept(Protocol):
    """A container, and what it held."""

    holder: Any

    def changes(self) -> dict[Any, tuple[Any, Any]]: ...
    def values(self) -> Iterable[Any]: ...
    def all_back(self) -> None: ...
    def back(self) -> Lost: ...


class _ByName:
    """What has values by name; of ``names`` only these are the step's."""

    def __init__(self, holder: Any, names: Collection[Any] | None = None, said: str = "") -> None:
        self.holder, self.names, self.said = holder, names, said
        self.held = self.now()

    def now(self) -> dict[Any, Any]:
        raise NotImplementedError

    def put(self, key: Any, value: Any) -> None:
        raise NotImplementedError

    def values(self) -> Iterable[Any]:
        return [*self.held.values()]

    def seen(self) -> Iterable[tuple[Any, Any]]:
        """Where tensors without data are looked for."""
        return self.now().items()

    def changes(self) -> dict[Any, tuple[Any, Any]]:
        now, held = self.now(), self.held
        pairs = {key: (held.get(key, NOTHING), now.get(key, NOTHING)) for key in {**now, **held}}
        return {key: (was, new) for key, (was, new) in pairs.items() if was is not new}

    def all_back(self) -> None:
        for key, (was, _) in self.changes().items():
            self.put(key, was)

    def back(self) -> Lost:
        lost = [key for key, x in self.seen() if _is_lost(x) and x is not self.held.get(key, NOTHING)]
        found = [(key, self.held.get(key, NOTHING)) for key in lost]
        for key, was in found:
            self.put(key, was)
        return [(self.said or key, was) for key, was in found]


class _Entries(_ByName):
    """A dict; with ``names``, a part of a namespace."""

    def now(self) -> dict[Any, Any]:
        if self.names is None:
            return dict(copied(self.holder))
        return {name: self.holder[name] for name in sorted(self.holder.keys() & self.names)}

    def put(self, key: Any, value: Any) -> None:
        if value is NOTHING:
            self.holder.pop(key, None)
        else:
            self.holder[key] = value

    def seen(self) -> Iterable[tuple[Any, Any]]:
        return [*self.holder.items()]  # of a namespace all of it: ``globals()["x"] = ...`` looks no name up

    def all_back(self) -> None:
        super().all_back()
        if self.names is None and not all(map(operator.is_, self.holder, self.held)):
            for key in self.held:  # in their order
                self.holder[key] = self.holder.pop(key)


class _Attributes(_ByName):
    """Attributes without a dict of their own: of a class, a module, an object with slots, a cell."""

    def now(self) -> dict[Any, Any]:
        if isinstance(self.holder, type | types.ModuleType):
            space = vars(self.holder)
            return {name: space[name] for name in sorted(space.keys() & set(self.names or ()))}
        found = {}
        for name in self.names or ():
            with suppress(AttributeError, ValueError):  # not set
                found[name] = getattr(self.holder, name)
        return found

    def put(self, key: Any, value: Any) -> None:
        if isinstance(self.holder, types.ModuleType) and isinstance(getattr(self.holder, key, None), types.ModuleType):
            return  # imported meanwhile, which is done once
        with suppress(AttributeError, TypeError, ValueError):  # a frozen one
            if value is NOTHING:
                delattr(self.holder, key)
            else:
                setattr(self.holder, key, value)


class _Sequence:
    """A list or a deque."""

    def __init__(self, holder: list[Any] | deque[Any]) -> None:
        self.holder, self._held = holder, list(holder)

    def values(self) -> Iterable[Any]:
        return self._held

    def changes(self) -> dict[Any, tuple[Any, Any]]:
        same = len(self.holder) == len(self._held) and all(map(operator.is_, self.holder, self._held))
        return {} if same else {"": (tuple(self._held), tuple(self.holder))}

    def all_back(self) -> None:
        if self.changes():
            self.holder.clear()
            self.holder.extend(self._held)

    def back(self) -> Lost:
        if not any(_is_lost(x) for x in self.holder if all(x is not was for was in self._held)):
            return []
        now = [*self.holder]
        self.all_back()
        pairs = enumerate(zip_longest(self._held, now, fillvalue=NOTHING))
        return [(i, was) for i, (was, new) in pairs if was is not new and _is_lost(new)]


class _Set:
    def __init__(self, holder: set[Any]) -> None:
        self.holder, self._held = holder, set(holder)

    def values(self) -> Iterable[Any]:
        return self._held

    def changes(self) -> dict[Any, tuple[Any, Any]]:
        return {} if self.holder == self._held else {"": (frozenset(self._held), frozenset(self.holder))}

    def all_back(self) -> None:
        self.holder &= self._held
        self.holder |= self._held

    def back(self) -> Lost:
        lost = [x for x in self.holder if _is_lost(x) and x not in self._held]
        self.holder.difference_update(lost)
        return [("an entry of a set", NOTHING)] * len(lost)


class _Array:
    """Numbers without tensors among them: an array of NumPy, bytes."""

    def __init__(self, holder: Any) -> None:
        self.holder, self._held = holder, holder.copy()

    def values(self) -> Iterable[Any]:
        return ()

    def changes(self) -> dict[Any, tuple[Any, Any]]:
        was, new = copied(self._held), copied(self.holder)
        return {} if was == new else {"": (was, new)}

    def all_back(self) -> None:
        if isinstance(self.holder, bytearray):
            self.holder[:] = self._held
        elif self.holder.flags.writeable and self.holder.shape == self._held.shape:
            self.holder[...] = self._held

    def back(self) -> Lost:
        return []


def _is_lost(x: Any) -> bool:
    """Whether a value is, or as a tuple has, a tensor without data."""
    return any(map(_is_lost, x)) if type(x) is tuple else isinstance(x, Tensor) and is_fake(x)


def _slots(cls: type) -> list[str]:
    """Names of a class whose values lie in its objects."""
    return [name for name, x in vars(cls).items() if isinstance(x, types.MemberDescriptorType)]


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> frozenset[str]:
    """The names that a function, or one within it, looks up."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*inner)
