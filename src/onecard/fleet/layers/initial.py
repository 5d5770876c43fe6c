"""First values of parallel layers: those of the one-card layer.

Each rank draws the whole parameter, as one card would, and keeps its part; so ranks must be seeded alike. Inside
``draw_parts`` it draws its part alone, by key and place: the numbers of ``with oc.one_card_random()`` on one card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from onecard import random
from onecard.comm.base.state import Kept, faked
from onecard.errors import FleetError
from onecard.train.shard import Shard

Fill = Callable[[Tensor], Any]
Drawn = tuple[Any, ...]  # a law's name and its parameters


class Initializer:
    """Fills a whole tensor. ``law``: the random numbers that it draws, for those that are drawn in parts."""

    def __call__(self, whole: Tensor) -> Any:
        name, *params = self.law(whole.shape)
        return getattr(whole, name)(*params)

    def law(self, shape: torch.Size) -> Drawn:
        """The in-place operator of torch, and its parameters."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Initializer):
    """One number everywhere."""

    value: float = 0.0

    def law(self, shape: torch.Size) -> Drawn:
        """``fill_``."""
        return "fill_", self.value


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal numbers."""

    mean: float = 0.0
    std: float = 1.0

    def law(self, shape: torch.Size) -> Drawn:
        """``normal_``."""
        return "normal_", self.mean, self.std


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform numbers of [low, high)."""

    low: float = -1.0
    high: float = 1.0

    def law(self, shape: torch.Size) -> Drawn:
        """``uniform_``."""
        return "uniform_", self.low, self.high


@dataclass(frozen=True)
class KaimingUniform(Initializer):
    """He et al. (2015), as ``nn.init.kaiming_uniform_``; with sqrt(5) the weights of ``nn.Linear``."""

    a: float = 0.0

    def law(self, shape: torch.Size) -> Drawn:
        """``uniform_`` within a bound that depends on the inputs of the whole layer."""
        # In this order, as torch computes it: the last digit counts.
        bound = math.sqrt(3.0) * (math.sqrt(2.0 / (1 + self.a**2)) / math.sqrt(shape[1]))
        return "uniform_", -bound, bound


@dataclass(frozen=True)
class XavierUniform(Initializer):
    """Glorot and Bengio (2010), as ``nn.init.xavier_uniform_``."""

    gain: float = 1.0

    def law(self, shape: torch.Size) -> Drawn:
        """``uniform_``."""
        bound = math.sqrt(3.0) * (self.gain * math.sqrt(2.0 / float(shape[0] + shape[1])))
        return "uniform_", -bound, bound


@dataclass(frozen=True)
class XavierNormal(Initializer):
    """Glorot and Bengio (2010), as ``nn.init.xavier_normal_``."""

    gain: float = 1.0

    def law(self, shape: torch.Size) -> Drawn:
        """``normal_``."""
        return "normal_", 0.0, self.gain * math.sqrt(2.0 / float(shape[0] + shape[1]))


@dataclass(frozen=True, eq=False)
class Assign:
    """Given numbers: those of the whole parameter, or of this rank's part. A weight is (out, in), as torch has it."""

    value: Any


@dataclass(frozen=True)
class ParamAttr:
    """Paddle's description of a parameter.

    Attributes:
        initializer: an ``Initializer``, or any function of the whole tensor, such as ``nn.init.xavier_uniform_``.
        name: for errors.
        trainable: whether it gets gradients.
    """

    initializer: Any = None
    name: str | None = None
    trainable: bool = True
    learning_rate: float = 1.0
    regularizer: Any = None
    need_clip: bool = True


def attr_of(given: Any, what: str) -> ParamAttr:
    """A ``weight_attr`` as a ParamAttr; it may be one, an initializer, a name, or None.

    Raises:
        FleetError: something else, or what only Paddle's parameters have.
    """
    if isinstance(given, ParamAttr):
        if given.learning_rate != 1.0 or given.regularizer is not None or not given.need_clip:
            raise FleetError(
                f"{what}: learning_rate, regularizer and need_clip belong to torch's optimizer: parameter groups "
                '({"params": [layer.weight], "lr": 0.5 * lr, "weight_decay": 0.0})'
            )
        return given
    if given is None or isinstance(given, str):
        return ParamAttr(name=given)
    if callable(given) or isinstance(given, Assign):
        return ParamAttr(given)
    raise FleetError(
        f"{what} is {given!r}; want a fleet.ParamAttr, an initializer such as fleet.Normal(std=0.02), or None"
    )


_by_part: Kept[list[bool]] = Kept(list)


@contextmanager
def draw_parts() -> Iterator[None]:
    """Inside, layers draw their own part alone, without memory for the whole.

    The numbers are those that one card draws under ``oc.one_card_random``, not those of plain torch.

    Example:
        >>> import onecard as oc
        >>> from onecard import fleet
        >>> fleet.init(is_collective=True) and None
        >>> _ = oc.manual_seed(0)
        >>> with fleet.draw_parts():
        ...     mine = fleet.meta_parallel.ColumnParallelLinear(4, 6)
        >>> _ = oc.manual_seed(0)
        >>> with oc.one_card_random():
        ...     torch.equal(mine.weight, torch.nn.Linear(4, 6, bias=False).weight)
        True
    """
    _by_part.here.append(True)
    try:
        yield
    finally:
        _by_part.here.pop()


def make(what: Shard, attr: ParamAttr, default: Fill, device: Any = None, dtype: Any = None) -> nn.Parameter:
    """This rank's part of a new parameter, with the values that the whole would have."""
    shape = list(what.shape)
    if what.dim >= 0:
        shape[what.dim] = sum(run.length for run in what.runs)
    local = torch.empty(shape, device=device, dtype=dtype)
    parameter = nn.Parameter(local, requires_grad=attr.trainable)
    fill = attr.initializer if attr.initializer is not None else default
    if local.is_meta or (faked.here and not isinstance(fill, Assign)):
        return parameter
    with torch.no_grad():
        if isinstance(fill, Assign):
            local.copy_(_assigned(fill.value, what, local, attr))
        elif isinstance(fill, Constant):
            local.fill_(fill.value)
        elif _by_part.here and isinstance(fill, Initializer):
            _draw(local, what, fill)
        else:
            whole = torch.empty(what.shape, device=device, dtype=dtype)
            fill(whole)
            local.copy_(what.take(whole))
    return parameter


def _assigned(value: Any, what: Shard, local: Tensor, attr: ParamAttr) -> Tensor:
    given = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))
    if tuple(given.shape) == tuple(local.shape):
        return given
    if tuple(given.shape) == what.shape:
        return what.take(given)
    turned = given.dim() == 2 and tuple(given.T.shape) in (tuple(local.shape), what.shape)
    raise FleetError(
        f"Assign{f' for {attr.name}' if attr.name else ''}: the value is {list(given.shape)}; want the whole {list(what.shape)} "
        f"or this rank's part {list(local.shape)}"
        + (". Paddle's weight is (in, out), torch's (out, in): Assign(value.T)" if turned else "")
    )


def _draw(local: Tensor, what: Shard, fill: Initializer) -> None:
    name, *params = fill.law(torch.Size(what.shape))
    law, key = random.law(name, local.dtype, *params), random.new_key()
    for box, here in what.boxes():
        random.fill(local[here], law, key, what.shape, [start for start, _ in box])
