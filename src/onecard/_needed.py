"""What this package needs of torch, said in a sentence at once and not by whatever fails first for want of it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

OLDEST = (2, 11)
"""The oldest torch that has all that is used here; ``pyproject.toml`` says the same."""


def complaint(version: str) -> str:
    """Why a torch cannot be used, with the repair; "" if it can.

    Example:
        >>> complaint("2.11.0+cpu"), complaint("3.0.0")
        ('', '')
        >>> complaint("2.9.1")
        'onecard needs torch 2.11 or newer; here is torch 2.9.1. The repair: pip install --upgrade torch'
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) >= OLDEST:
        return ""
    return (
        f"onecard needs torch {'.'.join(map(str, OLDEST))} or newer; here is torch {version}. The repair: pip install "
        "--upgrade torch"
    )


def check() -> None:
    """
    Raises:
        ImportError: torch is too old. SystemExit: the same, of the command (`onecard doctor`), which says that line alone.
    """
    import torch

    if words := complaint(torch.__version__):
        raise SystemExit(words) if _is_command(sys.argv) else ImportError(words)


def _is_command(argv: list[str]) -> bool:
    """Whether this is the program ``onecard``, or ``python -m onecard``, whose name is not there yet."""
    return bool(argv) and (argv[0] == "-m" or Path(argv[0]).stem == "onecard")


check()
