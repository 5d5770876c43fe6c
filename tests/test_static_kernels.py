"""Kernels: the fastest for each product, measured once, remembered, the same on all ranks of a host; eager's unless asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecard as oc
from onecard._torch import names as _torch
from onecard.errors import RecordingError
from onecard.static.passes import PASSES, fastest, kernel, kernels
from onecard.testing import run_ranks


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONECARD_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def trained(**options: Any) -> tuple[list[Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 16, bias=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = step if options.get("eager") else oc.to_static(step, **options)
    losses = [run(torch.randn(32, 24, generator=torch.Generator().manual_seed(i))) for i in range(8)]
    return losses, run


def others_win(name: str, shapes: Any) -> dict[str, float]:
    return {"torch": 10.0, "onednn": 1.0}


def by_onednn(run: Any) -> int:
    return sum("_linear_pointwise" in str(n.target) for n in run.recordings[0].nodes())


def test_the_kernel_that_wins_is_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = trained(eager=True)
    same, plain = trained()
    assert all(map(torch.equal, expected, same)) and by_onednn(plain) == 0, "eager's bits, unless asked for"
    monkeypatch.setattr(kernels, "measured", others_win)
    found, run = trained(kernels="fastest")
    assert by_onednn(run) == 5, "two forward, three backward: the first layer's input has no gradient"
    assert all(abs(a - b) <= 1e-6 * a for a, b in zip(expected, found, strict=True))
    known = json.loads(kernels.file().read_text())
    assert len(known) == 5 and kernels.file().parent == cache
    monkeypatch.setattr(kernels, "measured", lambda *_: pytest.fail("measured again"))
    assert by_onednn(trained(kernels="fastest")[1]) == 5
    kernels.file().write_text(json.dumps({k: {"torch": 1.0, "onednn": 0.99} for k in known}))
    again, run = trained(kernels="fastest")
    assert by_onednn(run) == 0 and all(map(torch.equal, again, expected)), "too near: torch's"


def test_measuring_leaves_the_program_alone(cache: Path) -> None:
    cache.mkdir()
    kernels.file().write_text("{no json")
    torch.manual_seed(1)
    before = torch.get_rng_state()
    (times,) = kernels.times_of([("linear", [((8, 4), (4, 1)), ((3, 4), (4, 1)), ((3,), (1,))])])
    assert times["torch"] > 0 and set(times) <= {"torch", "onednn"}
    assert torch.equal(before, torch.get_rng_state())
    assert json.loads(kernels.file().read_text())


def test_a_kernel_with_other_numbers_is_not_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: Any) -> Tensor:
        return torch.nn.functional.linear(*given[:3]) * 1.001

    monkeypatch.setattr(_torch, "onednn_linear", wrong)
    assert set(kernels.measured("linear", [((8, 4), (4, 1)), ((3, 4), (4, 1))])) == {"torch"}


def test_products_that_are_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "measured", others_win)

    def step(x: Tensor, w: Tensor, empty: Tensor) -> tuple[Tensor, ...]:
        return x.double() @ w.double(), x.bfloat16() @ w.bfloat16(), empty @ w, torch.addmm(x @ w, x, w), x @ w

    given = torch.randn(4, 4), torch.randn(4, 4), torch.zeros(0, 4)
    recording = oc.record(step)(*given)
    made = fastest(recording.graph)
    assert sum("_linear_pointwise" in str(n.target) for n in made.nodes) == 2, "float32 matrices only"
    for a, b in zip(step(*given), recording.with_graph(made).run(*given), strict=True):
        assert torch.allclose(a, b, rtol=1e-5)
    assert [(n, t["onednn"]) for _, n, t in kernel.table(recording.graph)] == [(2, 1.0)]


def test_unknown_kernels_are_refused() -> None:
    with pytest.raises(RecordingError, match="kernels='fast' is not one of 'eager', 'fastest'"):
        oc.to_static(lambda x: x, kernels="fast")
    assert "kernels" not in PASSES


def on_two_ranks(where: str) -> list[str]:
    os.environ["ONECARD_CACHE"] = where
    kernels.measured = lambda name, shapes: {"torch": 10.0, "onednn": 1.0 + 20.0 * oc.get_rank()}  # they would differ
    _, run = trained(kernels="fastest")
    return [str(n.target) for n in run.recordings[0].nodes()]


def test_ranks_take_the_same(tmp_path: Path) -> None:
    one, other = run_ranks(on_two_ranks, 2, str(tmp_path))
    assert one == other
