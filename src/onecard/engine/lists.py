"""custom_white_list and custom_black_list: functions of torch that autocast's own lists do not decide about."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onecard._torch.names import tree_leaves, tree_map
from onecard.engine.strategy import Amp
from onecard.errors import StrategyError


class Lists(TorchFunctionMode):
    """Inside, functions of two lists run in a dtype, or in float32, whatever autocast says."""

    def __init__(self, dtype: torch.dtype, white: Collection[str], black: Collection[str]) -> None:
        super().__init__()
        self.dtype, self.white, self.black = dtype, frozenset(white), frozenset(black)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        if name not in self.white and name not in self.black:
            return func(*args, **kwargs or {})
        wanted = self.dtype if name in self.white else torch.float32
        device = next((x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), "cpu")
        args, kwargs = tree_map(lambda x: _as(x, wanted), (args, kwargs or {}))
        with torch.autocast(device, enabled=False):
            return func(*args, **kwargs)


def lists_of(amp: Amp) -> AbstractContextManager[Any]:
    """The lists of a strategy, for a forward pass.

    Raises:
        StrategyError: a name that no function of torch has.
    """
    if not amp.enable or not (amp.custom_white_list or amp.custom_black_list):
        return nullcontext()
    for field in ("custom_white_list", "custom_black_list"):
        for name in getattr(amp, field):
            if not any(callable(getattr(owner, name, None)) for owner in (torch, torch.nn.functional, Tensor)):
                raise StrategyError(
                    f"Strategy: amp.{field}: torch has no function {name!r}; want names as in torch.nn.functional and torch: "
                    "'linear', 'matmul', 'softmax'",
                    f"amp.{field}",
                )
    return Lists(getattr(torch, amp.dtype), amp.custom_white_list, amp.custom_black_list)


def _as(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.bfloat16, torch.float16) else x
