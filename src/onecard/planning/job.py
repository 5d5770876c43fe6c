"""JobCost: what a step of a job takes on all its ranks: seconds by terms, bytes sent, memory of each kind of rank. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import StringIO
from typing import TYPE_CHECKING

from onecard.machine.cost import Machine
from onecard.machine.events import Event
from onecard.pipeline.schedule.timing import Span
from onecard.planning.lives import NO_LIVES, PieceLives
from onecard.planning.plan import Plan

if TYPE_CHECKING:  # rich is loaded by what prints
    from rich.console import Group
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class PieceCost:
    """What one distinct piece of a model takes, for one microbatch on one rank.

    Attributes:
        name: of the piece: "blocks.0", "before the blocks", "after the blocks"; alike: how many of the model are like it.
        forward, backward_input, backward_weight: seconds; the first two with the messages that they wait for.
        messages: of these, seconds waited for messages, by mesh axis, in forward and backward.
        sent: bytes sent by mesh axis, in forward and backward.
        macs: multiply-adds of the model, forward and backward; again: those that are computed again.
        kept: bytes that forward keeps for backward; transient: most bytes beyond that while it runs; first: the same with the
            gradients of its parameters, where backward makes them.
        output: bytes of what later pieces take of it: what a pipeline sends if it is cut behind this piece.
        tensors: elements of each of its parameters on this rank that gets a gradient; gradients: bytes of those, as it makes
            them; frozen: elements of the other parameters; pending: bytes sent to sum its gradients along
            other axes than dp, once in a step; expert_tensors: those of its tensors that are experts, of which other ranks
            along ep have others; batch: bytes of the step's arguments;
            lives: when its tensors are made and dropped.
        joined: (bytes sent, seconds) of messages of its forward that sum what an earlier piece has made, by axis: they are not
            sent where a pipeline is cut ahead of it, as what crosses is summed on the other side. handed: the same of its
            backward that sum gradients for an earlier piece: half of it is sent, as each rank hands on its part.
    """

    name: str
    alike: int
    forward: float
    backward_input: float
    backward_weight: float
    messages: Mapping[str, float]
    sent: Mapping[str, int]
    macs: int
    again: int
    kept: int
    transient: int
    first: int
    output: int
    tensors: tuple[int, ...]
    gradients: int
    frozen: int = 0
    pending: Mapping[str, int] = field(default_factory=dict)
    expert_tensors: tuple[int, ...] = ()
    batch: int = 0
    lives: PieceLives = field(default=NO_LIVES, repr=False)
    joined: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    handed: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Elements of its parameters on this rank."""
        return sum(self.tensors)

    @property
    def experts(self) -> int:
        """Of them, those of experts."""
        return sum(self.expert_tensors)

    @property
    def backward(self) -> float:
        """Seconds of both halves."""
        return self.backward_input + self.backward_weight


@dataclass(frozen=True, slots=True)
class RankCost:
    """What one kind of rank takes: all ranks of one place in the pipeline are alike.

    Attributes:
        name: "pp 0", ...; ranks: how many are alike; pieces: (name, how often) of what it holds.
        terms: seconds of a step by what they go to; they add up to the step: "compute", "messages along 'tp'" (and other
            axes; what nothing hides), "bubble", "optimizer", "host".
        sent: bytes that it sends in a step, by mesh axis.
        memory: bytes at its peak by what they are: "parameters", "gradients", "states", "activations", "buffers", "transient".
        over_time: (seconds, bytes) in a step.
        macs: multiply-adds of a step.
        update: bytes while torch's optimizer runs as it is, in a step that is not recorded; 0 where steps are recorded.
        reserving: computes ``reserved``.
    """

    name: str
    ranks: int
    pieces: tuple[tuple[str, int], ...]
    terms: Mapping[str, float]
    sent: Mapping[str, int]
    memory: Mapping[str, int]
    over_time: tuple[tuple[float, int], ...]
    macs: int
    update: int = 0
    reserving: Callable[[], int] | None = field(default=None, repr=False, compare=False)

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return sum(self.memory.values())

    @property
    def reserved(self) -> int:
        """Bytes that torch's caching allocator reserves of a GPU: what is alive, and the gaps between; on a CPU ``peak``.

        Simulated when it is asked for: within a second, for a deep pipeline too.
        """
        return max(self.peak, self.reserving()) if self.reserving is not None else self.peak


