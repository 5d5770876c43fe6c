"""The calls: save, load, latest, list, verify; and Paddle's names for the first two."""

from __future__ import annotations

import builtins
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onecard.checkpoint.format import folder as folders
from onecard.checkpoint.format.crc import crc32
from onecard.checkpoint.format.files import InputFile
from onecard.checkpoint.format.folder import CheckpointWarning, Found
from onecard.checkpoint.format.index import BLOCK, Index
from onecard.checkpoint.reader import loading
from onecard.checkpoint.reader.changes import Change
from onecard.checkpoint.writer import saving
from onecard.checkpoint.writer.saving import Saving
from onecard.comm.base.warned import warn
from onecard.comm.world import world
from onecard.errors import CheckpointError

Place = str | os.PathLike[str]


def save(state: Any, folder: Place, step: int | None = None, *, keep: int | None = None, wait: bool = True) -> Saving:
    """Save a state: every rank calls it, each writes its part, and it is there all at once or not at all.

    Args:
        state: dicts, lists and tuples of distributed and plain tensors, numbers, strings, None; modules, optimizers, schedulers
            and all else with ``state_dict()`` as they are. Plain tensors and other values are equal on all ranks.
        folder: where. An older checkpoint there is replaced: until the last moment it is the old one that loads.
        step: save to ``folder/step-...`` instead, beside the earlier steps.
        keep: with ``step``, remove all but so many of the newest complete steps, once the new one is complete.
        wait: False: copy what this rank writes and return; ``Saving.wait()`` or the next save waits for the rest.

    Returns:
        A ``Saving``: its ``path``, ``wait()`` and ``done()``.

    Raises:
        CheckpointError: the same on every rank; the folder then holds what it held before.

    Source: ``paddle.distributed.save_state_dict``; ``torch.distributed.checkpoint``.

    Example:
        >>> import tempfile, torch
        >>> place = tempfile.mkdtemp()
        >>> save({"weight": torch.ones(2), "step": 3}, place, step=3).path.name
        'step-00000003'
        >>> load(place)
        {'weight': tensor([1., 1.]), 'step': 3}
    """
    if not isinstance(folder, str | os.PathLike) and isinstance(state, str | os.PathLike):
        raise CheckpointError(f"save({str(state)!r}, ...): the state comes first: save(state, {str(state)!r})")
    root = Path(folder)
    if step is not None and (type(step) is not int or not 0 <= step < 10**18):
        raise CheckpointError(f"step={step!r}: want a whole number, 0 or more")
    if keep is not None and (type(keep) is not int or keep < 1 or step is None):
        raise CheckpointError(f"keep={keep!r}: want 1 or more, with step=...: save(state, folder, step=step, keep=3)")
    path = root if step is None else folders.step_folder(root, step)
    return saving.start(state, path, root, step, keep, wait)


def load(
    path: Place,
    state: Any = None,
    *,
    changes: Sequence[Change] = (),
    missing: str = "error",
    unexpected: str = "error",
    dtype: str = "same",
) -> Any:
    """Load a checkpoint into a state, in place: each rank reads its part, whatever the layouts were that it was saved under.

    Args:
        path: a checkpoint; or a folder of steps, of which the newest complete one is taken; or safetensors of others: a file,
            or a folder of Hugging Face's.
        state: what to fill: as for ``save``, or a part of it. None: the whole state is made anew, of plain tensors on the CPU.
        changes: what is otherwise in the checkpoint: ``Rename``, ``Fuse``, ``Split``, ``Stack``, ``Unstack``, ``Transpose``,
            applied in this order. A model of transformers needs none for a folder that transformers saved.
        missing: "error", or "keep" what the state has where the checkpoint has nothing.
        unexpected: "error", or "ignore" what the checkpoint has where the state has no place. Parts of the state that are not
            asked for at all (``{"model": model}`` of a model and an optimizer) are never unexpected; beside a flat dict of
            tensors, other tensors and values are.
        dtype: "same", or "cast" to the dtypes of the state.

    Returns:
        The state.

    Raises:
        CheckpointError: the same on every rank. What does not fit is said before anything is changed; only damage that is
            found while reading leaves the state partly filled.

    Source: ``paddle.distributed.load_state_dict``.

    Example:
        >>> import tempfile, torch
        >>> place, layer = tempfile.mkdtemp(), torch.nn.Linear(2, 1)
        >>> _ = save({"model": layer, "step": 7}, place)
        >>> load(place, {"model": torch.nn.Linear(2, 1), "step": 0})["step"]
        7
    """
    if not isinstance(path, str | os.PathLike) and isinstance(state, str | os.PathLike):
        raise CheckpointError(f"load(..., {str(state)!r}): the path comes first: load({str(state)!r}, state)")
    return loading.run(state, Path(path), changes, missing, unexpected, dtype)


