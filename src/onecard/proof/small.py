"""Widths made small: what a proof needs of a size is how it divides, not how large it is."""

from __future__ import annotations

from collections.abc import Sequence

from onecard.errors import ProofError

LEAST = 2
"""How many times its divisor a size is at least: with one, parts of one number would hide what is shifted or missing."""


def narrow(size: int, divisor: int) -> int:
    """The least size that leaves what this one leaves, divided by the product of all degrees.

    Example:
        >>> narrow(4096, 8), narrow(50257, 8), narrow(12, 8)
        (16, 17, 12)
    """
    return min(size, LEAST * divisor + size % divisor)


def narrowed(words: Sequence[str], wide: Sequence[str], divisor: int) -> list[str]:
    """A script's command line with other widths.

    Args:
        words: its command line.
        wide: names of flags that are widths: ``hidden=64``, or ``hidden`` alone where the command line says its size.
        divisor: the product of all degrees, so that every remainder stays.

    Raises:
        ProofError: a flag whose size nobody says.

    Example:
        >>> narrowed(["--hidden", "4096", "--lr", "0.1"], ["hidden", "vocab=64"], 8)
        ['--hidden', '16', '--lr', '0.1', '--vocab', '64']
    """
    made = [*words]
    for asked in wide:
        name, says, size = asked.partition("=")
        flags = [f"--{name.lstrip('-')}", f"--{name.lstrip('-').replace('_', '-')}"]
        at = next((i for i, word in enumerate(made) if word.partition("=")[0] in flags), None)
        if not says:
            size = _narrow_of(made, at, name, divisor)
        if at is None:
            made += [flags[0], size]
        elif "=" in made[at]:
            made[at] = f"{made[at].partition('=')[0]}={size}"
        else:
            made[at + 1 : at + 2] = [size]
    return made


def _narrow_of(words: Sequence[str], at: int | None, name: str, divisor: int) -> str:
    said = ""
    if at is not None:
        said = words[at].partition("=")[2] or "".join(words[at + 1 : at + 2])
    if not said.isdigit():
        raise ProofError(
            f"--wide {name}: the script's command line does not say how large it is, so that nobody knows which remainder to "
            f"keep: --wide {name}=64, or -- --{name} 4096"
        )
    return str(narrow(int(said), divisor))
