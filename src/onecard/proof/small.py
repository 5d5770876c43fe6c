"""Widths made small: what a proof needs of a size is how it divides, not how large it is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from onecard.errors import ProofError

LEAST = 2
"""How many times its divisor a size is at least: with one, parts of one number would hide what is shifted or missing."""

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "width", "hidden")
FREE = (
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "ffn", "moe_intermediate_size", "vocab_size",
    "vocabulary", "vocab", "padded_vocab_size", "batch", "batch_size", "global_batch_size", "global_batch", "micro_batch_size",
)  # fmt: skip
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads", "nhead")
HEAD = ("head_dim", "kv_channels", "d_head", "head_size")
"""Names of widths: of the stream, which heads divide; of what stands alone; how many heads, which stay; how wide one is."""


def narrow(size: int, divisor: int) -> int:
    """The least size that leaves what this one leaves, divided by the product of all degrees.

    Example:
        >>> narrow(4096, 8), narrow(50257, 8), narrow(12, 8)
        (16, 17, 12)
    """
    return min(size, LEAST * divisor + size % divisor)


def stream(size: int, heads: int, divisor: int) -> int:
    """The same of a width that heads divide: each stays as even or odd as it was, and all of them as they divide.

    Example:
        >>> stream(4096, 32, 8), stream(768, 12, 8), stream(100, 12, 8)
        (64, 24, 100)
    """
    if not heads or size % heads:
        return size
    each = size // heads
    for less in range(2 - each % 2, each, 2):
        made = less * heads
        if made >= LEAST * divisor and made % divisor == size % divisor:
            return made
    return size


def widths(sizes: dict[str, int], divisor: int) -> dict[str, int]:
    """What the widths among named sizes become; those that stay are left out.

    Example:
        >>> widths({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}, 8)
        {'hidden_size': 64, 'vocab_size': 16}
    """
    heads = next((sizes[name] for name in HEADS if name in sizes), 1)
    made = {name: stream(sizes[name], heads, divisor) for name in HIDDEN if name in sizes}
    made |= {name: narrow(sizes[name], divisor) for name in FREE if name in sizes}
    for name in HEAD:  # said beside the stream, of which it then is no quotient
        if name in sizes:
            wide = next((each for each in HIDDEN if each in sizes and sizes[each] == heads * sizes[name]), None)
            made[name] = made[wide] // heads if wide else sizes[name]
    return {name: size for name, size in made.items() if size != sizes[name]}


def smaller(given: Any, divisor: int) -> tuple[Any, dict[str, tuple[int, int]]]:
    """A config with other widths, a copy; and what has become of each. Of what is no config: it, and nothing.

    What has a width of the stream and a number of heads, as attributes that can be set, is a config.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(hidden_size=4096, num_attention_heads=32, vocab_size=50257, num_hidden_layers=2)
        >>> smaller(config, 8)[0]
        namespace(hidden_size=64, num_attention_heads=32, vocab_size=17, num_hidden_layers=2)
    """
    if isinstance(given, type) or not hasattr(given, "__dict__"):
        return given, {}
    sizes = {name: x for name in (*HIDDEN, *FREE, *HEADS, *HEAD) if type(x := getattr(given, name, None)) is int}
    if not any(name in sizes for name in HIDDEN) or not any(name in sizes for name in HEADS):
        return given, {}
    made, found = copy.deepcopy(given), widths(sizes, divisor)
    for name, size in found.items():
        try:
            object.__setattr__(made, name, size) if _is_frozen(made) else setattr(made, name, size)
        except (AttributeError, TypeError, ValueError):
            return given, {}
    return made, {name: (sizes[name], size) for name, size in found.items()}


def _is_frozen(x: Any) -> bool:
    return bool(getattr(getattr(type(x), "__dataclass_params__", None), "frozen", False))


def flags(words: Sequence[str], divisor: int) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """A script's command line with less of each width that it names, and what has become of each.

    Example:
        >>> flags(["--hidden-size", "4096", "--heads=32", "--lr", "0.1"], 8)
        (['--hidden-size', '64', '--heads=32', '--lr', '0.1'], {'hidden_size': (4096, 64)})
    """
    sizes = {}
    for name in (*HIDDEN, *FREE, *HEADS, *HEAD):
        said = _said(words, _at(words, name))
        if said.isdigit():
            sizes[name] = int(said)
    found = widths(sizes, divisor)
    return narrowed(words, [f"{name}={size}" for name, size in found.items()], divisor), {
        name: (sizes[name], size) for name, size in found.items()
    }


def said_of(found: dict[str, tuple[int, int]]) -> str:
    """Which widths were made small, in words.

    Example:
        >>> said_of({"hidden_size": (4096, 64)})
        'widths made small: hidden_size 4096 -> 64'
    """
    return "widths made small: " + ", ".join(f"{name} {was} -> {now}" for name, (was, now) in found.items())


def narrowed(words: Sequence[str], wanted: Sequence[str], divisor: int) -> list[str]:
    """A script's command line with other widths.

    Args:
        words: its command line.
        wanted: names of flags that are widths: ``hidden=64``, or ``hidden`` alone where the command line says its size.
        divisor: the product of all degrees, so that every remainder stays.

    Raises:
        ProofError: a flag whose size nobody says.

    Example:
        >>> narrowed(["--hidden", "4096", "--lr", "0.1"], ["hidden", "vocab=64"], 8)
        ['--hidden', '16', '--lr', '0.1', '--vocab', '64']
    """
    made = [*words]
    for asked in wanted:
        name, says, size = asked.partition("=")
        at = _at(made, name)
        if not says:
            size = _narrow_of(made, at, name, divisor)
        if at is None:
            made += [f"--{name.lstrip('-')}", size]
        elif "=" in made[at]:
            made[at] = f"{made[at].partition('=')[0]}={size}"
        else:
            made[at + 1 : at + 2] = [size]
    return made


def _at(words: Sequence[str], name: str) -> int | None:
    """Where a command line has a flag, in either spelling."""
    spelled = (f"--{name.lstrip('-')}", f"--{name.lstrip('-').replace('_', '-')}")
    return next((i for i, word in enumerate(words) if word.partition("=")[0] in spelled), None)


def _said(words: Sequence[str], at: int | None) -> str:
    return "" if at is None else words[at].partition("=")[2] or "".join(words[at + 1 : at + 2])


def _narrow_of(words: Sequence[str], at: int | None, name: str, divisor: int) -> str:
    said = _said(words, at)
    if not said.isdigit():
        raise ProofError(
            f"--narrow {name}: the script's command line does not say how large it is, so that nobody knows which remainder to "
            f"keep: --narrow {name}=64, or -- --{name} 4096"
        )
    return str(narrow(int(said), divisor))
