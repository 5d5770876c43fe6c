"""Load: look at what there is and what is wanted, agree that it fits, read this rank's bytes, agree that they are right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard.checkpoint.format import folder, tree
from onecard.checkpoint.format.index import NAME, Index, name_of, read_index
from onecard.checkpoint.format.objects import Names, keys_of
from onecard.checkpoint.format.pieces import in_whole, local_holdings
from onecard.checkpoint.reader import changes as changing
from onecard.checkpoint.reader import foreign, hugging_face, sharing
from onecard.checkpoint.reader.changes import Change, nearest
from onecard.checkpoint.reader.reading import Reader
from onecard.checkpoint.reader.sharing import Filled
from onecard.checkpoint.reader.targets import StateWalk, Want
from onecard.checkpoint.reader.virtual import Virtual
from onecard.checkpoint.writer import saving
from onecard.comm.agree.meeting import meet
from onecard.errors import CheckpointError
from onecard.place.boxes import Box, volume
from onecard.tensor import DistTensor, from_dtensor, reshard

_CHANNEL = "checkpoint"
_SHOWN = 5  # names in an error


def run(state: Any, path: Path, changes: Sequence[Change], missing: str, unexpected: str, dtype: str) -> Any:
    """Fill a state; the state. Every rank of the world calls it."""
    saving.finish()
    walk, result, error, digest, links = None, None, "", "", False
    elsewhere: list[str] = []
    try:
        _check_words(
            missing=(missing, "error", "keep"),
            unexpected=(unexpected, "error", "ignore"),
            dtype=(dtype, "same", "cast"),
        )
        index = open_any(path)
        digest, links = f"{index.folder} {index.digest}", not index.digest
        if not (changes or index.digest):
            changes = hugging_face.conversion(state, list(index.tensors))
            index.state = dict(tree.flat(list(changing.apply(changes, _virtual(index))))) if changes else index.state
        tensors = changing.apply(changes, _virtual(index))
        walk = StateWalk(tensors, Names(state), changes=changes)
        if state is None:
            node = dict(tree.flat(list(tensors))) if changes else index.state
            result = walk.made(node, "")
        else:
            result = walk.value(state, index.state, "")
        left, elsewhere = walk.left_over(index.state) if unexpected == "error" else ([], [])
        error = _complaints(walk, index, missing, left, dtype)
        if not error:
            with Reader(index.folder, index.files, links) as reader:
                sharing.check(_memory(walk), reader)
    except Exception as fault:
        error = saving.in_words(fault)
    _meet(path, [digest, elsewhere], partial(_agree, walk), error)
    assert walk is not None
    error = ""
    try:
        with Reader(index.folder, index.files, links) as reader:
            _read(walk, reader)
    except Exception as fault:
        error = f"{saving.in_words(fault)}. What it was loaded into is partly filled: do not use it"
    _meet(path, "", lambda words: None, error)
    for act in walk.last:
        act()
    walk.groups.finish()
    return result


def _virtual(index: Index) -> dict[str, Virtual]:
    return {name: Virtual.of(entry) for name, entry in index.tensors.items()}


def open_any(path: Path) -> Index:
    """The checkpoint at a path: one of ours, the newest step in a folder of them, or files of safetensors."""
    if path.is_file() and path.suffix == ".safetensors":
        return foreign.read_safetensors(path)
    if (path / NAME).exists() or (path / NAME).is_symlink():
        return read_index(path)
    newest, skipped = folder.latest_step(path)
    if newest is not None:
        return read_index(newest)
    if skipped:
        raise CheckpointError(f"{path} has no complete step: " + "; ".join(found.problem for found in skipped))
    if (path / foreign.HF_INDEX).exists() or (path / foreign.HF_FILE).exists():
        return foreign.read_huggingface(path)
    if (path / ".metadata").exists():
        what = "is a folder of torch.distributed.checkpoint"
    elif path.is_file():
        what = "is a file"
    else:
        raise CheckpointError(
            f"{path} " + ("has no index.json: there is no checkpoint" if path.is_dir() else "does not exist")
        )
    raise CheckpointError(
        f"{path} {what}, which is not loaded as it is: onecard.checkpoint.convert({str(path)!r}, 'converted') first"
    )


def _complaints(walk: StateWalk, index: Index, missing: str, left: Sequence[str], dtype: str) -> str:
    """All that does not fit, in words."""
    found = []
    lacking = walk.lacking() if missing == "error" else []
    if lacking:
        named = [f"{name!r}{nearest(name, walk.tensors)}" for name in lacking[:_SHOWN]]
        found.append(
            f"{index.folder} does not have {_counted(len(lacking))}: {', '.join(named)}. Names that differ are told by "
            "changes=[onecard.checkpoint.Rename(old, new)]; missing='keep' leaves what is there"
        )
        if numbered := next((name for name in lacking if re.search(r"param_groups of \d+$", name)), None):
            place = numbered.split(".param_groups")[0]
            found.append(
                f"{place!r} goes by the names of its model's parameters, which the state does not have: load them together, "
                f'{{"model": model, "{place}": optimizer}}'
            )
    if left:
        found.append(_unexpected(walk, str(index.folder), left))
    for want in walk.wants:
        name, target, saved = want.name, want.target, walk.tensors[want.name]
        if want.shape != saved.shape:
            found.append(f"{name!r} is {list(saved.shape)} in {index.folder}, {list(want.shape)} in the state")
        elif target.dtype != saved.dtype and dtype == "same":
            found.append(
                f"{name!r} is {name_of(saved.dtype)} in {index.folder}, {name_of(target.dtype)} in the state; "
                "dtype='cast' converts"
            )
        if target.is_meta:
            found.append(f"{name!r} has no memory to load into (meta): module.to_empty(device=...) first")
    more = [] if len(found) <= _SHOWN else [f"and {len(found) - _SHOWN} more"]
    return "\n".join(found[:_SHOWN] + more)


def _unexpected(walk: StateWalk, where: str, left: Sequence[str]) -> str:
    named, tensors = [f"{name!r}" for name in left[:_SHOWN]], sum(name in walk.tensors for name in left)
    return (
        f"{where} has {_counted(tensors, len(left) - tensors)} without a place in the state: {', '.join(named)}; "
        "unexpected='ignore' leaves them out"
    )


def _counted(tensors: int, values: int = 0) -> str:
    both = ((tensors, "tensor"), (values, "value"))
    return " and ".join(f"{count} {what}s" if count > 1 else f"a {what}" for count, what in both if count)


def _check_words(**given: tuple[str, str, str]) -> None:
    for name, (value, *allowed) in given.items():
        if value not in allowed:
            raise CheckpointError(f"{name}={value!r}: want {allowed[0]!r} or {allowed[1]!r}")


def _read(walk: StateWalk, reader: Reader) -> None:
    """Fill what is wanted, in the order of the files."""
    todo: dict[Any, Filled] = {}
    after = []
    with torch.no_grad():
        for want in walk.wants:
            found = walk.tensors[want.name]
            holdings, act = _places(want)
            if act is not None:
                after.append(act)
            for box, local in holdings:
                if volume(box):
                    # tied weights are read once
                    todo[keys_of(local)[-1], box, found.views] = Filled(want.name, found, box, local)
        for item in sorted(todo.values(), key=lambda each: _where(each.saved)):
            reader.read(item.name, item.saved, item.box, item.local)
        for act in after:
            act()


def _memory(walk: StateWalk) -> list[Filled]:
    """What is read into memory that may be another's too."""
    found = []
    for want in walk.wants:
        x = want.target
        if isinstance(x, torch.distributed.tensor.DTensor) or (
            isinstance(x, DistTensor) and (x._spec.layout.merged or x._spec.layout.pending)
        ):
            continue
        for box, local in in_whole(local_holdings(x), want.part):
            found.append(Filled(want.name, walk.tensors[want.name], box, local.detach()))
    return found


