"""Warnings name the line of the user's program, however deep in the library they are given."""

from __future__ import annotations

import warnings

from onecard.comm.base import record


def warn(words: str, category: type[Warning] = UserWarning) -> None:
    """A warning at the innermost line that is neither onecard's nor PyTorch's."""
    frame = record.user_frame()
    if frame is None:
        file, _, line = record.user_line().rpartition(":")
        warnings.warn_explicit(words, category, file or "?", int(line) if line.isdigit() else 0)
        return
    there = frame.f_globals
    registry = there.setdefault("__warningregistry__", {})
    module = there.get("__name__", "<unknown>")
    warnings.warn_explicit(words, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


__all__ = ["warn"]
