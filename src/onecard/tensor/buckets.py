"""Pending sums of many tensors, settled in buckets: one message for many small tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from onecard import resharding as planner
from onecard.comm import collectives, groups, record
from onecard.comm.state import machine
from onecard.layout import Layout
from onecard.rules.call import Path
from onecard.tensor import memory
from onecard.tensor.dist_tensor import DistTensor, announce

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel; a tensor that fills a bucket alone is summed where it lies


def settle_all(tensors: Sequence[Any], name: str = "settle", explicit: bool = True) -> None:
    """Sum every pending tensor of a list in place, in buckets: one message for many small tensors.

    Args:
        tensors: DistTensors and others (left alone), on one or several meshes.
        name: the operator that needs them, for ``explain``.
    """
    buckets: dict[Any, list[DistTensor]] = {}
    for x in {id(t): t for t in tensors if isinstance(t, DistTensor)}.values():
        layout = x._spec.layout
        if layout.pending and not x._spec.here:
            memory.adopt(x, x._local)
        elif layout.pending:
            buckets.setdefault((layout.mesh, layout.pending, x.dtype, x._spec.device), []).append(x)
    for members in buckets.values():
        for bucket in _fill(members):
            _settle_bucket(bucket, name, explicit)


def _fill(members: list[DistTensor]) -> list[list[DistTensor]]:
    buckets: list[list[DistTensor]] = [[]]
    room = BUCKET_BYTES
    for x in members:
        if x._local.nbytes > room and buckets[-1]:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(x)
        room -= x._local.nbytes
    return buckets


def _settle_bucket(bucket: list[DistTensor], name: str, explicit: bool) -> None:
    layout = bucket[0]._spec.layout
    if len(bucket) == 1:
        x = bucket[0]
        x._become(layout.settled(), name, "self", "summed once, where it is needed whole", explicit)
        return
    flat = torch.cat([x._local.reshape(-1) for x in bucket])
    if record.observers.here:
        one_dim = Layout.make(layout.mesh, ((),), layout.pending)
        steps = planner.plan(tuple(flat.shape), flat.element_size(), one_dim, one_dim.settled(), machine.here)
        announce(steps, name, "self", tuple(flat.shape), "summed once, in a bucket", explicit, len(bucket))
    record.serving.here = (name, "self", tuple(flat.shape))
    for axis, op in layout.pending:
        flat = collectives.all_reduce(flat, groups.group(layout.mesh, axis), op, inplace=True)
    for x, part in zip(bucket, flat.split([x._local.numel() for x in bucket]), strict=True):
        memory.adopt(x, part.view(x._local.shape))


def settle_first(func: Any, paths: Sequence[Path], name: str) -> Callable[..., Any]:
    """The operator, after the tensors at these places of a list were settled together."""

    def call(*args: Any, **kwargs: Any) -> Any:
        settle_all([(args[at] if isinstance(at, int) else kwargs[at])[i] for at, i in paths], name, explicit=False)
        return func(*args, **kwargs)

    return call