def _where(found: Virtual) -> tuple[str, int]:
    first = found.views[0].piece if found.views else None
    return (first.file, first.offset) if first is not None else ("", 0)


def _places(want: Want) -> tuple[Sequence[tuple[Box, Tensor]], Any]:
    """What of a saved tensor this rank wants, and where; and what to do afterwards. All ranks call it in one order."""
    x = want.target
    if isinstance(x, torch.distributed.tensor.DTensor):
        x = from_dtensor(x)
    if not isinstance(x, DistTensor):
        return in_whole(local_holdings(x), want.part), None
    x.reduce_partial()
    x._refresh()
    layout = x._spec.layout
    if layout.merged:  # read in one piece, and laid out afterwards
        new: Any = reshard(x, x.mesh, list(layout.in_one_piece().placements))
        return in_whole(local_holdings(new), want.part), lambda: x.copy_(new)
    return in_whole(local_holdings(x), want.part), None


def _agree(walk: StateWalk | None, words: Sequence[Any]) -> None:
    """All read the same, and what one rank has no place for is another's."""
    rank = next((r for r, (digest, _) in enumerate(words) if digest != words[0][0]), None)
    if rank is not None:
        raise CheckpointError(
            f"rank 0 reads {words[0][0]}, rank {rank} reads {words[rank][0]}: all ranks load the same"
        )
    left = [name for name in words[0][1] if all(name in others for _, others in words[1:])]
    if left and walk is not None:
        raise CheckpointError(_unexpected(walk, "the checkpoint", left))


def _meet(path: Path, word: Any, decide: Any, error: str) -> Any:
    found, answer = meet(_CHANNEL, f"load of {path}", word, decide, error, f"{path} was not loaded.")
    if found:
        raise CheckpointError(found)
    return answer
