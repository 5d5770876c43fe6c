"""What expressions are in a function that runs: values of its names, and of what these lead to, without running any code."""

from __future__ import annotations

import builtins
import contextvars
import functools
import importlib
import operator
import sys
import types
import weakref
from typing import Any

from onecard.static.guards.chains import Expr
from onecard.static.guards.instructions import instruction_at
from onecard.static.guards.lookup import ABSENT, UNKNOWN, attribute, held_by, helps, item, users
from onecard.static.guards.seen import Seen

_instruction = functools.lru_cache(maxsize=8192)(instruction_at)
_Frame = types.FrameType


class FrameValues:
    """Values in the functions that run now.

    Attributes:
        seen: what has been looked up; it knows what is older than the step.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self._cells: dict[int, dict[str, list[Any]]] = {}  # of each frame
        self._returned: dict[
            int, dict[int, Any]
        ] = {}  # for each frame, what its instructions have been given by functions
        self._functions: dict[int, list[Any]] = {}  # by their code

    def runs(self, f: Any) -> None:
        """A function is called."""
        module = str(f.__globals__.get("__name__", ""))
        if users(module):
            self.seen.function(f)
        if users(module) or helps(module):
            known = self._functions.setdefault(id(f.__code__), [])
            if all(f is not x for x in known):
                known.append(f)

    def leave(self, frame: _Frame, result: Any, goes_on: bool) -> None:
        """A function ends; what it returns is known where it is used at once, in a function that is followed."""
        self._cells.pop(id(frame), None)
        self._returned.pop(id(frame), None)
        back = frame.f_back
        if back is not None and goes_on and self.seen.was_there(result):
            at = _instruction(back.f_code, back.f_lasti)
            self._returned.setdefault(id(back), {})[at] = result

    def forget(self, frame: _Frame, at: int) -> None:
        """An instruction is about to run again."""
        returned = self._returned.get(id(frame))
        if returned:
            returned.pop(at, None)

    def value(self, e: Expr | None, frame: _Frame) -> Any:
        """What an expression is now, without running code of the program's."""
        if e is None:
            return UNKNOWN
        returned = self._returned.get(id(frame))
        if returned and e.at in returned:
            return returned[e.at]
        if e.kind == "const":
            return e.name
        if e.kind in ("local", "cell"):
            if e.name not in frame.f_locals and (cells := self.cells(frame, e.name)):  # in the body of a class
                return cells[0].cell_contents
            return frame.f_locals.get(e.name, UNKNOWN)
        if e.kind in ("global", "name"):
            if e.kind == "name" and e.name in frame.f_locals:
                return frame.f_locals[e.name]
            return frame.f_globals.get(e.name, getattr(builtins, e.name, UNKNOWN))
        if e.kind == "import":
            return sys.modules.get(e.name, UNKNOWN)
        if e.kind == "tuple":
            parts = tuple(self.value(a, frame) for a in e.args)
            return UNKNOWN if any(x is UNKNOWN for x in parts) else parts
        if e.kind == "either":
            found = {id(x): x for x in (self.value(a, frame) for a in e.args)}
            return next(iter(found.values())) if len(found) == 1 else UNKNOWN
        base = self.value(e.base, frame)
        if base is UNKNOWN or base is ABSENT:
            return UNKNOWN
        return self._part(e, base, frame)

    def _part(self, e: Expr, base: Any, frame: _Frame) -> Any:
        if e.kind == "attr":
            found = attribute(base, e.name)[0]
        elif e.kind == "item":
            key = self.value(e.args[0], frame)
            found = UNKNOWN if key is UNKNOWN else item(base, key)[0]
        elif base is globals:
            found = frame.f_globals
        elif base is super and len(e.args) != 1:
            this, code = frame.f_locals.get("__class__"), frame.f_code
            x = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if e.args:
                this, x = (self.value(a, frame) for a in e.args)
            found = super(this, x) if isinstance(this, type) and isinstance(x, this) else UNKNOWN
        else:
            found = UNKNOWN if e.name else self._result(base, [self.value(a, frame) for a in e.args])
        return UNKNOWN if found is ABSENT else found

    def _result(self, f: Any, args: list[Any]) -> Any:
        """What a few functions return that only look something up."""
        if f is getattr and len(args) in (2, 3) and isinstance(args[1], str) and args[0] is not UNKNOWN:
            found = attribute(args[0], args[1])[0]
            return args[2] if found is ABSENT and len(args) == 3 else found
        if f is importlib.import_module and len(args) == 1 and isinstance(args[0], str):
            return sys.modules.get(args[0], UNKNOWN)
        if (f is vars or f is type) and len(args) == 1 and args[0] is not UNKNOWN:
            return held_by(args[0]) if f is vars else type(args[0])
        if (
            any(f is g for g in (operator.attrgetter, operator.itemgetter))
            and args
            and all(isinstance(a, str | int) for a in args)
        ):
            return f(*args)
        if isinstance(f, weakref.ref):
            if self.seen.was_there(f):
                self.seen.old(f())
            return f()
        own = getattr(f, "__self__", None) if isinstance(f, types.BuiltinMethodType) else None
        if isinstance(own, dict) and f.__name__ in ("get", "setdefault") and args and args[0] is not UNKNOWN:
            found = dict.get(own, args[0], ABSENT)
            return (args[1] if len(args) == 2 else None) if found is ABSENT else found
        if isinstance(f, functools.partial) or f is UNKNOWN:
            return UNKNOWN
        if isinstance(own, contextvars.ContextVar) and f.__name__ == "get":
            return own.get(args[0] if args else UNKNOWN)
        return UNKNOWN

    def cells(self, frame: _Frame, name: str) -> list[Any]:
        """The cells that a free name may be; none if they were made in the step."""
        known = self._cells.get(id(frame))
        if known is None:
            known = self._cells[id(frame)] = self._cells_of(frame)
        return known.get(name, [])

    def _cells_of(self, frame: _Frame) -> dict[str, list[Any]]:
        """Those of all functions with this code that hold what the names are here: which of them runs, Python does not say."""
        code, found = frame.f_code, dict[str, list[Any]]()
        for f in self._functions.get(id(code), ()):
            cells = dict(zip(code.co_freevars, f.__closure__ or (), strict=False))
            if all(_holds(cell, frame.f_locals.get(name, ABSENT)) for name, cell in cells.items()):
                for name, cell in cells.items():
                    found.setdefault(name, []).append(cell)
        above = frame.f_back
        while not found and above is not None:  # a function that the step has made, of cells of the one around it
            if any(code is constant for constant in above.f_code.co_consts):
                return {name: self.cells(above, name) for name in code.co_freevars}
            above = above.f_back
        return found


def _holds(cell: Any, value: Any) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:
        return value is ABSENT
