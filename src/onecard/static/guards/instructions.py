"""The instructions of code as a trace stops at them."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator


def instructions(code: types.CodeType) -> Iterator[tuple[int, bool, dis.Instruction]]:
    """Each instruction, with where it begins and whether it is jumped to.

    One of a large argument has several words, and a trace stops at the first.
    """
    begin, is_target = None, False
    for i in dis.get_instructions(code):
        begin = i.offset if begin is None else begin
        is_target = is_target or i.is_jump_target
        if i.opname != "EXTENDED_ARG":
            yield begin, is_target, i
            begin, is_target = None, False


def instruction_at(code: types.CodeType, at: int) -> int:
    """The instruction of which a place in code is a part: while a function is called, its caller stands behind it."""
    return max((begin for begin, _, _ in instructions(code) if begin <= at), default=at)
