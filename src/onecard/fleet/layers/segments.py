"""Where a list of layers is cut into stages: uniformly, at layers of a name, by parameters, by time."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from onecard._torch.names import tree_map
from onecard.errors import FleetError

METHODS = '"uniform", "layer:Name", "parameters", "time" (with example_input=), or the bounds themselves, [0, 3, 6]'


def uniform(layers: int, stages: int) -> list[int]:
    """The bounds of stages of equally many layers, longer ones first.

    Example:
        >>> uniform(7, 3)
        [0, 3, 5, 7]
    """
    return [0, *accumulate(layers // stages + (i < layers % stages) for i in range(stages))]


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """The bounds for which the dearest stage costs least; each has a layer or more.

    Example:
        >>> balanced([9, 1, 1, 1, 6], 2), balanced([0, 0, 1], 3)
        ([0, 1, 5], [0, 1, 2, 3])
    """
    sums = [0.0, *accumulate(costs)]
    count = len(costs)
    # best[j]: of the first j layers in so many stages, the dearest stage's cost and the bounds before j.
    best: dict[int, tuple[float, list[int]]] = {j: (sums[j], [0]) for j in range(1, count + 1)}
    for stage in range(2, stages + 1):
        best = {
            j: min(
                ((max(best[i][0], sums[j] - sums[i]), [*best[i][1], i]) for i in range(stage - 1, j)),
                key=lambda found: found[0],
            )
            for j in range(stage, count + 1)
        }
    return [*best[count][1], count]


def at_layers(names: Sequence[str], word: str, stages: int) -> list[int]:
    """The bounds for which the layers whose name contains a word are dealt out equally; what is between goes with the one before.

    Example:
        >>> at_layers(["Embedding", "Block", "Block", "Norm", "Block", "Block", "Head"], "Block", 2)
        [0, 4, 7]
    """
    matches = [i for i, name in enumerate(names) if re.search(word, name, re.IGNORECASE)]
    if len(matches) < stages:
        raise FleetError(
            f"seg_method='layer:{word}': {len(matches)} of the layers {list(dict.fromkeys(names))} match, too few "
            f"for {stages} stages"
        )
    starts = uniform(len(matches), stages)[1:-1]
    return [0, *(matches[i] for i in starts), len(names)]


def bounds_of(
    method: Any,
    names: Sequence[str],
    stages: int,
    parameters: Callable[[], list[int]],
    seconds: Callable[[], list[float]],
) -> list[int]:
    """The bounds that a ``seg_method`` means.

    Raises:
        FleetError: no such method, or fewer layers than stages.
    """
    if len(names) < stages:
        raise FleetError(
            f"{len(names)} layers do not fill {stages} stages: each has one or more; lower pp_degree or "
            "num_virtual_pipeline_stages"
        )
    if method == "uniform":
        return uniform(len(names), stages)
    if isinstance(method, str) and method.startswith("layer:"):
        return at_layers(names, method.removeprefix("layer:"), stages)
    if method in ("parameters", "parameter"):
        return balanced(parameters(), stages)
    if method == "time":
        return balanced(seconds(), stages)
    if isinstance(method, list | tuple) and all(isinstance(i, int) for i in method):
        rising = all(a < b for a, b in pairwise(method))
        if len(method) == stages + 1 and rising and method[0] == 0 and method[-1] == len(names):
            return list(method)
        raise FleetError(
            f"seg_method={list(method)}: want {stages + 1} rising bounds from 0 to {len(names)}, the number of layers"
        )
    raise FleetError(f"seg_method is {method!r}; want {METHODS}")


def measure(layers: Sequence[Callable[[], Any]], example: Any, runs: int = 3) -> list[float]:
    """Seconds of forward and backward of each layer, one after the other; each is made, measured and dropped.

    Args:
        layers: functions that make a layer.
        example: what the first layer is given: a microbatch.
        runs: of each layer; the shortest counts.
    """
    found, value = [], example
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for make in layers:
            layer, best, made = make(), float("inf"), value
            for _ in range(runs):
                given = tree_map(_leaf, value)
                begin = time.perf_counter()
                made = layer(given)
                _backward(made)
                best = min(best, time.perf_counter() - begin)
            found.append(best)
            value = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, made)
    return found


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def _backward(made: Any) -> None:
    for x in made if isinstance(made, tuple | list) else [made]:
        if isinstance(x, Tensor) and x.requires_grad:
            x.backward(torch.ones_like(x), retain_graph=True)


def count(layers: Sequence[Callable[[], Any]]) -> list[int]:
    """How many parameters each layer has; they are made without memory."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        made = [make() for make in layers]
    return [sum(p.numel() for p in m.parameters()) if isinstance(m, nn.Module) else 0 for m in made]
