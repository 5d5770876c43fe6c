"""What a backward pass leaves to Python: hooks, and the backward of a ``Function``; all else is autograd's own, and linear."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.overrides import TorchFunctionMode

from onecard._torch import names as _torch
from onecard.comm.base import record
from onecard.static.capture.recorder import Recorder


def seen_by(recorder: Recorder) -> AbstractContextManager[Any]:
    """Inside, a recorder knows which calls of torch's within a backward pass Python makes."""

    def watching(engine: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            with _Within(recorder):
                return engine(*args, **kwargs)

        return backward

    return _torch.engine_by(watching)


class _Within(TorchFunctionMode):
    """Of each pass, as a mode is off while a call runs that it has seen: ``backward()`` itself.

    It sees no operator that autograd calls, as that does so below Python.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self.recorder
        before, task = recorder.hooked, _torch.graph_task()
        if task not in (-1, before) and record.hooked(sys._getframe(1)):
            recorder.hooked = task
        try:
            return func(*args, **(kwargs or {}))
        finally:
            recorder.hooked = before
