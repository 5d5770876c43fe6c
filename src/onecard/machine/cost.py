"""cost: what a message and a computation take on a machine. Pure; every decision and every price of a recording uses it.

To decide, numbers need only be right in proportion, and must be the same on all ranks: they are never measured while a program
runs. To foretell a step's time they must be right: a data sheet's (``Machine.preset``) or measured (``Machine.measure``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from numbers import Real
from operator import ge, gt
from typing import Any

from onecard.errors import CostError
from onecard.machine.kernels import Kernels
from onecard.place.mesh import ProcessMesh

Curve = tuple[tuple[float, float], ...]
"""(size, seconds), ascending."""
DIVIDED = "divided parameter"
"""The curve of what Python does in a step for a parameter whose states are divided: see ``Machine.recorded``."""


@dataclass(frozen=True, slots=True)
class Link:
    """What ranks send over: seconds of a message however small, bytes a second that a rank sends.

    Example:
        >>> Link(latency=1e-5, bandwidth=1e9).seconds(10**6)
        0.00101
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (type(self.bandwidth) is type(self.latency) is float and self.bandwidth > 0 <= self.latency):
            _check("Link", {"bandwidth": self.bandwidth}, {"latency": self.latency})  # links are made by the message

    def seconds(self, sent: float) -> float:
        """Of a message of ``sent`` bytes; none if there is nothing to send."""
        return self.latency + sent / self.bandwidth if sent else 0.0


HOST = ("to_host", "host_memory")
"""Rates of a host's memory, which are 0 where it is the rank's own."""


