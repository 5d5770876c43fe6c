"""Tied weights as transformers looks for them ahead of ``save_pretrained``: by where they begin and end in memory.

Of a weight that is divided each rank's memory has a part, and nobody may take it for the whole. What transformers asks is which
names are one weight: it is shown stand-ins, of which those of one weight have one memory.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from onecard._torch.imported import when_imported
from onecard.auto import taken
from onecard.tensor import DistTensor, unshard

_MODULE, _FUNCTION = "transformers.modeling_utils", "remove_tied_weights_from_state_dict"


def one_card(stack: ExitStack) -> None:
    """Until the stack closes, if the program imports it."""
    when_imported(stack, _MODULE, partial(_shown, stack))


def _shown(stack: ExitStack, module: Any) -> None:
    real = getattr(module, _FUNCTION, None)
    if real is None:  # of another version
        return

    @wraps(real)
    def called(state_dict: dict[str, Any], *args: Any, **given: Any) -> dict[str, Any]:
        shown = stand_ins(state_dict)
        found = real({**state_dict, **shown}, *args, **given)
        # Whole from here on: what goes into which file is decided by memory, of which each rank has another part.
        return {name: unshard(state_dict[name]).cpu() if name in shown else x for name, x in found.items()}

    taken.put(stack, [(module, _FUNCTION, called)])


def stand_ins(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """For each distributed tensor a plain one of its shape: one memory of one element for all names of one weight."""
    made: dict[Any, Tensor] = {}
    found = {}
    for name, x in state_dict.items():
        if isinstance(x, DistTensor):
            weight = x._local.untyped_storage()._cdata, x._local.storage_offset(), x.shape
            if weight not in made:
                made[weight] = torch.empty((), dtype=x.dtype, device="cpu").expand(x.shape)
            found[name] = made[weight]
    return found