@dataclass(frozen=True, slots=True)
class JobCost:
    """What a step of a job takes; ``print`` it for a table.

    Attributes:
        plan, machine: what it is priced for.
        seconds: of a step; ``terms``: of the rank that takes longest, which add up to them.
        tokens: of a step, on all ranks together (rows of the batch, if the model has no tokens).
        model_flops, hardware_flops: of a step on all ranks, without and with what is computed again.
        ranks: one entry for each place in the pipeline.
        pieces: what they are made of.
        spans: one rank of each kind over a step, in seconds.
    """

    plan: Plan
    machine: Machine
    seconds: float
    terms: Mapping[str, float]
    tokens: int
    model_flops: int
    hardware_flops: int
    ranks: tuple[RankCost, ...]
    pieces: tuple[PieceCost, ...]
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def events(self) -> tuple[Event, ...]:
        """The spans, to be drawn."""
        return tuple(map(_event, self.spans))

    @property
    def tokens_per_second(self) -> float:
        """On all ranks together."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """Share of the machine's peak that the model's operations take."""
        return self.model_flops / (self.seconds * self.plan.world * self._peak_rate)

    @property
    def hfu(self) -> float:
        """Share of the machine's peak that all operations take."""
        return self.hardware_flops / (self.seconds * self.plan.world * self._peak_rate)

    @property
    def _peak_rate(self) -> float:
        return self.machine.dtypes.get(self.plan.compute, self.machine.flops)

    @property
    def peak(self) -> int:
        """Most bytes at once on any rank."""
        return max(rank.peak for rank in self.ranks)

    @property
    def reserved(self) -> int:
        """Bytes that torch's allocator reserves on the rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak).reserved

    @property
    def needs(self) -> int:
        """Bytes of a rank that the plan can do with however it is applied: in place, as ``oc.parallelize`` and ``run --auto``
        do where there are no stages and no microbatches, torch's optimizer has temporaries that a recorded step has not."""
        return max(max(rank.peak, rank.update) for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether every rank's peak is within the machine's memory; true where that is not known."""
        return not self.machine.capacity or self.peak <= self.machine.capacity

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=120).print(self)
        return text.getvalue().rstrip()

    def __rich__(self) -> Group:
        from rich.console import Group

        return Group(_head(self), table_of(self), *([_held(self)] if self.machine.to_host else []))


def table_of(job: JobCost) -> Table:
    """The step by kinds of ranks: seconds by terms, bytes sent, memory by what it is."""
    from rich.table import Table

    made = Table()
    made.add_column("")
    shown = _shown(job.ranks)
    for rank in shown:
        made.add_column(f"{rank.name} ({rank.ranks} ranks)" if rank.ranks > 1 else rank.name, justify="right")
    for name in dict.fromkeys(name for rank in job.ranks for name in rank.terms):
        made.add_row(name, *(seconds_in_words(rank.terms.get(name, 0.0)) for rank in shown))
    made.add_section()
    for axis in dict.fromkeys(axis for rank in job.ranks for axis in rank.sent):
        made.add_row(f"sent along {axis!r}", *(bytes_in_words(rank.sent.get(axis, 0)) for rank in shown))
    made.add_section()
    for name in dict.fromkeys(name for rank in job.ranks for name in rank.memory):
        made.add_row(name, *(bytes_in_words(rank.memory.get(name, 0)) for rank in shown))
    made.add_row("memory at its peak", *(bytes_in_words(rank.peak) + _verdict(rank, job.machine) for rank in shown))
    return made


def _head(job: JobCost) -> str:
    plan = job.plan
    degrees = " x ".join(
        f"{axis}={getattr(plan, axis)}" for axis in ("pp", "dp", "cp", "tp") if getattr(plan, axis) > 1
    )
    ranks = f"{plan.world:,} ranks ({degrees})" if plan.world > 1 else "one rank"
    return (
        f"{ranks}, {job.machine.name or 'machine'}: {seconds_in_words(job.seconds)} a step, "
        f"{job.tokens_per_second:,.0f} tokens/s, MFU {job.mfu:.1%}, HFU {job.hfu:.1%}"
    )


def _held(job: JobCost) -> str:
    fullest = max(job.ranks, key=lambda rank: rank.peak)
    words = f"Of the device torch's allocator reserves {bytes_in_words(fullest.reserved)} on {fullest.name}, simulated"
    if job.fits and job.machine.capacity and fullest.reserved > job.machine.capacity:
        words += ": more than there is, so that it has to give some back and ask again, which takes time"
    return words + "."


def _shown(ranks: tuple[RankCost, ...]) -> list[RankCost]:
    """The first, the second, the last place of the pipeline, and the one that needs most memory."""
    if len(ranks) <= 4:
        return list(ranks)
    chosen = {0, 1, len(ranks) - 1, max(range(len(ranks)), key=lambda i: ranks[i].peak)}
    return [ranks[i] for i in sorted(chosen)]


def _verdict(rank: RankCost, machine: Machine) -> str:
    if not machine.capacity:
        return ""
    return " fits" if rank.peak <= machine.capacity else f" > {bytes_in_words(machine.capacity)}"


def seconds_in_words(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 or not seconds else f"{seconds * 1e6:.1f} us"


def bytes_in_words(nbytes: int) -> str:
    if nbytes >= 2**27:
        return f"{nbytes / 2**30:.2f} GiB"
    return f"{nbytes / 2**20:.2f} MiB" if nbytes >= 2**17 or not nbytes else f"{nbytes / 2**10:.1f} KiB"


def _event(span: Span) -> Event:
    kind, stage, microbatch = span.action
    names = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
    return Event(
        span.rank, "", span.start, span.end, name=f"{kind}{microbatch}", kind=names.get(kind, kind), shade=stage,
        told={"stage": stage, "microbatch": microbatch},
    )  # fmt: skip
