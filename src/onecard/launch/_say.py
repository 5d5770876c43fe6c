"""The launcher's own lines."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Prints a line of the launcher's own."""
    print(f"onecard: {text}", file=sys.stderr, flush=True)
