"""Copies of a parameter on several ranks: made equal when the program begins, and compared now and then while it runs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from onecard.comm.agree import sparse_check
from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks
from onecard.comm.world import world
from onecard.fleet.gradients import holders
from onecard.fleet.gradients import sums as gradients

_CURE = (
    "Each rank must do the same to its copy. p.grad, and what torch.autograd.grad gives for a parameter, are of all ranks' data; "
    "other tensors are of this rank's. Random numbers: seed all ranks alike. A forward that writes to a parameter sees this "
    "rank's rows alone (F.embedding(max_norm=)): do that behind each step"
)


def by_group(tensors: Iterable[Tensor]) -> list[tuple[Ranks, list[Tensor]]]:
    """Those that other ranks have copies of, with those ranks."""
    kinds: dict[tuple[int, ...], tuple[Ranks, list[Tensor]]] = {}
    for p in tensors:
        if p.numel() and not p.is_meta and (group := holders.copies(p)) is not None:
            kinds.setdefault(group.ranks, (group, []))[1].append(p)
    return [kinds[ranks] for ranks in sorted(kinds)]


@torch.no_grad()
def equalise(tensors: Iterable[Tensor]) -> None:
    """Give copies of a parameter or a buffer one value: that of the first rank that has it."""
    for group, mine in by_group(tensors):
        for bucket in gradients.buckets(mine):
            with gradients.together([p.detach() for p in bucket]) as flat:
                plain.broadcast(flat, group, 0, call="distributed_model")


def compare(number: int, model: nn.Module) -> None:
    """After a forward: copies that have drifted apart are an error, at the first and behind steps 1, 2, 4, 8, 16, 24, ...

    Raises:
        CommunicationError: names the parameter, and its values on two ranks.
    """
    if not sparse_check.on.here:
        return
    site = sparse_check.site(("fleet", number), lambda: f"fleet {number}")
    if not site.tick():
        return
    world.init()
    names = {id(p): name for name, p in model.named_parameters()}
    for group, mine in by_group(model.parameters()):
        where = sparse_check.site(("fleet", number, group.ranks), lambda r=group.ranks: f"fleet {number}/{r}")  # type: ignore[misc]
        where.count = site.count
        belief = f"is one parameter on ranks {list(group.ranks)}"
        subjects = [sparse_check.Subject(f"the parameter {names[id(p)]}", p, belief, _CURE) for p in mine]
        sparse_check.equal(where, "forward", subjects)
