"""Automatic mixed precision of a recorded step: what runs ahead of backward passes and optimizers runs under ``torch.autocast``.

A step that is written down under autocast has the casts that autocast makes, for every operator that torch knows, and the
dtypes of gradients that autograd gives them. So it is the eager program bit for bit. A pass over a graph of float32 operators
cannot be: which gradient is rounded, and where, is no longer to be seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch
from onecard.static.step.phases import steps

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "half": torch.bfloat16}
"""What ``also`` may ask for; "half" is the name that "bfloat16" had."""


def dtype_of(also: Iterable[str]) -> torch.dtype | None:
    """The dtype that products are to have; None: that of their operands."""
    return next((DTYPES[name] for name in also if name in DTYPES), None)


@contextmanager
def autocast(dtype: torch.dtype | None, leaves: Iterable[Any]) -> Iterator[None]:
    """Inside, a whole step runs as a program that writes ``with torch.autocast(...)`` around its forward pass.

    Args:
        dtype: None: nothing is done.
        leaves: the step's arguments; their device is that of the step.
    """
    if dtype is None:
        yield
        return
    device = next((x.device.type for x in leaves if isinstance(x, Tensor)), "cpu")
    stepping = ExitStack()  # what is open while an optimizer steps

    def without() -> Any:
        torch.clear_autocast_cache()  # as at the end of a program's with block; weights may be other ones afterwards
        return torch.autocast(device, enabled=False)

    def ending(engine: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*args: Any, **kwargs: Any) -> Any:
            with without():
                return engine(*args, **kwargs)

        return backward

    with (
        stepping,
        steps(lambda _: stepping.enter_context(without()), lambda _: stepping.close()),
        torch.autocast(device, dtype),
        _torch.engine_by(ending),
    ):
        yield
