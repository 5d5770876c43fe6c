"""What ``torch.distributed.checkpoint`` asks of a tensor of another kind: its parts. So its save and load take a DistTensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onecard._torch import dcp as _torch
from onecard.errors import DispatchError
from onecard.tensor.dist_tensor import DistTensor


def _part(x: DistTensor) -> tuple[Tensor, tuple[int, ...]] | None:
    """This rank's part and where it begins; None if it has none."""
    x.reduce_partial()._refresh()
    layout = x._spec.layout
    if layout.merged:
        raise DispatchError(
            f"torch.distributed.checkpoint cannot say how {x._spec!r} lies: a rank holds no box of it. "
            "onecard.save_state_dict(state, path) saves it, or lay it out in one piece: onecard.reshard(x, mesh, placements)"
        )
    if not x._spec.here or not x._local.numel():
        return None
    return x._local, layout.local_offset(tuple(x.shape))


def _write_items(self: DistTensor, name: str, value: Any) -> list[Any]:
    found = _part(self)
    return [] if found is None else [_torch.dcp_item(name, found[0], tuple(self.shape), found[1])]


def _chunk_list(self: DistTensor) -> list[Any]:
    found = _part(self)
    return [] if found is None else [_torch.dcp_chunk(*found)]


def _shard(self: DistTensor, index: Any) -> Tensor:
    return self._local


DistTensor.__create_write_items__ = _write_items  # type: ignore[attr-defined]
DistTensor.__create_chunk_list__ = _chunk_list  # type: ignore[attr-defined]
DistTensor.__get_tensor_shard__ = _shard  # type: ignore[attr-defined]
