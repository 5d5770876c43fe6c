"""What a step looks up of the program's objects while it is recorded: a replay is right only where all of that is as it was.

What was there *before* the step counts: what the step itself counts up differs at its next call.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from operator import contains
from typing import Any
from weakref import ProxyTypes

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from onecard._torch.scaling import has_checked
from onecard.errors import RecordingError
from onecard.static.guards.before import STILL
from onecard.static.guards.guard import LOOKED_UP, OF_CODE, Guard
from onecard.static.guards.lookup import ABSENT, BYTES, CONTAINERS, SHOW, Place, behind, now_at, users
from onecard.static.guards.numbers import Number, numbers_in
from onecard.static.guards.unchanged import copied, is_plain, kept
from onecard.train.own_parameters import named_parameters


class Seen:
    """What has been looked up.

    Attributes:
        guards: what must be as it was.
        roots: modules, optimizers and tensors, by the names that they were found by.
        never: why the step can never be replayed, "" if it can.
        repeated: what each replay gives again, in words, and whether it was drawn.
    """

    def __init__(self, had: Callable[[Tensor], bool], found: Callable[[Any], None]) -> None:
        self._had, self._found = had, found
        self._old: dict[int, Any] = {}  # kept while the step runs, so that nothing new has the identity of one of them
        self.guards: list[Guard] = []
        self.roots: list[tuple[str, Any]] = []
        self.never = ""
        self.repeated: dict[str, bool] = {}
        self._known: set[Any] = set()
        self._first: dict[int, tuple[Any, Any]] = {}  # containers, and what they held when they were first seen
        self._stored: list[Any] = []
        self._library: set[Any] = set()  # what a library without torch has looked up
        self._left: dict[Any, tuple[Callable[[], Any], str, str]] = {}
        self._written: tuple[Any, str] | None = None  # the first file, and where
        self.old(sys.modules)

    def was_there(self, x: Any) -> bool:
        """Whether an object is known to be older than the step: something old has led to it."""
        return id(x) in self._old or isinstance(x, _LASTING) or (isinstance(x, Tensor) and self._had(x))

    def old(self, *objects: Any) -> None:
        """Objects are older than the step, and what they hold for good."""
        for x in objects:
            self._old_one(x)

    def _old_one(self, x: Any) -> None:
        if (
            id(x) in self._old or type(x) in ProxyTypes or isinstance(x, (Tensor, *STILL))
        ):  # what is behind a proxy may be gone
            return
        self._old[id(x)] = x
        if isinstance(x, tuple | frozenset):
            parts: Any = x
        elif isinstance(x, types.MethodType):
            parts = (x.__self__, x.__func__)
        elif isinstance(x, partial):
            parts = (x.func, *x.args, x.keywords, *x.keywords.values())
        elif isinstance(x, SHOW):
            parts = (behind(x),)
        elif isinstance(x, types.FunctionType):
            parts = (*(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values())
        else:
            return
        self.old(*parts)

    # -- noting ----------------------------------------------------------------------------------------------------------

    def read(self, place: Place, name: str, line: str, library: bool = False) -> None:
        """Something is looked up; ``library``: by one without torch, whose own counts are nothing to the step."""
        mark = _mark(place)
        try:
            if mark in self._known or not self.was_there(place.owner):
                self._left.pop((mark[0], str(place.key)), None)  # the step hands it over to itself
                return
            self._known.add(mark)
        except TypeError:  # a key that is none
            return
        value = self._before(place)
        self.old(value)
        if isinstance(value, CONTAINERS):
            self.touch(value)
        self.root(name, value)
        kind = type(value)
        if not isinstance(value, nn.Module | Optimizer | Tensor | type) and users(str(kind.__module__)):
            self.ask(f"class {id(value)}", partial(type, value), f"the class of {name}", line)
        if not isinstance(value, Number) and (not isinstance(value, Tensor) or self._had(value)):
            self.guards.append(Guard(place, kept(value), name, line, library))
            if library:
                self._library.add(mark)

    def _before(self, place: Place) -> Any:
        """What was there before the step, as far as the step's own calls of a container's methods have changed it."""
        first = self._first.get(id(place.holder))
        if place.kind != "entry" or first is None:
            return now_at(place)
        held, key = first[1], place.key
        if isinstance(held, dict):
            return held.get(key, ABSENT)
        return held[key] if isinstance(held, tuple) and -len(held) <= key < len(held) else ABSENT

    def root(self, name: str, value: Any) -> None:
        """A module, an optimizer or a tensor has this name."""
        kinds = isinstance(value, nn.Module | Optimizer) or (isinstance(value, Tensor) and self._had(value))
        if kinds and all(value is not x for _, x in self.roots):
            self.roots.append((name, value))
            self._found(value)

    def outermost(self, given: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
        """Modules, optimizers and tensors that the step has found, but for what others of them hold; ``given`` come first."""
        found, inside = list[tuple[str, Any]](), set[int]()
        tensors = [(n, x) for n, x in self.roots if isinstance(x, Tensor)]
        for name, x in (*given, *(r for r in self.roots if not isinstance(r[1], Tensor)), *tensors):
            if id(x) not in inside:
                found.append((name, x))
                inside |= set(map(id, _held(x)))
        return found

    def stored(self, place: Place, library: bool = False) -> None:
        """The step stores something there: what it looks up there later is its own."""
        if isinstance(place.holder, CONTAINERS):
            self.touch(place.holder)
        try:
            mark = _mark(place)
            self._known.add(mark)
            if library and mark in self._library:  # a progress bar's count
                self.guards = [g for g in self.guards if g.place.kind not in LOOKED_UP or _mark(g.place) != mark]
            self._stored.append(place)  # it stays, so that its identity is its own
        except TypeError:
            return

    def leaves(self, place: Place, name: str, line: str) -> None:
        """The program's own code puts something where it finds it after the step."""
        if self.was_there(place.owner) and not isinstance(place.owner, Tensor | Optimizer) and not is_installed(line):
            self._left.setdefault((id(place.holder), str(place.key)), (partial(now_at, place), name, line))

    def grows(self, x: Any, name: str, line: str) -> None:
        """The program's own code adds to a container."""
        if self.was_there(x) and not is_installed(line):
            self.touch(x)
            self._left.setdefault((id(x), ""), (partial(_added, x, len(x)), name, line))

    def writes(self, file: Any, name: str, line: str) -> None:
        """The program's own code writes to a file; what it shows on a terminal is its own affair."""
        shown = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        if not any(file is x or file is getattr(x, "buffer", None) for x in shown) and not is_installed(line):
            self._written = self._written or (name, line)

    def look_at_left(self) -> None:
        """What the step leaves is what is there now: the places get back what they had."""
        self._left = {k: (partial(_same, now()), name, line) for k, (now, name, line) in self._left.items()}

    def left_behind(self, states: Collection[int] = ()) -> str:
        """What the step leaves that a replay would not, in words: tensors, numbers that may change, longer lists, files.

        Args:
            states: who the dicts of optimizers' states are, in which a replay leaves the tensors that the step has.
        """
        noted = {id(g.place.holder) for g in self.guards if g.place.kind not in ("answer", "code")}
        for (holder, key), (now, name, line) in self._left.items():
            value = now()
            made = isinstance(value, Tensor) and not self._had(value) and holder not in states
            if (made or isinstance(value, Number | _Added)) and (key or holder not in noted):
                what = f"adds to {name}" if isinstance(value, _Added) else f"sets {name}"
                return f"the step {what} at {line}, in Python, which a replay does not repeat: return it, and keep it outside"
        if self._written:
            file, line = self._written
            what = f"writes to {file} at {line}, in Python, which a replay does not repeat"
            return f"the step {what}: return it, and write it outside"
        return ""

    def touch(self, x: Any) -> None:
        """A container comes up, which the step may change."""
        if id(x) not in self._first and self.was_there(x):
            self._first[id(x)] = (x, copied(x))

    def whole(self, x: Any, name: str, line: str, depth: int = 3) -> None:
        """All that a container holds may be looked at, by what is not the program's Python."""
        x = behind(x)
        if isinstance(x, (tuple, *CONTAINERS)) and depth:
            if not isinstance(x, tuple):
                if not self.was_there(x):  # the step's own, with lists of the program among what it holds
                    for part in () if isinstance(x, BYTES) else x.values() if isinstance(x, dict) else x:
                        if isinstance(part, CONTAINERS):
                            self.whole(part, name, line, depth - 1)
                    return
                if ("whole", id(x)) in self._known:
                    return
                self.touch(x)
                self._known.add(("whole", id(x)))
                self.guards.append(Guard(Place("whole", x, None, x), self._first[id(x)][1], name, line))
            if not isinstance(x, BYTES):
                for part in self._first[id(x)][1] if not isinstance(x, tuple) else x:
                    self._part(x, part, name, line, depth)

    def _part(self, x: Any, part: Any, name: str, line: str, depth: int) -> None:
        if isinstance(x, dict):
            self.old(part)
            part = self._first[id(x)][1][part]
        self.old(part)
        self.whole(part, name, line, depth - 1)

    def within(self, x: Any, key: Any, name: str, line: str) -> None:
        """It is asked whether a set has something."""
        self.touch(x)
        if self.was_there(x) and (id(x), "within", key) not in self._known:
            self._known.add((id(x), "within", key))
            self._ask(partial(contains, x, key), key in self._first[id(x)][1], name, line)

    def ask(self, of: Any, question: Callable[[], Any], name: str, line: str) -> None:
        """Something is asked, of an object or of what a text names, that can be asked again."""
        if ("asked", of if isinstance(of, str) else id(of)) not in self._known:
            self.settled(of)
            answer = question()
            self.old(answer)
            self._ask(question, kept(answer), name, line)

    def _ask(self, question: Callable[[], Any], answer: Any, name: str, line: str) -> None:
        self.guards.append(Guard(Place("answer", question, None, question), answer, name, line))

    def scale_by(self, scalers: Sequence[GradScaler]) -> None:
        """The step scales by these: of torch's code no look-up is seen, and their options are numbers of Python."""
        for scaler in scalers:
            if has_checked(scaler):
                raise RecordingError(
                    "GradScaler.step (or unscale_) is in the recorded step and update() is not: a replay makes no notes in "
                    "Python, which update() reads. Put scaler.update() into the step, behind scaler.step(optimizer)"
                )
            for key, value in vars(scaler).items():
                if is_plain(value) and not key.startswith("_init"):  # what the first scale was made of
                    place = Place("entry", vars(scaler), key, scaler)
                    self.guards.append(Guard(place, value, f"{type(scaler).__name__}.{key}", "an option of it"))

    def settled(self, of: Any) -> None:
        """An object has been asked, or has been given its answer by the step."""
        self._known.add(("asked", of if isinstance(of, str) else id(of)))
        self._stored.append(of)

    def repeats(self, does: str, name: str, line: str) -> None:
        """The step has something of an object that may answer otherwise next time, and that nobody can look into."""
        if (does, name) not in self._known:
            self._known.add((does, name))
            self.repeated[
                f"the step {does} {name} at {line}; every replay repeats what it was given while it was recorded. Do it before "
                "the step, and pass what comes of it as an argument"
            ] = does == DRAWS

    def function(self, f: Any) -> None:
        """A function of the program's runs."""
        if ("code", id(f)) not in self._known and self.was_there(f):
            self._known.add(("code", id(f)))
            self.guards += [Guard(Place("code", f, key, f), getattr(f, key), f.__qualname__, "") for key in OF_CODE]

    def lost(self, fault: Exception, line: str) -> None:
        """Something was looked up that cannot be followed."""
        self.never = self.never or f"what the step reads at {line} cannot be followed ({type(fault).__name__}: {fault})"

    # -- afterwards ------------------------------------------------------------------------------------------------------

    def settle(self, roots: list[tuple[str, Any]]) -> None:
        """Leave out what a recording looks at anyway, and what only the step itself has held."""
        modules = {id(m) for _, r in roots if isinstance(r, nn.Module) for m in r.modules()}
        inner = {id(x) for _, r in roots if isinstance(r, Optimizer) for x in parts_of(r)}
        # While a step is recorded functions of torch and of math are others, which write down what they do.
        self.guards = [_afterwards(g) for g in self.guards if not _looked_at(g, modules, inner)]
        for held in (self._first, self._known, self._old, self._stored, self._library, self._left):
            held.clear()
        self._had, self._found = (lambda x: False), (lambda x: None)

    def without_counts(self) -> bool:
        """After a call that did what was recorded: leave out what a library has changed for itself; whether there was any."""
        still = [g for g in self.guards if not (g.library and g.difference())]
        changed, self.guards = len(still) < len(self.guards), still
        return changed

    def difference(self) -> str:
        """What is not as it was, in words; "" if all is."""
        if self.never:
            return self.never
        # What has a name in the program is said first.
        guards = sorted(self.guards, key=lambda g: _SAID.index("" if g.place.kind in LOOKED_UP else g.place.kind))
        return next((said for g in guards if (said := g.difference())), "")


