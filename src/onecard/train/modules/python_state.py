"""What a forward changes in Python: attributes, lists, dicts. A second run of it begins from what the first one began from."""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

_DEEP, _MANY, _LONG = 6, 4096, 4096  # how far what is given is looked at: nested, objects, entries of one
_INTERNAL = frozenset({*nn.Module().__dict__, "forward"}) - {"training"}
_NO_STATE = (
    Tensor, nn.Module, type, enum.Enum, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip
_GONE = object()


class PythonState:
    """Objects of Python that a forward may change, and what they held ahead of it.

    Args:
        module: whose forward it is, with the modules below it; None: of a function.
        given: its arguments: caches of keys and values, lists to which results are added.

    Example:
        >>> counter = types.SimpleNamespace(calls=0)
        >>> state = PythonState(None, (counter,))
        >>> counter.calls += 1
        >>> state.keep_changed()
        >>> back = state.begin()
        >>> counter.calls
        0
        >>> back()
        >>> counter.calls
        1
    """

    def __init__(self, module: nn.Module | None, given: Any) -> None:
        self._before = [(x, _content(x)) for x in _found(module, given)]

    def keep_changed(self) -> None:
        """The first run is over: what it has not changed is nothing to set back."""
        self._before = [(x, was) for x, was in self._before if _differs(_content(x), was)]

    def begin(self) -> Callable[[], None]:
        """All that was changed is as it was ahead of the first run; call what is returned to have it as it is now."""
        now = [(x, _content(x)) for x, _ in self._before]
        for x, was in self._before:
            _put(x, was)

        def back() -> None:
            for x, held in now:
                _put(x, held)

        return back


def _found(module: nn.Module | None, given: Any) -> Iterator[Any]:
    """Modules, and what of Python they and the arguments hold, each once."""
    seen, waiting = set[int](), [(x, 0) for x in (*(module.modules() if module is not None else ()), given)]
    while waiting and len(seen) < _MANY:
        x, depth = waiting.pop()
        if id(x) in seen or not (isinstance(x, nn.Module) or _has_state(x)):
            continue
        seen.add(id(x))
        entries = _content(x) if not isinstance(x, tuple) else x
        if len(entries) > _LONG:
            continue
        if not isinstance(x, tuple):
            yield x
        if depth < _DEEP:
            waiting += [(y, depth + 1) for y in (entries.values() if isinstance(entries, dict) else entries)]


def _has_state(x: Any) -> bool:
    if isinstance(x, list | dict | set | deque | tuple):
        return True
    return not isinstance(x, _NO_STATE) and isinstance(getattr(x, "__dict__", None), dict)


def _content(x: Any) -> Any:
    if isinstance(x, nn.Module):
        return {k: v for k, v in x.__dict__.items() if k not in _INTERNAL}
    if isinstance(x, dict):
        return dict(x)
    return list(x) if isinstance(x, list | deque | set) else dict(x.__dict__)


def _differs(now: Any, was: Any) -> bool:
    if len(now) != len(was):
        return True
    if isinstance(now, dict):
        return any(now.get(k, _GONE) is not v for k, v in was.items())
    return any(a is not b for a, b in zip(now, was, strict=True))


def _put(x: Any, held: Any) -> None:
    if isinstance(x, list):
        x[:] = held
    elif isinstance(x, deque):
        x.clear()
        x.extend(held)
    elif isinstance(x, set):
        x.clear()
        x.update(held)
    else:
        entries = x if isinstance(x, dict) else x.__dict__
        kept = _INTERNAL if isinstance(x, nn.Module) else ()
        for key in [k for k in entries if k not in held and k not in kept]:
            del entries[key]
        entries.update(held)