@dataclass(frozen=True, slots=True, eq=False)  # plans are found by it: by identity, that costs nothing
class Machine:
    """What the cost model knows of a device and its links.

    Attributes:
        latency: seconds of a message however small.
        bandwidth: bytes a second that a rank sends along a mesh axis.
        between_hosts: bytes a second that a rank sends to another host, where the two are told apart.
        memory: bytes a second that a rank reads and writes in its own memory.
        flops: floating-point operations a second of a rank, in a matrix product; a multiply-add is two.
        name: for people.
        dtypes: ``flops`` by the dtype's name ("bfloat16"), where they differ.
        capacity: bytes of a rank's memory; 0 where it is not known.
        launch: seconds that a kernel takes however small.
        beside: share of a started message's time that runs beside computation; where ranks copy it themselves, less than 1.
        uneven: how many times as long it takes until all ranks have computed as it takes a rank on average; what is more than 1
            is waited for at the messages.
        per_host: ranks on one host, counted from rank 0; 0 if all are. A mesh axis that crosses hosts goes at ``between_hosts``.
        to_host: bytes a second from a rank's memory to its host's, and as many back; 0 where they are one.
        host_memory: bytes a second that a rank reads and writes there, while all ranks of the host do; 0 where ``to_host`` is.
        links: by the name of a mesh axis, where it is told; else the two above.
        kernels: how near kernels come to these peaks (``Machine.preset("A100")``); None: they are reached.
        curves: measured seconds by size, for families of operators and kinds of messages (``graph/families.py``); where there is
            one, it counts, else the numbers above.
        source: where the numbers are from.

    Raises:
        CostError: a rate that is not more than 0, or an amount below 0.

    Source: a message costs latency + bytes / bandwidth (the alpha-beta model, Hockney 1994); a computation costs what
        its bytes or its multiply-adds take, whichever is more (the roofline model, Williams et al. 2009).

    Example:
        >>> h100 = Machine.preset("H100")
        >>> round(h100.compute(touched=0, products=10**12, dtype="bfloat16") * 1e3, 2)  # milliseconds
        2.02
        >>> h100.with_links(dp=Link(20e-6, 25e9)).links["dp"].bandwidth
        25000000000.0
    """

    latency: float = 30e-6
    bandwidth: float = 5e9
    between_hosts: float = 1e9
    memory: float = 5e10
    flops: float = 2e11
    name: str = ""
    dtypes: Mapping[str, float] = field(default_factory=dict)
    capacity: int = 0
    launch: float = 0.0
    beside: float = 1.0
    uneven: float = 1.0
    per_host: int = 0
    to_host: float = 0.0
    host_memory: float = 0.0
    links: Mapping[str, Link] = field(default_factory=dict)
    curves: Mapping[str, Curve] = field(default_factory=dict)
    source: str = ""
    kernels: Kernels | None = None

    def __post_init__(self) -> None:
        dtypes = {f"dtypes[{name!r}]": rate for name, rate in self.dtypes.items()}
        rates = {name: getattr(self, name) for name in ("bandwidth", "between_hosts", "memory", "flops")}
        amounts = {name: getattr(self, name) for name in ("latency", "launch", "capacity", "per_host", *HOST)}
        _check("Machine", {**rates, **dtypes}, amounts)
        if (self.to_host > 0) is not (self.host_memory > 0):
            raise CostError(
                f"Machine: to_host={self.to_host:g} and host_memory={self.host_memory:g}: give both rates, or neither where the "
                "host's memory is the rank's own"
            )

    @staticmethod
    def preset(name: str, peak: bool = False) -> Machine:
        """A machine by its data sheet, with what kernels reach of it: "A100", "H100", "H200".

        Args:
            peak: without the latter: the data sheet alone, which no program exceeds.

        Raises:
            CostError: no such machine.
        """
        if name not in PRESETS:
            raise CostError(
                f"there is no machine {name!r}; there are {', '.join(PRESETS)}. Of another one: onecard.Machine(flops=..., "
                "memory=..., bandwidth=...), or, of this one, onecard.Machine.measure()"
            )
        return PRESETS[name] if peak else _with_kernels(name)

    @staticmethod
    def measure(*recordings: Any) -> Machine:
        """This machine: products, operators and memory by size; messages too where a process group is up (then on all ranks).
        A GPU: the shares of its peaks that its kernels reach (``kernels``); its links are the data sheet's.

        Takes seconds. Each rank gets the same machine. Nothing else should run meanwhile.

        Args:
            recordings: each of their operators is measured by itself, too, with tensors like its own, on this rank.
        """
        if measurer is None:
            raise CostError(
                "Machine.measure() measures operators and messages, which this module does not know: import onecard"
            )
        return measurer(*recordings)

    def recorded(self) -> Machine:
        """The same for steps that are recorded (``to_static``, ``Engine``): what Python does for each parameter is not in them.

        Example:
            >>> Machine(curves={DIVIDED: ((1.0, 1e-4),)}).recorded().curves
            {}
        """
        return replace(self, curves={name: curve for name, curve in self.curves.items() if name != DIVIDED})

    def with_links(self, **links: Link) -> Machine:
        """The same machine with links for mesh axes, by their names."""
        return replace(self, links={**self.links, **links})

    def link(self, mesh: ProcessMesh, axis: int, kind: str = "") -> Link | None:
        """What messages along a mesh axis go over; None where nothing is told of it."""
        if not self.links and not self.per_host and self.kernels is None:
            return None
        named = self.links.get(mesh.dim_names[axis])
        if named is not None or not (self.per_host or self.kernels):
            return named
        return self.line(kind, mesh.mesh.shape[axis], self.hosts_along(mesh, axis))

    def hosts_along(self, mesh: ProcessMesh, axis: int) -> int:
        """On how many hosts the ranks along an axis are, as far as ``per_host`` tells them apart.

        Example:
            >>> mesh = ProcessMesh([[0, 1], [2, 3]], ["host", "in"])
            >>> [Machine(per_host=2).hosts_along(mesh, axis) for axis in (0, 1)]
            [2, 1]
        """
        return 1 + int(_changes(mesh.mesh // self.per_host, axis).max()) if self.per_host else 1

    def crosses(self, mesh: ProcessMesh, axis: int) -> bool:
        """Whether messages along an axis go to other hosts."""
        return self.hosts_along(mesh, axis) > 1

    def line(self, kind: str, count: int, hosts: int = 1) -> Link | None:
        """What a collective of ``count`` ranks on so many hosts goes over; None where nothing is told of it.

        A ring crosses each host's border once, and the ranks of it that share a host share their adapters.
        """
        together = 1 if kind == "all_to_all" else max(1, count // hosts)
        far = min(self.bandwidth, together * self.between_hosts)
        if self.kernels is None:
            return Link(self.latency * (1 + hosts // 8), far) if hosts > 1 else None
        return Link(*self.kernels.line(kind, self.bandwidth, far, count, hosts))

    def far(self, sent: int, mesh: ProcessMesh, axis: int, kind: str) -> int:
        """How many of the bytes that a rank sends along an axis leave its host, where all ranks send alike.

        Two levels send each byte once between hosts; what goes from each rank to each other goes as it is.

        Example:
            >>> mesh = ProcessMesh([0, 1, 2, 3], ["dp"])
            >>> [Machine(per_host=2).far(96, mesh, 0, kind) for kind in ("all_reduce", "all_to_all")]
            [32, 64]
        """
        ranks, hosts = mesh.shape[axis], self.hosts_along(mesh, axis)
        if hosts < 2 or not sent:
            return 0
        return sent * (ranks - ranks // hosts if kind == "all_to_all" else hosts - 1) // (ranks - 1)

    def is_far(self, rank: int, other: int) -> bool:
        """Whether two ranks are on different hosts, as far as ``per_host`` tells them apart."""
        return self.per_host > 0 and rank // self.per_host != other // self.per_host

    def message(self, sent: int, far: int = 0, link: Link | None = None, kind: str = "") -> float:
        """Seconds to send ``sent`` bytes, ``far`` of them to other hosts; none if there is nothing to send."""
        if not sent:
            return 0.0
        if link is not None:
            return link.seconds(sent)
        if kind in self.curves:
            return read(self.curves[kind], sent)
        if self.kernels is not None:
            (start, near_rate), (_, far_rate) = (
                self.kernels.line("send", self.bandwidth, self.between_hosts, 2, hosts) for hosts in (1, 2)
            )
            return start + (sent - far) / near_rate + far / far_rate
        return self.latency + (sent - far) / self.bandwidth + far / self.between_hosts

    def copy(self, touched: float) -> float:
        """Seconds to read and write ``touched`` bytes on one rank."""
        return touched / self.memory if self.kernels is None else self.kernels.touch(self.memory, touched)

    def compute(self, touched: float, products: float, dtype: str = "") -> float:
        """Seconds of an operator that touches bytes and multiplies and adds ``products`` times."""
        return max(touched / self.memory, 2 * products / self.dtypes.get(dtype, self.flops))

    def __repr__(self) -> str:
        size = f", {self.capacity / 2**30:.0f} GiB" if self.capacity else ""
        rates = (
            f"{self.flops / 1e12:.4g} TFLOP/s, {self.memory / 1e9:.4g} GB/s{size}, {self.bandwidth / 1e9:.4g} GB/s sent"
        )
        return f"<Machine {self.name}: {rates}>"


def _check(kind: str, rates: Mapping[str, Any], amounts: Mapping[str, Any]) -> None:
    """Rates, by which is divided, are more than 0; amounts are 0 or more."""
    for given, wanted, fits in ((rates, "more than 0", gt), (amounts, "0 or more", ge)):
        for name, value in given.items():
            if not (isinstance(value, Real) and fits(value, 0)):
                raise CostError(f"{kind}: {name} has to be a number that is {wanted}, not {value!r}")


def _changes(host: Any, axis: int) -> Any:
    """For each line along an axis, how often the next rank is on another host."""
    return (host.take(range(1, host.shape[axis]), axis) != host.take(range(host.shape[axis] - 1), axis)).sum(axis)


def sent(kind: str, given: int, ranks: int) -> int:
    """Bytes that each of these ranks sends in a collective, in a ring, where it gives ``given`` bytes.

    Example:
        >>> [sent(kind, 80, 4) for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")]
        [120, 60, 240, 60]
    """
    if kind == "all_reduce":
        return 2 * (ranks - 1) * given // ranks
    if kind == "all_gather":
        return (ranks - 1) * given
    return (ranks - 1) * given // ranks if kind in ("reduce_scatter", "all_to_all") else given


def read(curve: Curve, size: float) -> float:
    """Seconds at a size: between two measured sizes by a power law, beyond them in proportion; never less than the smallest.

    Example:
        >>> [round(read(((10.0, 1.0), (1000.0, 100.0)), size), 3) for size in (1, 100, 10000)]
        [1.0, 10.0, 1000.0]
    """
    sizes = [s for s, _ in curve]
    i = bisect_left(sizes, size)
    if i == 0:
        return curve[0][1]
    (a, t), (b, u) = curve[i - 1], curve[min(i, len(curve) - 1)]
    if i == len(curve):
        return t * size / a
    return t * math.exp(math.log(u / t) * math.log(size / a) / math.log(b / a))


measurer: Callable[..., Machine] | None = None
"""Measures this machine; ``graph/measure.py`` puts it here, which knows operators and messages."""

MACHINE = Machine()
_LAUNCH: dict[str, Any] = {"launch": 4e-6, "latency": 15e-6}
"""Of no data sheet: an empty kernel after another one, and a small message among eight devices, are about so long."""


def _sxm(name: str, tera: Mapping[str, float], gigabytes: int, **given: Any) -> Machine:
    dtypes = {dtype: value * 1e12 for dtype, value in tera.items()}
    return Machine(
        name=name, flops=dtypes["bfloat16"], dtypes=dtypes, capacity=gigabytes * 2**30, per_host=8, **_LAUNCH, **given
    )


_HOPPER = {
    "float64": 67.0,
    "float32": 67.0,
    "tfloat32": 494.7,
    "bfloat16": 989.4,
    "float16": 989.4,
    "float8_e4m3fn": 1978.9,
}
PRESETS = {
    "A100": _sxm(
        "A100",
        {"float64": 19.5, "float32": 19.5, "tfloat32": 156.0, "bfloat16": 312.0, "float16": 312.0},
        80,
        memory=2.039e12,
        bandwidth=3e11,
        between_hosts=2.5e10,
        to_host=3.2e10,
        host_memory=5.1e10,
        source="NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB): dense rates; NVLink 600 GB/s, half of it each way. Between "
        "hosts: DGX A100 data sheet, one 200 Gb/s adapter for each GPU. The host: PCIe 4 x16, and of 16 channels of DDR4-3200 "
        "the eighth part",
    ),
    "H100": _sxm(
        "H100",
        _HOPPER,
        80,
        memory=3.35e12,
        bandwidth=4.5e11,
        between_hosts=5e10,
        to_host=6.4e10,
        host_memory=7.6e10,
        source="NVIDIA H100 Tensor Core GPU data sheet (SXM5): rates without sparsity; NVLink 900 GB/s, half of it each way. "
        "Between hosts: DGX H100 data sheet, one 400 Gb/s adapter for each GPU. The host: PCIe 5 x16, and of 16 channels of "
        "DDR5-4800 the eighth part",
    ),
    "H200": _sxm(
        "H200",
        _HOPPER,
        141,
        memory=4.8e12,
        bandwidth=4.5e11,
        between_hosts=5e10,
        to_host=6.4e10,
        host_memory=7.6e10,
        source="NVIDIA H200 Tensor Core GPU data sheet (SXM): rates without sparsity; NVLink 900 GB/s, half of it each way. "
        "Between hosts: DGX H200 data sheet, one 400 Gb/s adapter for each GPU. The host: PCIe 5 x16, and of 16 channels of "
        "DDR5-4800 the eighth part",
    ),
}
"""Rates of a data sheet are peaks: a step takes longer than priced with them."""
_KERNELS = {"A100": "a100", "H100": "h100", "H200": "h100"}


@lru_cache(8)
def _with_kernels(name: str) -> Machine:
    kernels = Kernels.of(_KERNELS[name])
    return replace(PRESETS[name], kernels=kernels, beside=kernels.beside)
