"""Layers whose parameters come to be in their first forward (``nn.LazyLinear``)."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy


def refuse_lazy(model: nn.Module, call: str, error: type[Exception]) -> None:
    """A parameter without a shape has no parts.

    Raises:
        error: the model has such a parameter or buffer.

    Example:
        >>> refuse_lazy(nn.Sequential(nn.LazyLinear(2)), "oc.shard_layer", ValueError)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: oc.shard_layer: '0.weight' of a LazyLinear has no shape before its first forward, and no parts. ...
    """
    for path, module in model.named_modules():
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if is_lazy(tensor):
                raise error(
                    f"{call}: {f'{path}.{name}'.lstrip('.')!r} of a {type(module).__name__} has no shape before its first "
                    "forward, and no parts. Call the model once before, on one card's tensors: with torch.no_grad(): model(x[:1])"
                )
