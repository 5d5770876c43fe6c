"""What each instruction of a function reads and writes of objects, as expressions over its names: ``self.options["scale"]``.

A small machine goes through the instructions once, with expressions in place of values. What it does not know is ``None``: a
value that nobody can tell ahead of time. Nothing is run here.
"""

from __future__ import annotations

import dis
import re
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from onecard.static.guards.instructions import instructions


class Expr(NamedTuple):
    """How a value comes about.

    ``kind``: "local", "cell", "global", "const", "attr" (``name`` of ``base``), "item" (``base[args[0]]``), "call" (of ``base``),
    "import", "match" (attributes of ``base``, by a pattern of the class ``args[0]``), "tuple" of ``args``, "either" of ``args``
    (which way the program has taken is not known). ``at``: the instruction that makes it.
    """

    kind: str
    at: int
    name: Any = None
    base: Any = None
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.kind == "attr":
            return f"{text(self.base)}.{self.name}"
        if self.kind == "item":
            return f"{text(self.base)}[{text(self.args[0])}]"
        if self.kind == "call":
            return f"{text(self.base)}({', '.join(map(text, self.args))})"
        if self.kind == "either":
            return text(self.args[0])
        return repr(self.name) if self.kind == "const" else str(self.name)


def text(expr: Expr | None) -> str:
    """An expression as in the program; "..." where it is not known."""
    return "..." if expr is None else str(expr)


class Act(NamedTuple):
    """What one instruction does to an object, about to run.

    ``kind``: "read" (``of`` is looked up), "within" (an item: whether it is there), "whole" (all that ``of`` holds may be looked
    at), "call" (``of``), "match" (attributes of ``of`` are, by a pattern), "store" (``of`` is an attribute, an item or a name).
    """

    kind: str
    of: Any


_NULL = Expr("null", -1)
_ENDS = {
    "RETURN_VALUE",
    "RETURN_CONST",
    "JUMP_FORWARD",
    "JUMP_BACKWARD",
    "JUMP_BACKWARD_NO_INTERRUPT",
    "RAISE_VARARGS",
    "RERAISE",
}
_WHOLE = {  # operations that look into the value on top of the stack, or into the two on top
    "GET_ITER": 1, "GET_YIELD_FROM_ITER": 1, "UNPACK_SEQUENCE": 1, "UNPACK_EX": 1, "FORMAT_VALUE": 1, "FORMAT_SIMPLE": 1,
    "UNARY_NOT": 1, "TO_BOOL": 1, "CONVERT_VALUE": 1, "BINARY_OP": 2, "COMPARE_OP": 2, "LIST_EXTEND": 1, "SET_UPDATE": 1,
    "DICT_UPDATE": 1, "DICT_MERGE": 1, "GET_LEN": 1, "MATCH_SEQUENCE": 1, "MATCH_MAPPING": 1, "MATCH_KEYS": 2,
    "POP_JUMP_FORWARD_IF_FALSE": 1, "POP_JUMP_FORWARD_IF_TRUE": 1, "POP_JUMP_BACKWARD_IF_FALSE": 1,
    "POP_JUMP_BACKWARD_IF_TRUE": 1, "POP_JUMP_IF_FALSE": 1, "POP_JUMP_IF_TRUE": 1, "JUMP_IF_TRUE_OR_POP": 1,
    "JUMP_IF_FALSE_OR_POP": 1, "CALL_INTRINSIC_1": 1,
}  # fmt: skip


