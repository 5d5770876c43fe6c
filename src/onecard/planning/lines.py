"""What messages along an axis of a plan take: among ranks of one host, or of several. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from onecard.machine.cost import Machine, sent
from onecard.static.price import families

_MEASURED = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
"""Collectives under the names that measured machines know."""


@dataclass(frozen=True, slots=True)
class AxisLine:
    """Ranks along an axis: ``count`` of them, each ``stride`` after the one before, ``per_host`` ranks on a host (0: all).

    Example:
        >>> h100 = Machine.preset("H100")
        >>> near, far = AxisLine("tp", h100, 8, 1, 8), AxisLine("dp", h100, 8, 8, 8)
        >>> near.is_far, far.is_far, far.seconds("all_reduce", 2**30) > 5 * near.seconds("all_reduce", 2**30)
        (False, True, True)
    """

    name: str
    machine: Machine
    count: int
    stride: int
    per_host: int

    @property
    def is_far(self) -> bool:
        """Whether it has ranks of several hosts."""
        return self.per_host > 0 and self.stride * self.count > self.per_host

    def sent(self, kind: str, given: int) -> int:
        """Bytes that each rank sends, where it gives so many."""
        return sent(kind, given, self.count) if self.count > 1 else 0

    def seconds(self, kind: str, given: int, messages: int = 1) -> float:
        """Seconds of a collective in which each rank gives so many bytes, in so many messages of one size.

        Ranks of a line that share a host share their adapters (``Machine.line``).
        """
        if messages > 1:
            return messages * self.seconds(kind, -(-given // messages))
        nbytes = self.sent(kind, given)
        if not nbytes:
            return 0.0
        named = self.machine.links.get(self.name)
        if named is not None:
            return named.seconds(nbytes)
        together = max(1, self.per_host // self.stride) if self.is_far else self.count
        link = self.machine.line(kind, self.count, ceil(self.count / together))
        if link is not None:
            return link.seconds(nbytes)
        return self.machine.message(nbytes, kind=families.sent(_MEASURED.get(kind, kind), self.count))

    def send(self, nbytes: int) -> float:
        """Seconds in which one rank sends so many bytes to the next one."""
        named = self.machine.links.get(self.name)
        if named is not None or not nbytes:
            return named.seconds(nbytes) if named is not None else 0.0
        return self.machine.message(nbytes, far=nbytes if self.is_far else 0, kind=families.sent("send", 2))
