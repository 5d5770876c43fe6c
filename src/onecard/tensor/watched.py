"""What the sparse check looks at: plain operands, what becomes distributed, parameters just written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onecard.comm.agree import check, clock, sparse_check
from onecard.comm.agree.sparse_check import Site, Subject
from onecard.comm.base import record
from onecard.comm.base.state import Kept
from onecard.comm.issue import groups
from onecard.comm.world import world
from onecard.place.layout import Layout
from onecard.place.mesh import ProcessMesh
from onecard.rules.call import Path
from onecard.tensor.dist_tensor import COPIES, DistTensor, copied_axes
from onecard.tensor.staged import own_stages

READ_APART = (
    ". If each rank reads its own part of the data (a DistributedSampler): take the sampler away, onecard.shard_dataloader("
    'loader, mesh, "dp") gives each rank its part'
)


class Operands:
    """The plain operands of one kind of call: they count as Replicate, so that every rank must hold the same.

    Calls outside autograd are counted apart: one rank may evaluate on its own. So is each stage of a pipeline: of
    what others have it leaves calls out.
    """

    def __init__(self, operator: str, paths: Sequence[tuple[str, Path]], mesh: ProcessMesh) -> None:
        self.operator, self.paths, self.mesh = operator, paths, mesh
        self.here, self.apart = mesh.coordinate() is not None, mesh in groups.apart.here
        names = ",".join(name for name, _ in paths)
        self.labels = tuple(f"{operator}/{names}/{'grad' if grad else 'no_grad'}" for grad in (False, True))
        self.sites: dict[Any, Site] = {}

    def compare(self, at: Callable[[Path], Any]) -> None:
        """Compare them, if it is time to."""
        if self.apart:
            for _, path in self.paths:
                x = at(path)
                if isinstance(x, Tensor) and x.requires_grad:  # backward goes on with each rank's own
                    x.register_hook(own_whole)
        label, stages = self.labels[torch.is_grad_enabled()], own_stages.here
        key = (label, stages, _turn(self.mesh, label, stages))
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = _site(self.mesh, "/".join(map(str, key)))
        if site.tick():
            world.init()  # a program in which nothing is sent would never meet
            if not self.here:
                return
            found = [(name, at(path)) for name, path in self.paths]
            if self.apart:
                found = [(name, x) for name, x in found if not (isinstance(x, Tensor) and x.requires_grad)]
            sparse_check.equal(site, self.operator, [_plain(n, x) for n, x in found if isinstance(x, Tensor)])


def own_whole(x: Tensor) -> Tensor:
    """A distributed tensor as this rank has it, whole; ranks outside its mesh are not asked."""
    if not isinstance(x, DistTensor):
        return x
    layout = Layout.replicated(x.mesh, x.dim())
    return (x if x._spec.layout is layout else x.redistribute(layout.placements)).to_local()


def _plain(name: str, x: Tensor) -> Subject:
    claim = check.plain(name, x)
    return Subject(claim.name, x, claim.belief, claim.cure + READ_APART)


def _site(mesh: ProcessMesh, what: str) -> Site:
    return sparse_check.site((mesh, what), lambda: f"{mesh!r}/{what}")


def _site_of(layout: Layout, *what: Any) -> Site:
    return sparse_check.site((layout, *what), lambda: f"{layout.mesh!r}/{layout}/{'/'.join(map(str, what))}")


_turns: Kept[dict[Any, tuple[int, Any, int]]] = Kept(dict)


def _turn(mesh: ProcessMesh, *of: Any) -> int:
    """Which call of a kind this is since the last message that all ranks of the mesh had, of the first few.

    Inputs and labels that are laid out one after the other are two subjects: of one, each second call would never be compared.
    """
    key = (mesh, *of)
    sent, last, number = _turns.here.get(key, (-1, None, -1))
    now = clock.sent.here
    if now != sent:
        before, last = last, _had_by_all(mesh)
        number = -1 if last != before else number
    number = (number + 1) % _TURNS
    _turns.here[key] = now, last, number
    return number


def _had_by_all(mesh: ProcessMesh) -> Any:
    """The messages that all ranks of a mesh had so far; with several axes each line of ranks has its own, and may have none."""
    return groups.history(mesh) if sum(n > 1 for n in mesh.shape) == 1 else None


_TURNS = 8


def whole(call: str, x: Tensor, layout: Layout) -> None:
    """Compare a whole value that each rank gives to be laid out."""
    site = _site_of(layout, call, x.dim(), _turn(layout.mesh, layout, call, x.dim()))
    if site.tick():
        sparse_check.equal(site, f"{call} as [{layout}]", [_plain("data", x)])


def part(call: str, local: Tensor, layout: Layout, cure: str) -> None:
    """Compare the part that each rank gives with those that should be equal to it; warn where different parts are equal."""
    copied, turn = copied_axes(layout), _turn(layout.mesh, layout, call, local.dim())
    mine = _place(layout.mesh, copied)
    if copied:
        site = _site_of(layout, call, local.dim(), "copies", mine, turn)
        if site.tick():
            name = f"the part {list(local.shape)} {str(local.dtype).removeprefix('torch.')} [{layout}]"
            sparse_check.equal(site, call, [Subject(name, local, "promises equal copies", COPIES)])
    if any(layout.dims) and not layout.pending:
        site = _site_of(layout, call, local.dim(), "parts", turn)
        if site.tick():
            sparse_check.parts(site, call, local, mine, cure)


def _place(mesh: ProcessMesh, copied: tuple[int, ...]) -> tuple[int, ...]:
    """Which part this rank holds of what has copies along some axes: only ranks at the same place hold the same."""
    return tuple(i for axis, i in enumerate(mesh.coordinate() or ()) if axis not in copied)


def written(operator: str, tensors: Sequence[Any], combines: bool) -> None:
    """Compare the copies of parameters that an operator has just written to, and note writes to sums that are pending.

    Only what another tensor is brought into is compared: an optimizer does that once a step.
    """
    first = next((x for x in tensors if isinstance(x, DistTensor)), None)
    if first is None:
        return
    layout = first._spec.layout
    if layout.pending:
        # One rank's write to its summand is in the sum, and looks like any other summand there.
        clock.mark(layout.mesh.process_ids, f"wrote to a pending sum {list(first.shape)} by {operator}")
    # A view is asked first: to know whether it is a leaf, torch takes it again, which fails for one just written to.
    elif combines and first.requires_grad and not first._is_view() and first.is_leaf:
        site = _site_of(layout, operator, len(tensors), _number(first), *own_stages.here)
        if site.tick():
            world.init()
            _compare_copies(site, operator, tensors)


def _compare_copies(site: Site, operator: str, tensors: Sequence[Any]) -> None:
    groups: dict[Any, list[DistTensor]] = {}
    for x in tensors:
        if isinstance(x, DistTensor) and x._spec.here:
            groups.setdefault((x.mesh, copied_axes(x._spec.layout)), []).append(x)
    for (mesh, copied), members in groups.items():
        if copied:
            where = _site(mesh, f"{site.label}/{copied}/{_place(mesh, copied)}")
            where.count = site.count
            sparse_check.equal(where, operator, [_copy(x) for x in members])


def _copy(x: DistTensor) -> Subject:
    name = f"the parameter{record.name_of(x)} {x._spec!r}"
    return Subject(name, x._local, "promises equal copies", COPIES)


def _number(x: Any) -> int:
    found = getattr(x, "_onecard_number", None)
    if found is None:
        found = x._onecard_number = sparse_check.serial(f"{x.mesh!r} {x._spec.layout}")
    return found
