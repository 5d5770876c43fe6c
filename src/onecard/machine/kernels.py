"""Kernels: how near kernels come to a device's peaks, by what they do and how large it is. Pure; a data file for each device.

A data sheet's peaks are what no kernel exceeds. What one takes depends on how a product falls into tiles and the tiles into waves
over the processors, on the share of the bandwidth that a kernel reaches, and on what it costs to begin at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from math import ceil, log

from onecard.errors import CostError

Shares = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Shares of a device's peaks that its kernels reach; every number is told with its source in the data file.

    Attributes:
        processors: streaming multiprocessors, each of which makes one tile of a product at a time.
        products: share of the peak rate that a full wave of a product reaches, by dtype; "" of any other.
        tiles: (rows, columns) by name, such as "256x128", and what share of that rate this tile reaches.
        lost: so much longer than the inner size a tile takes, in elements of it: to begin and to write its result.
        memory: share of the peak bandwidth by family of operators (``static/price/families.py``); "" of any other.
        start: seconds that a kernel takes beyond its work.
        attention, attention_backward: share of the peak rate by width of heads.
        messages: share of a link's bandwidth by kind of message between ranks of one host; "" of any other.
        between: the same between hosts, of an adapter's.
        message_start, message_each: seconds of a message however small: the first rank, and each further one.
        between_start, between_each: the same between hosts.
        beside: share of a started message's time that hides beside a product (``Machine.beside``).
        source: where the numbers are from.

    Source: waves of tiles: NVIDIA, "Matrix multiplication background user's guide"; Osama et al., "Stream-K" (2023).

    Example:
        >>> a100 = Kernels.of("a100")
        >>> full, partly = (a100.product(312e12, 2.039e12, 256 * 9 * n, 8192, 128 * 12) for n in (1, 1.01))
        >>> partly / full > 1.2  # a few tiles more are a wave more
        True
    """

    processors: int
    products: Shares
    tiles: Shares
    lost: int
    memory: Shares
    start: float
    attention: Shares
    attention_backward: Shares
    messages: Shares
    between: Shares
    message_start: float
    message_each: float
    between_start: float
    between_each: float
    beside: float
    source: str = ""
    made: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(name: str) -> Kernels:
        """The kernels of a device by its data file: "a100", "h100"; ``made`` says how each number was found.

        Raises:
            CostError: there is no such file.
        """
        return _read(name)

    def product(
        self,
        flops: float,
        bandwidth: float,
        rows: int,
        inner: int,
        columns: int,
        batch: int = 1,
        dtype: str = "bfloat16",
    ) -> float:
        """Seconds of ``batch`` products (rows, inner) x (inner, columns).

        Args:
            flops, bandwidth: the device's peaks for this dtype, operations and bytes a second.

        The best of all tiles, with the inner size cut in up to 16 parts whose results are summed, as libraries choose.
        """
        if not rows * inner * columns * batch:
            return 0.0
        size = _SIZES.get(dtype, 4)
        made = rows * columns * batch * max(size, 2)  # is written when its tile is done, which nothing hides
        given = (rows + columns) * inner * batch * size
        rate = flops / self.processors * self.products.get(dtype, self.products[""])
        best = float("inf")
        for (tall, wide), share in _tiles(tuple(self.tiles.items())):
            tiles = ceil(rows / tall) * ceil(columns / wide) * batch
            for parts in _PARTS:
                if parts > 1 and (inner < 256 * parts or tiles * parts > 2 * self.processors):
                    break
                waves = ceil(tiles * parts / self.processors)
                computed = waves * 2 * tall * wide * (inner / parts + self.lost) / (rate * share)
                parted = 2 * parts * rows * columns * batch * 4 if parts > 1 else 0
                within = max(computed, self.moved(bandwidth, given))
                best = min(best, within + self.moved(bandwidth, made + parted))
        return self.start + best

    def moved(self, bandwidth: float, touched: float, family: str = "") -> float:
        """Seconds to read and write, without the start of a kernel."""
        return touched / (bandwidth * self.memory.get(family, self.memory[""]))

    def touch(self, bandwidth: float, touched: float, family: str = "") -> float:
        """Seconds of a kernel that does little besides reading and writing."""
        return self.start + self.moved(bandwidth, touched, family) if touched else 0.0

    def attend(
        self, flops: float, products: float, width: int, time: int, causal: bool = False, backward: bool = False
    ) -> float:
        """Seconds of an attention in one kernel: ``products`` multiply-adds of heads of this width over so much time.

        Under a causal mask those that are left out do not count, and tiles at its border are half empty.
        """
        share = _at(self.attention_backward if backward else self.attention, width)
        lost = RAMP * (2 if backward else 1) * (2 if causal else 1)
        return self.start + 2 * products * (1 + lost / time) / (flops * share)

    def line(self, kind: str, near: float, far: float, count: int, hosts: int = 1) -> tuple[float, float]:
        """Of a collective among ``count`` ranks on so many hosts: seconds however small, bytes a second that each sends.

        Args:
            near, far: bytes a second of a link within a host, and of what a line has between hosts.
        """
        within = near * self.messages.get(kind, self.messages[""])
        if hosts == 1:
            return self.message_start + self.message_each * (count - 1), within
        rate = min(within, far * self.between.get(kind, self.between[""]))
        return self.between_start + self.between_each * (hosts - 1), rate


_SIZES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "float64": 8}
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16)
RAMP = 128
"""An attention over so much time takes twice as long for each product as one over a long time: FlashAttention-3's figures."""


def _at(shares: Shares, width: int) -> float:
    """A share at a width between two that are known."""
    known = sorted((int(name), share) for name, share in shares.items())
    low = max((k for k in known if k[0] <= width), default=known[0])
    high = min((k for k in known if k[0] >= width), default=known[-1])
    part = 0.0 if low[0] >= high[0] else log(width / low[0]) / log(high[0] / low[0])
    return low[1] + part * (high[1] - low[1])


@lru_cache(16)
def _tiles(named: tuple[tuple[str, float], ...]) -> tuple[tuple[tuple[int, int], float], ...]:
    """Each tile both ways round."""
    found = {}
    for name, share in named:
        tall, wide = map(int, name.split("x"))
        found[tall, wide] = found[wide, tall] = share
    return tuple(found.items())


@lru_cache(16)
def _read(name: str) -> Kernels:
    file = resources.files("onecard.machine") / "data" / f"{name}.json"
    try:
        data = json.loads(file.read_text())
    except OSError:
        raise CostError(f"there are no kernels of {name!r}; there are a100, h100") from None
    return Kernels(**data)