def save_state_dict(state_dict: Any, path: Place, *, wait: bool = True) -> Saving:
    """``save`` to one folder, under Paddle's name.

    Source: ``paddle.distributed.save_state_dict``.

    Example:
        >>> import tempfile, torch
        >>> place = tempfile.mkdtemp()
        >>> _ = save_state_dict(torch.nn.Linear(2, 1).state_dict(), place)
        >>> sorted(load(place))
        ['bias', 'weight']
    """
    return save(state_dict, path, wait=wait)


def load_state_dict(state_dict: Any, path: Place, **how: Any) -> Any:
    """``load`` into a state dict, in place, under Paddle's name and with its order of arguments.

    Source: ``paddle.distributed.load_state_dict``.

    Example:
        >>> import tempfile, torch
        >>> place, weight = tempfile.mkdtemp(), torch.zeros(2)
        >>> _ = save_state_dict({"weight": torch.ones(2)}, place)
        >>> load_state_dict({"weight": weight}, place)
        {'weight': tensor([1., 1.])}
        >>> weight
        tensor([1., 1.])
    """
    return load(path, state_dict, **how)


def list(folder: Place) -> builtins.list[Found]:
    """The steps in a folder, the oldest first; each with its bytes, or with the ``problem`` for which it cannot be loaded.

    Example:
        >>> import tempfile
        >>> place = tempfile.mkdtemp()
        >>> for step in (1, 2):
        ...     _ = save({"step": step}, place, step=step)
        >>> [(found.step, found.problem) for found in list(place)]
        [(1, ''), (2, '')]
    """
    return folders.list_steps(Path(folder))


def latest(folder: Place) -> Path | None:
    """The newest complete step in a folder; None if there is none. Says by a ``CheckpointWarning`` what it skipped.

    Example:
        >>> import tempfile
        >>> place = tempfile.mkdtemp()
        >>> latest(place) is None
        True
        >>> _ = save({"step": 1}, place, step=1)
        >>> latest(place).name
        'step-00000001'
    """
    found, skipped = folders.latest_step(Path(folder))
    for other in skipped if world.get_rank() == 0 else ():
        warn(f"skipped step {other.step}: {other.problem}", CheckpointWarning)
    return found


def verify(path: Place) -> builtins.list[str]:
    """Read all of a checkpoint (of a folder: of each step) and say what is wrong with it; nothing, if it is whole.

    Example:
        >>> import tempfile
        >>> place = tempfile.mkdtemp()
        >>> _ = save({"step": 1}, place)
        >>> verify(place)
        []
    """
    steps = [found.path for found in folders.list_steps(Path(path))]
    problems: builtins.list[str] = []
    for place in steps or [Path(path)]:
        try:
            problems += _problems(loading.open_any(place))
        except CheckpointError as fault:
            problems.append(str(fault))
    return problems


def _problems(index: Index) -> builtins.list[str]:
    """What is wrong with the files: each byte is read once."""
    found = []
    for name, said in index.files.items():
        try:
            with InputFile(index.folder, name, links=not index.digest) as file:
                folders.check_size(file, said.size)
                if said.crc32 is not None and f"{crc32(file.read(0, said.header)):08x}" != said.crc32:
                    found.append(f"{file.path} is damaged: the checksum of its header does not fit")
                found += _damage(index, file, name)
        except CheckpointError as fault:
            found.append(str(fault))
    return found


def _damage(index: Index, file: InputFile, name: str) -> builtins.list[str]:
    found, seen = [], set()
    for tensor, entry in index.tensors.items():
        for piece in entry.pieces:
            if piece.file != name or piece.crc32 is None or piece.offset in seen:
                continue
            seen.add(piece.offset)
            for start in range(0, piece.bytes, BLOCK):
                data = file.read(piece.offset + start, min(BLOCK, piece.bytes - start))
                if f"{crc32(data):08x}" != piece.crc32[start // BLOCK * 8 : start // BLOCK * 8 + 8]:
                    at = piece.offset + start
                    found.append(f"{file.path} is damaged: bytes {at:,} to {at + len(data):,}, of tensor {tensor!r}")
    return found
