"""shard_dataloader: a torch DataLoader whose batches arrive laid out on a mesh."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _DatasetKind

from onecard.comm import collectives, groups, world
from onecard.errors import DispatchError, LayoutError
from onecard.layout import Layout, chunk
from onecard.mesh import ProcessMesh
from onecard.tensor import shard_tensor
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.spec import Spec, contiguous_stride

Axis = str | int | None


class ShardDataloader:
    """The batches of a DataLoader as DistTensors; made by ``shard_dataloader``. Iterate it, or call it and iterate."""

    def __init__(
        self, loader: DataLoader[Any], meshes: Sequence[ProcessMesh], axes: Sequence[Axis], keys: Sequence[str] | None
    ) -> None:
        self.loader, self.meshes, self.keys = loader, list(meshes), keys
        self.axes = [None if a is None else mesh.axis(a) for mesh, a in zip(meshes, axes, strict=True)]
        home = next((i for i, mesh in enumerate(meshes) if mesh.coordinate() is not None), 0)
        self.home, self.axis = meshes[home], self.axes[home]
        self.sizes: deque[tuple[int, int]] = deque()
        self.part = self._local_loader()

    @property
    def dataset(self) -> Any:
        """The loader's dataset."""
        return self.loader.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples of a whole batch."""
        return self.loader.batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def __call__(self) -> Iterator[Any]:
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        """Whole batches; this rank has read only its part of them."""
        if self.part is None:
            for batch in self._shared(iter(self.loader)):
                yield self._map(batch, lambda value, i: self._cut_whole(value, i))
            return
        self.sizes.clear()
        for batch in self._shared(iter(self.part)):
            yield self._map(batch["batch"], lambda value, i, whole=batch["sizes"]: self._wrap_part(value, i, *whole))

    def _local_loader(self) -> DataLoader[Any] | None:
        """The loader of this rank's part of each batch; None if batches cannot be taken apart before they are read."""
        old = self.loader
        place = self.home.coordinate()
        if self.axis is None or place is None or old._dataset_kind != _DatasetKind.Map or old.batch_sampler is None:
            return None
        sampler = _PartSampler(old.batch_sampler, self.home.shape[self.axis], place[self.axis], self.sizes)
        return DataLoader(
            old.dataset,
            batch_sampler=sampler,
            num_workers=old.num_workers,
            collate_fn=old.collate_fn,
            pin_memory=old.pin_memory,
            timeout=old.timeout,
            worker_init_fn=old.worker_init_fn,
            multiprocessing_context=old.multiprocessing_context,
            generator=old.generator,
            prefetch_factor=old.prefetch_factor,
            persistent_workers=old.persistent_workers,
        )

    def _shared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Batches read by the first rank along the non-batch axes and given to the others, so that all are equal."""
        place = self.home.coordinate() or ()
        lines = [groups.group(self.home, a) for a in range(len(place)) if a != self.axis]
        lines = [line for line in lines if line.size > 1]
        reader = all(line.index == 0 for line in lines)
        while True:
            batch = _next(batches) if reader else None
            if reader and batch is not _END and self.part is not None:
                batch = {"batch": batch, "sizes": self.sizes.popleft()}
            for line in lines:
                batch = collectives.broadcast_object(_DONE if batch is _END else batch, line, 0)
            if batch is _END or (isinstance(batch, str) and batch == _DONE):
                return
            yield batch

    def _map(self, batch: Any, lay_out: Any) -> Any:
        """Lay out each tensor; entry i of a tuple (or key i of ``input_keys``) goes to mesh i, the last for the rest."""
        if isinstance(batch, Mapping):
            order = list(self.keys or batch)
            missing = [key for key in order if key not in batch]
            if missing:
                raise LayoutError(f"shard_dataloader: input_keys {missing} are not in the batch {list(batch)}")
            return {key: lay_out(value, order.index(key) if key in order else 0) for key, value in batch.items()}
        if isinstance(batch, list | tuple):
            return type(batch)([lay_out(value, i) for i, value in enumerate(batch)])
        return lay_out(batch, 0)

    def _target(self, i: int, ndim: int) -> Layout:
        number = min(i, len(self.meshes) - 1)
        mesh, axis = self.meshes[number], self.axes[number]
        placements: list[Placement] = [Replicate()] * mesh.ndim
        if axis is not None and ndim:
            placements[axis] = Shard(0)
        return Layout.of(mesh, ndim, placements)

    def _wrap_part(self, value: Any, i: int, whole: int, mine: int) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([self._wrap_part(v, i, whole, mine) for v in value])
        if not isinstance(value, Tensor):
            return value
        shape = torch.Size([whole, *value.shape[1:]])
        layout = self._target(i, value.dim())
        spec = Spec.make(layout, shape, contiguous_stride(shape), value.dtype, _device(value))
        local = value[:mine].to(spec.device) if spec.here else value.new_empty(0)
        if spec.here and tuple(local.shape) != layout.local_shape(shape):
            raise DispatchError(
                f"shard_dataloader: a batch of {whole} samples gave this rank a tensor of {list(local.shape)}, "
                f"not {list(layout.local_shape(shape))}; collate_fn must stack samples along dim 0"
            )
        return wrap(local, spec)

    def _cut_whole(self, value: Any, i: int) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([self._cut_whole(v, i) for v in value])
        if not isinstance(value, Tensor):
            return value
        layout = self._target(i, value.dim())
        return shard_tensor(value, layout.mesh, layout.placements)


def _device(value: Tensor) -> torch.device:
    """Where a batch's local tensors go."""
    return world.device() if value.device.type == "cpu" else value.device


