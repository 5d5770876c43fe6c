"""convert: from the formats of others, and to them. One process does it, tensor by tensor where the formats allow."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecard._torch import dcp as _torch
from onecard.checkpoint.format import files, tree
from onecard.checkpoint.format.index import Index
from onecard.checkpoint.format.objects import Names, unfold
from onecard.checkpoint.format.pieces import BUFFER, Share, StateTensor, chunks, sources_of
from onecard.checkpoint.reader import changes as changing
from onecard.checkpoint.reader import foreign, loading
from onecard.checkpoint.reader.changes import Change
from onecard.checkpoint.reader.pickled import METADATA, read_dcp, read_torch_file
from onecard.checkpoint.reader.reading import Reader
from onecard.checkpoint.reader.virtual import Virtual
from onecard.checkpoint.writer import saving
from onecard.checkpoint.writer.writing import write_shares
from onecard.comm.agree.meeting import meet
from onecard.errors import CheckpointError

FORMATS = ("onecard", "huggingface", "torch", "dcp")
Tensors = dict[str, Virtual | Tensor]


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    format: str = "onecard",
    *,
    changes: Sequence[Change] = (),
    only: str = "",
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a checkpoint in another format. Every rank may call it; the first one does it.

    Args:
        source: a checkpoint of onecard; a file or folder of safetensors (Hugging Face's); a file of ``torch.save``, read with
            ``weights_only``; a folder of ``torch.distributed.checkpoint``. No code in them is run.
        target: what must not exist yet.
        format: "onecard"; "huggingface", a folder of safetensors files, or one file if the target is called so, tensors only;
            "torch", one file; "dcp".
        changes: as for ``load``. With them the state becomes a flat dict of tensors.
        only: the key of the state to convert, "model": its tensors, under their names in it.
        max_shard_bytes: of a file of "huggingface".

    Raises:
        CheckpointError: the source cannot be read, or holds what the format cannot.

    "torch" and "dcp" have the whole state in memory once, as those libraries want it. The others have one bounded buffer.

    Example:
        >>> import tempfile
        >>> place = tempfile.mkdtemp()
        >>> torch.save({"weight": torch.ones(2), "step": 3}, f"{place}/old.pt")
        >>> convert(f"{place}/old.pt", f"{place}/new")
        >>> loading.run(None, Path(place, "new"), (), "error", "error", "same")
        {'weight': tensor([1., 1.]), 'step': 3}
    """
    start, end = Path(source), Path(target)

    def act(words: Sequence[Any]) -> None:
        if format not in FORMATS:
            raise CheckpointError(f"format={format!r}: want one of {', '.join(FORMATS)}")
        if end.exists():
            raise CheckpointError(f"{end} exists already: name a new place, or remove it first")
        node, tensors, reader = _open(start, changes, only, format)
        with reader:
            _WRITERS[format](end, node, tensors, reader, max_shard_bytes)

    error, _ = meet("convert", f"convert of {start}", None, act, "", f"{start} was not converted.")
    if error:
        raise CheckpointError(error)


def _open(path: Path, changes: Sequence[Change], only: str, format: str) -> tuple[Any, Tensors, Reader]:
    """A state as a tree, and its tensors: in memory, or to be read."""
    tensors: Tensors
    if (path / METADATA).exists() or (path.is_file() and path.suffix != ".safetensors"):
        state = read_dcp(path) if path.is_dir() else read_torch_file(path)
        held: dict[str, Tensor] = {}
        if format == "onecard":  # those of others count an optimizer's parameters
            state = unfold(state, Names(state))
        node = tree.encode(state, "", held.__setitem__)
        tensors, index = dict(held), Index(path, {}, {}, node)
    else:
        index = loading.open_any(path)
        node, tensors = index.state, {name: Virtual.of(entry) for name, entry in index.tensors.items()}
    if changes:
        if any(isinstance(x, Tensor) for x in tensors.values()):
            raise CheckpointError("changes are for files of safetensors: convert to 'onecard' first, then with changes")
        tensors = dict(changing.apply(changes, tensors))  # type: ignore[arg-type]
        node = dict(tree.flat(list(tensors)))
    if only:
        found = {name.removeprefix(f"{only}."): x for name, x in tensors.items() if name.startswith(f"{only}.")}
        if not found:
            raise CheckpointError(f"only={only!r}: no tensor is there{changing.nearest(only, tensors)}")
        tensors, node = found, dict(tree.flat(list(found)))
    return node, tensors, Reader(index.folder, index.files, not index.digest)


