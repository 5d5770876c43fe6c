"""ProcessMesh: an n-d grid of ranks with named axes. Pure data: nothing here talks to another process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from onecard.errors import MeshError

_interned: WeakValueDictionary[tuple[Any, ...], ProcessMesh] = WeakValueDictionary()


def _rank_from_environment() -> int:
    return int(os.environ.get("RANK", "0"))


# comm replaces this once a process group exists; a mesh itself never asks torch.distributed.
rank_source: Callable[[], int] = _rank_from_environment
# Whether a program is read as one card's, so that meshes of any shape are of one rank. comm replaces this.
alone_source: Callable[[], bool] = bool


class ProcessMesh:
    """An n-d arrangement of ranks: any ranks, in any order, with a name for each axis.

    Equal meshes are the same object, so comparing and hashing cost nothing.

    Args:
        mesh: ranks as a nested list, array or tensor of ints; each rank at most once.
        dim_names: one name for each axis; ``d0, d1, ...`` if left out.

    Raises:
        MeshError: ranks that are negative, repeated or ragged, or names that do not fit.

    Source: ``ProcessMesh`` of Paddle's auto-parallel; ``DeviceMesh`` of PyTorch.

    Example:
        >>> mesh = ProcessMesh([[2, 4, 5], [0, 1, 3]], dim_names=["x", "y"])
        >>> mesh.shape, mesh.ndim, mesh.process_ids
        ([2, 3], 2, [2, 4, 5, 0, 1, 3])
        >>> mesh[0]
        ProcessMesh([2, 4, 5], dim_names=['y'])
        >>> mesh.get_dim_size("x")
        2
    """

    __slots__ = ("__weakref__", "_coordinates", "_grid", "_names", "highest")
    _grid: np.ndarray
    _names: tuple[str, ...]
    _coordinates: dict[int, tuple[int, ...]]
    highest: int  # of its ranks

    def __new__(cls, mesh: Any, dim_names: Sequence[str] | None = None) -> ProcessMesh:
        if isinstance(mesh, ProcessMesh):
            mesh, dim_names = mesh._grid, dim_names or mesh._names
        grid = _read_grid(mesh)
        names = _read_names(grid, dim_names)
        if alone_source():
            grid = np.zeros_like(grid, shape=(1,) * grid.ndim)
        key = (grid.shape, tuple(grid.ravel().tolist()), names)
        found = _interned.get(key)
        if found is not None:
            return found
        self = object.__new__(cls)
        self._grid, self._names = grid, names
        self._coordinates = {int(rank): place for place, rank in np.ndenumerate(grid)}
        self.highest = int(grid.max())
        _interned[key] = self
        return self

    @classmethod
    def from_device_mesh(cls, device_mesh: Any) -> ProcessMesh:
        """The ProcessMesh with the ranks and axis names of a torch ``DeviceMesh``."""
        return cls(device_mesh.mesh.tolist(), device_mesh.mesh_dim_names)

    @property
    def shape(self) -> list[int]:
        """Ranks along each axis."""
        return list(self._grid.shape)

    @property
    def ndim(self) -> int:
        """How many axes."""
        return self._grid.ndim

    @property
    def size(self) -> int:
        """How many ranks."""
        return self._grid.size

    @property
    def dim_names(self) -> list[str]:
        """The axes' names, outermost first."""
        return list(self._names)

    @property
    def process_ids(self) -> list[int]:
        """All ranks, in the order of the grid."""
        ranks: list[int] = self._grid.ravel().tolist()
        return ranks

    @property
    def mesh(self) -> np.ndarray:
        """The grid of ranks (a copy)."""
        return self._grid.copy()

    def axis(self, name: str | int) -> int:
        """The index of an axis given by name or by index (negative counts from the end)."""
        if isinstance(name, str):
            if name in self._names:
                return self._names.index(name)
        elif -self.ndim <= name < self.ndim:
            return name % self.ndim
        raise MeshError(f"{self!r} has no axis {name!r}; its axes are {list(self._names)}")

    def get_dim_size(self, dim: str | int) -> int:
        """Ranks along one axis."""
        return self._grid.shape[self.axis(dim)]

    def get_mesh_with_dim(self, dim_name: str, index: int | None = None) -> ProcessMesh:
        """The same ranks with axis ``dim_name`` first; with ``index``, the sub-mesh at that index of it.

        Example:
            >>> ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"]).get_mesh_with_dim("tp", 1)
            ProcessMesh([1, 3], dim_names=['dp'])
        """
        axis = self.axis(dim_name)
        order = [axis, *(i for i in range(self.ndim) if i != axis)]
        turned = ProcessMesh(self._grid.transpose(order), [self._names[i] for i in order])
        return turned if index is None else turned[index]

    def coordinate(self, rank: int | None = None) -> tuple[int, ...] | None:
        """Where a rank (by default this process) stands in the grid; None if it is not in it."""
        return self._coordinates.get(rank_source() if rank is None else rank)

    def neighbours(self, axis: str | int, rank: int | None = None) -> list[int]:
        """The ranks that differ from ``rank`` (by default this process) only along one axis, in grid order."""
        index, place = self.axis(axis), self.coordinate(rank)
        if place is None:
            raise MeshError(f"rank {rank_source() if rank is None else rank} is not in {self!r}")
        line = place[:index] + (slice(None),) + place[index + 1 :]
        return [int(other) for other in self._grid[line]]

    def __getitem__(self, index: Any) -> ProcessMesh:
        """A sub-mesh: by index or slice along the leading axes, or by axis name(s) around this process.

        An index takes its axis away; the last axis stays, so that a single rank is a mesh too.
        """
        wanted = index if isinstance(index, tuple) else (index,)
        if wanted and all(isinstance(name, str) for name in wanted):
            return self._around(wanted)
        if not wanted or len(wanted) > self.ndim or not all(_is_index(item) for item in wanted):
            raise MeshError(
                f"{self!r}[{index!r}]: want an index or a slice for each of the leading axes, or axis names"
            )
        if alone_source():
            wanted = tuple(item if isinstance(item, slice) else 0 for item in wanted)
        try:
            part = self._grid[wanted]
        except IndexError as fault:
            raise MeshError(f"{self!r}[{index!r}]: {fault}") from None
        if not part.size:
            raise MeshError(f"{self!r}[{index!r}]: no rank is left")
        kept = [name for i, name in enumerate(self._names) if i >= len(wanted) or isinstance(wanted[i], slice)]
        return ProcessMesh(np.atleast_1d(part), kept or self._names[-1:])

    def _around(self, names: tuple[str, ...]) -> ProcessMesh:
        axes, place = [self.axis(name) for name in names], self.coordinate()
        if place is None:
            raise MeshError(f"rank {rank_source()} is not in {self!r}, so it has no sub-mesh {list(names)} of its own")
        line = tuple(slice(None) if i in axes else place[i] for i in range(self.ndim))
        kept = [i for i in range(self.ndim) if i in axes]
        return ProcessMesh(self._grid[line].transpose([kept.index(i) for i in axes]), names)

    def __contains__(self, rank: int) -> bool:
        return rank in self._coordinates

    def __iter__(self) -> Iterator[ProcessMesh]:
        return (self[i] for i in range(self._grid.shape[0]))

    def __len__(self) -> int:
        return self._grid.shape[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return ProcessMesh, (self._grid.tolist(), list(self._names))

    def __copy__(self) -> ProcessMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessMesh:
        return self

    def __repr__(self) -> str:
        return f"ProcessMesh({self._grid.tolist()}, dim_names={list(self._names)})"

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self._names, self._grid.shape, strict=True))
        return f"ProcessMesh({axes})\n{self._grid}"


