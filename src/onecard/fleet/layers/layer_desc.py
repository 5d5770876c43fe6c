"""LayerDesc, SharedLayerDesc: layers of a pipeline that are made where they belong. Paddle's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from onecard.errors import FleetError


class LayerDesc:
    """A layer that is not there yet: its class and what it is made with. Only the rank that has it makes it.

    Raises:
        FleetError: no class of modules.

    Source: ``paddle.distributed.fleet.meta_parallel.LayerDesc``.

    Example:
        >>> LayerDesc(nn.Linear, 4, 2, bias=False)
        LayerDesc(Linear, 4, 2, bias=False)
    """

    def __init__(self, layer_func: type[nn.Module], *inputs: Any, **kwargs: Any) -> None:
        if not (isinstance(layer_func, type) and issubclass(layer_func, nn.Module)):
            raise FleetError(
                f"LayerDesc takes a class of modules and its arguments, LayerDesc(nn.Linear, 4, 2); not {layer_func!r}. A "
                "function stands in the list of layers as it is"
            )
        self.layer_func, self.inputs, self.kwargs = layer_func, inputs, kwargs

    def build_layer(self) -> nn.Module:
        """The layer."""
        return self.layer_func(*self.inputs, **self.kwargs)

    def __repr__(self) -> str:
        words = [self.layer_func.__name__, *map(repr, self.inputs), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{type(self).__name__}({', '.join(words)})"


class SharedLayerDesc(LayerDesc):
    """A layer that stands in several places of the list, such as an embedding that is the head as well.

    On one rank it is one module. On several each has a copy of it, with the values of the first; their gradients are summed.

    Args:
        key: its name: all of one key are one layer.
        layer_func: its class.
        forward_func: (layer, value) -> value, where it is not called as a layer.
        shared_weight_attr: the name of a parameter that it must have, or of a property that gives one. All of its parameters
            are shared, as on one card.

    Source: ``paddle.distributed.fleet.meta_parallel.SharedLayerDesc``.
    """

    def __init__(
        self,
        key: str,
        layer_func: type[nn.Module],
        forward_func: Callable[[Any, Any], Any] | None = None,
        shared_weight_attr: str = "weight",
        *inputs: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(layer_func, *inputs, **kwargs)
        self.layer_name = self.key = key
        self.forward_func, self.shared_weight_attr = forward_func, shared_weight_attr
