"""What an Engine reads batches from: datasets, torch's loaders, loaders that are laid out, any iterable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from onecard._torch.names import tree_map
from onecard.engine.placing import MeshPlace
from onecard.errors import EngineError
from onecard.train import ShardDataloader, shard_dataloader


class EngineLoader:
    """Batches as an Engine takes them, each rank's part; made by ``Engine.dataloader``. Iterate it, or call it and iterate.

    ``len``, ``dataset``, ``batch_size``, ``state_dict`` and ``load_state_dict`` are those of ``shard_dataloader``.
    """

    def __init__(self, loader: ShardDataloader, place: MeshPlace, steps: int | None = None) -> None:
        self.loader, self.place, self.steps = loader, place, steps

    @property
    def dataset(self) -> Any:
        """The dataset that is read."""
        return self.loader.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples of a whole batch."""
        return self.loader.batch_size

    def __len__(self) -> int:
        return len(self.loader) if self.steps is None else min(self.steps, len(self.loader))

    def __call__(self) -> Iterator[Any]:
        return iter(self)

    def __iter__(self) -> Iterator[Any]:
        batches = (tree_map(self.place.read, batch) for batch in self.loader)
        return batches if self.steps is None else islice(batches, self.steps)

    def state_dict(self) -> dict[str, Any]:
        """The position: the same on all ranks, and on any other number of them."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position."""
        self.loader.load_state_dict(state)


class WholeBatches:
    """Any iterable of whole batches, the same on every rank. Its position is how many of them were read."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches, self.read, self.before = batches, 0, 0
        self.once = iter(batches) is batches

    def __iter__(self) -> Iterator[Any]:
        before, self.before = self.before, 0
        self.read = before
        for batch in islice(self.batches, before, None):
            self.read += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How many batches were read of this pass."""
        return {"read": self.read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Leave out those that were read."""
        self.before = state["read"]


def loader_of(
    data: Any, place: MeshPlace, batch_size: int, train: bool, steps: int | None = None, **options: Any
) -> Any:
    """What ``fit`` and its kin are given, as a loader.

    Raises:
        EngineError: no data, or fewer samples than a batch that is trained on.
    """
    if isinstance(data, EngineLoader | WholeBatches):
        return data
    if isinstance(data, ShardDataloader):
        return EngineLoader(data, place, steps)
    if not isinstance(data, DataLoader):
        if not _is_dataset(data):
            return _whole(data)
        data = _loader(data, batch_size, train, options)
    _check_whole(data)
    axis = place.axes[0] if place.axes else None
    meshes = [place.mesh] if place.last is place.mesh else [place.mesh, place.last]
    axes = [axis if axis in mesh.dim_names else None for mesh in meshes]
    return EngineLoader(shard_dataloader(data, meshes, axes), place, steps)


def _is_dataset(data: Any) -> bool:
    return isinstance(data, IterableDataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))


def _whole(data: Any) -> WholeBatches:
    try:
        return WholeBatches(data)
    except TypeError:
        raise EngineError(
            f"Engine: {type(data).__name__} is no data: want a dataset (with __getitem__ and __len__, or an IterableDataset), a "
            "DataLoader, or an iterable of batches"
        ) from None


def _loader(dataset: Any, batch_size: int, train: bool, options: dict[str, Any]) -> DataLoader[Any]:
    if type(batch_size) is not int or batch_size < 1:
        raise EngineError(
            f"Engine: batch_size={batch_size!r}: want a whole number, 1 or more: samples of the whole batch"
        )
    if not isinstance(dataset, IterableDataset):
        _check_length(len(dataset), batch_size, train or bool(options.get("drop_last")))
    given = {name: value for name, value in options.items() if value is not None}
    return DataLoader(dataset, batch_size, **given)


def _check_whole(loader: DataLoader[Any]) -> None:
    """A loader gives whole batches; samplers that divide them over ranks would have the engine divide them twice."""
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if getattr(sampler, "num_replicas", getattr(sampler, "nranks", 1)) != 1:
            raise EngineError(
                f"Engine: the loader's {type(sampler).__name__} gives each rank its own samples, but the engine divides whole "
                "batches itself: DataLoader(dataset, batch_size, shuffle=True), with the whole batch's size"
            )


def _check_length(samples: int, batch_size: int, full: bool) -> None:
    """Nothing is trained on, and nothing looked at, of a dataset that makes no batch."""
    if samples == 0:
        raise EngineError("Engine: the dataset has no samples")
    if full and samples < batch_size:
        raise EngineError(
            f"Engine: batch_size={batch_size}: the dataset has {samples} sample(s), fewer than a batch: write "
            f"batch_size={samples} or less"
        )


def no_batches(mode: str, epoch: int) -> EngineError:
    """The error for a pass without a batch."""
    again = ": a generator gives its batches once; give fit a dataset, a DataLoader or a list" if epoch else ""
    return EngineError(f"Engine: the data gave no batch to {mode} on in pass {epoch}{again}")


Collate = Callable[[list[Any]], Any]
