"""Checkpoints: boxes of named tensors in safetensors files with one index, checked, and committed by one rename.

``save`` and ``load`` take any nested state. What is saved under one layout, on any number of ranks, loads under any other.
"""

from onecard.checkpoint.api import latest, list, load, load_state_dict, save, save_state_dict, verify
from onecard.checkpoint.format.folder import CheckpointWarning, Found
from onecard.checkpoint.format.random_state import RandomState
from onecard.checkpoint.reader.changes import Fuse, Rename, Split, Stack, Transpose, Unstack
from onecard.checkpoint.reader.conversion import convert
from onecard.checkpoint.writer.saving import Saving
from onecard.checkpoint.writer.stopping import preempted

__all__ = [
    "CheckpointWarning", "Found", "Fuse", "RandomState", "Rename", "Saving", "Split", "Stack", "Transpose",
    "Unstack", "convert", "latest", "list", "load", "load_state_dict", "preempted", "save", "save_state_dict", "verify",
]  # fmt: skip
