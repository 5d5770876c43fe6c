"""What a step makes of its batch's length after ``backward()``: the whole batch's, though the batch is cut in microbatches."""

from __future__ import annotations

import collections
import math
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

ROWS, CALLS = 8, 4
Late = Callable[[nn.Module, Any, int], Any]


def grads(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def replaced(net: nn.Module, optimizer: Any, n: int) -> None:
    for p in net.parameters():
        assert p.grad is not None
        p.grad = p.grad / n


@torch.no_grad()
def by_hand(net: nn.Module, optimizer: Any, n: int) -> None:
    for p in net.parameters():
        p.add_(p.grad, alpha=-optimizer.param_groups[0]["lr"] / n)  # type: ignore[arg-type]


@torch.no_grad()
def averaged(net: Any, optimizer: Any, n: int) -> None:
    net.average.lerp_(net.weight, 0.01 * n)


@torch.no_grad()
def decayed(net: nn.Module, optimizer: Any, n: int) -> None:
    for p in net.parameters():
        p.mul_(1 - 0.001 * n)


RIGHT: dict[str, Late] = {
    "nothing": lambda net, optimizer, n: None,
    "div_": lambda net, optimizer, n: [g.div_(n) for g in grads(net)],
    "mul_": lambda net, optimizer, n: [g.mul_(1 / n) for g in grads(net)],
    "root": lambda net, optimizer, n: [g.div_(math.sqrt(n)) for g in grads(net)],
    "replaced": replaced,
    "foreach": lambda net, optimizer, n: torch._foreach_div_(grads(net), n),
    "clipped by norm": lambda net, optimizer, n: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01 * n),
    "by hand, with lr": by_hand,
    "a number of two": lambda net, optimizer, n: [g.mul_(0.1 if n > ROWS // 2 else 0.2) for g in grads(net)],
    "a comparison": lambda net, optimizer, n: [g.mul_(n > ROWS // 2) for g in grads(net)],
    "full": lambda net, optimizer, n: [g.div_(torch.full((), float(n))) for g in grads(net)],
    "made before": lambda net, optimizer, n: [g.div_(torch.tensor(1.0) * n) for g in grads(net)],
    "added": lambda net, optimizer, n: [g.add_(0.05 * torch.ones_like(g) / n) for g in grads(net)],
}
REFUSED: dict[str, Late] = {
    "tensor": lambda net, optimizer, n: [g.div_(torch.tensor(float(n))) for g in grads(net)],
    "a dtype": lambda net, optimizer, n: [
        g.copy_(g.to(torch.float64 if n > ROWS // 2 else torch.half)) for g in grads(net)
    ],
    "ones": lambda net, optimizer, n: [g.div_(torch.ones(n).sum()) for g in grads(net)],
    "a branch": lambda net, optimizer, n: [g.mul_(0.1) for g in grads(net)] if n > ROWS // 2 else None,
    "clipped by value": lambda net, optimizer, n: torch.nn.utils.clip_grad_value_(net.parameters(), 0.001 * n),
}
AFTER: dict[str, Late] = {"averaged": averaged, "decayed": decayed}


def trained(late: Late, after: Late | None = None, whole: bool = True, **options: Any) -> Tensor:
    """Losses, and (``whole``) parameters and an average of them; ``options`` of ``to_static``: none, the step as it is."""
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    net.register_buffer("average", net.weight.detach().clone())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(net(x), y, reduction="sum")
        loss.backward()
        late(net, optimizer, len(x))
        if late is not by_hand:
            optimizer.step()
        if after is not None:
            after(net, optimizer, len(x))
        return loss.detach()

    run = oc.to_static(step, **options) if options else step
    losses = [run(torch.randn(ROWS, 6), torch.randint(4, (ROWS,))) for _ in range(CALLS)]
    state = [*net.parameters(), *net.buffers()] if whole else []  # a stage has its own alone
    return torch.cat([torch.stack(losses), *[x.detach().flatten() for x in state]])


@pytest.mark.share(1)
@pytest.mark.parametrize("avg", [None, False])
@pytest.mark.parametrize("name", RIGHT)
def test_a_number_is_the_whole_batchs(name: str, avg: bool | None) -> None:
    torch.testing.assert_close(trained(RIGHT[name], k_steps=4, avg=avg), trained(RIGHT[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", AFTER)
def test_after_the_optimizer(name: str) -> None:
    wanted = trained(RIGHT["nothing"], AFTER[name])
    torch.testing.assert_close(trained(RIGHT["nothing"], AFTER[name], k_steps=4), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_refused(name: str) -> None:
    with pytest.raises(RecordingError, match=r"depends on how long one is: .* at .*test_late_numbers.py:\d+"):
        trained(REFUSED[name], k_steps=4)


def test_a_loop_over_microbatches_is_told() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trained(REFUSED["tensor"], k_steps=4, avg=False)
    assert any("takes 2 of a microbatch, and 8 of the batch" in str(w.message) for w in said)


class Slot:
    """An object without a dict."""

    __slots__ = ("calls",)


class OnClass:
    calls = 0


def next_in(name: str) -> Callable[[nn.Module], int]:
    """How a step counts its calls."""
    module = types.ModuleType("counts")
    slot, space, array, numbered = Slot(), types.SimpleNamespace(), np.zeros(1), bytearray(1)
    sequence, names, last = [0], collections.OrderedDict[str, int](), 0
    OnClass.calls = 0

    def up(net: nn.Module) -> int:
        nonlocal last
        if name == "array":
            array[0] += 1
            return int(array[0])
        if name == "bytes":
            numbered.append(0)
            return len(numbered) - 1
        if name == "list":
            sequence[0] += 1
            return sequence[0]
        if name == "dict":
            names["calls"] = names.get("calls", 0) + 1
            return names["calls"]
        if name == "variable":
            last += 1
            return last
        holder = {"module": module, "class": OnClass, "slot": slot, "object": space, "layer": net}[name]
        holder.calls = getattr(holder, "calls", 0) + 1  # type: ignore[attr-defined]
        return int(holder.calls)

    return up


@pytest.mark.share(1)
@pytest.mark.parametrize(
    "name", ["array", "bytes", "list", "dict", "variable", "module", "class", "slot", "object", "layer"]
)
def test_a_step_that_counts_its_calls_is_no_length(name: str) -> None:
    """It fits no recording, and runs as it is; looks at it leave the count alone."""

    def once(**options: Any) -> tuple[Tensor, list[int]]:
        up, calls = next_in(name), list[int]()

        def late(net: nn.Module, optimizer: Any, n: int) -> None:
            calls.append(up(net))
            for g in grads(net):
                g.mul_(0.9 ** calls[-1])

        return trained(late, **options), calls

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, calls = once(k_steps=4)
    assert any("the step changes what it reads itself" in str(w.message) for w in said)
    assert calls == [*range(1, CALLS + 1)]
    torch.testing.assert_close(found, once()[0])


def test_looks_leave_python_alone() -> None:
    """What a step appends, counts and stores once is there once for each call."""
    log, seen, kept = list[int](), {"steps": 0, "rows": 0}, set[int]()

    def late(net: nn.Module, optimizer: Any, n: int) -> None:
        log.append(n)
        seen["steps"] += 1
        seen["rows"] += n
        kept.add(len(log))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(late, k_steps=4)
    assert (log, seen, kept) == ([ROWS] * CALLS, {"steps": CALLS, "rows": ROWS * CALLS}, {1, 2, 3, 4})


def planned(name: str, plan: oc.Plan) -> float:
    """By how much a plan's losses are other than one card's. On a rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, wanted = trained(RIGHT[name], None, False, plan=plan), trained(RIGHT[name], None, False)
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.proof
@pytest.mark.parametrize("how", [{"pp": 2}, {"dp": 2}, {"tp": 2}])
@pytest.mark.parametrize("name", ["div_", "root"])
def test_under_a_plan(name: str, how: dict[str, int]) -> None:
    plan = oc.Plan(**how, microbatches=4, parameters="float32", compute="float32")  # type: ignore[arg-type]
    assert max(run_ranks(planned, 2, name, plan)) < 1e-5


def test_a_list_of_tensors_is_left_alone() -> None:
    held = [torch.ones(3), torch.zeros(3)]
    first, second = held

    def late(net: nn.Module, optimizer: Any, n: int) -> None:
        held.append(held.pop(0))  # asks no tensor whether it is another one

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(late, k_steps=4)
    assert len(held) == 2 and held[0] is first and held[1] is second  # of four calls


def test_a_function_whose_names_lie_in_a_dict_keeps_them() -> None:
    """Two functions that a text was executed for share one dict of names, which is no module's."""
    names: dict[str, Any] = {"torch": torch}
    exec(
        "def scaled(gs, n):\n    [g.div_(n) for g in gs]\ndef late(net, optimizer, n):\n    return [torch.ones(()), n]\n",
        names,
    )

    scaled, late, before = names["scaled"], names["late"], {*names}

    def both(net: nn.Module, optimizer: Any, n: int) -> None:
        scaled(grads(net), n)
        late(net, optimizer, n)

    found = trained(both, k_steps=4)
    assert {*names} == before
    torch.testing.assert_close(found, trained(RIGHT["div_"]), rtol=1e-5, atol=1e-6)


def by_rows(plan: oc.Plan | None) -> list[float]:
    """Losses of a model of which rows are divided along tp, with clipping. On a rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Tanh(), nn.Flatten(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run: Any = step if plan is None else oc.to_static(step, plan=plan)
    draw = torch.Generator().manual_seed(1)
    shapes = ((16, (ROWS, 4)), (4, (ROWS,)))
    return [float(run(*(torch.randint(n, shape, generator=draw) for n, shape in shapes))) for _ in range(CALLS)]


def test_layouts_that_follow_the_rows_are_no_length() -> None:
    """Of a microbatch of one row gradients are pending that are whole in the batch: clipping then sums others first."""
    plan = oc.Plan(
        tp=2, microbatches=8, parameters="float32", compute="float32", per_host=0, outputs=(("0", "tp: Shard(0)"),)
    )
    wanted = by_rows(None)
    for found in run_ranks(by_rows, 2, plan):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0.0)
