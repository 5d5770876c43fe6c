"""Owners: which rank has each row of a dim, where no layout can say it, because data decides.

Every rank of the mesh knows the owner of every row (a few integers for each), so all of them know the sizes of all messages
without asking. A rank outside of it has no row, and knows none of the numbers. But how a tensor of rows lies must be known
there, too, or it could not send to the mesh or receive from it: so it follows from axes and shapes, never from the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.place.parts import Dim, axes_of, is_merged, merge
from onecard.recorded import Opaque

LIMIT = 64  # dims of which it is known who has each index


class ChosenRows(Opaque):
    """Rows that were chosen by number.

    Attributes:
        source: who has what they were chosen of; ``owners``: who has the chosen ones.
        into: where the chosen rows that this rank has stand among those that it has of ``source``.
    """

    __slots__ = ("__weakref__", "into", "numbers", "owners", "source", "version")

    def __init__(self, source: Owners, numbers: Tensor, owners: Owners) -> None:
        self.source, self.numbers, self.owners, self.version = source, numbers, owners, _version(numbers)
        self.into = source.local(numbers[owners.mine])


class Owners:
    """Who has each row. Equal on all ranks; a row is on one rank of those along the axes named here, and on all along others.

    Attributes:
        mesh: the ranks; ``here``: whether this one is among them.
        size: how many rows there are.
        places: for each axis that divides the rows, the coordinate of each row along it. Anything on a rank outside the mesh.
        device: of the places, and of ``mine``.
        mine: the rows that this rank has, ascending.
        home: how the dim lay of which the rows were chosen: its size, and the axes that cut it.
        experts: how the experts are cut to whose ranks they have gone; (): they are on the ranks on which they were chosen.
        used: whether a product was made of them: then they go home when somebody asks who knows nothing of rows.
        place: the coordinates of the one expert at which all of them are, if they have gone to it one expert at a time.
        ways: how they go to other owners (see ``ways``); ``groups``: where their experts' rows end (see ``grouped``).
    """

    __slots__ = (
        "__weakref__", "_choices", "_used", "device", "experts", "groups", "here", "home", "mesh", "mine", "place", "places",
        "size", "used", "ways",
    )  # fmt: skip

    def __init__(
        self, mesh: ProcessMesh, size: int, places: dict[int, Tensor], home: tuple[int, Dim], experts: Dim = (),
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        self.mesh, self.size, self.places, self.home, self.experts = mesh, size, places, home, experts
        self.used = bool(experts)
        self.device = next((p.device for p in places.values()), device or torch.device("cpu"))
        self.place: dict[int, int] | None = None
        coordinate = mesh.coordinate()
        self.here = coordinate is not None
        self.mine = self.held(coordinate).nonzero().squeeze(1) if coordinate is not None else self._none()
        self.ways: WeakKeyDictionary[Owners, Any] = WeakKeyDictionary()
        self.groups: Any = None
        self._choices: WeakValueDictionary[int, ChosenRows] = WeakValueDictionary()
        self._used: Owners | None = None

    def _none(self) -> Tensor:
        return torch.empty(0, dtype=torch.long, device=self.device)

    @property
    def moved(self) -> bool:
        """Whether the rows have left the ranks on which they were chosen."""
        return bool(self.experts)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that divide the rows."""
        return tuple(sorted(self.places))

    @property
    def extra(self) -> tuple[int, ...]:
        """The axes that divide the rows of one expert among ranks that have it."""
        return tuple(a for a in self.axes if a not in (self.place or ()))

    def held(self, coordinate: Sequence[int], but: int = -1) -> Tensor:
        """For each row whether a rank has it, or a rank that differs from it along the axis ``but``."""
        found = None
        for axis, places in self.places.items():
            if axis != but:
                same = places == coordinate[axis]
                found = same if found is None else found & same
        if found is not None:
            return found
        return torch.ones(self.size, dtype=torch.bool, device=self.device)

    def chosen(self, numbers: Tensor) -> ChosenRows | None:
        """The choice of rows by these numbers, if it was made, somebody still has it, and nobody wrote to them since."""
        found = self._choices.get(id(numbers))
        return found if found is not None and found.numbers is numbers and found.version == _version(numbers) else None

    def choose(self, numbers: Tensor) -> ChosenRows:
        """Rows by number: of row ``i`` the owner is that of ``numbers[i]``."""
        places = {axis: places[numbers] for axis, places in self.places.items()}
        owners = Owners(self.mesh, len(numbers), places, self.home, self.experts, self.device)
        owners.used, owners.place = self.used, self.place
        made = ChosenRows(self, numbers, owners)
        if made.version is not None:
            self._choices[id(numbers)] = made
        return made

    def in_use(self) -> Owners:
        """The same of rows of which a product was made."""
        if self.used:
            return self
        if self._used is None:
            self._used = Owners(self.mesh, self.size, self.places, self.home, self.experts, self.device)
            self._used.used, self._used.place = True, self.place
        return self._used

    def local(self, rows: Tensor) -> Tensor:
        """Where rows that this rank has stand among those that it has."""
        return torch.searchsorted(self.mine, rows)

    def same(self, other: Owners) -> bool:
        """Whether all rows have the same owners."""
        if self is other:
            return True
        return (
            self.size == other.size
            and self.axes == other.axes
            and all(torch.equal(other.places[a], p) for a, p in self.places.items())
        )

    def settled(self) -> Dim:
        """How the dim lies when its rows have gone home."""
        size, dim = self.home
        if size == self.size or not dim:
            return dim
        if size > 1 and self.size and self.size % size == 0 and not is_merged(dim):
            return merge([(size, dim), (self.size // size, ())], self.mesh)
        return axes_of(dim)


def of_dim(mesh: ProcessMesh, size: int, dim: Dim, device: torch.device) -> Owners:
    """The owners of the indices of a dim that a layout cuts: one value for each rank, dim and device."""
    return _of_dim(mesh, size, dim, device, mesh.coordinate())


@lru_cache(LIMIT)
def _of_dim(mesh: ProcessMesh, size: int, dim: Dim, device: torch.device, rank: Any) -> Owners:
    places = {axis: places.to(device) for axis, places in _places(mesh, size, dim)}
    return Owners(mesh, size, places, (size, dim), (), device)


def _places(mesh: ProcessMesh, size: int, dim: Dim) -> tuple[tuple[int, Tensor], ...]:
    axes, layout, numbers = axes_of(dim), Layout.make(mesh, (dim,)), torch.arange(size, device="cpu")
    found = {axis: torch.zeros(size, dtype=torch.long, device="cpu") for axis in axes}
    for place in product(*(range(mesh.shape[axis]) for axis in axes)):
        coordinate = [0] * mesh.ndim
        for axis, index in zip(axes, place, strict=True):
            coordinate[axis] = index
        rows = layout.local_part(numbers, coordinate)
        for axis, index in zip(axes, place, strict=True):
            found[axis][rows] = index
    return tuple(found.items())


def can_move(source: Owners, target: Owners) -> bool:
    """Whether rows can go from one to the other: nothing is copied to several ranks."""
    return source.size == target.size and source.places.keys() <= target.places.keys()


def _version(numbers: Tensor) -> int | None:
    """What changes when somebody writes to them; None: nobody can tell."""
    return None if numbers.is_inference() else numbers._version
