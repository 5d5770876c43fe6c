"""Passes: small pure functions, graph -> graph, one file each. Each gives a new graph that does the same and can be left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from onecard.errors import RecordingError
from onecard.graph.passes.dead import dead_nodes
from onecard.graph.passes.equal import equal_nodes
from onecard.graph.passes.names import plain_names
from onecard.graph.recording import Recording

Pass = Callable[[fx.Graph], fx.Graph]
PASSES: dict[str, Pass] = {"names": plain_names, "equal": equal_nodes, "dead": dead_nodes}
"""All passes, in the order in which they run. Bits stay as they are by all of these."""


def optimised(recording: Recording, without: Sequence[str] = ()) -> Recording:
    """A recording by the passes, less those named.

    Raises:
        RecordingError: there is no such pass.

    Example:
        >>> import onecard, torch
        >>> recording = onecard.record(lambda x: (x * 2).detach() + x * 2)(torch.ones(2))
        >>> len(list(recording.nodes())), len(list(optimised(recording).nodes()))
        (4, 2)
    """
    if unknown := [name for name in without if name not in PASSES]:
        raise RecordingError(f"there is no pass {unknown[0]!r}; there are {', '.join(PASSES)}")
    graph = recording.graph
    for name, run in PASSES.items():
        if name not in without:
            graph = run(graph)
            graph.lint()
    return recording.with_graph(graph)


__all__ = ["PASSES", "Pass", "dead_nodes", "equal_nodes", "optimised", "plain_names"]
