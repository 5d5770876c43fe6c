"""shard_dataloader: a torch DataLoader whose batches arrive laid out on a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.utils.data import DataLoader, default_collate

from onecard._torch import names as _torch
from onecard._torch.names import tree_leaves
from onecard.comm.agree import clock
from onecard.comm.base import record
from onecard.comm.base.state import machine
from onecard.comm.base.warned import warn
from onecard.comm.issue import collectives, groups
from onecard.errors import DispatchError, LayoutError
from onecard.moves.resharding import Step
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.tensor import shard_tensor
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.spec import Spec, contiguous_stride
from onecard.train.data import rows
from onecard.train.data.order import LoaderOrder
from onecard.train.data.part import PartSampler, ReadBatch, again, iterates_itself, mapped, reads_together
from onecard.train.data.position import Position, begun, skipped

Axis = str | int | None


class ShardDataloader:
    """The batches of a DataLoader as DistTensors; made by ``shard_dataloader``. Iterate it, or call it and iterate.

    ``len``, ``dataset`` and ``batch_size`` are the loader's.
    """

    def __init__(
        self, loader: DataLoader[Any], meshes: Sequence[ProcessMesh], axes: Sequence[Axis], keys: Sequence[str] | None
    ) -> None:
        self.loader, self.meshes, self.keys = loader, list(meshes), keys
        self.axes = [None if a is None else mesh.axis(a) for mesh, a in zip(meshes, axes, strict=True)]
        home = next((i for i, mesh in enumerate(meshes) if mesh.coordinate() is not None), 0)
        self.home, self.axis = meshes[home], self.axes[home]
        self.order = LoaderOrder(loader, self.meshes)
        self.part = self._local_loader()
        self.read = 0
        self.position = Position(loader)
        self.pads = loader.collate_fn is not default_collate or reads_together(loader.dataset)

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

    def state_dict(self) -> dict[str, Any]:
        """The position: the same on all ranks, and on any other number of them. Every rank of the meshes calls it."""
        return self.position.state(lambda value: _from_first(value, self.home, self._others(), "random state"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position: the next pass gives the batches that were left, none twice."""
        self.position.load(state)

    def __iter__(self) -> Iterator[Any]:
        """Whole batches; this rank has read only its part of them."""
        ranks = {rank for mesh in self.meshes for rank in mesh.process_ids}
        for batch in self._shared():
            self.read += 1
            self.position.batches += 1
            clock.mark(ranks, f"has read {self.read} batch(es) of {self.order.label}")
            if self.part is None:
                yield self._map(batch, lambda value, i: self._cut_whole(value, i))
            elif batch["whole"]:
                yield self._map(batch["batch"], lambda value, i: self._cut_whole(value, i))
            else:
                yield self._map(batch["batch"], lambda value, i, whole=batch["size"]: self._wrap_part(value, i, whole))

    def _local_loader(self) -> DataLoader[Any] | None:
        """The loader of this rank's part of each batch; None if batches cannot be taken apart before they are read."""
        old = self.loader
        place = self.home.coordinate()
        if self.axis is None or place is None or not _torch.reads_by_index(old) or old.batch_sampler is None:
            return None
        if iterates_itself(old):
            return None
        sampler = PartSampler(old.batch_sampler, self.home.shape[self.axis], place[self.axis], self.order)
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

    def _shared(self) -> Iterator[Any]:
        """Batches read by the first rank along the non-batch axes and given to the others, so that all are equal."""
        place, axes = self.home.coordinate() or (), self._others()
        reads = all(place[a] == 0 for a in axes)
        with self.position.beginning() as before:
            batches = self._start(before) if reads else iter(())
            # Making the iterator drew from torch's generator (the sampler's permutation): all ranks go on from there.
            torch.set_rng_state(_from_first(torch.get_rng_state(), self.home, axes, "random state"))
            own = _OwnRandom(place[self.axis] if self.part is not None and self.axis is not None else 0)
        while True:
            batch = self._next(batches if reads else None, own, self.part is not None and self._sampler().whole)
            if batch is _END:
                self.position.ended = True
                return
            if self.pads and self.part is not None and self.axis is not None:
                batch = self._made_as_of_all(batch, own, reads)
            yield batch

    def _sampler(self) -> PartSampler:
        """What says which samples this rank reads of each batch."""
        return cast(PartSampler, cast(DataLoader[Any], self.part).batch_sampler)

    def _next(self, batches: Iterator[Any] | None, own: _OwnRandom, whole: bool) -> Any:
        """The next batch, or ``_END``; of the first rank where this one reads none itself."""
        batch = None if batches is None else own.next(batches, self.position.batches, whole)
        batch = _from_first(_DONE if batch is _END else batch, self.home, self._others(), "batch")
        if isinstance(batch, str) and batch == _DONE:
            return _END
        if self.part is not None and batch["wrong"] and not self.pads:
            raise DispatchError(batch["wrong"])
        return batch

    def _made_as_of_all(self, batch: Any, own: _OwnRandom, reads: bool) -> Any:
        """A part of the whole batch: where a rank's part is none, they are read again, whole."""
        axis = cast(int, self.axis)
        if not batch["whole"]:
            known = self._sampler().whole  # of one that a worker had begun in parts
            differs = 2 if known else rows.same_parts(batch, self.home, axis)
            if not differs:
                return batch
            if differs > 1 and self.read and not known:
                _warn_late(self.read + 1)
            self._sampler().whole = True
            batches = (self._taken(again(self.loader, read), read.of_all()) for read in [self._read]) if reads else None
            batch = self._next(batches, own, whole=True)
        if rows.same_parts(batch, self.home, axis):
            rows.refuse_parts(batch, self.home, axis)
        return batch

    def _others(self) -> list[int]:
        """The axes along which one rank reads for the others."""
        here = range(self.home.ndim if self.home.coordinate() is not None else 0)
        return [a for a in here if a != self.axis and self.home.shape[a] > 1]

    def _start(self, before: int) -> Iterator[Any]:
        """An iterator over what this rank reads, but the batches read before; the sampler has drawn all that it draws."""
        if self.part is None:
            self.order.begin_unseen()
            whole: Any = iter(self.loader)
            if self.loader.num_workers or not _torch.reads_by_index(self.loader) or iterates_itself(self.loader):
                return islice(whole, before, None)  # they are read again
            whole._sampler_iter = skipped(begun(whole._sampler_iter), before)
            return whole
        sampler = self._sampler()
        sampler.before = before
        batches = iter(self.part)
        indices = sampler.last
        indices.start()
        return (self._taken(batch, indices.reads.popleft()) for batch in batches)

    def _taken(self, batch: Any, read: ReadBatch) -> Any:
        """This rank's part of what the loader has read of a batch."""
        self._read = read
        made = {"batch": batch, "size": len(read.indices), "whole": read.whole, "wrong": None}
        if (
            self.pads
            and not read.whole
            and rows.looked_at(self.read + 1)
            and not rows.are_of_the_whole(self.loader, read)
        ):
            return made | {"wrong": "another batch"}
        try:
            return made | {"batch": read.rows(batch)}
        except DispatchError as error:  # for the ranks that wait for this batch, too
            return made | {"wrong": str(error)}

    def _map(self, batch: Any, lay_out: Any) -> Any:
        """Lay out each tensor; entry i of a tuple (or key i of ``input_keys``) goes to mesh i, the last for the rest."""
        if isinstance(batch, Mapping):
            order = list(self.keys or batch)
            missing = [key for key in order if key not in batch]
            if missing:
                raise LayoutError(f"shard_dataloader: input_keys {missing} are not in the batch {list(batch)}")
            return {key: lay_out(value, order.index(key) if key in order else 0) for key, value in batch.items()}
        if isinstance(batch, list | tuple):
            made = [lay_out(value, i) for i, value in enumerate(batch)]
            return type(batch)(*made) if hasattr(batch, "_fields") else type(batch)(made)
        return lay_out(batch, 0)

    def _target(self, i: int, ndim: int) -> Layout:
        number = min(i, len(self.meshes) - 1)
        mesh, axis = self.meshes[number], self.axes[number]
        placements: list[Placement] = [Replicate()] * mesh.ndim
        if axis is not None and ndim:
            placements[axis] = Shard(0)
        return Layout.of(mesh, ndim, placements)

    def _wrap_part(self, value: Any, i: int, whole: int) -> Any:
        """A part's tensors as those of the whole batch."""
        if not isinstance(value, Tensor):
            return mapped(value, lambda v: self._wrap_part(v, i, whole) if isinstance(v, Tensor) else v)
        shape = torch.Size([whole, *value.shape[1:]])
        layout = self._target(i, value.dim())
        spec = Spec.make(layout, shape, contiguous_stride(shape), value.dtype, value.device)
        local = value if spec.here else value.new_empty(0)
        if spec.here and tuple(local.shape) != layout.local_shape(shape):
            raise DispatchError(
                f"shard_dataloader: this rank has {local.shape[0]} rows of a batch of {whole} samples, "
                f"not the {layout.local_shape(shape)[0]} of mesh {min(i, len(self.meshes) - 1)}; along shard_dims "
                "all meshes must be as long"
            )
        return wrap(local, spec)

    def _cut_whole(self, value: Any, i: int) -> Any:
        if not isinstance(value, Tensor):
            return mapped(value, lambda v: self._cut_whole(v, i) if isinstance(v, Tensor) else v)
        if value.layout is not torch.strided or value.is_nested:
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            raise DispatchError(
                f"shard_dataloader: a batch has a {kind} tensor, and distributed tensors are dense: let collate_fn give "
                "its indices and values, or padded rows and their lengths; or x.to_dense()"
            )
        layout = self._target(i, value.dim())
        return shard_tensor(value, layout.mesh, layout.placements)


