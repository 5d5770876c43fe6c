"""Recorded steps of mixtures whose experts are cut: recorded with one batch, replayed with others, which go elsewhere."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
from experts_programs import LAYERS
from test_experts import LAYOUTS, TOP, marked, values
from torch import nn

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

CALLS = 5  # the first records; the third and fourth are compared with the step itself


def replays(layer: str, name: str) -> list[float]:
    """The largest relative errors of the loss and the gradients, call by call."""
    run = LAYERS[layer]
    x, *given = marked(name, values(1))
    plain = [nn.Parameter(v.clone()) for v in values(1)[1:]]
    params = [nn.Parameter(v.detach()) for v in given]
    recorded = oc.to_static(lambda x: step(x, params))

    def step(x: Any, weights: list[Any]) -> Any:
        loss = run(x, *weights, TOP).square().sum()
        loss.backward()
        return loss

    found = []
    for call in range(CALLS):
        batch = values(10 + call)[0]
        made, wanted = recorded(oc.shard_tensor(batch, x.mesh, LAYOUTS[name][2])), step(batch, plain)
        pairs = [(made, wanted), *((a.grad, b.grad) for a, b in zip(params, plain, strict=True))]
        found.append(
            max(float((oc.unshard(a.detach()) - b.detach()).abs().max() / b.detach().abs().max()) for a, b in pairs)
        )
        for weight in (*params, *plain):
            weight.grad = None
    return found


def all_replays(cases: list[tuple[str, str]]) -> dict[str, list[float]]:
    warnings.simplefilter("error", UserWarning)  # nothing is dropped, nothing compared and found different
    return {", ".join(case): replays(*case) for case in cases}


def refused(layer: str, name: str) -> str:
    warnings.simplefilter("ignore", oc.GatheredOperatorWarning)  # where() of what depends on data
    x, *given = marked(name, values(1))
    run = oc.to_static(lambda x: LAYERS[layer](x, *given, TOP))
    with pytest.raises(RecordingError) as caught:
        for _ in range(2):  # the second call is recorded
            run(x)
    return str(caught.value)


@pytest.mark.proof
@pytest.mark.share(1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_replays_follow_the_router(ranks):
    names = [name for name in ("ep=2", "ep in dp", "ep beside tp") if math.prod(LAYOUTS[name][0]) == ranks]
    cases = [(layer, name) for name in names for layer in ("grouped", "dense", "einsum")]
    for found in run_ranks(all_replays, ranks, cases):
        assert {case: e for case, e in found.items() if len(e) != CALLS or not max(e) <= 1e-5} == {}


def test_a_loop_over_experts_is_refused_by_name():
    for text in run_ranks(refused, 2, "loop", "ep=2"):
        assert "experts_programs.py" in text and "depends on values" in text
