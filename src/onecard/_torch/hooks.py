"""Hooks of all modules, taken off without a rest; and what hooks of pruning and of weight norm make."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.weight_norm import WeightNorm


class LeftBehind:
    """A hook that a pickled module has not: in its place is one of Python's own that does nothing, also where no onecard is."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (sys.audit, "onecard: a hook of several ranks, which does nothing here")


# Which hooks are given keywords. In its place: none, so that nothing is taken off it.
_given_keywords: dict[int, bool] = getattr(modules, "_global_forward_hooks_with_kwargs", {})


def after_all_modules(hook: Callable[..., None]) -> Callable[[], None]:
    """Call a hook behind the forward of each module, with its keywords; what is returned takes it off.

    torch's own handle leaves a mark behind, for which ``torch.compile(module)`` warns of a hook that is not there.
    """
    handle = register_module_forward_hook(hook, with_kwargs=True, always_call=True)

    def remove() -> None:
        handle.remove()
        _given_keywords.pop(handle.id, None)

    return remove


@contextmanager
def without_products(module: nn.Module) -> Iterator[None]:
    """Inside, no module has what ``nn.utils.prune`` and ``nn.utils.weight_norm`` make of parameters ahead of each forward: the
    graph of it holds them.
    """
    hooks = [
        (m, h, name)
        for m in module.modules()
        for h in m._forward_pre_hooks.values()
        if isinstance(h, (BasePruningMethod, WeightNorm))
        and isinstance(vars(m).get(name := h._tensor_name if isinstance(h, BasePruningMethod) else h.name), Tensor)
    ]
    for m, _, name in hooks:
        vars(m).pop(name)
    try:
        yield
    finally:
        for m, hook, _ in hooks:
            hook(m, None)
