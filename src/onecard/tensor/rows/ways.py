"""Ways of rows from the ranks that have them to others: found once for two owners, and gone by all that lies like them.

A layer sends its rows to their experts, their weights after them, and the results home, and backward does so again, the other
way round. All of these go one way, or its reverse.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from onecard.comm.base import record
from onecard.comm.base.state import machine
from onecard.comm.issue import collectives
from onecard.comm.issue.groups import Group, group
from onecard.comm.issue.handle import Handle
from onecard.moves.resharding import Step
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.tensor.rows.halves import at_once, half
from onecard.tensor.rows.owners import Owners


class MessageWords(NamedTuple):
    """What those who watch are told of a message: the operator that needs it, its operand, how that lies, its whole shape."""

    operator: str
    operand: str
    layout: Layout
    shape: tuple[int, ...]


class Leg(NamedTuple):
    """An all-to-all along an axis, in rows.

    Attributes:
        leave, arrive: how many rows go to each rank of the axis, and come from it.
        order: this rank's rows in the order of the ranks that they go to; None: they lie so.
        back: where each row that comes belongs, in the order in which they come; None: there.
        anything: whether any rank of the line has a row.
    """

    axis: int
    leave: list[int]
    arrive: list[int]
    order: Tensor | None
    back: Tensor | None
    anything: bool

    def reversed(self) -> Leg:
        return Leg(self.axis, self.arrive, self.leave, self.back, self.order, self.anything)


class Way(NamedTuple):
    """``kept``: which of its rows a rank goes on with, where several have the same ones; None: all of them."""

    kept: Tensor | None
    legs: tuple[Leg, ...]


def move(values: Tensor, dim: int, source: Owners, target: Owners, told: MessageWords) -> Tensor:
    """This rank's rows after they have gone from the ranks of ``source`` to those of ``target``.

    Args:
        values: the rows of ``source`` that this rank has, along ``dim``.
        told: for those who watch.
    """
    if source is target or not source.here:
        return values
    way = source.ways.get(target) or _known(source, target) or _found(source, target)
    if way.kept is not None and len(way.kept) < values.shape[dim]:
        values = values.movedim(dim, 0).index_select(0, way.kept).movedim(0, dim)  # rows stay rows in memory
    with nullcontext() if len(way.legs) == 1 else at_once():
        for leg in way.legs:
            values = _exchange(values, dim, leg, source.mesh, told)
    return values


def _known(source: Owners, target: Owners) -> Way | None:
    """The way between two that have the same rows as these."""
    for other, way in list(target.ways.items()):
        if target in other.ways and other.same(source):
            return _keep(source, target, other.ways[target], way)
    for other, way in list(source.ways.items()):
        if source in other.ways and other.same(target):
            return _keep(source, target, way, other.ways[source])
    return None


def _keep(source: Owners, target: Owners, way: Way, back: Way) -> Way:
    source.ways[target], target.ways[source] = way, back
    return way


def _found(source: Owners, target: Owners) -> Way:
    here, kept, legs = source, None, list[Leg]()
    new = {axis: p for axis, p in target.places.items() if axis not in source.places}
    if new:  # these ranks have the same rows: each keeps its own
        here = Owners(source.mesh, source.size, source.places | new, source.home, target.experts, source.device)
        kept = source.local(here.mine)
    rest = [a for a in target.axes if a not in new and not torch.equal(here.places[a], target.places[a])]
    for axis in rest:
        gone = target
        if axis != rest[-1]:
            gone = Owners(
                here.mesh, here.size, here.places | {axis: target.places[axis]}, here.home, target.experts, here.device
            )
        legs.append(_leg(here, gone, axis))
        here = gone
    way = Way(kept, tuple(legs))
    if kept is None and len(legs) < 2:  # of several legs the reverse is another way than the one that would be found
        return _keep(source, target, way, Way(None, tuple(leg.reversed() for leg in legs)))
    source.ways[target] = way
    return way


def _leg(source: Owners, target: Owners, axis: int) -> Leg:
    line = group(source.mesh, axis)
    to, came_from = target.places[axis][source.mine], source.places[axis][target.mine]
    anything = bool(source.size)
    if anything and len(source.places) > 1:  # only ranks of this line count
        anything = bool(source.held(source.mesh.coordinate() or (), but=axis).any())
    leave, arrive = (torch.bincount(p, minlength=line.size).tolist() for p in (to, came_from))
    return Leg(axis, leave, arrive, _order(to, line), _order(came_from, line), anything)


def _order(places: Tensor, line: Group) -> Tensor | None:
    """The rows in the order of the ranks of a message; None if they are."""
    if line.order:
        turned = torch.tensor([line.order.index(place) for place in range(line.size)], device=places.device)
        places = turned[places]
    if len(places) < 2 or bool((places[1:] >= places[:-1]).all()):
        return None
    return torch.argsort(places, stable=True)


def _exchange(values: Tensor, dim: int, leg: Leg, mesh: ProcessMesh, told: MessageWords) -> Tensor:
    line = group(mesh, leg.axis)
    given = values.movedim(dim, 0) if dim else values
    row = given.shape[1:]
    width = row.numel()

    def send(later: bool) -> Handle:
        _tell(told, leg.axis, dim, (len(given) - leg.leave[line.index]) * width * values.element_size(), mesh)
        rows = given.contiguous() if leg.order is None else given.index_select(0, leg.order)
        sent, came = ([n * width for n in _by_rank(counts, line)] for counts in (leg.leave, leg.arrive))
        return collectives.exchanged(rows.view(-1), came, sent, line, leg.anything and bool(width), later)

    flat = send(False).wait() if half.here is None else half.here.exchanged(send)
    made = flat.view(sum(leg.arrive), *row)
    if leg.back is not None:  # what came lies by sender; rows lie by number
        made = torch.empty_like(made).index_copy_(0, leg.back, made)
    return made.movedim(0, dim) if dim else made


def _by_rank(counts: list[int], line: Group) -> list[int]:
    return [counts[place] for place in line.order] if line.order else counts


def _tell(told: MessageWords, axis: int, dim: int, sent: int, mesh: ProcessMesh) -> None:
    operator, operand, layout, shape = told
    record.serving.here = (operator, operand, shape)
    if record.observers.here:
        seconds = machine.here.message(sent, link=machine.here.link(mesh, axis))
        step = Step("all_to_all", axis, layout, layout, dim, dim, bytes=sent, seconds=seconds)
        record.tell(
            record.Notice(step, operator, operand, shape, "rows go where they are used", record.user_line(), False)
        )
