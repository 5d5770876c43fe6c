"""Numbers of Python that may change between steps, followed while a step is recorded: learning rates, step counts, arguments.

A ``Number`` computes like the float that it is, and writes each operation into the graph. What cannot be followed (a branch,
``int(x)``, a function of C) becomes a condition of the recording: where it does not hold, the step is recorded anew.
"""

from __future__ import annotations

import functools
import gc
import math
import operator
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor

from onecard.static.guards import frozen

# What C code reads in place of the value: not a number, with a mark that arithmetic hands on. So a number that went through a
# function that nobody can follow is found where it comes out, and is not baked in.
_MARK = 0x0C0FFEE
POISON = struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | _MARK))[0]


def poisoned(value: Any) -> bool:
    """Whether a number came out of C code that a ``Number`` went into.

    Example:
        >>> poisoned(math.cos(POISON)), poisoned(math.nan), poisoned(1.0)
        (True, False, False)
    """
    if type(value) is not float or value == value:
        return False
    return struct.unpack("<Q", struct.pack("<d", value))[0] & 0xFFFFFFFFFFFF == _MARK


class Number(float):
    """A float with its node in a graph.

    Attributes:
        value: what it is in the step that is recorded.
        node: where it comes from, made when it is first asked for; ``writer``: who writes operations and conditions down.
    """

    __slots__ = ("_node", "value", "writer")
    value: float
    _node: Any
    writer: Any

    def __new__(cls, value: float, node: Any, writer: Any) -> Number:
        self = float.__new__(cls, POISON)
        self.value, self._node, self.writer = value, node, writer
        return self

    @property
    def node(self) -> Any:
        """Its node in the graph."""
        if callable(self._node):
            self._node = self._node()
        return self._node

    def _fixed(self) -> float:
        """The value for what cannot be followed: from now on a condition."""
        self.writer.condition(operator.eq, (self.node, self.value), True)
        return self.value

    def __float__(self) -> float:
        return self._fixed()

    def __int__(self) -> int:
        return int(self._fixed())

    __trunc__ = __int__

    def __round__(self, digits: Any = None) -> Any:
        return round(self._fixed(), digits)

    def __floor__(self) -> int:
        return math.floor(self._fixed())

    def __ceil__(self) -> int:
        return math.ceil(self._fixed())

    def __bool__(self) -> bool:
        return self.writer.condition(operator.ne, (self.node, 0.0), self.value != 0.0)

    def __hash__(self) -> int:
        return hash(self._fixed())

    def is_integer(self) -> bool:
        """As float's."""
        return self._fixed().is_integer()

    def as_integer_ratio(self) -> tuple[int, int]:
        """As float's."""
        return self._fixed().as_integer_ratio()

    def hex(self) -> str:
        """As float's."""
        return self._fixed().hex()

    def conjugate(self) -> Number:
        """As float's."""
        return self

    def __repr__(self) -> str:
        return repr(self.value)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __reduce__(self) -> Any:
        return float, (self.value,)

    def __deepcopy__(self, memo: Any) -> float:
        return self.value

    def __copy__(self) -> float:
        return self.value


def _value(x: Any) -> Any:
    return x.value if isinstance(x, Number) else x


def _node(x: Any) -> Any:
    return x.node if isinstance(x, Number) else x


def _arithmetic(function: Callable[..., Any], turned: bool) -> Callable[..., Any]:
    def method(self: Number, other: Any, *rest: Any) -> Any:
        if isinstance(other, Tensor) or not isinstance(other, float | int):
            return NotImplemented
        pair = (other, self) if turned else (self, other)
        result = function(*map(_value, pair))
        return self.writer.number(result, function, tuple(map(_node, pair)))

    return method


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: self.writer.number(function(self.value), function, (self.node,))


def _comparison(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Number, other: Any) -> Any:
        if isinstance(other, Tensor) or not isinstance(other, float | int):
            return NotImplemented
        return self.writer.condition(function, (self.node, _node(other)), function(self.value, _value(other)))

    return method


def _define() -> None:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        function = getattr(operator, name)
        setattr(Number, f"__{name}__", _arithmetic(function, turned=False))
        setattr(Number, f"__r{name}__", _arithmetic(function, turned=True))
    for name in ("neg", "pos", "abs"):
        setattr(Number, f"__{name}__", _unary(getattr(operator, name)))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Number, f"__{name}__", _comparison(getattr(operator, name)))


_define()


_NAMES = "sqrt exp log log2 log10 log1p expm1 sin cos tan asin acos atan atan2 sinh cosh tanh pow fabs fmod hypot"
MATH: tuple[Callable[..., float], ...] = tuple(getattr(math, name) for name in _NAMES.split())
"""Functions of C that are followed while a step is recorded, if they are called as ``math.sqrt``."""


@contextmanager
def followed_by_math() -> Iterator[None]:
    """Inside, functions of the module ``math`` that are given a followed number give one."""
    with ExitStack() as stack:
        for function in MATH:
            stack.enter_context(patch.object(math, function.__name__, _followed(function)))
        yield


def _followed(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def run(*args: Any) -> Any:
        tag = next((x for x in args if isinstance(x, Number)), None)
        if tag is None:
            return function(*args)
        return tag.writer.number(function(*map(_value, args)), function, tuple(map(_node, args)))

    return run


def given_back(numbers: list[Number]) -> None:
    """What the program has kept of these numbers (in a log, a scheduler, an attribute) becomes the floats that they are."""
    kept = _still_held(numbers, 1)
    for holder in gc.get_referrers(*kept) if kept else ():
        if holder is not numbers and holder is not kept:
            _give_back(holder)
    if kept and _still_held(kept, 2) and frozen.is_any(listed := gc.get_objects()):
        for holder in frozen.objects(listed):
            if Number in map(type, gc.get_referents(holder)):
                _give_back(holder)


def _still_held(numbers: list[Number], ours: int) -> list[Number]:
    """Those that somebody else has than so many lists of ours."""
    fewest = ours + max(sys.getrefcount(n) for n in [Number(0.0, None, None)]) - 1
    return [n for n in numbers if sys.getrefcount(n) > fewest]


def _give_back(holder: Any) -> None:
    if isinstance(holder, dict):
        for key in [key for key, value in holder.items() if isinstance(value, Number)]:
            holder[key] = holder[key].value
    elif isinstance(holder, list):
        if any(isinstance(x, Number) for x in holder):
            holder[:] = [x.value if isinstance(x, Number) else x for x in holder]
    elif hasattr(holder, "__dict__") and not isinstance(holder, Number | type):
        for key in [key for key, value in vars(holder).items() if isinstance(value, Number)]:
            setattr(holder, key, vars(holder)[key].value)


def plain(value: Any) -> Any:
    """A value with the numbers in it (also in lists, tuples and dicts) as ordinary floats."""
    if isinstance(value, Number):
        return value.value
    if type(value) in (list, tuple):
        return type(value)(plain(v) for v in value)
    if type(value) is dict:
        return {k: plain(v) for k, v in value.items()}
    return value


def numbers_in(value: Any) -> list[Number]:
    """All numbers in a value, in order."""
    if isinstance(value, Number):
        return [value]
    if isinstance(value, list | tuple):
        return [n for v in value for n in numbers_in(v)]
    if type(value) is dict:
        return [n for v in value.values() for n in numbers_in(v)]
    return []