def _read(x: Virtual | Tensor, name: str, reader: Reader) -> Tensor:
    if isinstance(x, Tensor):
        return x
    made = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    reader.read(name, x, tuple((0, n) for n in x.shape), made)
    return made


def _sources(tensors: Tensors) -> dict[str, StateTensor]:
    held = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    found = sources_of(held)
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            found[name] = StateTensor(name, x.dtype, x.shape)
    return {name: found[name] for name in sorted(found)}


def _content(shares: Sequence[Share], tensors: Tensors, reader: Reader) -> Callable[[int], Iterator[Tensor]]:
    """The bytes of whole tensors: of those in files a buffer at a time."""

    def stretches(i: int) -> Iterator[Tensor]:
        name = shares[i].source.name
        x = tensors[name]
        if isinstance(x, Tensor):
            yield from chunks(x)
            return
        if not x.shape:
            yield from chunks(_read(x, name, reader))
            return
        rows = max(1, BUFFER * x.shape[0] // max(1, shares[i].nbytes))
        for start in range(0, x.shape[0], rows):
            stop = min(start + rows, x.shape[0])
            part = torch.empty((stop - start, *x.shape[1:]), dtype=x.dtype, device="cpu")
            reader.read(name, x, ((start, stop), *((0, n) for n in x.shape[1:])), part)
            yield from chunks(part)

    return stretches


def _to_onecard(target: Path, node: Any, tensors: Tensors, reader: Reader, limit: int) -> None:
    saving.save_alone(target, node, _sources(tensors), lambda shares: _content(shares, tensors, reader))


def _to_huggingface(target: Path, node: Any, tensors: Tensors, reader: Reader, limit: int) -> None:
    shares = [Share(s, tuple((0, n) for n in s.shape), 0) for s in _sources(tensors).values() if s.alias is None]
    if target.suffix == ".safetensors":
        beside = target.with_name(target.name + ".new")
        files.make_folder(target.parent)
        _write_file(beside, shares, tensors, reader)
        files.rename(beside, target)
        files.sync_folder(target.parent)
        return
    shards: list[list[Share]] = [[]]
    for share in shares:
        if shards[-1] and sum(s.nbytes for s in shards[-1]) + share.nbytes > limit:
            shards.append([])
        shards[-1].append(share)
    count = len(shards)
    names = [foreign.HF_FILE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    beside = target.with_name(target.name + ".new")
    files.make_folder(beside)
    for name, shard in zip(names, shards, strict=True):
        _write_file(beside / name, shard, tensors, reader)
    if count > 1:
        where = {share.source.name: name for name, shard in zip(names, shards, strict=True) for share in shard}
        total = {"total_size": sum(share.nbytes for share in shares)}
        text = json.dumps({"metadata": total, "weight_map": where}, indent=2)
        files.write_text(beside / foreign.HF_INDEX, text.encode())
    files.sync_folder(beside)
    files.rename(beside, target)
    files.sync_folder(target.parent)


def _write_file(path: Path, shares: list[Share], tensors: Tensors, reader: Reader) -> None:
    shares.sort(key=lambda s: -s.source.dtype.itemsize)
    write_shares(path, shares, _content(shares, tensors, reader), lambda nbytes: None)


def _whole(node: Any, tensors: Tensors, reader: Reader) -> Any:
    return tree.decode(node, lambda name: _read(tensors[name], name, reader))


def _to_torch(target: Path, node: Any, tensors: Tensors, reader: Reader, limit: int) -> None:
    beside = target.with_name(target.name + ".new")
    files.make_folder(target.parent)
    with open(beside, "wb") as file:
        torch.save(_whole(node, tensors, reader), file)
        file.flush()
        os.fsync(file.fileno())
    files.rename(beside, target)
    files.sync_folder(target.parent)


def _to_dcp(target: Path, node: Any, tensors: Tensors, reader: Reader, limit: int) -> None:
    files.make_folder(target.parent)
    beside = target.with_name(target.name + ".new")
    _torch.dcp_save(_whole(node, tensors, reader), beside)
    files.rename(beside, target)


_WRITERS = {"onecard": _to_onecard, "huggingface": _to_huggingface, "torch": _to_torch, "dcp": _to_dcp}

__all__ = ["FORMATS", "convert"]
