"""What one rank of a pipeline refuses while it records, all refuse at once, wherever it happens."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import onecard as oc
from onecard.pipeline.cut import stages
from onecard.static import call
from onecard.static.passes import microbatches
from onecard.testing import run_ranks


def _fails(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("no more memory")


def _on_second_rank(module: Any, name: str) -> Callable[[], None]:
    """A function of the library's own fails, on rank 1 alone."""

    def put() -> None:
        if oc.get_rank() == 1:
            setattr(module, name, _fails)

    return put


POINTS: dict[str, Callable[[], None]] = {
    "batch": _on_second_rank(stages, "check_batch"),
    "look": _on_second_rank(nn.Tanh, "forward"),
    "record": _on_second_rank(call, "_check_backward"),
    "merge": _on_second_rank(stages, "Parts"),
    "bind": _on_second_rank(call, "make_room"),
}


def _told() -> dict[str, tuple[str, float]]:
    found = {}
    for name, put in POINTS.items():
        kept = {(m, n): getattr(m, n) for m, n in ((stages, "check_batch"), (stages, "Parts"))}
        kept |= {(call, n): getattr(call, n) for n in ("_check_backward", "make_room")}
        kept[nn.Tanh, "forward"] = nn.Tanh.forward
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(x: Tensor, net: Any = net, optimizer: Any = optimizer) -> None:
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = oc.to_static(step, plan=oc.Plan(pp=2, microbatches=2))
        put()
        before = time.monotonic()
        try:
            run(torch.ones(4, 4))
            found[name] = "", 0.0
        except Exception as why:
            found[name] = f"{type(why).__name__}: {why}", time.monotonic() - before
        for (module, attribute), was in kept.items():
            setattr(module, attribute, was)
    return found


def test_what_one_rank_refuses_all_refuse_at_once() -> None:
    first, second = run_ranks(_told, 2, timeout=60.0)
    for name in POINTS:
        assert second[name][0].endswith("no more memory"), (name, second[name])
        said, seconds = first[name]
        assert said.startswith("RecordingError: step: rank(s) [1] could not record this step; rank 0 could"), (
            name,
            said,
        )
        assert said.endswith("rank 1: ValueError: no more memory"), (name, said)
        assert seconds < 5.0, (name, seconds)


class Replaces(nn.Module):
    """Keeps a mean in a buffer, or beside it in a dict, and puts a new tensor there at each step; or counts by a number."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.first, self.second, self.place = nn.Linear(4, 4), nn.Linear(4, 3), place
        self.register_buffer("mean", torch.zeros(4))
        self.kept, self.count = {"mean": torch.zeros(4)}, 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.place == "buffer":
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        elif self.place == "dict":
            self.kept["mean"] = 0.9 * self.kept["mean"] + 0.1 * h.detach().mean(0)
        elif self.place == "number":
            self.count += 1
            h = h / self.count
        return self.second(h)


def _in_words(place: str) -> tuple[str, bool]:
    net = Replaces(place)
    optimizer, mean = torch.optim.SGD(net.parameters(), 0.1), net.mean

    def step(x: Tensor) -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    how: Any = {"plan": oc.Plan(pp=2, microbatches=2)} if place else {"stages": oc.Stages(2, at=["second"])}
    run = oc.to_static(step, **how)
    try:
        for _ in range(2):
            run(torch.ones(4, 4))
        net.double()
    except oc.errors.OnecardError as why:
        return str(why), net.mean is mean
    return "", False


def _mistakes() -> list[tuple[str, bool]]:
    return [_in_words(place) for place in ("buffer", "dict", "number", "")]


def _divided() -> tuple[str, float]:
    """A step of marks whose division into microbatches one rank refuses, by values that it alone has."""
    mesh = oc.ProcessMesh([0, 1], ["tp"])
    net: Any = oc.shard_layer(nn.Linear(4, 3), mesh)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: Tensor) -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = oc.to_static(step, k_steps=2)
    run(torch.ones(4, 4))  # as it is
    if oc.get_rank() == 1:
        microbatches.doubts = _fails
    before = time.monotonic()
    try:
        run(torch.ones(4, 4))
    except Exception as why:
        return f"{type(why).__name__}: {why}", time.monotonic() - before
    return "", 0.0


def test_marks_are_divided_on_all_ranks_or_none() -> None:
    first, second = run_ranks(_divided, 2)
    assert "rank(s) [1] could not record this step" in first[0] and "no more memory" in first[0], first
    assert second[0].startswith("ValueError: no more memory") and max(first[1], second[1]) < 10, second


def test_replaced_tensors_and_converted_models_are_refused_in_words() -> None:
    for buffer, entry, number, converted in run_ranks(_mistakes, 2, timeout=60.0):
        assert "reads self.mean at " in buffer[0] and "self.mean.copy_(new) in place of self.mean = new" in buffer[0]
        assert buffer[1]  # the buffer that was there is there again
        assert "test_cut_refused.py" in entry[0] and "puts another tensor in its place" in entry[0]
        assert "net.count was 1 and is 2" in number[0] and "Count in a tensor" in number[0]
        assert "convert it before the first call of the step" in converted[0]