def _is_index(item: Any) -> bool:
    return isinstance(item, slice | int | np.integer) and not isinstance(item, bool)


def _read_grid(mesh: Any) -> np.ndarray:
    try:
        # tolist: an array made straight from a torch tensor draws a warning from numpy.
        grid = np.array(mesh.tolist() if hasattr(mesh, "tolist") else mesh)
    except RuntimeError as fault:  # a tensor without data
        raise MeshError(
            f"ProcessMesh({type(mesh).__name__}): its values are not there ({str(fault).splitlines()[0]}). Without devices "
            "tensors have no data: give ranks as a list or an array of numpy: np.arange(8).reshape(4, 2)"
        ) from None
    except ValueError:
        raise MeshError(f"ProcessMesh({mesh!r}): rows have different lengths; a mesh is a full grid") from None
    if grid.ndim == 0 or grid.size == 0 or not np.issubdtype(grid.dtype, np.integer):
        of_all = "; of all ranks: ProcessMesh(range(onecard.get_world_size()))" if grid.ndim == 0 else ""
        raise MeshError(f"ProcessMesh({mesh!r}): want a nested list of ranks such as [[0, 1], [2, 3]]{of_all}")
    ranks, counts = np.unique(grid, return_counts=True)
    if ranks[0] < 0:
        raise MeshError(f"ProcessMesh({mesh!r}): rank {ranks[0]} is negative; ranks count from 0")
    if counts.max() > 1:
        raise MeshError(
            f"ProcessMesh({mesh!r}): rank {ranks[counts.argmax()]} stands in it more than once, but a rank has one place. A mesh "
            f"of {grid.size} ranks: ProcessMesh({np.arange(grid.size).reshape(grid.shape).tolist()})"
        )
    return grid.astype(np.int64)


def _read_names(grid: np.ndarray, dim_names: Sequence[str] | None) -> tuple[str, ...]:
    names = tuple(f"d{i}" for i in range(grid.ndim)) if dim_names is None else tuple(dim_names)
    if isinstance(dim_names, str):
        names = (dim_names,)
    if len(names) != grid.ndim or len(set(names)) != len(names):
        raise MeshError(
            f"a mesh of shape {list(grid.shape)} needs {grid.ndim} different axis names, not {list(names)}: "
            f"ProcessMesh(..., dim_names={[f'd{i}' for i in range(grid.ndim)]})"
        )
    return names
