"""torch's own clipping, called with fleet's parameters: the same program as on one card, so it means what it means there.

``torch.nn.utils.clip_grad_norm_`` sees plain local tensors: its norm would be of this rank's parts, before they are summed,
another one on each rank, and copies of a parameter would drift apart without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onecard import _torch
from onecard.fleet import gradients, norms, sharded_model
from onecard.fleet.merging import waiting
from onecard.fleet.twins import trained

_done: list[str] = []


def install() -> None:
    """Once a process: torch's clipping hands fleet's parameters to fleet's."""
    if not _done:
        _done.append("clip")
        _torch.within(torch.nn.utils.clip_grad_norm_, _norm)
        _torch.within(torch.nn.utils.clip_grad_value_, _value)
        sharded_model.install()


def _norm(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_norm_(
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        parameters = _listed(parameters)
        if gradients.of_fleet(parameters):
            return norms.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        return torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    return clip_grad_norm_


def _value(torchs: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_value_(parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        parameters = _listed(parameters)
        if not gradients.of_fleet(parameters):
            return torchs(parameters, clip_value, foreach)
        if waiting(parameters):
            return None
        gradients.sync(parameters)
        torchs(parameters, clip_value, foreach)
        for p in parameters:
            gradients.note(p)

    return clip_grad_value_


def _listed(parameters: Any) -> Any:
    """Something that can be looked at twice; what is empty stays what it is, for torch's own warning."""
    if isinstance(parameters, Tensor):
        return [trained(parameters)]
    listed = [*map(trained, parameters)]
    return listed or (x for x in listed)


__all__ = ["install"]