_END: Any = object()
_ODD = 0x9E3779B97F4A7C15  # far from all seeds that differ by the number of a part
_DONE = "onecard: no more batches"


def _warn_late(number: int) -> None:
    warn(
        f"shard_dataloader: of batch {number} collate_fn makes other rows of this rank's samples than of all, where it made the "
        "same before; so from here on each rank reads whole batches, as one card. Parts are compared in batches 1, 2, 4, 8, ...: "
        "those before may have been such batches, too. Do what takes samples of a batch together in the step, or from the "
        "first batch on",
        UserWarning,
    )


def _from_first(value: Any, mesh: ProcessMesh, axes: Sequence[int], what: str) -> Any:
    """The value of the first rank along each of some axes."""
    for axis in axes:
        value = collectives.broadcast_object(value, groups.group(mesh, axis), 0)
        if record.observers.here:
            _announce(value, mesh, axis, what)
    return value


def _announce(value: Any, mesh: ProcessMesh, axis: int, what: str) -> None:
    """Tell the observers of a broadcast; its size is known only once it is there."""
    layout = Layout.replicated(mesh, 0)
    sent = sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    step = Step("broadcast", axis, layout, layout, bytes=sent, seconds=machine.here.message(sent))
    reason = "read once, equal on all"
    record.tell(record.Notice(step, "shard_dataloader", what, (), reason, record.user_line(), explicit=True))


