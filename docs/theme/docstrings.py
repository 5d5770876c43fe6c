"""Docstrings as the site shows them: an example, in a section or not, is code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_BARE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*)", re.M)


def as_sections(text: str) -> str:
    """``Example:`` is the parser's ``Examples:``; ``Source:`` and bare doctests keep their lines."""
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.M)
    text = re.sub(r"^Source: ", "**Source:** ", text, flags=re.M)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    return _BARE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", text)


class Examples(griffe.Extension):
    """Rewrites every docstring when it is read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_sections(obj.docstring.value)
