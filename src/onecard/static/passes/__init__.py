"""Passes: small functions, graph -> graph, one file each. Each gives a graph that does the same, and can be left out.

What they are given stays as it is, but for a ``Draft``: the copy that all of them edit, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

from onecard._torch.graphs import copy_of, emptied
from onecard.comm.base.state import Kept
from onecard.errors import RecordingError
from onecard.static.capture import autocast
from onecard.static.passes.buckets import small_together
from onecard.static.passes.common_subexpressions import equal_nodes
from onecard.static.passes.dead import dead_nodes
from onecard.static.passes.decompositions import taken_apart
from onecard.static.passes.draft import Draft
from onecard.static.passes.fixed import of_no_input
from onecard.static.passes.inplace import in_place
from onecard.static.passes.kernel import fastest
from onecard.static.passes.merge import merged
from onecard.static.passes.noop_views import plain_names
from onecard.static.passes.options import ROWS, StaticOptions
from onecard.static.passes.overlap import overlapped
from onecard.static.passes.pieces import cut_buckets
from onecard.static.passes.recompute import candidates, recomputed
from onecard.static.passes.scatter import scattered
from onecard.static.price.live import Live
from onecard.static.step.order import check_defined, check_drawn, check_started, line_up
from onecard.static.step.step import AnyStep

Pass = Callable[[fx.Graph], fx.Graph]
PASSES: dict[str, Pass] = {
    "decompositions": taken_apart, "fixed": of_no_input, "noop_views": plain_names, "common_subexpressions": equal_nodes,
    "dead": dead_nodes, "scatter": scattered, "buckets": small_together, "pieces": cut_buckets, "overlap": overlapped,
    "inplace": in_place,
}  # fmt: skip
"""All passes, in the order in which they run. Bits stay as they are by all of these."""
ASKED: dict[str, Pass] = {"recompute": recomputed, "fastest": fastest}
"""Passes that run where they are asked for, after "dead". The last one changes numbers: it is what ``kernels`` asks for."""
withheld: Kept[frozenset[str]] = Kept(frozenset)
"""Passes that run on no step of the present world, to find out which one is at fault (``onecard.prove``)."""
KERNELS = ("eager", "fastest")
"""Which kernels multiply: those of the eager run, or the fastest ones, whose last bits may be others."""


def chosen(options: StaticOptions, most: int | None = None) -> dict[str, Pass]:
    """The passes that run, those that are asked for in their places. ``most``: how many nodes "recompute" may compute again.

    Raises:
        RecordingError: there are no such kernels, or no such pass.
    """
    also, without = options.passes, options.left_out
    if options.kernels not in KERNELS:
        raise RecordingError(f"kernels={options.kernels!r} is not one of {', '.join(map(repr, KERNELS))}")
    if unknown := [name for name in also if name not in ASKED]:
        raise RecordingError(f"also={unknown[0]!r}: the passes to ask for are {', '.join([*ASKED, *autocast.DTYPES])}")
    if unknown := [name for name in without if name not in (*PASSES, ROWS)]:
        raise RecordingError(f"there is no pass {unknown[0]!r}; there are {', '.join(PASSES)}")
    asked = {name: run for name, run in ASKED.items() if name in (*also, options.kernels)}
    if "recompute" in asked:
        asked["recompute"] = partial(recomputed, most=most)
    made = dict[str, Pass]()
    for name, run in PASSES.items():
        made |= {name: run} if name not in without else {}
        made |= asked if name == "dead" else {}
    return {name: run for name, run in made.items() if name not in withheld.here}


def optimised(recording: AnyStep, without: Sequence[str] = ()) -> AnyStep:
    """A recording by the passes, less those named.

    Raises:
        RecordingError: there is no such pass; or one has moved what must not be moved, or dropped a message.

    Example:
        >>> import onecard, torch
        >>> recording = onecard.record(lambda x: (x * 2).detach() + x * 2)(torch.ones(2))
        >>> len(list(recording.nodes())), len(list(optimised(recording).nodes()))
        (4, 2)
    """
    return recording.with_graph(rewritten(recording.graph, StaticOptions(without=without)).graph)


@dataclass(frozen=True)
class RewrittenGraph:
    """A graph after all passes that were chosen; and with the name "" for the beginning and of each pass the messages then."""

    graph: fx.Graph
    messages: list[tuple[str, dict[Any, list[Any]]]]


def rewritten(graph: fx.Graph, options: StaticOptions, most: int | None = None) -> RewrittenGraph:
    """A graph after all passes that are chosen. They edit one copy of it, one after the other (``draft.py``).

    Raises:
        RecordingError: a pass has made a graph that does something else. Names it.
    """
    passes, messages = chosen(options, most), [("", line_up(graph))]
    now: fx.Graph = copy_of(graph, Draft) if passes else graph
    try:
        for name, run in passes.items():
            before, now = now, run(now)
            if before is not now and before is not graph:
                emptied(before)
            messages.append(
                (name, line_up(now))
            )  # also of one with nothing to do here: on another rank it may have had
        now = now.sealed() if isinstance(now, Draft) else now
        _look_at(graph, now)
    except Exception:
        _blame(graph, passes)
        raise
    return RewrittenGraph(now, messages)


def fitting(graph: fx.Graph, options: StaticOptions) -> tuple[RewrittenGraph, int]:
    """``rewritten`` with as little recomputed as brings the peak of live memory under ``memory_limit``, and that peak.

    It is the largest results that are computed again. Where even all of them do not do, all are.
    """
    limit = options.memory_limit
    assert limit is not None

    def tried(most: int) -> tuple[RewrittenGraph, int]:
        found = rewritten(graph, options, most)
        return found, Live(found.graph).peak

    low, best = 0, tried(0)
    if best[1] <= limit:
        return best
    high = candidates(graph)
    best = tried(high)
    while best[1] <= limit and high - low > 1:
        middle = (low + high) // 2
        found = tried(middle)
        if found[1] <= limit:
            high, best = middle, found
        else:
            low = middle
    return best


def _look_at(before: fx.Graph, made: fx.Graph) -> None:
    """Whether passes have kept what a graph does besides computing: see ``check_defined`` and those after it."""
    if made is not before:
        check_defined(made)
        check_started(made)
        check_drawn(before, made)


def _blame(graph: fx.Graph, passes: Mapping[str, Pass]) -> None:
    """Run the passes again, and name the first whose graph is another one.

    Raises:
        RecordingError: there is one.
    """
    for name, run in passes.items():
        before, graph = graph, run(graph)
        try:
            _look_at(before, graph)
        except RecordingError as fault:
            raise RecordingError(
                f"the pass {name!r}: {fault}; to_static(..., without=[{name!r}]) leaves it out"
            ) from None


__all__ = [
    "ASKED", "KERNELS", "PASSES", "Pass", "StaticOptions", "chosen", "cut_buckets", "dead_nodes", "equal_nodes", "fastest",
    "fitting", "in_place", "merged", "of_no_input", "optimised", "overlapped", "plain_names", "recomputed", "scattered",
    "rewritten", "small_together", "taken_apart", "withheld",
]  # fmt: skip
