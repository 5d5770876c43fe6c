"""The folders of checkpoints: what belongs to one, what an interrupted save left behind, which step is the newest."""

from __future__ import annotations

import builtins
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onecard.checkpoint.format import files
from onecard.checkpoint.format.files import InputFile
from onecard.checkpoint.format.index import NAME, Index, read_index
from onecard.errors import CheckpointError

NEW_INDEX = f"{NAME}.new"
_STEP = re.compile(r"step-(\d{8,18})")
_DATA = re.compile(r"(\d{5,})-(\d{5,})-of-(\d{5,})\.safetensors")


@dataclass(frozen=True)
class Found:
    """A step in a folder of checkpoints; ``problem`` says why it cannot be loaded, "" if it can."""

    step: int
    path: Path
    nbytes: int
    problem: str = ""


class CheckpointWarning(UserWarning):
    """A step that was skipped, because it is not complete or damaged."""


def step_folder(root: Path, step: int) -> Path:
    """Where a step is.

    >>> step_folder(Path("run"), 20).as_posix()
    'run/step-00000020'
    """
    return root / f"step-{step:08d}"


def data_name(generation: int, rank: int, size: int) -> str:
    """The file of a rank. Each save of a folder has a number of its own, so that no file is written over."""
    return f"{generation:05d}-{rank:05d}-of-{size:05d}.safetensors"


def list_steps(root: Path) -> builtins.list[Found]:
    """The steps in a folder, the oldest first, with what is wrong with each: index and sizes are looked at, not the data."""
    return [_look(step, path) for step, path in sorted(_steps(root))]


def latest_step(root: Path) -> tuple[Path | None, builtins.list[Found]]:
    """The newest step that is complete, and those that are newer but are not."""
    skipped: builtins.list[Found] = []
    for step, path in sorted(_steps(root), reverse=True):
        found = _look(step, path)
        if not found.problem:
            return path, skipped
        skipped.append(found)
    return None, skipped


def _steps(root: Path) -> Iterator[tuple[int, Path]]:
    with suppress(FileNotFoundError, NotADirectoryError):
        for entry in os.scandir(root):
            match = _STEP.fullmatch(entry.name)
            if match and entry.is_dir(follow_symlinks=False):
                yield int(match[1]), Path(entry.path)


def _look(step: int, path: Path) -> Found:
    try:
        index = read_index(path)
        check_sizes(index)
    except CheckpointError as fault:
        unfinished = not (path / NAME).exists()
        return Found(step, path, 0, f"{path} has no {NAME}: its save was interrupted" if unfinished else str(fault))
    return Found(step, path, index.nbytes)


def check_sizes(index: Index) -> None:
    """Whether the files of a checkpoint are there and as long as the index says.

    Raises:
        CheckpointError: one is not.
    """
    for name, said in index.files.items():
        with InputFile(index.folder, name) as file:
            check_size(file, said.size)


def check_size(file: InputFile, size: int) -> None:
    """Raise a CheckpointError if a file has another size than its index says."""
    if file.size != size:
        how = "was cut off" if file.size < size else "is not the one that was written"
        raise CheckpointError(
            f"{file.path} has {file.size:,} bytes, the index says {size:,}: it {how}. Take another step's"
        )


def prepare(folder: Path, root: Path) -> int:
    """Make the folder of a save ready, clean up after interrupted ones; the number of this save. For who has the lock."""
    if root != folder:
        for _, path in _steps(root):
            if not (path / NAME).exists():
                _clean(path, None)
                if path != folder:
                    with suppress(OSError):  # somebody keeps files of their own there
                        files.remove_folder(path)
    files.make_folder(folder)
    index = _clean_folder(folder)
    numbers = [int(match[1]) for name in os.listdir(folder) if (match := _DATA.fullmatch(name))]
    return 1 + max([0 if index is None else index.generation, *numbers])


def _clean_folder(folder: Path) -> Index | None:
    if not (folder / NAME).exists():
        _clean(folder, None)
        return None
    try:
        index = read_index(folder)
    except CheckpointError:
        return None  # damaged: what is left of it stays until something better is there
    _clean(folder, index)
    return index


def _clean(folder: Path, index: Index | None) -> None:
    """Remove what belongs to no complete save; files that are none of ours stay."""
    kept = set() if index is None else set(index.files)
    for name in sorted(os.listdir(folder)):
        if name == NEW_INDEX or (_DATA.fullmatch(name) and name not in kept):
            files.remove(folder / name)


def commit(folder: Path, text: bytes) -> None:
    """Make a new index the one that counts: by one rename, after all that it speaks of is on the disk."""
    files.sync_folder(folder)
    files.write_text(folder / NEW_INDEX, text)
    files.rename(folder / NEW_INDEX, folder / NAME)
    files.sync_folder(folder)


def tidy(folder: Path, root: Path, index: Index, keep: int | None) -> None:
    """After a commit: remove what it replaced, and the oldest steps but ``keep``."""
    _clean(folder, index)
    if keep is None or root == folder:
        return
    good = [found for found in list_steps(root) if not found.problem]
    newest = {found.path for found in good[-keep:]} | {folder}
    for found in good:
        if found.path not in newest:
            _remove_step(found.path)


def _remove_step(path: Path) -> None:
    files.remove(
        path / NAME
    )  # first: what is interrupted from here on is an incomplete step, which the next save removes
    _clean(path, None)
    with suppress(OSError):
        files.remove_folder(path)


def clean_up(folder: Path, root: Path) -> None:
    """After a save that failed: what it wrote, and the folder of its step, if that is empty now."""
    _clean_folder(folder)
    if folder != root and not (folder / NAME).exists():
        with suppress(OSError):
            files.remove_folder(folder)
