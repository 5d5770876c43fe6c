"""What torch's own checkpoints ask of a tensor, and how they are written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from onecard._torch import patches


def dcp_save(state: Any, folder: Any) -> None:
    """``torch.distributed.checkpoint.save`` of plain tensors, in this process alone."""
    from torch.distributed import checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is meant
        checkpoint.save(state, checkpoint_id=folder, no_dist=True)


def dcp_item(name: str, local: Tensor, shape: tuple[int, ...], start: tuple[int, ...]) -> Any:
    """What ``torch.distributed.checkpoint`` asks of a tensor that is cut: this rank's part of it."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunk = dcp_chunk(local, start)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(local), torch.Size(shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def dcp_chunk(local: Tensor, start: tuple[int, ...]) -> Any:
    """The same for loading: where this rank's part is."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(offsets=torch.Size(start), sizes=local.size())


def show_in_state_dicts(what: Callable[[Any], Any]) -> None:
    """``torch.distributed.checkpoint.state_dict`` sees ``what`` of each parameter that it finds in modules."""
    from torch.distributed.checkpoint import state_dict

    def make(torchs: Callable[..., Any]) -> Callable[..., Iterator[tuple[str, Any]]]:
        return lambda *args, **kwargs: ((name, what(found)) for name, found in torchs(*args, **kwargs))

    if hasattr(state_dict, "_iterate_valid_model_state"):
        of_dcp = "torch.distributed.checkpoint.state_dict._iterate_valid_model_state"
        patches.replace(of_dcp, state_dict, "_iterate_valid_model_state", make)
