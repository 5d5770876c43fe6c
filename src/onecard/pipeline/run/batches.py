"""Whether ranks that read parts of one batch were given one batch: else inputs are trained on labels that are not theirs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from onecard import recorded
from onecard._torch.names import tree_leaves
from onecard.comm.agree import sparse_check
from onecard.comm.agree.sparse_check import Site, Subject
from onecard.comm.world import world
from onecard.place.mesh import ProcessMesh

_BELIEF = (
    "is given to every rank of a pipeline alike, the whole batch: one rank reads the inputs, another one the labels"
)
_CURE = (
    "Give every rank the same batch: seed the loader alike, and take a DistributedSampler away (beside dp it goes over the ranks "
    "along dp alone). Where a rank does not read a tensor, one of the meta device, of the same shape, may stand in its place, "
    "and None for labels"
)


def compare(sites: Sequence[Site], operator: str, inputs: Any, targets: Any) -> None:
    """Compare digests with those of the rank that came first. What is constant, as what only stands for a shape, tells nothing.

    Raises:
        CommunicationError: the ranks have other batches; with both ranks, and some values.
    """
    for site, what, value in zip(sites, ("the input", "the labels"), (inputs, targets), strict=True):
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        with recorded.unrecorded():
            tells = tensors and all(map(_tells, tensors))
        if tells:
            given = enumerate(tensors)
            said = [
                Subject(f"{what}{f' {i}' if len(tensors) > 1 else ''} {list(x.shape)}", x, _BELIEF, _CURE)
                for i, x in given
            ]
            sparse_check.equal(site, operator, said)


def compare_stages(meshes: Sequence[ProcessMesh], inputs: Any, targets: Any) -> None:
    """The same of stages by marks: ranks at the same place of the first and of the last mesh were given the same.

    Along an axis ranks may have parts of a batch. Meshes of different sizes have no places in common.
    """
    first, last = tuple(meshes[0].process_ids), tuple(meshes[-1].process_ids)
    if not sparse_check.on.here or len(first) != len(last) or set(first) & set(last):
        return
    sites = [
        sparse_check.site(("stages", first, last, place, what), partial(_label, first, last, place, what))
        for place in range(len(first))
        for what in ("x", "y")
    ]
    due = [site.tick() for site in sites]
    me = world.get_rank()
    if all(due) and me in (*first, *last):
        place = (first if me in first else last).index(me)
        compare(sites[2 * place : 2 * place + 2], "a step of stages by marks", inputs, targets)


def _label(first: Sequence[int], last: Sequence[int], place: int, what: str) -> str:
    return f"stages {first} {last}/{place}/{what}"


def _tells(x: Tensor) -> bool:
    return sparse_check.comparable(x) and x.numel() > 0 and bool((x != x.flatten()[0]).any())