_END: Any = object()
_DONE = "onecard: no more batches"


def _next(batches: Iterator[Any]) -> Any:
    return next(batches, _END)


class _PartSampler:
    """This rank's part of each batch of indices; remembers the sizes of the whole batch and of the part."""

    def __init__(self, batches: Any, parts: int, index: int, sizes: deque[tuple[int, int]]) -> None:
        self.batches, self.parts, self.index, self.sizes = batches, parts, index, sizes

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self.batches:
            indices = list(batch)
            start, length = chunk(len(indices), self.parts, self.index)
            self.sizes.append((len(indices), length))
            # A rank whose part is empty reads one sample to learn its shape, and keeps none of it.
            yield indices[start : start + length] or indices[:1]


def shard_dataloader(
    loader: DataLoader[Any],
    meshes: ProcessMesh | Sequence[ProcessMesh],
    shard_dims: Axis | Sequence[Axis] = None,
    input_keys: Sequence[str] | None = None,
) -> ShardDataloader:
    """Batches of a DataLoader as DistTensors: the batch dim cut along one axis, equal on all others.

    The batch that the loader describes is the whole batch, as on one card. A rank reads only the samples of its part;
    ranks that differ only along other axes get their data from the first of them, so that it is equal even where a
    dataset draws random samples. Seed all ranks alike (or give the loader a seeded generator) if it shuffles.

    Args:
        loader: a torch DataLoader; batches may be tensors, tuples, lists or dicts of tensors.
        meshes: one mesh, or one for each entry of a batch (the last serves the rest).
        shard_dims: the mesh axis that cuts dim 0, by name or index, for all meshes or for each; None: nothing is cut.
        input_keys: for dict batches, the keys in the order of ``meshes``.

    Returns:
        An iterable with the loader's length.

    Raises:
        LayoutError: shard_dims that do not fit the meshes, keys that are not in a batch.

    Source: ``paddle.distributed.shard_dataloader``.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> batches = shard_dataloader(DataLoader(torch.arange(6.0), batch_size=4), ProcessMesh([0], ["dp"]), "dp")
        >>> [batch.shape[0] for batch in batches]
        [4, 2]
    """
    listed = [meshes] if isinstance(meshes, ProcessMesh) else list(meshes)
    axes = [shard_dims] * len(listed) if shard_dims is None or isinstance(shard_dims, str | int) else list(shard_dims)
    if len(axes) != len(listed):
        raise LayoutError(
            f"shard_dataloader: {len(axes)} shard_dims for {len(listed)} mesh(es); give one for each mesh"
        )
    return ShardDataloader(loader, listed, axes, input_keys)


__all__ = ["ShardDataloader", "shard_dataloader"]
