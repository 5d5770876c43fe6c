"""What really runs while a step is recorded: each instruction of the program's own functions that looks something up is noted.

Names cannot be found by reading code: an object's ``__getattr__``, a function that is found in a dict, a list that a library
goes through. So the functions run under a trace (``sys.settrace``), and before an instruction looks something up it is looked
up here, without running anything. Functions of torch, onecard and NumPy run as ever: what they are given is noted.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from onecard.static.guards.asked_again import is_setting
from onecard.static.guards.before import STILL
from onecard.static.guards.calls import Calls
from onecard.static.guards.chains import Act, Expr, acts_of, text
from onecard.static.guards.frames import FrameValues
from onecard.static.guards.lookup import (
    ABSENT,
    CONTAINERS,
    UNKNOWN,
    Place,
    attribute,
    behind,
    function_of,
    helps,
    in_bases,
    item,
    users,
)
from onecard.static.guards.seen import Seen

_acts = functools.lru_cache(maxsize=8192)(acts_of)
_Frame = types.FrameType
_IMPORTS = {-3: ()}  # the plan of what imports a file


class Ran:
    """A trace of one step.

    Attributes:
        seen: what has been looked up.
    """

    def __init__(
        self,
        fn: Any,
        leaves: Sequence[Any],
        had: Callable[[Tensor], bool],
        found: Callable[[Any], None],
        made_before: Sequence[Any],
    ) -> None:
        self.seen = Seen(had, found)
        self._values, self._calls = FrameValues(self.seen), Calls(self.seen)
        self._closures: dict[int, list[Any]] = {}
        plain, closures = types.FunctionType, self._closures
        held = [x for x in made_before if type(x) is plain and (x.__closure__ or x.__defaults__ or x.__kwdefaults__)]
        for code, function in zip(map(id, map(attrgetter("__code__"), held)), held, strict=True):  # there are thousands
            if code in closures:
                closures[code].append(function)
            else:
                closures[code] = [function]
        self.seen.old(*(x for x in made_before if type(x) is not plain), fn, *leaves)
        self._plans: dict[int, Any] = {}
        self._codes: list[Any] = []  # kept, so that their identities are theirs
        self._methods: set[tuple[int, int]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, what runs is noted. A debugger or a measurement of coverage goes on."""
        before = sys.gettrace()
        begin = self._traced(before)
        sys._getframe().f_trace_opcodes = True  # Python 3.12 asks for it ahead of the first trace
        sys.settrace(begin)
        try:
            yield
        finally:
            if sys.gettrace() is begin:
                sys.settrace(before)

    def _traced(self, other: Any) -> Any:
        plans, learn, begin, step = self._plans, self._learn, self._begin, self._local(other)
        importing = [0]

        def imported(frame: _Frame, event: str, arg: Any) -> Any:
            importing[0] -= event == "return"
            return imported

        def trace(frame: _Frame, event: str, arg: Any) -> Any:
            code = frame.f_code
            plan = plans.get(id(code))
            if plan is None:
                plan = learn(frame)
            if plan is _IMPORTS:  # what an imported file does is no part of the step
                importing[0] += 1
                return imported
            if importing[0] or (plan and plan.get(-1) and not (frame.f_back and plans.get(id(frame.f_back.f_code)))):
                plan = None
            local = None
            if other is not None:
                local = other(frame, event, arg)
                if sys.gettrace() is not trace:  # those written in C take the place of what has called them
                    sys.settrace(trace)
            if not plan:
                return local
            begin(frame)
            followed = step if local is None else self._both(step, local)
            frame.f_trace = followed  # ahead of the next line: Python 3.13 asks for it
            frame.f_trace_opcodes = True
            if local is None:
                frame.f_trace_lines = False
            return followed

        return trace

    def _both(self, step: Any, local: Any) -> Any:
        """Two traces of one function."""
        held = [local]

        def both(frame: _Frame, event: str, arg: Any) -> Any:
            step(frame, event, arg)
            if event != "opcode" and held[0] is not None:
                held[0] = held[0](frame, event, arg)
            return both

        return both

    def _local(self, other: Any) -> Any:
        plans, act, leave = self._plans, self._act, self._values.leave

        def step(frame: _Frame, event: str, arg: Any) -> Any:
            if event == "opcode":
                found = plans[id(frame.f_code)].get(frame.f_lasti)
                if found is not None:
                    try:
                        act(frame, found)
                    except Exception as fault:  # an object that answers otherwise than Python's do
                        self.seen.lost(fault, f"{frame.f_code.co_filename}:{frame.f_lineno}")
            elif event == "return":
                leave(frame, arg, frame.f_back is not None and bool(plans.get(id(frame.f_back.f_code))))
            return step

        return step

    def _learn(self, frame: _Frame) -> Any:
        """What the code of a function does; {} of what is not the program's."""
        code = frame.f_code
        self._codes.append(code)
        self.seen.old(frame.f_globals)
        module = str(frame.f_globals.get("__name__", ""))
        plan: Any = {}
        if code.co_name == "_find_and_load" and module.startswith("importlib"):
            plan = _IMPORTS
        elif users(module):  # one that looks nothing up is followed, too: its result may be an object
            plan = {-2: (), **_acts(code)}
        elif helps(module):
            of_python = module.partition(".")[0] in sys.stdlib_module_names
            plan = {-2: (), -1: "python" if of_python else "library", **_acts(code)}
        self._plans[id(code)] = plan
        return plan

    def _begin(self, frame: _Frame) -> None:
        """A method runs: it is to stay that of its class."""
        code = frame.f_code
        for f in self._closures.pop(id(code), ()):
            self.seen.old(f)
            self._values.runs(f)
        if code.co_argcount:
            x = frame.f_locals.get(code.co_varnames[0])
            kind: Any = x if isinstance(x, type) else type(x)
            if (id(code), id(kind)) not in self._methods:
                self._methods.add((id(code), id(kind)))
                for base, name, f in _methods(kind, code):
                    for place in in_bases(base, name)[0]:
                        self.seen.read(place, f"{base.__name__}.{name}", self._line(frame))
                    self._values.runs(f)

    def _line(self, frame: _Frame) -> str:
        """The line of the program's own."""
        while (self._plans.get(id(frame.f_code)) or {}).get(-1) and frame.f_back is not None:
            frame = frame.f_back
        return f"{frame.f_code.co_filename}:{frame.f_lineno}"

    # -- what instructions do --------------------------------------------------------------------------------------------

    def _act(self, frame: _Frame, acts: tuple[Act, ...]) -> None:
        for kind, e in acts:
            if kind in ("read", "call"):
                self._values.forget(frame, e.at)
            if kind == "read":
                self._read(frame, e)
            elif kind == "store":
                for place in self._places(frame, e):
                    if not self._in_library(frame):
                        self.seen.leaves(place, str(e), self._line(frame))
                    self.seen.stored(place, self._in_library(frame))
            elif kind == "whole":
                self._whole(frame, e)
            elif kind == "match":
                self._match(frame, e)
            elif kind == "within":
                self._within(frame, e)
            elif kind == "grow":
                self._grow(frame, e)
            else:
                self._call(frame, e)

    def _call(self, frame: _Frame, e: Expr) -> None:
        f = self._values.value(e.base, frame)
        if (own := function_of(f)) is not None:
            self._values.runs(own)
        self._calls.of_library = self._in_library(frame)
        self._calls.look(f, [self._values.value(a, frame) for a in e.args], e, self._line(frame))

    def _in_library(self, frame: _Frame) -> bool:
        return bool(self._plans[id(frame.f_code)].get(-1) == "library")

    def _places(self, frame: _Frame, e: Expr) -> tuple[Place, ...]:
        """Where the value of an expression is looked up."""
        if e.kind in ("global", "name"):
            there = frame.f_globals
            given = vars(builtins).get(e.name, ABSENT)
            if e.name in there or given is ABSENT:
                return (Place("entry", there, e.name, there),)
            if isinstance(given, type | types.BuiltinFunctionType):
                return ()
            return (Place("entry", vars(builtins), e.name, builtins),)  # a program's own
        if e.kind == "cell":
            return tuple(Place("cell", cell, None, cell) for cell in self._values.cells(frame, e.name))
        if e.kind == "import":
            return (Place("entry", sys.modules, e.name, sys.modules),)
        if e.kind not in ("attr", "item"):
            return ()
        base = self._values.value(e.base, frame)
        if base is UNKNOWN:
            return ()
        if e.kind == "attr":
            if isinstance(base, CONTAINERS):
                self.seen.touch(base)
            return attribute(base, e.name)[1]
        key = self._values.value(e.args[0], frame)
        return item(base, key)[1] if key is not UNKNOWN else ()

    def _read(self, frame: _Frame, e: Expr) -> None:
        line = self._line(frame)
        places = self._places(frame, e)
        if e.name == "__dict__" and not places and self.seen.was_there(self._values.value(e.base, frame)):
            self.seen.old(self._values.value(e, frame))
        for place in places:
            self.seen.read(place, str(e), line, self._in_library(frame))
        if e.kind == "attr":
            self._of_c(e, self._values.value(e.base, frame), line)
        if e.kind == "item" and not places:  # by a key that is not known, or a slice
            base = behind(self._values.value(e.base, frame))
            if isinstance(base, CONTAINERS):
                self.seen.whole(base, text(e.base), line)

    def _of_c(self, e: Expr, base: Any, line: str) -> None:
        """An attribute that functions of C answer: a field of a structure, a setting of torch's."""
        if isinstance(base, ctypes.Structure | ctypes.Union):
            self.seen.whole(base, text(e.base), line)
        elif is_setting(base) and isinstance(getattr(base, str(e.name), None), STILL):
            self.seen.ask(str(e), partial(getattr, base, str(e.name)), str(e), line)

    def _match(self, frame: _Frame, e: Expr) -> None:
        """``case Point(x, y=0)``: attributes by the names that the class gives its first ones, and by their own."""
        count, *names = e.name
        kind = self._values.value(e.args[0], frame)
        first = getattr(kind, "__match_args__", ()) if isinstance(kind, type) else ()
        for name in (*first[:count], *names):
            self._read(frame, Expr("attr", e.at, name, e.base))

    def _within(self, frame: _Frame, e: Expr) -> None:
        base, key = self._values.value(e.base, frame), self._values.value(e.args[0], frame)
        if isinstance(base, dict):
            self._read(frame, e)
        elif isinstance(base, set) and isinstance(key, (*STILL, tuple)):
            self.seen.within(base, key, str(e), self._line(frame))
        elif isinstance(base, CONTAINERS):
            self.seen.whole(base, text(e.base), self._line(frame))

    def _grow(self, frame: _Frame, e: Expr) -> None:
        """``+=`` and its like: a list, a set or a dict is added to, and not looked into."""
        x = self._values.value(e, frame)
        if type(x) not in (list, set, dict):
            self._whole(frame, e)
        elif not self._in_library(frame):
            self.seen.grows(x, str(e), self._line(frame))

    def _whole(self, frame: _Frame, e: Expr) -> None:
        x = behind(self._values.value(e, frame))
        if isinstance(x, CONTAINERS):
            self.seen.whole(x, str(e), self._line(frame))
        else:
            self._calls.goes_on(x, str(e), self._line(frame))


class NotWatched:
    """In place of a trace, of a step that is only looked at: nothing of it is replayed, so that nothing has to be compared."""

    def __init__(self, had: Callable[[Tensor], bool], found: Callable[[Any], None]) -> None:
        self.seen = Seen(had, found)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the program runs as fast as it is."""
        yield


def watched(kinds: Iterable[type]) -> set[type]:
    """Types whose objects count, if they are there before a step: the program's classes, iterators, and functions."""

    def counts(kind: type) -> bool:
        ours = users(str(kind.__module__)) and not issubclass(kind, Tensor | type)
        return kind is types.FunctionType or hasattr(kind, "__next__") or ours

    return {*filter(counts, kinds)}


def _methods(kind: type, code: Any) -> Iterator[tuple[type, str, Any]]:
    """Where in a class and its bases code stands."""
    for base in kind.__mro__:
        held = vars(base)
        for name in (code.co_name,) if code.co_name in held else held:
            f = function_of(held[name])
            if f is not None and f.__code__ is code:
                yield base, name, f
