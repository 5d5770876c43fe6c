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
    "cut": _on_second_rank(stages, "starts_of"),
    "merge": _on_second_rank(stages, "Parts"),
    "rewrite": _on_second_rank(call, "rewritten"),
    "bind": _on_second_rank(call, "make_room"),
}


def _told() -> dict[str, tuple[str, float]]:
    found = {}
    for name, put in POINTS.items():
        kept = {(m, n): getattr(m, n) for m, n in ((stages, "check_batch"), (stages, "starts_of"), (stages, "Parts"))}
        kept |= {(call, n): getattr(call, n) for n in ("_check_backward", "rewritten", "make_room")}
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
