"""Gradients of gradients (penalties) go through every move between layouts, as through one card's program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fleet_programs import close
from torch import Tensor

import onecard as oc
from onecard.testing import run_ranks


def moves() -> dict[str, Callable[[Any], Any]]:
    """A plain tensor through a move, and back."""
    mesh = oc.ProcessMesh([0, 1], ["dp"])
    one, two = oc.ProcessMesh([0], ["pp"]), oc.ProcessMesh([1], ["pp"])
    cut, all_of_it = [oc.Shard(0)], [oc.Replicate()]

    def parts(x: Any) -> Any:
        laid = oc.reshard(x, mesh, cut)
        return oc.from_local(laid.to_local().square(), mesh, cut)

    return {
        "reshard": lambda x: oc.reshard(oc.reshard(x, mesh, cut).square(), mesh, all_of_it),
        "meshes": lambda x: oc.reshard(oc.reshard(x, one, all_of_it).square(), two, all_of_it),
        "unshard": lambda x: oc.unshard(oc.reshard(x, mesh, cut).square()),
        "local": parts,
    }


def penalised() -> None:
    for name, move in moves().items():
        found = []
        for run in (torch.square, move):
            torch.manual_seed(1)
            x = torch.randn(4, 3, requires_grad=True)
            y = run(x.tanh())
            (slope,) = torch.autograd.grad((y * y.exp()).sum(), x, create_graph=True)
            slope.square().sum().backward()
            found.append([slope.detach(), x.grad])
        for mine, single in zip(found[1], found[0], strict=True):
            close(oc.unshard(mine), _tensor(single), name)


def _tensor(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x


def test_second_derivatives_go_through_moves() -> None:
    run_ranks(penalised, 2)
