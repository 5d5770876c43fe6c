"""What is seen of a rank as it runs: operators with the values that they make, parameters and results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from onecard._torch import fakes
from onecard.comm.joined.hub import Told
from onecard.proof.capacity import copied
from onecard.proof.makers import Source
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.spec import Spec
from onecard.train.shard import Shard


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor as a rank had it at one place of the program: its local part, and how it lies; no spec: a plain tensor.

    ``made``: which entry has made it last, and as which of its values. ``shard``: of a parameter that a layer of fleet has cut.
    ``alike``: ranks that have the same, as the library says of a plain tensor.
    """

    local: Tensor
    spec: Spec | None
    made: Source | None = None
    shard: Shard | None = None
    alike: tuple[int, ...] = ()

    @staticmethod
    def of(x: Tensor) -> Value:
        """A copy of what a tensor is now."""
        local = x._local if isinstance(x, DistTensor) else fakes.local_of(x) if isinstance(x, DTensor) else x
        return Value(copied(local), x._spec if isinstance(x, DistTensor) else None)


@dataclass(slots=True)
class Entry:
    """One operator as one rank ran it.

    Attributes:
        number: how many this rank ran before.
        name: "aten.mm"; values: of its results, in order.
        phase: forward, backward or optimizer; module: its path; line: the user's; in backward those of the forward call.
        messages: that the rank began since the entry before.
        draws: whether it draws random numbers.
        inputs: for each value what it was made of: an entry, and which of its values.
        message: this entry is a message that serves no operator: its values are what arrived.
        moved: of values that are another one, brought to other ranks, what has made that one.
        inside: the library's own line; "" where the user's program calls the operator.
    """

    number: int
    name: str
    values: list[Value]
    phase: str
    module: str
    line: str
    messages: tuple[Told, ...]
    draws: bool
    inputs: list[tuple[Source, ...]]
    message: Told | None = None
    moved: dict[int, Source] = field(default_factory=dict)
    inside: str = ""


@dataclass(slots=True)
class Held:
    """A parameter, buffer, gradient or state of the program at one time."""

    name: str
    kind: str  # "initial", "gradient", "final", "buffer", "state"
    step: int
    value: Value
    sure: bool = False  # its name is that which it has on one card


@dataclass(slots=True)
class Watched:
    """All that was seen of one rank."""

    entries: list[Entry] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    messages: list[Told] = field(default_factory=list)
    steps: int = 0
    returned: Any = None
