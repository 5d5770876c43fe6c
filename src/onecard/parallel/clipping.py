"""Norms of gradients that lie on several meshes: torch's ``clip_grad_norm_`` of a pipeline by marks is one card's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from onecard import _torch
from onecard.tensor import DistTensor
from onecard.tensor.buckets import reduce_all
from onecard.tensor.convert import unshard

_done: list[str] = []


def install() -> None:
    """Once a process: ``get_total_norm``, and so ``clip_grad_norm_``, joins the norms of all meshes."""
    if not _done:
        _done.append("norm")
        _torch.within(torch.nn.utils.get_total_norm, _over_meshes)


def _over_meshes(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        by_mesh: dict[Any, list[Tensor]] = {}
        for x in listed:
            by_mesh.setdefault(x.mesh if isinstance(x, DistTensor) else None, []).append(x)
        if len(by_mesh) > 1:  # stages of a pipeline: no rank has all of them, and every rank needs the norm
            reduce_all(listed, "get_total_norm", explicit=False)  # all alike, whatever kernels come after
            # Outside a mesh there is nothing to compute, and torch's list operator has no largest of nothing.
            ways = [foreach if _here(part[0]) else False for part in by_mesh.values()]
            norms = [torchs(part, norm_type, False, way) for part, way in zip(by_mesh.values(), ways, strict=True)]
            listed = [unshard(norm) for norm in norms]
        return torchs(listed, norm_type, error_if_nonfinite, foreach)

    return get_total_norm


def _here(x: Tensor) -> bool:
    return x._spec.here if isinstance(x, DistTensor) else True
