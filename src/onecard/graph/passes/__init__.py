"""Passes: small pure functions, graph -> graph, one file each. Each gives a new graph that does the same and can be left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import fx

from onecard.errors import RecordingError
from onecard.graph.live import Live
from onecard.graph.order import check_drawn, check_started
from onecard.graph.passes.apart import taken_apart
from onecard.graph.passes.buckets import small_together
from onecard.graph.passes.dead import dead_nodes
from onecard.graph.passes.equal import equal_nodes
from onecard.graph.passes.fixed import of_no_input
from onecard.graph.passes.inplace import in_place
from onecard.graph.passes.kernel import fastest
from onecard.graph.passes.merge import merged
from onecard.graph.passes.names import plain_names
from onecard.graph.passes.overlap import overlapped
from onecard.graph.passes.pieces import cut_buckets
from onecard.graph.passes.recompute import candidates, recomputed
from onecard.graph.passes.scatter import scattered
from onecard.graph.recording import Recording

Pass = Callable[[fx.Graph], fx.Graph]
PASSES: dict[str, Pass] = {
    "apart": taken_apart, "fixed": of_no_input, "names": plain_names, "equal": equal_nodes, "dead": dead_nodes,
    "scatter": scattered, "buckets": small_together, "pieces": cut_buckets, "overlap": overlapped, "inplace": in_place,
}  # fmt: skip
"""All passes, in the order in which they run. Bits stay as they are by all of these."""
ASKED: dict[str, Pass] = {"recompute": recomputed, "fastest": fastest}
"""Passes that run where they are asked for, after "dead". The last one changes numbers: it is what ``kernels`` asks for."""
KERNELS = ("eager", "fastest")
"""Which kernels multiply: those of the eager run, or the fastest ones, whose last bits may be others."""


def chosen(kernels: str = "eager", also: Sequence[str] = (), most: int | None = None) -> dict[str, Pass]:
    """All passes, with those that are asked for in their places. ``most``: how many nodes "recompute" may compute again.

    Raises:
        RecordingError: there are no such kernels, or no such pass.
    """
    if kernels not in KERNELS:
        raise RecordingError(f"kernels={kernels!r} is not one of {', '.join(map(repr, KERNELS))}")
    if unknown := [name for name in also if name not in ASKED]:
        raise RecordingError(f"also={unknown[0]!r}: the passes to ask for are {', '.join(ASKED)}")
    asked = {name: run for name, run in ASKED.items() if name in (*also, kernels)}
    if "recompute" in asked:
        asked["recompute"] = partial(recomputed, most=most)
    made = dict[str, Pass]()
    for name, run in PASSES.items():
        made[name] = run
        if name == "dead":
            made |= asked
    return made


def optimised(recording: Recording, without: Sequence[str] = ()) -> Recording:
    """A recording by the passes, less those named.

    Raises:
        RecordingError: there is no such pass; or one has moved what must not be moved, or dropped a message.

    Example:
        >>> import onecard, torch
        >>> recording = onecard.record(lambda x: (x * 2).detach() + x * 2)(torch.ones(2))
        >>> len(list(recording.nodes())), len(list(optimised(recording).nodes()))
        (4, 2)
    """
    *_, (_, graph) = stages(recording.graph, without)
    return recording.with_graph(graph)


def stages(
    graph: fx.Graph,
    without: Sequence[str] = (),
    kernels: str = "eager",
    also: Sequence[str] = (),
    most: int | None = None,
) -> list[tuple[str, fx.Graph]]:
    """A graph with the name "", and after each pass but those named: (the pass, the graph)."""
    if unknown := [name for name in without if name not in PASSES]:
        raise RecordingError(f"there is no pass {unknown[0]!r}; there are {', '.join(PASSES)}")
    found = [("", graph)]
    for name, run in chosen(kernels, also, most).items():
        if name not in without:
            made = run(found[-1][1])
            if made is not found[-1][1]:
                _looked_at(name, found[-1][1], made)
            found.append((name, made))  # also one that had nothing to do here: on another rank it may have had
    return found


def fitting(
    graph: fx.Graph, limit: int, without: Sequence[str] = (), kernels: str = "eager", also: Sequence[str] = ()
) -> tuple[list[tuple[str, fx.Graph]], int]:
    """``stages`` with as little recomputed as brings the peak of live memory under a limit, and that peak.

    It is the largest results that are computed again. Where even all of them do not do, all are.
    """
    also = [*dict.fromkeys([*also, "recompute"])]

    def tried(most: int) -> tuple[list[tuple[str, fx.Graph]], int]:
        found = stages(graph, without, kernels, also, most)
        return found, Live(found[-1][1]).peak

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


def _looked_at(name: str, before: fx.Graph, made: fx.Graph) -> None:
    made.lint()
    try:
        check_started(made)
        check_drawn(before, made)
    except RecordingError as fault:
        raise RecordingError(f"the pass {name!r}: {fault}; to_static(..., without=[{name!r}]) leaves it out") from None


__all__ = [
    "ASKED", "KERNELS", "PASSES", "Pass", "chosen", "cut_buckets", "dead_nodes", "equal_nodes", "fastest", "fitting", "in_place",
    "merged", "of_no_input", "optimised", "overlapped", "plain_names", "recomputed", "scattered", "small_together", "stages",
    "taken_apart",
]  # fmt: skip