class _Machine:
    """Goes through code once; ``acts`` are what it finds, by instruction."""

    def __init__(self, code: types.CodeType) -> None:
        self.acts: dict[int, list[Act]] = {}
        self.stack: list[Any] = []
        self.at = 0
        self._waiting: dict[int, list[Any]] = {}  # the stack with which a later instruction is jumped to
        self._names: tuple[str, ...] = ()
        self._free = frozenset(code.co_freevars)
        live = True
        for begin, is_target, i in instructions(code):
            self.at = begin
            if (there := self._waiting.pop(begin, None)) is not None:
                self.stack = _joined(self.stack, there) if live else there
            elif not live or is_target:
                # A handler of exceptions, or the head of a loop, whose own iterator is on top.
                self.stack = self.stack[:-1] + [None] if live and self.stack else []
            live = True
            before = list(self.stack)
            self._step(i)
            if i.opcode in dis.hasjrel or i.opcode in dis.hasjabs:
                self._jump(i, before)
            live = i.opname not in _ENDS

    def _step(self, i: dis.Instruction) -> None:
        for expr in self.stack[-_WHOLE.get(i.opname, 0) :] if i.opname in _WHOLE else ():
            grown = (
                i.opname == "BINARY_OP" and i.argrepr.endswith("=") and len(self.stack) > 1 and expr is self.stack[-2]
            )
            self._act("grow" if grown else "whole", expr)
        known: Callable[[_Machine, Any], None] | None = _KNOWN.get(i.opname)
        if known is not None:
            known(self, i)
        elif "_FAST" in i.opname:
            self._fast(i)
        elif i.opname == "POP_TOP" or i.opname.startswith("POP_JUMP"):
            self.pop()
        else:
            self._other(i)

    def _fast(self, i: dis.Instruction) -> None:
        """Names of the function: one, or two in one instruction, such as STORE_FAST_LOAD_FAST."""
        names = i.argval if isinstance(i.argval, tuple) else (i.argval,)
        for verb, name in zip(_VERBS.findall(i.opname), names, strict=True):
            if verb == "LOAD":
                self.push("local", name)
            elif verb == "STORE":
                self.pop()

    def _other(self, i: dis.Instruction) -> None:
        """An instruction of which only the number of values is known that it takes and leaves."""
        change = dis.stack_effect(i.opcode, i.arg if i.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if change < 0:
            self.pop(-change)
        elif change:
            self.stack += [None] * change
        if self.stack and i.opname not in _LEAVES_THE_TOP:
            self.stack[-1] = None

    def _jump(self, i: dis.Instruction, before: list[Any]) -> None:
        if not isinstance(i.argval, int) or i.argval <= i.offset:
            return
        change = dis.stack_effect(i.opcode, i.arg, jump=True)
        there = before[: len(before) + change] if change <= 0 else before + [None] * change
        if change <= 0 and len(before) + change < 0:
            there = []
        known = self._waiting.get(i.argval)
        self._waiting[i.argval] = there if known is None else _joined(known, there)

    def pop(self, count: int = 1) -> list[Any]:
        """The values on top, the first one first; unknown ones where nothing is known."""
        if not count:
            return []
        found = self.stack[-count:]
        del self.stack[-count:]
        return [None] * (count - len(found)) + found

    def push(self, kind: str, name: Any = None, base: Any = None, args: tuple[Any, ...] = ()) -> Expr:
        """A new value on top."""
        made = Expr(kind, self.at, name, base, args)
        self.stack.append(made)
        return made

    def _act(self, kind: str, of: Any) -> None:
        if of is not None and of.kind == "either":
            for one in of.args:
                self._act(kind, one)
        elif of is not None and of.kind not in ("null", "const"):
            self.acts.setdefault(self.at, []).append(Act(kind, of))

    # -- instructions ----------------------------------------------------------------------------------------------------

    def const(self, i: Any) -> None:
        self.push("const", i.argval)

    def null(self, i: Any) -> None:
        self.stack.append(_NULL)

    def load_global(self, i: Any) -> None:
        name = str(i.argval)
        if i.arg & 1:
            self.stack.append(_NULL)
        self._act("read", self.push("global", name))

    def load_name(self, i: Any) -> None:
        if "_DICT_OR_" in i.opname:
            self.pop()
        self._act("read", self.push("name", i.argval))

    def load_cell(self, i: Any) -> None:
        if "_DICT_OR_" in i.opname:
            self.pop()
        made = self.push("cell" if i.argval in self._free else "local", i.argval)
        if made.kind == "cell":
            self._act("read", made)

    def load_attr(self, i: Any) -> None:
        (base,) = self.pop()
        method = i.opname == "LOAD_METHOD" or (i.opname == "LOAD_ATTR" and _METHODS_BY_FLAG and bool(i.arg & 1))
        if method:
            self.stack.append(_NULL)
        self._part("attr", i.argval, base, ())

    def load_super(self, i: Any) -> None:
        base, *given = self.pop(3)
        of = Expr("call", self.at, None, base, tuple(given) if i.arg & 2 else ())
        if i.arg & 1:
            self.stack.append(_NULL)
        self._part("attr", i.argval, of, ())

    def binary(self, i: Any) -> None:
        if i.argrepr == "[]":
            self.load_item(i)
        else:
            self.pop(2)
            self.stack.append(None)

    def match_class(self, i: Any) -> None:
        subject, kind, names = self.pop(3)
        if subject is not None and kind is not None and names is not None:
            self._act("match", Expr("match", self.at, (i.arg, *names.name), subject, (kind,)))
        self.stack.append(None)

    def _part(self, kind: str, name: Any, base: Any, args: tuple[Any, ...]) -> None:
        """An attribute or an item, of each value that may be meant."""
        bases = base.args if base is not None and base.kind == "either" else (base,)
        made = tuple(Expr(kind, self.at, name, one, args) for one in bases)
        for one in made:
            self._act("read", one)
        self.stack.append(made[0] if len(made) == 1 else Expr("either", self.at, None, None, made))

    def load_item(self, i: Any) -> None:
        base, key = self.pop(2)
        self._part("item", None, base, (key,))

    def within(self, i: Any) -> None:
        key, base = self.pop(2)
        if base is not None:
            self._act("within", Expr("item", self.at, None, base, (key,)))
        self.stack.append(None)

    def load_slice(self, i: Any) -> None:
        base, _, _ = self.pop(3)
        self._act("whole", base)
        self.stack.append(None)

    def store_attr(self, i: Any) -> None:
        (base,) = self.pop()
        if i.opname == "STORE_ATTR":
            self.pop()
        self._act("store", Expr("attr", self.at, i.argval, base))

    def store_item(self, i: Any) -> None:
        base, key = self.pop(2)
        if i.opname == "STORE_SUBSCR":
            self.pop()
        self._act("store", Expr("item", self.at, None, base, (key,)))

    def store_name(self, i: Any) -> None:
        if i.opname.startswith("STORE"):
            self.pop()
        kind = "global" if i.opname.endswith(("GLOBAL", "NAME")) else "cell" if i.argval in self._free else "local"
        self._act("store", Expr(kind, self.at, i.argval))

    def import_name(self, i: Any) -> None:
        names, _ = self.pop(2)[::-1]
        whole = names is not None and bool(names.name)  # "from a.b import c" gives a.b, "import a.b" gives a
        name = i.argval if whole else i.argval.partition(".")[0]
        self._act("read", self.push("import", name))

    def import_from(self, i: Any) -> None:
        self._act("read", self.push("attr", i.argval, self.stack[-1] if self.stack else None))

    def kw_names(self, i: Any) -> None:
        pass

    def call(self, i: Any) -> None:
        if i.opname == "CALL_KW":
            self.pop()
        args = self.pop(i.arg)
        self._called(_called(self.pop(2)), tuple(args))

    def _called(self, base: Any, args: tuple[Any, ...], name: Any = None) -> None:
        bases = base.args if base is not None and base.kind == "either" else (base,)
        made = tuple(Expr("call", self.at, name, one, args) for one in bases)
        for one in made:
            self._act("call", one)
        self.stack.append(made[0] if len(made) == 1 else Expr("either", self.at, None, None, made))

    def call_unpacked(self, i: Any) -> None:
        first, second, args, *_ = self.pop(4 if _NAMED_ALWAYS or i.arg & 1 else 3)
        self._act(
            "whole", args
        )  # a list that is spread as it is, which no instruction before this one has gone through
        self._called(_called([first, second]), (args,), "spread")

    def copy(self, i: Any) -> None:
        self.stack.append(self.stack[-i.arg] if i.arg <= len(self.stack) else None)

    def swap(self, i: Any) -> None:
        if len(self.stack) < i.arg:
            self.stack = [None] * (i.arg - len(self.stack)) + self.stack
        self.stack[-1], self.stack[-i.arg] = self.stack[-i.arg], self.stack[-1]

    def or_pop(self, i: Any) -> None:
        self.pop()

    def iterate(self, i: Any) -> None:
        self.stack.append(None)

    def unpack(self, i: Any) -> None:
        (base,) = self.pop()
        self.stack += [None if base is None else Expr("item", self.at, None, base, (Expr("const", self.at, k),))
                       for k in reversed(range(i.arg))]  # fmt: skip

    def nothing(self, i: Any) -> None:
        pass

    def tuple_of(self, i: Any) -> None:
        args = self.pop(i.arg)
        if args and all(a is not None for a in args):
            self.push("tuple", None, None, tuple(args))
        else:
            self.stack.append(None)


_VERBS = re.compile("(LOAD|STORE|DELETE)_FAST")
_NAMED_ALWAYS = sys.version_info >= (3, 14)  # f(*args) has keywords, too, or NULL
_METHODS_BY_FLAG = "LOAD_METHOD" not in dis.opmap or dis.opmap["LOAD_METHOD"] > 255
_LEAVES_THE_TOP = {"POP_EXCEPT", "END_FOR", "CACHE", "PRECALL", "NOP", "RESUME", "MAKE_CELL", "COPY_FREE_VARS", "POP_ITER",
                   "LIST_EXTEND", "LIST_APPEND", "SET_ADD", "MAP_ADD", "SET_UPDATE", "DICT_UPDATE", "DICT_MERGE"}  # fmt: skip
_KNOWN: dict[str, Callable[[_Machine, Any], None]] = {
    "LOAD_CONST": _Machine.const, "PUSH_NULL": _Machine.null, "LOAD_GLOBAL": _Machine.load_global,
    "LOAD_NAME": _Machine.load_name, "LOAD_DEREF": _Machine.load_cell, "LOAD_CLASSDEREF": _Machine.load_cell,
    "LOAD_FROM_DICT_OR_DEREF": _Machine.load_cell, "LOAD_FROM_DICT_OR_GLOBALS": _Machine.load_name,
    "LOAD_SUPER_ATTR": _Machine.load_super, "LOAD_SMALL_INT": _Machine.const, "BINARY_OP": _Machine.binary,
    "MATCH_CLASS": _Machine.match_class, "CONTAINS_OP": _Machine.within, "NOT_TAKEN": _Machine.nothing,
    "LOAD_ATTR": _Machine.load_attr, "LOAD_METHOD": _Machine.load_attr, "BINARY_SUBSCR": _Machine.load_item,
    "BINARY_SLICE": _Machine.load_slice, "STORE_ATTR": _Machine.store_attr, "DELETE_ATTR": _Machine.store_attr,
    "STORE_SUBSCR": _Machine.store_item, "DELETE_SUBSCR": _Machine.store_item, "STORE_GLOBAL": _Machine.store_name,
    "STORE_DEREF": _Machine.store_name, "DELETE_GLOBAL": _Machine.store_name, "DELETE_DEREF": _Machine.store_name,
    "STORE_NAME": _Machine.store_name, "IMPORT_NAME": _Machine.import_name, "IMPORT_FROM": _Machine.import_from,
    "KW_NAMES": _Machine.kw_names, "CALL": _Machine.call, "CALL_KW": _Machine.call,
    "CALL_FUNCTION_EX": _Machine.call_unpacked, "COPY": _Machine.copy, "SWAP": _Machine.swap,
    "JUMP_IF_TRUE_OR_POP": _Machine.or_pop, "JUMP_IF_FALSE_OR_POP": _Machine.or_pop, "FOR_ITER": _Machine.iterate,
    "UNPACK_SEQUENCE": _Machine.unpack, "NOP": _Machine.nothing, "RESUME": _Machine.nothing, "PRECALL": _Machine.nothing,
    "CACHE": _Machine.nothing, "MAKE_CELL": _Machine.nothing, "COPY_FREE_VARS": _Machine.nothing,
    "BUILD_TUPLE": _Machine.tuple_of,
}  # fmt: skip


def _called(two: list[Any]) -> Any:
    """What is called, of the two values under the arguments: the order of it and of NULL depends on the version of Python."""
    first, second = two
    return second if first is _NULL else first if second is _NULL else None


def _joined(one: list[Any], other: list[Any]) -> list[Any]:
    """What is known of a stack that comes about in two ways."""
    count = min(len(one), len(other))
    return [_either(a, b) for a, b in zip(one[len(one) - count :], other[len(other) - count :], strict=True)]


def _either(one: Any, other: Any) -> Any:
    if one == other or one is None or other is None:
        return one if one == other else None
    parts = dict.fromkeys(x for e in (one, other) for x in (e.args if e.kind == "either" else (e,)))
    return Expr("either", -1, None, None, tuple(parts))


def acts_of(code: types.CodeType) -> dict[int, tuple[Act, ...]]:
    """For each instruction of code that looks something up, or stores it: what."""
    return {at: tuple(found) for at, found in _Machine(code).acts.items()}
