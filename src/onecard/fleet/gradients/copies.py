"""Copies of a parameter on several ranks: made equal when the program begins, and compared now and then while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from onecard._torch.names import tree_leaves
from onecard.comm.agree import sparse_check
from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks
from onecard.comm.world import world
from onecard.fleet.gradients import holders
from onecard.fleet.gradients import sums as gradients
from onecard.fleet.grid.topology import get_hybrid_communicate_group
from onecard.train.own_parameters import named_parameters
from onecard.train.shard import held

_CURE = (
    "Each rank must do the same to its copy. p.grad, and what torch.autograd.grad gives for a parameter, are of all ranks' data; "
    "other tensors are of this rank's. Random numbers: seed all ranks alike. A forward that writes to a parameter sees this "
    "rank's rows alone (F.embedding(max_norm=)): do that behind each step"
)


def by_group(tensors: Iterable[Tensor]) -> list[tuple[Ranks, list[Tensor]]]:
    """Those that other ranks have copies of, with those ranks."""
    return _gathered(tensors, lambda p: [group] if (group := holders.copies(p)) is not None else [])


def _gathered(
    tensors: Iterable[Tensor], groups: Callable[[Tensor], Iterable[Ranks]]
) -> list[tuple[Ranks, list[Tensor]]]:
    """Those that have data by their groups, in one order on all ranks."""
    kinds: dict[tuple[int, ...], tuple[Ranks, list[Tensor]]] = {}
    for p in tensors:
        for group in groups(p) if p.numel() and not p.is_meta else ():
            kinds.setdefault(group.ranks, (group, []))[1].append(p)
    return [kinds[ranks] for ranks in sorted(kinds)]


@torch.no_grad()
def equalise(tensors: Iterable[Tensor]) -> None:
    """Give copies of a parameter or a buffer one value: that of the first rank that has it."""
    for group, mine in by_group(tensors):
        for bucket in gradients.buckets(mine):
            with gradients.together([p.detach() for p in bucket]) as flat:
                plain.broadcast(flat, group, 0, call="distributed_model")


_SAME_BATCH = (
    "Ranks along mp compute one batch together: DistributedBatchSampler gives them the same, or a sampler with "
    "rank=hcg.get_data_parallel_rank(), num_replicas=hcg.get_data_parallel_world_size(); layers cut a sequence "
    "themselves"
)


def compare_given(number: int, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Ahead of a forward: what ranks along mp are given, at forwards 1, 2, 4, 8, 16, 24, ...

    Not of a model of sequence parallelism, which may be given its part: gradients of its parameters are summed along mp.

    Raises:
        CommunicationError: they were given other numbers.
    """
    hcg = get_hybrid_communicate_group()
    if not sparse_check.on.here or hcg.degrees["mp"] == 1:
        return
    group = hcg.group("mp")
    site = sparse_check.site(("fleet given", number, group.ranks), lambda: f"fleet given {number}/{group.ranks}")
    if not site.tick() or any(group in held(p).sums for p in model.parameters()):
        return
    world.init()
    given = [(f"argument {i}", x) for i, x in enumerate(args)] + [(f"argument {name}", x) for name, x in kwargs.items()]
    named = [(name, x) for name, value in given for x in tree_leaves(value) if isinstance(x, Tensor)]
    belief = f"is one batch on ranks {list(group.ranks)}, which divide layers"
    sparse_check.equal(site, "forward", [sparse_check.Subject(name, x, belief, _SAME_BATCH) for name, x in named])


def _tied(tensors: Iterable[Tensor]) -> list[tuple[Ranks, list[Tensor]]]:
    """Those of which other stages have copies, with the ranks of these stages."""
    pipeline = {*get_hybrid_communicate_group().group("pp").ranks}
    return _gathered(tensors, lambda p: [g for g in held(p).sums if g.size > 1 and {*g.ranks} <= pipeline])


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
    named = dict(named_parameters(model))
    known = getattr(model, "first_name", str)  # of a pipeline's, as other stages call it, too
    names = {id(p): known(name) for name, p in named.items()}
    for group, mine in [*by_group(named.values()), *_tied(named.values())]:
        where = sparse_check.site(("fleet", number, group.ranks), lambda r=group.ranks: f"fleet {number}/{r}")  # type: ignore[misc]
        where.count = site.count
        belief = f"is one parameter on ranks {list(group.ranks)}"
        subjects = [sparse_check.Subject(f"the parameter {names[id(p)]}", p, belief, _CURE) for p in mine]
        sparse_check.equal(where, "forward", subjects)
