"""Text to train on that every machine has: the source files of the running Python's standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

VALIDATION_SHARE = 20  # one file in so many is held out
# Installed packages, tests and generated tables are not the library's prose.
EXCLUDED_FOLDERS = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"]
)


@dataclass(frozen=True)
class Corpus:
    """Bytes as 1-d uint8 tensors, split by file."""

    train: Tensor
    validation: Tensor


def stdlib_files(root: Path | None = None) -> list[Path]:
    """The `.py` files of the standard library (or of `root`), sorted by their path within it.

    Raises FileNotFoundError if there are none (zipped or embedded Pythons).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    kept = [name for name in sorted(found) if EXCLUDED_FOLDERS.isdisjoint(Path(name).parts)]
    if not kept:
        raise FileNotFoundError(
            f"no Python source files in {root}: the corpus of this example is the standard library of the running "
            "Python, and this Python comes without its source files (zipped or embedded builds do). "
            "Pass a folder that holds .py files: --corpus path/to/folder"
        )
    return [found[name] for name in kept]


def is_validation(name: str) -> bool:
    """Whether the file of this relative path is held out: by a hash, so that other files do not matter."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % VALIDATION_SHARE == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the corpus: about 10 MB in CPython.

    Raises FileNotFoundError if there are no files, ValueError if one side of the split is empty.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in stdlib_files(root):
        parts[is_validation(path.relative_to(root).as_posix())].append(path.read_bytes())
    if not parts[True] or not parts[False]:
        raise ValueError(
            f"the {len(parts[True]) + len(parts[False])} Python files in {root} are too few to split into training "
            f"and validation files (one file in {VALIDATION_SHARE} is held out); pass a larger folder to --corpus"
        )
    train, validation = (torch.frombuffer(bytearray(b"\n".join(parts[held])), dtype=torch.uint8) for held in parts)
    return Corpus(train, validation)


def windows(data: Tensor, starts: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets, each (len(starts), seq_len) int64, of the windows that begin at `starts`."""
    ids = data[starts[:, None] + torch.arange(seq_len + 1)].long()
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def sample_batch(data: Tensor, batch_size: int, seq_len: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The training batch of a step, drawn at random: a function of (seed, step), so equal on every rank.

    Returns inputs and targets, (batch_size, seq_len) int64.
    """
    n = _n_windows(data, seq_len)
    starts = np.random.default_rng((seed, step)).integers(0, n, size=batch_size)
    return windows(data, torch.from_numpy(starts), seq_len)


def validation_batches(data: Tensor, n: int, batch_size: int, seq_len: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`n` fixed batches, evenly spaced over `data`."""
    starts = torch.linspace(0, _n_windows(data, seq_len) - 1, n * batch_size, dtype=torch.float64).long()
    for chunk in starts.view(n, batch_size):
        yield windows(data, chunk, seq_len)


def _n_windows(data: Tensor, seq_len: int) -> int:
    n = len(data) - seq_len
    if n < 1:
        raise ValueError(f"a text of {len(data)} bytes has no window of {seq_len} + 1 bytes; take a smaller --seq-len")
    return n
