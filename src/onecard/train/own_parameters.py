"""Parameters as a forward sees them, where those who ask for all are given distributed ones (``fleet``'s levels of ZeRO)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """A module's parameters as it has them, where others are given distributed or gathered ones."""
    return getattr(module._parameters, "plain", module._parameters)


def named_parameters(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All below a module, by torch's names, also of a wrapper that gives them other ones; each once."""
    seen = set()
    for path, module in root.named_modules():
        for name, x in own_parameters(module).items():
            if x is not None and id(x) not in seen:
                seen.add(id(x))
                yield f"{path}.{name}" if path else name, x
