"""`onecard convert`: checkpoints from and to other formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from onecard.checkpoint import api
from onecard.checkpoint.reader.changes import Rename
from onecard.checkpoint.reader.conversion import FORMATS, convert
from onecard.commands.front import Flag, answered, parsed, print_json
from onecard.commands.options import Pairs, pairs
from onecard.commands.waiting import waiting
from onecard.errors import CheckpointError
from onecard.planning.job import bytes_in_words

ENDINGS = {".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch", ".safetensors": "huggingface"}
"""Formats that a target's name says."""


@dataclass(frozen=True)
class Asked:
    """Write a checkpoint in another format. What the source is, is seen from its files; no code in them is run.

    Usage: onecard convert run/step-00000020 hf --to huggingface --only model; onecard convert model.pt folder;
    onecard convert dcp_folder model.pt. A checkpoint of any layout is read: parts of tensors are put together.
    """

    source: tyro.conf.Positional[Path]
    """a checkpoint of onecard (of several steps the newest); a file or folder of safetensors, such as Hugging Face's; a file of
    torch.save; a folder of torch.distributed.checkpoint"""
    target: tyro.conf.Positional[Path]
    """what must not exist yet"""
    to: Annotated[str | None, tyro.conf.arg(metavar="|".join(FORMATS), help_behavior_hint="")] = None
    """by default torch for a target such as model.pt, huggingface for model.safetensors, else onecard. huggingface: safetensors,
    tensors only; a folder, or one file if the target is called so"""
    only: str = ""
    """the key of the state to convert, such as model: its tensors, under their names in it"""
    rename: Pairs = ()
    """tensors under other names, such as "model.*=*"; * stands for any text. May be given several times"""
    max_shard_bytes: int = 5_000_000_000
    """of a file of huggingface"""
    json: Flag = False
    """what was written as JSON, in place of the line"""


def main(argv: Sequence[str]) -> int:
    """Converts a checkpoint and returns the exit status."""
    asked = parsed(Asked, argv, "convert")
    return answered("convert", lambda: _run(asked))


def _run(asked: Asked) -> int:
    if not asked.source.exists():
        raise CheckpointError(f"{asked.source} does not exist")
    form = asked.to or ENDINGS.get(asked.target.suffix, "onecard")
    source = _newest(asked.source)
    changes = [Rename(old, new) for old, new in pairs("rename", asked.rename).items()]
    with waiting(f"converting {source}"):
        convert(source, asked.target, form, changes=changes, only=asked.only, max_shard_bytes=asked.max_shard_bytes)
    files = [asked.target] if asked.target.is_file() else [f for f in asked.target.rglob("*") if f.is_file()]
    size = sum(f.stat().st_size for f in files)
    if asked.json:
        print_json(
            {"target": str(asked.target), "format": form, "bytes": size, "files": len(files), "source": str(source)}
        )
    else:
        print(f"{asked.target}: {form}, {bytes_in_words(size)}, of {source}")
    return 0


def _newest(source: Path) -> Path:
    """Of a folder of several steps the newest one that is whole."""
    steps = api.list(source) if source.is_dir() else []
    if not any(step.path != source for step in steps):
        return source
    return api.latest(source) or source