class _OwnRandom:
    """Torch's random numbers for a dataset, apart from the program's: those must stay in step on all ranks, and ranks
    that read different samples would draw different counts of them. Each batch has its own, wherever a pass was resumed."""

    def __init__(self, part: int) -> None:
        program = torch.get_rng_state()
        self.seed, self.part = int(torch.randint(2**62, (), device="cpu")), part
        torch.set_rng_state(program)

    def next(self, batches: Iterator[Any], number: int, whole: bool) -> Any:
        """The next batch, or ``_END``; ``whole``: all ranks read all of it, and draw the same."""
        program, seed = torch.get_rng_state(), self.seed + (0 if whole else self.part)
        torch.set_rng_state(torch.Generator(device="cpu").manual_seed((seed + number * _ODD) % 2**63).get_state())
        try:
            return next(batches, _END)
        finally:
            torch.set_rng_state(program)


def shard_dataloader(
    loader: DataLoader[Any],
    meshes: ProcessMesh | Sequence[ProcessMesh],
    shard_dims: Axis | Sequence[Axis] = None,
    input_keys: Sequence[str] | None = None,
) -> ShardDataloader:
    """Batches of a DataLoader as DistTensors: the batch dim cut along one axis, equal on all others.

    The batch that the loader describes is the whole batch, as on one card. A rank reads only the samples of its part;
    ranks that differ only along other axes get their data from the first of them, so that it is equal even where a
    dataset draws random samples. Seed all ranks alike (or give the loader a seeded generator) if it shuffles; ranks whose
    samplers give other orders are named at the first batch, or at the latest at the end of a pass. What a
    dataset draws from torch's generator is drawn apart from the program's numbers, which stay in step on all ranks.

    A ``collate_fn`` may make of a batch what it likes: pad it to its longest sample, pack graphs, mix, sort, count. For any but
    torch's own the ranks compare the shapes of their parts (one message a batch), and what it makes of a part with what it
    makes of all samples (in batches 1, 2, 4, 8, ...); once these differ, each reads whole batches and keeps its rows.

    Args:
        loader: a torch DataLoader; batches may be tensors, tuples, lists, dicts or dataclasses of tensors.
        meshes: one mesh, or one for each entry of a batch (the last serves the rest).
        shard_dims: the mesh axis that cuts dim 0, by name or index, for all meshes or for each; None: nothing is cut.
        input_keys: for dict batches, the keys in the order of ``meshes``.

    Returns:
        An iterable with the loader's length.

    Raises:
        LayoutError: shard_dims that do not fit the meshes, keys that are not in a batch; a ``collate_fn`` or a dataset that
            gives each rank another length for the same batch.
        CommunicationError: ranks that shuffle differently.

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
