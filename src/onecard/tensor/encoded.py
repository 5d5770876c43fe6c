"""What JSON encoders, and wandb, make of a distributed tensor: what they make of a plain one."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from onecard._torch import patches
from onecard._torch.imported import when_imported
from onecard.tensor.convert import unshard
from onecard.tensor.dist_tensor import DistTensor

_REFUSED = (
    "Object of type DistTensor is not JSON serializable, as a plain tensor is not. "
    "Write loss.item() for a number, x.tolist() for all values: on every rank"
)


def _given_plain(known: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """json's encoder refuses tensors. One that extends it and knows plain tensors by their type's name (wandb's) is given one."""

    def default(self: Any, o: Any) -> Any:
        if not isinstance(o, DistTensor):
            return known(self, o)
        if type(self).default is json.JSONEncoder.default:
            raise TypeError(_REFUSED)
        try:
            return self.default(unshard(o))
        except TypeError as fault:
            raise TypeError(_REFUSED) from fault

    return default


def _whole(known: Callable[..., Any]) -> Callable[..., Any]:
    """wandb's ``config`` knows plain tensors by their type's name; of others it would keep what they print."""

    def friendly(obj: Any, *rest: Any, **given: Any) -> Any:
        return known(unshard(obj) if isinstance(obj, DistTensor) else obj, *rest, **given)

    return friendly


def _config(util: Any) -> None:
    if hasattr(util, "json_friendly"):
        patches.replace("wandb.util.json_friendly", util, "json_friendly", _whole)


_waiting = ExitStack()
"""Until wandb is there."""


@patches.with_first_tensor
def _install() -> None:
    _waiting.close()
    when_imported(_waiting, "wandb.util", _config)
    patches.replace("json.JSONEncoder.default", json.JSONEncoder, "default", _given_plain)
