"""What an operator that torch refuses was given: torch's error keeps its kind and words, and gets a note."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onecard.comm.base import record
from onecard.errors import OnecardError
from onecard.rules.call import schema_of
from onecard.tensor.dist_tensor import DistTensor

_START = "onecard: in "


def note(fault: Exception, func: Any, args: Any, kwargs: Any) -> None:
    """Add the operator, its tensors with their layouts, and the user's line; once, at the innermost operator."""
    if isinstance(fault, OnecardError) or any(said.startswith(_START) for said in getattr(fault, "__notes__", ())):
        return
    given = {**dict(zip(schema_of(func).arguments, args, strict=False)), **kwargs}
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    said = ", ".join(f"{name} {_words(x)}" for name, x in tensors.items())
    fault.add_note(
        f"{_START}{str(func).removesuffix('.default')}({said}) at {record.user_line()}{_cure(str(fault), tensors)}"
    )


def _words(x: Tensor) -> str:
    kind = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    return f"{kind} {x._spec.layout}" if isinstance(x, DistTensor) else f"{kind}, plain"


def _cure(words: str, tensors: dict[str, Tensor]) -> str:
    """Labels and indices are int64, which each decomposition says in words of its own."""
    kinds = {name: x.dtype for name, x in tensors.items() if name in ("target", "index", "indices")}
    of_kinds = "dtype" in words or "scalar type" in words
    wrong = [name for name, kind in kinds.items() if kind != torch.int64 and of_kinds]
    return f". Labels and indices are int64: {wrong[0]}.long()" if wrong else ""
