"""Runs of operators given to a compiler: what is cut out of a graph, by torch's own kernels in its place; and Inductor itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from amounts import seeds
from fuzz.recorded import many
from torch import Tensor, nn

import onecard as oc
from onecard._torch import names as _torch
from onecard.errors import RecordingError
from onecard.static.code import segments


def plainly(graph: Any, given: Any) -> Callable[..., Any]:
    """In a compiler's place."""
    return lambda *inputs: graph(*inputs)


def trained(backend: str) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = model(x)
        loss = y.log_softmax(-1).square().mean() + (y[:, :2] * 2).sin().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), y.detach().t()

    run = oc.to_static(step, backend=backend)
    found = []
    for i in range(6):
        torch.manual_seed(i)
        found += run(torch.randn(6, 8))
    return [x.clone() for x in found], run.recordings[0]


def test_runs_keep_every_bit_by_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = trained("eager")
    monkeypatch.setattr(_torch, "inductor", lambda: plainly)
    found, recording = trained("inductor")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    runs = segments.segments(recording.graph)
    assert (
        sum(len(run.nodes) for run in runs) >= 15 and any(run.views for run in runs) and recording.backend == "inductor"
    )


def test_runs_of_random_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "inductor", lambda: plainly)
    monkeypatch.setattr(segments, "LEAST", 1)
    tried = seeds(40, 2, 24)
    found = many(tried, None, backend="inductor")
    wrong = {seed: v.why for seed, v in zip(tried, found, strict=True) if v.kind == "wrong"}
    assert not wrong and sum(v.kind == "right" for v in found) >= len(tried) // 2, wrong


def test_results_that_lie_otherwise_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a compiler that gives one tensor twice, and one that gives other strides."""
    expected, _ = trained("eager")
    for wrong in (
        lambda out: (out[0],) * len(out),
        lambda out: [x.t().contiguous().t() if x.dim() == 2 else x for x in out],
    ):
        monkeypatch.setattr(_torch, "inductor", lambda wrong=wrong: lambda graph, _: lambda *x: wrong(graph(*x)))
        assert all(torch.equal(a, b) for a, b in zip(trained("inductor")[0], expected, strict=True))


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecordingError, match="backend='xla' is not one of 'eager', 'inductor'"):
        oc.to_static(lambda x: x, backend="xla")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecordingError, match=r"none of no-such-compiler on the PATH\. Install one"):
        oc.to_static(lambda x: x, backend="inductor")


@pytest.mark.proof  # half a minute of compilers
@pytest.mark.filterwarnings("ignore")  # of Inductor's own imports
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="no compiler of C++")
def test_inductor() -> None:
    weight = torch.linspace(-1, 1, 64, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        loss = (torch.sin(x * weight) + torch.exp(-weight)).square().mean()
        loss.backward()
        return loss.detach()

    run = oc.to_static(step, backend="inductor")
    for i in range(4):
        x = torch.full((64,), float(i))
        found, gradient = run(x).item(), weight.grad.clone()
        expected = step(x).item()
        assert abs(found - expected) < 1e-6 and torch.allclose(gradient, weight.grad, atol=1e-6)
