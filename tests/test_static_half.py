"""``also=["half"]``: the step is recorded under torch.autocast, and so is the eager program under autocast, bit for bit."""

from __future__ import annotations

import importlib
import sys
import types
import unittest
from collections.abc import Callable
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
import torch
from amounts import share
from static_programs import gpt, mesh
from torch import Tensor, nn

import onecard as oc
from onecard._torch import names as _torch
from onecard.errors import RecordingError
from onecard.testing import run_ranks

CALLS = 5


class ConvNet(nn.Module):
    """Convolutions, batch norm, pooling, and a part that its author keeps in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.then = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.out, self.tied = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = nn.functional.max_pool2d(self.then(x), 2).mean((2, 3))
        with torch.autocast("cpu", enabled=False):
            x = self.out(x.float())  # its backward pass is float32, too
        return self.tied(self.out(x))


def step_of(model: nn.Module, optimizer: Any, dtype: torch.dtype | None, scaler: Any = None) -> Callable[..., Any]:
    """A step; with a dtype the way torch's documentation writes it."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None) if dtype else torch.enable_grad():
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach(), out.detach()

    return step


def conv_trained(dtype: torch.dtype, static: bool, **options: Any) -> list[Tensor]:
    """Results of all calls, and what is left."""
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20) if dtype is torch.float16 else None
    step = step_of(model, optimizer, None if static else dtype, scaler)
    run = oc.to_static(step, also=["half" if dtype is torch.bfloat16 else "float16"], **options) if static else step
    generator = torch.Generator().manual_seed(1)
    seen = []
    for i in range(CALLS):
        x = torch.randn(4, 3, 8, 8, generator=generator)
        x = (
            x * float("inf") if i == 3 and scaler is not None else x
        )  # this step must be skipped, and the scale be halved
        seen += [r.clone() for r in run(x, torch.randint(0, 4, (4,), generator=generator))]
        seen += [p.detach().clone() for p in model.parameters()]
        seen += [scaler._scale.clone()] if scaler is not None else []
    if static:
        assert len(run.recordings) == 1
    return [*seen, *model.buffers(), *(x for s in optimizer.state.values() for x in s.values())]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_conv_net_is_that_of_autocast(dtype: torch.dtype) -> None:
    """Every call, from the first on: losses, outputs, weights, statistics, moments; in float16 with a scaler and an infinity."""
    expected, found = conv_trained(dtype, False), conv_trained(dtype, True)
    assert all(map(same, expected, found))
    single = conv_trained(torch.bfloat16, False)[0]
    assert expected[1].dtype is dtype and single.dtype is torch.float32
    if dtype is torch.float16:
        weights = [expected[i * 13 + 2] for i in range(CALLS)]
        assert same(weights[2], weights[3]) and not same(weights[3], weights[4]), "the infinity skips its step"


def within_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return fn(*args)

    return run


def gpt_trained(where: Any, static: bool) -> list[Tensor]:
    torch.manual_seed(3)
    model, _, step, data = gpt(where, dropout=0.1)
    if not static:  # as one writes it: the model and its loss within autocast
        model.forward = within_autocast(model.forward)
    file = importlib.import_module("model")
    loss = file.next_byte_loss
    run = oc.to_static(step, also=["half"]) if static else step
    with patch.object(file, "next_byte_loss", loss if static else within_autocast(loss)):
        losses = [oc.unshard(run(*batch).detach()) for batch in islice(data, CALLS)]
    return [*losses, *(oc.unshard(p.detach()) for p in model.parameters())]


def gpt_on_ranks() -> list[bool]:
    return [
        all(map(same, gpt_trained(where, False), gpt_trained(where, True)))
        for where in share((mesh(1, 2), mesh(2, 1)), 1)
    ]


@pytest.mark.proof
def test_a_gpt_is_that_of_autocast() -> None:
    """Attention, norms, embeddings, dropout; on one card, tp, and in the proof dp."""
    expected, found = gpt_trained(None, False), gpt_trained(None, True)
    assert all(map(same, expected, found))
    assert all(map(all, run_ranks(gpt_on_ranks, 2)))


def torchs_lists() -> Any:
    """torch's own lists; they are in a file that wants a package for tests, which nothing here uses."""
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with patch.dict(sys.modules, {} if "expecttest" in sys.modules else {"expecttest": stub}):
        from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists
    return AutocastCPUTestLists(torch.device("cpu"))


def listed(lists: Any) -> list[tuple[str, str, Any, tuple[Any, ...], dict[str, Any]]]:
    """All operators of torch's own lists for autocast: list, name, function, arguments."""
    found = []
    for kind in ("nn_16", "torch_16", "nn_fp32", "torch_fp32", "torch_need_autocast_promote"):
        for name, args, *rest in getattr(lists, kind):
            for home in (torch, torch.nn.functional, torch._C._nn):
                if hasattr(home, name):
                    found.append((kind, name, getattr(home, name), args, rest[0] if rest else {}))
                    break
    return found


def test_every_operator_of_torchs_lists() -> None:
    """What autocast makes of each of them, a replay makes of it: dtype and bits."""
    done, kinds, refused = [], set(), dict[str, str]()
    for kind, name, function, args, kwargs in listed(torchs_lists()):
        given = [x for x in _torch.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.layout is not torch.strided for x in given):
            continue

        def call(*tensors: Tensor, fn: Any = function, form: Any = (args, kwargs)) -> Any:
            rest = iter(tensors)
            mine, named = _torch.tree_map(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, form)
            return fn(*mine, **named)

        try:
            with torch.autocast("cpu", torch.bfloat16):
                expected = call(*given)
        except Exception:  # torch itself cannot run it on this CPU
            continue
        run = oc.to_static(call, also=["half"])
        try:
            found = [run(*given) for _ in range(3)][-1]
        except RecordingError as fault:
            refused[name] = str(fault)
            continue
        pairs = list(zip(_torch.tree_leaves(expected), _torch.tree_leaves(found), strict=True))
        assert pairs and all(same(a.detach(), b.detach()) for a, b in pairs), (kind, name)
        assert len(run.recordings) == 1, name
        done.append(name)
        kinds.add((kind, next(a.dtype for a, _ in pairs)))
    assert not refused and len(done) >= 33, (done, refused)
    assert {("torch_16", torch.bfloat16), ("nn_16", torch.bfloat16), ("nn_fp32", torch.float32)} <= kinds


def test_products_outside_of_the_forward_pass_stay_float32() -> None:
    """An optimizer that multiplies matrices, and the backward pass of a product that was kept in float32."""
    weight, other = torch.randn(8, 8, requires_grad=True), torch.eye(8)

    class Turns(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            weight.grad = weight.grad @ other
            return super().step()

    optimizer = Turns([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        (x @ weight).square().sum().backward()
        optimizer.step()
        assert weight.grad is not None
        return weight.grad

    run, x = oc.to_static(step, also=["half"]), torch.randn(4, 8)
    for _ in range(3):
        run(x)
    text = str(run.recordings[0])
    assert text.count("bfloat16") > 0
    last = [line for line in text.splitlines() if "mm" in line][-1]
    assert "bfloat16" not in last, text
