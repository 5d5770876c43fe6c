"""Where a recorded forward is cut into stages: at modules that are named, or so that stages take equally long."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise

from torch import fx

from onecard.errors import RecordingError
from onecard.machine.cost import Machine
from onecard.pipeline.cut.alike import first_of
from onecard.pipeline.cut.balance import balanced, calls_of, in_chains, is_one_call
from onecard.static.passes.once import Once, phase_of
from onecard.static.passes.whole_counts import is_whole
from onecard.static.step.order import only_names


def forward_of(graph: fx.Graph, once: Once) -> list[fx.Node]:
    """The nodes of a microbatch's forward pass, up to its first gradient, but for counts, which run ahead of it."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and node not in once.head:
            if phase_of(node) != "forward":
                break
            if not is_whole(node):
                found.append(node)
    return found


def starts_of(
    graph: fx.Graph, stages: int, at: Sequence[str], machine: Machine, once: Once, whole: bool = False
) -> list[fx.Node]:
    """The first node of each stage but the first.

    Args:
        graph: of one microbatch.
        at: the modules with which the later stages begin; none: where the price is balanced.
        once: what of the graph runs once.
        whole: all nodes of one operator on distributed tensors stay together, as ranks that exchange messages within a stage
            need it (``as_first``).

    Raises:
        RecordingError: no such module, modules out of order, as many as do not make so many stages, or fewer nodes than stages.
    """
    nodes = forward_of(graph, once)
    if at:
        return _named(nodes, stages, at)
    if found := _as_before(graph, nodes, stages):
        return found
    if len(nodes) < stages:
        raise RecordingError(
            f"stages: {stages} of them, and the forward pass has {len(nodes)} operators: take fewer ranks, or virtual=1"
        )
    return balanced(graph, nodes, stages, machine, whole)


def as_first(graph: fx.Graph, once: Once, mine: list[fx.Node], ranks: Sequence[int]) -> list[fx.Node]:
    """The cuts of the first of these ranks, in this one's nodes, which may be more or fewer for each operator.

    Args:
        ranks: of all pipelines that exchange messages within a stage, so that all cut at one operator. Left alone they would
            not: the summands of a sum are not the same work on each. One small message.
    """
    if len(ranks) < 2:
        return mine
    nodes = forward_of(graph, once)
    numbers = [n.meta["operator"] for n in mine]
    first = first_of(numbers, ranks)
    at_or_after = [next((n for n in nodes if n.meta["operator"] >= number), nodes[-1]) for number in first]
    return [n if n.meta["operator"] == number else a for n, number, a in zip(mine, first, at_or_after, strict=True)]


def _as_before(graph: fx.Graph, nodes: list[fx.Node], stages: int) -> list[fx.Node]:
    """The cuts of an earlier recording, by which the parameters lie; none, if there was none. A stage may have little."""
    found: list[fx.Node] = []
    homes: dict[fx.Node, tuple[int, ...]] = {}
    earlier = False  # also where the first stage has all parameters
    first, calls = nodes[0], calls_of(graph)  # first: of the call that a node is of
    closed, order, anywhere = in_chains(graph, nodes), {n: i for i, n in enumerate(nodes)}, 0
    for before, node in pairwise([nodes[0], *nodes]):
        first = first if is_one_call(before, node, calls) else node
        known = [s for n in node.all_input_nodes if (s := n.meta.get("stages") or homes.get(n))]
        if not known:
            continue
        earlier = True
        if only_names(node):
            homes[node] = known[0]
            continue
        later = [s for s in set(known[0]).intersection(*known[1:]) if s >= len(found)]
        at = order[first]
        # Memory is made ahead of what is written to it: that of a parameter that is gathered.
        while at in closed and at > anywhere:
            at -= 1
        found += [first if at in closed else nodes[at]] * (min(later) - len(found) if later else 0)
        anywhere = order[node] + 1
    if not earlier:
        return []
    last = nodes[max(i for i in range(len(nodes)) if i not in closed)]
    return found + [last] * (stages - 1 - len(found))


def _named(nodes: list[fx.Node], stages: int, at: Sequence[str]) -> list[fx.Node]:
    if len(at) != stages - 1:
        raise RecordingError(
            f"stages: at={list(at)} begins {len(at)} stages beside the first, and the schedule has {stages} in all: name "
            f"{stages - 1} modules, or none, to have the cost balanced"
        )
    found: list[fx.Node] = []
    order = {n: i for i, n in enumerate(nodes)}
    for path in at:
        first = _first_inside(nodes, path)
        if first is None:
            known = sorted({str(n.meta.get("module", "")) for n in nodes} - {""})
            near = get_close_matches(path, known, 3, 0.0)
            raise RecordingError(
                f"stages: at={path!r}: no module of that path runs in the step; there are {', '.join(near)}"
            )
        if found and at.index(path) < len(found):
            raise RecordingError(f"stages: at={list(at)} names {path!r} twice: a module begins one stage")
        if found and order[first] <= order[found[-1]]:
            raise RecordingError(
                f"stages: at={list(at)}: {path!r} runs before {at[len(found) - 1]!r}, or with it: name modules in the order in "
                "which they run"
            )
        found.append(first)
    if order[found[0]] == 0:
        raise RecordingError(
            f"stages: at={at[0]!r} is the first module that runs, so that the first stage would be empty"
        )
    return found


def _first_inside(nodes: list[fx.Node], path: str) -> fx.Node | None:
    """The first node of a module, which may be named without the name of the one among several models that has such a path."""
    if (first := next((n for n in nodes if _inside(n, path)), None)) is not None:
        return first
    heads = dict.fromkeys(str(n.meta.get("module", "")).partition(".")[0] for n in nodes)
    found = {
        head: n for head in heads if (n := next((n for n in nodes if _inside(n, f"{head}.{path}")), None)) is not None
    }
    return next(iter(found.values())) if len(found) == 1 else None


def _inside(node: fx.Node, path: str) -> bool:
    module = str(node.meta.get("module", ""))
    return module == path or module.startswith(f"{path}.")
