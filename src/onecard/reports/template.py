"""Pages without a network: a template of ``page/`` with its places filled."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources


def part(name: str) -> str:
    """The text of a file of ``page/``."""
    return (resources.files("onecard.reports") / "page" / name).read_text(encoding="utf-8")


def filled(name: str, given: Mapping[str, str]) -> str:
    """A template with each ``{{place}}`` filled by HTML that is ready."""
    before, *rest = part(name).split("{{")
    parts = (piece.partition("}}") for piece in rest)
    return before + "".join(given[place] + after for place, _, after in parts)