DRAWS = "draws from"
_SAID = ("", "whole", "answer", "code")


def _mark(place: Place) -> tuple[Any, ...]:
    return id(place.holder), id(place.key) if place.kind == "slot" else place.key


class _Added(int):
    """How much longer a container has become."""


def _same(value: Any) -> Any:
    return value


def _added(x: Any, length: int) -> Any:
    return _Added(len(x) - length) if len(x) > length else None


def is_installed(line: str) -> bool:
    """Whether a line is a library's: what that keeps for itself is its own affair."""
    return "site-packages" in line or "dist-packages" in line


def _held(x: Any) -> Iterator[Any]:
    """What has its place by a module or an optimizer, and the thing itself."""
    yield x
    if isinstance(x, nn.Module):
        yield from nn.Module.modules(x)
        yield from (p for _, p in named_parameters(x))
        yield from nn.Module.buffers(x)
    elif isinstance(x, Optimizer):
        for group in x.param_groups:
            yield from (t for t in (*group["params"], *group.values()) if isinstance(t, Tensor))
        yield from (t for state in x.state.values() for t in state.values() if isinstance(t, Tensor))


_LASTING = (type, types.ModuleType, nn.Module, Optimizer)


def parts_of(optimizer: Optimizer) -> Iterator[Any]:
    """The containers of an optimizer that a recording looks at."""
    yield vars(optimizer)
    yield optimizer.param_groups
    yield optimizer.state
    yield from optimizer.state.values()
    for group in optimizer.param_groups:
        yield group
        yield group["params"]


def _afterwards(guard: Guard) -> Guard:
    owner = guard.place.owner
    if guard.place.kind not in LOOKED_UP or not isinstance(owner, type | types.ModuleType):
        return guard
    name = owner.__module__ if isinstance(owner, type) else vars(owner).get("__name__", "")
    return guard if users(str(name)) else guard._replace(must=kept(now_at(guard.place)))


def _looked_at(guard: Guard, modules: set[int], inner: set[int]) -> bool:
    """Whether a recording looks at this anyway (``fits.py``)."""
    kind, holder, key, owner = guard.place
    if kind != "entry":
        return kind == "whole" and id(holder) in inner
    if id(owner) in modules and isinstance(owner, nn.Module):
        if holder is not owner.__dict__:  # parameters, buffers, modules
            return True
        return key in _OF_EVERY_MODULE or (isinstance(guard.must, STILL) and not str(key).startswith("_"))
    if id(holder) not in inner:
        return False
    if isinstance(key, Tensor):  # which states a parameter has
        return True
    followed = isinstance(guard.must, tuple | list) and numbers_in(guard.must)  # as betas of a group
    return bool(followed or not is_plain(guard.must)) and guard.must is not ABSENT


_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
