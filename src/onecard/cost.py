"""cost: what a message and a computation take on a machine. Pure; every decision prices its choices with it.

The numbers need only be right in proportion, and must be the same on all ranks: they are never measured at run time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)  # plans are found by it: by identity, that costs nothing
class Machine:
    """What the cost model knows of a machine.

    Attributes:
        latency: seconds of a message however small.
        bandwidth: bytes a second that a rank sends along a mesh axis.
        between_hosts: bytes a second that a rank sends to another host, where the two are told apart (transfer.py).
        memory: bytes a second that a rank reads and writes in its own memory.
        flops: multiply-adds a second of a rank, in a matrix product.

    Source: a message costs latency + bytes / bandwidth (the alpha-beta model, Hockney 1994); a computation costs what
    its bytes or its multiply-adds take, whichever is more (the roofline model, Williams et al. 2009).
    """

    latency: float = 30e-6
    bandwidth: float = 5e9
    between_hosts: float = 1e9
    memory: float = 5e10
    flops: float = 1e11

    def message(self, sent: int, far: int = 0) -> float:
        """Seconds to send ``sent`` bytes, ``far`` of them to other hosts; none if there is nothing to send."""
        return self.latency + (sent - far) / self.bandwidth + far / self.between_hosts if sent else 0.0

    def copy(self, touched: float) -> float:
        """Seconds to read and write ``touched`` bytes on one rank."""
        return touched / self.memory

    def compute(self, touched: float, products: float) -> float:
        """Seconds of an operator that touches bytes and multiplies and adds ``products`` times."""
        return max(touched / self.memory, products / self.flops)


MACHINE = Machine()
