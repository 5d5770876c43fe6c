"""Hooks of all modules, taken off without a rest; and what hooks of pruning make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules import module as modules
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils.prune import BasePruningMethod

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
    """Inside, no module has what ``nn.utils.prune`` makes of a parameter and its mask: the graph of it holds both."""
    hooks = [
        (m, h) for m in module.modules() for h in m._forward_pre_hooks.values() if isinstance(h, BasePruningMethod)
    ]
    for m, hook in hooks:
        vars(m).pop(hook._tensor_name, None)
    try:
        yield
    finally:
        for m, hook in hooks:
            hook(m, None)
