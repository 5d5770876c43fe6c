"""What torch keeps for each thread, taken in one thread and entered in another one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _push_mode


def of_this_thread(device: torch.device) -> Callable[[ExitStack], None]:
    """What enters it in the thread that calls it: gradients or not, autocast, modes, the device and its stream.

    A thread that ends takes its modes with it.
    """
    grad = torch.is_grad_enabled()
    kinds = {"cpu", device.type}
    casts = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    cached = torch.is_autocast_cache_enabled()
    dispatched, functions = _get_current_dispatch_mode_stack(), _get_current_function_mode_stack()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def enter(stack: ExitStack) -> None:
        if stream is not None:
            torch.cuda.set_device(device)
            stack.enter_context(torch.cuda.stream(stream))
        for mode in dispatched:
            _push_mode(mode)
        for function_mode in functions:
            stack.enter_context(function_mode)
        for kind, dtype in casts.items():
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
        stack.enter_context(torch.set_grad_enabled(grad))

    return enter


def gpu_sleeps(cycles: int) -> None:
    """Start a kernel that does nothing for so many cycles, behind which others queue up."""
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(cycles)
