"""The sum of sparse tensors: every rank gathers all entries and adds them up in the order of the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch
from onecard.comm.shm import algorithms
from onecard.comm.shm.channel import Channel
from onecard.comm.shm.signature import CollectiveSignature
from onecard.comm.shm.work import Body
from onecard.errors import CommunicationError


def all_reduce_sparse(group: Any, channel: Channel, tensor: Tensor, op: str) -> Body:
    """The body of an all-reduce of a sparse COO tensor."""
    if tensor.layout is not torch.sparse_coo or op not in ("sum", "avg"):
        raise CommunicationError(f"all_reduce({op}) of a tensor of layout {tensor.layout} is not defined")
    signs = [group._sign("all_reduce_sparse", tensor.numel(), tensor, op) for _ in range(3)]

    def body(deadline: float) -> None:
        with torch.no_grad():
            mine = tensor.detach().coalesce()
            counts = _gather(channel, signs[0], deadline, torch.tensor([mine._nnz()], device="cpu"), [1] * channel.size)
            lengths = [int(count) for count in counts]
            rows, width = mine.sparse_dim(), mine.values()[:1].numel() if mine._nnz() else _width(mine)
            indices = _gather(channel, signs[1], deadline, mine.indices(), [rows * n for n in lengths])
            values = _gather(channel, signs[2], deadline, mine.values(), [width * n for n in lengths])
            total = None
            for index, value, n in zip(indices, values, lengths, strict=True):
                entries = value.view(n, *mine.values().shape[1:])
                part = _torch.sparse(index.view(rows, n), entries, mine.shape)
                total = part if total is None else total + part
            result = total.coalesce() if total is not None else mine
            if op == "avg":
                result = result / channel.size
            tensor.copy_(result)  # not of a detached one, which has entries of its own

    return body


def _width(tensor: Tensor) -> int:
    count = 1
    for length in tensor.shape[tensor.sparse_dim() :]:
        count *= length
    return count


def _gather(
    channel: Channel, sign: CollectiveSignature, deadline: float, mine: Tensor, counts: list[int]
) -> list[Tensor]:
    mine = mine.contiguous()
    parts = [torch.empty(count, dtype=mine.dtype, device="cpu") for count in counts]
    sizes = [part.nbytes for part in parts]
    algorithms.all_gather(channel, sign, deadline, mine.data_ptr(), sizes, [part.data_ptr() for part in parts])
    return parts
