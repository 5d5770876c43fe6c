"""Hooks of all modules, taken off without a rest."""

from __future__ import annotations

from collections.abc import Callable

from torch.nn.modules import module as modules
from torch.nn.modules.module import register_module_forward_hook

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
