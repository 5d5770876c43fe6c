"""What a forward changes in Python: attributes, lists, dicts. A second run of it begins from what the first one began from."""

from __future__ import annotations

import copy
import enum
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onecard import recorded
from onecard._torch.fakes import is_fake
from onecard._torch.names import fakes

_DEEP, _MANY, _LONG = 6, 4096, 4096  # how far what is given is looked at: nested, objects, entries of one
_INTERNAL = frozenset({*nn.Module().__dict__, "forward"}) - {"training"}
_NO_STATE = (
    Tensor, nn.Module, type, enum.Enum, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip
_GONE = object()
_DRAWERS = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
_VALUES = np.ndarray | Tensor
_GLOBAL = (random.getstate.__self__, np.random.get_state.__self__)  # type: ignore[attr-defined]


class PythonState:
    """Objects of Python that a forward may change, and what they held ahead of it.

    Args:
        modules: that the forward runs, with those below them.
        given: its arguments: caches of keys and values, lists to which results are added.

    Example:
        >>> counter = types.SimpleNamespace(calls=0)
        >>> state = PythonState([], (counter,))
        >>> counter.calls += 1
        >>> state.keep_changed()
        >>> back = state.begin()
        >>> counter.calls
        0
        >>> back()
        >>> counter.calls
        1
    """

    def __init__(self, modules: Sequence[nn.Module], given: Any) -> None:
        self._before = [(x, _content(x)) for x in (*_found(modules, given), *_GLOBAL)]

    def keep_changed(self) -> None:
        """The first run is over: what it has not changed is nothing to set back."""
        self._before = [(x, was) for x, was in self._before if _is_changed(x, was)]

    def begin(self) -> Callable[[], None]:
        """All that was changed is as it was ahead of the first run; call what is returned to have it as it is now."""
        now = [(x, _content(x)) for x, _ in self._before]
        for x, was in self._before:
            _put(x, was)

        def back() -> None:
            for x, held in now:
                _put(x, held)

        return back


def _found(modules: Sequence[nn.Module], given: Any) -> Iterator[Any]:
    """Modules, and what of Python they and the arguments hold, each once."""
    seen, waiting = set[int](), [(x, 0) for x in (*modules, given)]
    while waiting and len(seen) < _MANY:
        x, depth = waiting.pop()
        if id(x) in seen or not (isinstance(x, nn.Module) or _has_state(x)):
            continue
        seen.add(id(x))
        if isinstance(x, _DRAWERS | _VALUES):
            yield x
            continue
        entries = _content(x) if not isinstance(x, tuple) else x
        if len(entries) > _LONG:
            continue
        if not isinstance(x, tuple):
            yield x
        if depth < _DEEP:
            waiting += [(y, depth + 1) for y in (entries.values() if isinstance(entries, dict) else entries)]


_OTHERS = ("onecard", "torch")  # groups, meshes, messages under way: what they count is not the forward's


def _has_state(x: Any) -> bool:
    if type(x).__module__.partition(".")[0] in _OTHERS and not isinstance(x, torch.Generator | Tensor):
        return False
    if isinstance(x, list | dict | set | deque | tuple | _DRAWERS):
        return True
    if isinstance(x, np.ndarray):
        return x.size <= _LONG and x.dtype != object
    if isinstance(x, Tensor):  # one that counts; not what layers compute with
        return type(x) is Tensor and x.numel() <= _LONG and _is_plain(x)
    if isinstance(x, _NO_STATE):
        return False
    return isinstance(getattr(x, "__dict__", None), dict) or bool(_slots(x))


def _is_plain(x: Tensor) -> bool:
    """Whether it has values that nobody is to learn, and no step is written down."""
    without = x.requires_grad or x.is_meta or x.is_inference() or is_fake(x) or x.layout is not torch.strided
    return not without and recorded.recorder is None and not fakes()


def _slots(x: Any) -> list[str]:
    named = [s for kind in type(x).__mro__ if kind.__module__ != "builtins" for s in getattr(kind, "__slots__", ())]
    return [s for s in named if isinstance(s, str) and not s.startswith("__")]


def _content(x: Any) -> Any:
    if isinstance(x, nn.Module):
        return {k: v for k, v in x.__dict__.items() if k not in _INTERNAL}
    if isinstance(x, dict):
        return dict(x)
    if isinstance(x, _DRAWERS):
        return _drawer(x)[0]()
    if isinstance(x, _VALUES):
        return x.copy() if isinstance(x, np.ndarray) else (x._version, x.detach().clone())
    if isinstance(x, list | deque | set):
        return list(x)
    return {**{s: getattr(x, s) for s in _slots(x) if hasattr(x, s)}, **getattr(x, "__dict__", {})}


def _drawer(x: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How the state of what draws random numbers is read, and set."""
    if isinstance(x, torch.Generator):
        return x.get_state, x.set_state
    if isinstance(x, np.random.Generator):
        bits: Any = x.bit_generator
        return lambda: copy.deepcopy(bits.state), lambda state: setattr(bits, "state", state)
    return (x.getstate, x.setstate) if isinstance(x, random.Random) else (x.get_state, x.set_state)


def _is_changed(x: Any, was: Any) -> bool:
    if isinstance(x, Tensor):  # nobody waits for a device
        return x._version != was[0]
    return _differs(_content(x), was)


def _differs(now: Any, was: Any) -> bool:
    if isinstance(now, Tensor):  # the state of a generator
        return not torch.equal(now, was)
    if isinstance(now, np.ndarray):
        return not np.array_equal(now, was, equal_nan=now.dtype.kind in "fc")
    if isinstance(now, tuple):  # of what draws
        return any(_differs(a, b) if isinstance(a, np.ndarray) else a != b for a, b in zip(now, was, strict=True))
    if len(now) != len(was):
        return True
    if isinstance(now, dict):
        return any(now.get(k, _GONE) is not v for k, v in was.items())
    return any(a is not b for a, b in zip(now, was, strict=True))


def _put(x: Any, held: Any) -> None:
    if isinstance(x, _DRAWERS):
        _drawer(x)[1](held)
    elif isinstance(x, Tensor):
        with torch.no_grad():
            x.copy_(held[1])
    elif isinstance(x, np.ndarray):
        x[...] = held
    elif isinstance(x, list):
        x[:] = held
    elif isinstance(x, deque):
        x.clear()
        x.extend(held)
    elif isinstance(x, set):
        x.clear()
        x.update(held)
    else:
        slots = [] if isinstance(x, dict | nn.Module) else _slots(x)
        for key in slots:
            if key in held:
                object.__setattr__(x, key, held[key])
        held = {k: v for k, v in held.items() if k not in slots}
        entries = x if isinstance(x, dict) else getattr(x, "__dict__", {})
        kept = _INTERNAL if isinstance(x, nn.Module) else ()
        for key in [k for k in entries if k not in held and k not in kept]:
            del entries[key]
        entries.update(held)
