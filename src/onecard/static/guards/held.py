"""What a step can reach of its program's containers, and what they held: a look leaves tensors without data in none of them.

A step that is looked at without being done runs its Python: it puts what it makes into dicts, lists, attributes and variables
of enclosing functions. None of that has values. So it is taken out again, whatever the step reads there later.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from onecard._torch.fakes import is_fake
from onecard.static.guards.lookup import users

_MOST = 200_000  # containers; a program that reaches more is followed so far
_PUT_BACK = ("state", "param_groups")
NOTHING = object()


class HeldTensors:
    """Containers that can be reached from some values, with what they hold now.

    Args:
        roots: functions, their arguments, what they are called on.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self._kept: list[tuple[Any, Any]] = []
        self._spaces = set[int]()  # of functions: dicts of which only the names that they look up were noted
        seen, waiting = set[int](), [*roots]
        while waiting and len(self._kept) < _MOST:
            x = waiting.pop()
            if id(x) not in seen:
                seen.add(id(x))
                waiting += self._within(x)

    def _within(self, x: Any) -> Iterable[Any]:
        """What a value leads to; what it holds is noted."""
        if isinstance(x, dict):
            return [*self._noted(x, dict(x)).values()]
        if isinstance(x, list | deque):
            return [*self._noted(x, list(x))]
        if isinstance(x, set):
            return [*self._noted(x, set(x))]
        if isinstance(x, tuple | frozenset):
            return list(x)
        if isinstance(x, types.FunctionType):
            return [*self._of_function(x)]
        if isinstance(x, types.MethodType):
            return [x.__self__, x.__func__]
        if isinstance(x, functools.partial):
            return [x.func, x.args, x.keywords]
        if isinstance(x, Optimizer):
            hooks = [*x._optimizer_step_pre_hooks.values(), *x._optimizer_step_post_hooks.values()]
            if not users(str(type(x).__module__)):
                return hooks
            # A count of its own (``self.k += 1``). States and groups are put back elsewhere.
            own = self._noted(vars(x), dict(vars(x)))
            return [*hooks, *(value for name, value in own.items() if name not in _PUT_BACK)]
        if isinstance(x, Tensor | type | types.ModuleType):
            return []
        if isinstance(x, nn.Module | types.SimpleNamespace) or users(str(type(x).__module__)):
            return [vars(x)] if hasattr(x, "__dict__") else []
        return []

    def _of_function(self, x: types.FunctionType) -> Iterator[Any]:
        yield from (x.__defaults__ or (), x.__kwdefaults__ or {}, x.__dict__)
        for cell in x.__closure__ or ():
            yield self._noted(cell, _in_cell(cell))
        if users(str(x.__module__)):
            found = {name: x.__globals__.get(name, NOTHING) for name in _names(x.__code__)}
            self._spaces.add(id(x.__globals__))
            yield from self._noted(x.__globals__, found).values()

    def _noted(self, container: Any, held: Any) -> Any:
        self._kept.append((container, held))
        return held

    def all_back(self) -> None:
        """Everything that a step has put in, or in the place of something, is out again: numbers and texts, too."""
        for container, held in reversed(self._kept):
            if isinstance(container, dict):
                for key in [key for key, was in held.items() if container.get(key, NOTHING) is not was]:
                    _put(container, key, held[key])
                if id(container) not in self._spaces:
                    for key in [key for key in container if key not in held]:
                        del container[key]
            elif isinstance(container, types.CellType):
                if _in_cell(container) is not held:
                    _put_in_cell(container, held)
            elif isinstance(container, set):
                container &= held
                container |= held
            elif len(container) != len(held) or any(a is not b for a, b in zip(container, held, strict=True)):
                container.clear()
                container.extend(held)

    def back(self) -> list[tuple[Any, Any]]:
        """Take tensors without data out again; their keys, and what had been there before, or ``NOTHING``."""
        found: list[tuple[Any, Any]] = []
        for container, held in self._kept:
            if isinstance(container, dict):
                lost = [key for key, value in container.items() if _is_lost(value) and value is not held.get(key)]
                for key in lost:
                    _put(container, key, held.get(key, NOTHING))
                found += [(key, held.get(key, NOTHING)) for key in lost]
            elif isinstance(container, types.CellType):
                if _is_lost(now := _in_cell(container)) and now is not held:
                    _put_in_cell(container, held)
                    found.append(("a variable of an enclosing function", held))
            elif isinstance(container, set):
                lost = [value for value in container if _is_lost(value) and value not in held]
                container.difference_update(lost)
                found += [("an entry of a set", NOTHING)] * len(lost)
            elif any(_is_lost(value) for value in container if all(value is not x for x in held)):
                now = [*container]
                container.clear()
                container.extend(held)
                pairs = enumerate(zip_longest(held, now, fillvalue=NOTHING))
                found += [(i, was) for i, (was, new) in pairs if was is not new and _is_lost(new)]
        return found


def _is_lost(x: Any) -> bool:
    """Whether a value is, or as a tuple has, a tensor without data."""
    return any(map(_is_lost, x)) if type(x) is tuple else isinstance(x, Tensor) and is_fake(x)


def _put(container: dict[Any, Any], key: Any, value: Any) -> None:
    if value is NOTHING:
        container.pop(key, None)
    else:
        container[key] = value


def _in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING


def _put_in_cell(cell: types.CellType, value: Any) -> None:
    if value is NOTHING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> frozenset[str]:
    """The names that a function, or one within it, looks up."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*inner)
