"""What a step of one rank takes, as recorded from its program: seconds by phases and terms, bytes by axis, memory. Pure data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

from torch import fx

from onecard.planning.job import bytes_in_words, seconds_in_words
from onecard.static.price.live import Live, size_of
from onecard.static.price.messages import axis_of, is_message, waits_for
from onecard.static.price.price import Cost
from onecard.static.step.step import RecordedStep

if TYPE_CHECKING:  # rich is loaded by what prints
    from rich.console import Group

VERSION = 1
PHASES = ("forward", "backward", "after backward", "optimizer")


@dataclass(frozen=True, slots=True)
class RankStep:
    """What a step of one rank takes; ``print`` it for a table.

    Attributes:
        rank, world: which rank of how many; cost: of its recording, node by node.
        phases: seconds by what runs: forward, backward, what comes after it (sums of gradients, clipping), the optimizer.
        terms: the same seconds by what they go to: "compute", "messages along 'tp'" (and other axes; what nothing hides).
        memory: bytes at the peak: "parameters", "gradients", "states", "buffers", "batch and others", "activations".
    """

    rank: int
    world: int
    cost: Cost
    phases: Mapping[str, float]
    terms: Mapping[str, float]
    memory: Mapping[str, int]

    def data(self) -> dict[str, Any]:
        """All figures as JSON can hold them."""
        cost = self.cost
        return {
            "onecard": "RankStep", "version": VERSION, "rank": self.rank, "world": self.world, "machine": cost.machine.name,
            "seconds": cost.seconds, "flops": cost.flops, "phases": dict(self.phases), "terms": dict(self.terms),
            "sent": dict(cost.sent), "memory": dict(self.memory), "peak": cost.peak, "peak_at": cost.peak_at,
        }  # fmt: skip

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=120).print(self)
        return text.getvalue().rstrip()

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table

        cost, capacity = self.cost, self.cost.machine.capacity
        made = Table()
        made.add_column("")
        made.add_column(f"rank {self.rank} of {self.world:,}", justify="right")
        for rows in (self.phases, self.terms):
            for name, seconds in rows.items():
                made.add_row(name, seconds_in_words(seconds))
            made.add_section()
        for axis, count in cost.sent.items():
            made.add_row(f"sent along {axis!r}", bytes_in_words(count))
        made.add_section()
        for name, count in self.memory.items():
            made.add_row(name, bytes_in_words(count))
        verdict = "" if not capacity else " fits" if cost.peak <= capacity else f" > {bytes_in_words(capacity)}"
        made.add_row("memory at its peak", bytes_in_words(cost.peak) + verdict)
        rate = cost.flops / cost.seconds / 1e12 if cost.seconds else 0.0
        head = f"a step on {cost.machine.name or 'a machine'}: {seconds_in_words(cost.seconds)}, {rate:,.4g} TFLOP/s on a rank"
        return Group(head, made)


def rank_step(
    step: RecordedStep, cost: Cost, rank: int, world: int, kinds: Mapping[fx.Node, str], gradients: Collection[fx.Node]
) -> RankStep:
    """Put together what is known of a recorded step.

    Args:
        step, cost: the recording and its price.
        kinds: for each input what it is; gradients: nodes whose result is a parameter's gradient.
    """
    phases: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    terms: dict[str, float] = {"compute": 0.0}
    before = 0.0
    for node, found in zip(step.nodes(), cost.nodes, strict=True):
        seconds, before = found.then - before, found.then
        phases[found.phase] = phases.get(found.phase, 0.0) + seconds
        waited: Any = waits_for(node) or node
        name = f"messages along {axis_of(waited)!r}" if is_message(waited) else "compute"
        terms[name] = terms.get(name, 0.0) + seconds
    if cost.seconds > before:  # a message that nobody waits for
        terms["messages at the end"] = cost.seconds - before
        phases["optimizer"] += cost.seconds - before
    phases = {name: seconds for name, seconds in phases.items() if seconds}
    return RankStep(rank, world, cost, phases, terms, _memory(step.graph, cost, kinds, gradients))


def _memory(
    graph: fx.Graph, cost: Cost, kinds: Mapping[fx.Node, str], gradients: Collection[fx.Node]
) -> dict[str, int]:
    """Bytes at the peak by what they are."""
    live = Live(graph)
    found = dict.fromkeys(("parameters", "gradients", "states", "buffers", "batch and others"), 0)
    seen: set[Any] = set()
    for node, kind in kinds.items():
        for block in live.blocks_of(node) - seen:
            seen.add(block)
            found[kind] += size_of(block[0]) if block[0].op == "placeholder" else 0
    for node in graph.nodes:
        if node in gradients and not live.blocks_of(node) <= seen:
            seen |= live.blocks_of(node)
            found["gradients"] += size_of(node)
        if node.name == cost.peak_at:
            break
    found["activations"] = cost.peak - sum(found.values())
    return {name: count for name, count in found.items() if count}
