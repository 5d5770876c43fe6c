"""Owners: which rank has each row of a dim, where no layout can say it, because data decides. And the messages between two.

Every rank knows the owner of every row (a few integers for each), so all of them know the sizes of all messages without asking.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from onecard.comm.base import record
from onecard.comm.base.state import machine
from onecard.comm.issue import collectives
from onecard.comm.issue.groups import Group, group
from onecard.moves.resharding import Step
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.place.parts import Dim, axes_of, is_merged, merge

LIMIT = 64  # dims of which it is known who has each index


class Told(NamedTuple):
    """What those who watch are told of a message: the operator that needs it, its operand, how that lies, its whole shape."""

    operator: str
    operand: str
    layout: Layout
    shape: tuple[int, ...]


class Owners:
    """Who has each row. Equal on all ranks; a row is on one rank of those along the axes named here, and on all along others.

    Attributes:
        mesh: the ranks.
        size: how many rows there are.
        places: for each axis that divides the rows, the coordinate of each row along it.
        mine: the rows that this rank has, ascending.
        home: how the dim lay of which the rows were chosen: its size, and the axes that cut it.
        experts: how the experts are cut to whose ranks they have gone; (): they are on the ranks on which they were chosen.
        used: whether a product was made of them: then they go home when somebody asks who knows nothing of rows.
        place: the coordinates of the one expert at which all of them are, if they have gone to it one expert at a time.
    """

    __slots__ = ("experts", "home", "mesh", "mine", "place", "places", "size", "used")

    def __init__(
        self, mesh: ProcessMesh, size: int, places: dict[int, Tensor], home: tuple[int, Dim], experts: Dim = ()
    ) -> None:
        self.mesh, self.size, self.places, self.home, self.experts = mesh, size, places, home, experts
        self.used = bool(experts)
        self.place: dict[int, int] | None = None
        self.mine = self.held(mesh.coordinate() or (0,) * mesh.ndim).nonzero().squeeze(1)

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
        any_places = next(iter(self.places.values()), None)
        device = any_places.device if any_places is not None else None
        return torch.ones(self.size, dtype=torch.bool, device=device)

    def of(self, rows: Tensor) -> Owners:
        """The owners of rows chosen from these: of row ``i`` the owner of ``rows[i]``."""
        chosen = {axis: places[rows] for axis, places in self.places.items()}
        found = Owners(self.mesh, len(rows), chosen, self.home, self.experts)
        found.used, found.place = self.used, self.place
        return found

    def local(self, rows: Tensor) -> Tensor:
        """Where rows that this rank has stand among those that it has."""
        return torch.searchsorted(self.mine, rows)

    def same(self, other: Owners) -> bool:
        """Whether all rows have the same owners."""
        if self is other:
            return True
        return self.axes == other.axes and all(torch.equal(other.places[a], p) for a, p in self.places.items())

    def settled(self) -> Dim:
        """How the dim lies when its rows have gone home."""
        size, dim = self.home
        if size == self.size or not dim:
            return dim
        if size > 1 and self.size and self.size % size == 0 and not is_merged(dim):
            return merge([(size, dim), (self.size // size, ())], self.mesh)
        return axes_of(dim)


def of_dim(mesh: ProcessMesh, size: int, dim: Dim, device: torch.device) -> Owners:
    """The owners of the indices of a dim that a layout cuts."""
    places = {axis: places.to(device) for axis, places in _places(mesh, size, dim)}
    return Owners(mesh, size, places, (size, dim))


@lru_cache(LIMIT)
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


def move(values: Tensor, dim: int, source: Owners, target: Owners, told: Told) -> Tensor:
    """This rank's rows after they have gone from the ranks of ``source`` to those of ``target``.

    Args:
        values: the rows of ``source`` that this rank has, along ``dim``.
        told: for those who watch.
    """
    if source is target:
        return values
    here, mesh = source, source.mesh
    new = {axis: p for axis, p in target.places.items() if axis not in source.places}
    if new:  # these ranks have the same rows: each keeps its own
        here = Owners(mesh, source.size, source.places | new, source.home, target.experts)
        values = values.index_select(dim, source.local(here.mine))
    for axis in target.axes:
        if axis not in new and not torch.equal(here.places[axis], target.places[axis]):
            gone = Owners(mesh, here.size, here.places | {axis: target.places[axis]}, here.home, target.experts)
            values = _exchange(values, dim, here, gone, axis, told)
            here = gone
    return values


def _exchange(values: Tensor, dim: int, source: Owners, target: Owners, axis: int, told: Told) -> Tensor:
    """One all-to-all along an axis."""
    line, place = group(source.mesh, axis), source.mesh.coordinate() or ()
    to = target.places[axis][source.mine]
    alike = source.held(place, but=axis)
    come = (alike & (target.places[axis] == place[axis])).nonzero().squeeze(1)
    came_from = source.places[axis][come]
    leave, arrive = (_counts(places, line) for places in (to, came_from))
    given = values.movedim(dim, 0)
    row = given.shape[1:]
    width = row.numel()
    _tell(told, axis, dim, (len(to) - leave[line.index]) * width * values.element_size(), source.mesh)
    given = _in_order(given, to, line)
    flat = given.reshape(-1)
    sent = [n * width for n in _by_rank(leave, line)]
    came = [n * width for n in _by_rank(arrive, line)]
    anything = bool(width) and bool(alike.any())
    flat = collectives.exchanged(flat, came, sent, line, anything).wait()
    made = flat.view(sum(arrive), *row)
    back = _order(came_from, line)
    if back is not None:  # what came lies by sender; rows lie by number
        made = torch.empty_like(made).index_copy_(0, back, made)
    return made.movedim(0, dim)


def _counts(places: Tensor, line: Group) -> list[int]:
    return torch.bincount(places, minlength=line.size).tolist()


def _by_rank(counts: list[int], line: Group) -> list[int]:
    return [counts[place] for place in line.order] if line.order else counts


def _order(places: Tensor, line: Group) -> Tensor | None:
    """The rows in the order of the ranks of a message; None if they are."""
    if line.order:
        turned = torch.tensor([line.order.index(place) for place in range(line.size)], device=places.device)
        places = turned[places]
    if len(places) < 2 or bool((places[1:] >= places[:-1]).all()):
        return None
    return torch.argsort(places, stable=True)


def _in_order(given: Tensor, to: Tensor, line: Group) -> Tensor:
    order = _order(to, line)
    return given.contiguous() if order is None else given.index_select(0, order)


def _tell(told: Told, axis: int, dim: int, sent: int, mesh: ProcessMesh) -> None:
    operator, operand, layout, shape = told
    record.serving.here = (operator, operand, shape)
    if record.observers.here:
        seconds = machine.here.message(sent, link=machine.here.link(mesh, axis))
        step = Step("all_to_all", axis, layout, layout, dim, dim, bytes=sent, seconds=seconds)
        record.tell(
            record.Message(step, operator, operand, shape, "rows go where they are used", record.user_line(), False)
        )
