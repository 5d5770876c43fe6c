"""Layers of a pipeline's list that are modules and have a parameter in common, or read one another's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from onecard.comm.issue import plain
from onecard.comm.issue.ranks import Ranks, of_ranks
from onecard.comm.world import world
from onecard.errors import FleetError
from onecard.fleet.layers.parameters import sum_over
from onecard.tensor import DistTensor


class LayersElsewhere:
    """Parameters of layers that other ranks have. The modules of the list are in this process as well, so that a layer of this
    rank can read them (a function that closes over one, a reference beside the registered ones): its gradient would be lost."""

    def __init__(self, layers: Sequence[Any], mine: Iterable[Any]) -> None:
        here = {id(p) for p in mine}
        self._named = [
            (f"{index}.{name}", p)
            for index, layer in enumerate(layers)
            if isinstance(layer, nn.Module)
            for name, p in layer.named_parameters()
            if id(p) not in here
        ]
        self._without: list[tuple[str, Any]] = []

    def begin(self) -> None:
        """Before a backward: which have no gradient. A program may give one to those that it can see."""
        self._without = [(name, p) for name, p in self._named if p.grad is None]

    def check(self, stages: Sequence[int]) -> None:
        """After a backward.

        Raises:
            FleetError: one has a gradient, so that a stage of this rank has read it.
        """
        for name, p in self._without:
            if p.grad is not None:
                raise FleetError(
                    f"stage(s) {list(stages)} on rank {world.get_rank()} have read parameter {name}, which belongs to a layer of "
                    "another rank: it would be a copy that nobody trains. Make that layer one that stands in both places: "
                    f"fleet.SharedLayerDesc(key, ...) in the place of layer {name.split('.')[0]} and where it is read, with "
                    "forward_func=lambda layer, x: ..."
                )


def tie(layers: Sequence[Any], ranks: Sequence[int], pipeline: Ranks) -> dict[str, str]:
    """One parameter in modules on several ranks: each has a copy, with the values of the first; gradients are summed.

    Args:
        layers: of the list; ``ranks``: the place in the pipeline of the rank that has each.

    Returns:
        By the names of copies on this rank the first names that one card has for them, of layers on other ranks.
    """
    places: dict[int, list[int]] = {}
    found: dict[int, tuple[str, Any]] = {}
    first_names: dict[str, str] = {}
    for index, layer in enumerate(layers):
        for name, p in layer.named_parameters() if isinstance(layer, nn.Module) else ():
            places.setdefault(id(p), []).append(ranks[index])
            first, _ = found.setdefault(id(p), (f"{index}.{name}", p))
            if ranks[index] == pipeline.index != places[id(p)][0]:
                first_names[f"{index}.{name}"] = first
    for key, at in places.items():
        name, p = found[key]
        members = [pipeline.ranks[place] for place in sorted(set(at))]
        if len(members) == 1 or world.get_rank() not in members or isinstance(p, DistTensor):
            continue
        group = of_ranks(members, f"tied {name}")
        with torch.no_grad():
            plain.broadcast(p.detach(), group, members.index(pipeline.ranks[at[0]]), call="PipelineLayer")
        sum_over(p, group)
    return first_names
