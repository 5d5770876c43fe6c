"""A backward in two halves: the gradients of the whole one, no operator twice, weights only in W."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from onecard._torch.names import TorchDispatchMode
from onecard.pipeline.run.halves import input_half


class Scaled(torch.autograd.Function):
    """Makes both gradients in one piece, as custom functions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] * w, (grads[0] * x).sum(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.batch = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4)
        self.w = nn.Parameter(torch.randn(4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.lstm = nn.LSTM(4, 4, batch_first=True)


def in_place(m: Net, x: Tensor) -> Any:
    y = m.a(x) * 2
    y[:, :2] *= m.w[:2]
    return y.chunk(2, 1)


def transposed(m: Net, x: Tensor) -> Tensor:
    w = m.a.weight.t()
    return F.relu(m.batch(x) @ w) @ w @ m.b.weight + w * 2


PROGRAMS = {
    "residual": lambda m, x: m.norm(m.b(F.gelu(m.a(x))) + x),
    "a layer used twice, around another": lambda m, x: m.a(F.gelu(m.b(F.relu(m.a(x))))) * m.w,
    "three uses of two layers": lambda m, x: m.b(m.a(F.relu(m.b(F.relu(m.a(m.b(x))))))),
    "custom function beside others": lambda m, x: Scaled.apply(m.a(x), m.w) + m.b(x) * m.w,
    "transformer layer": lambda m, x: m.layer(x[None])[0],
    "lstm": lambda m, x: m.lstm(x[None])[0],
    "a view of a weight used twice, and as an output": transposed,
    "outputs that are an input and a function of a weight": lambda m, x: (x, m.a(x), m.w * 2),
    "in place, several outputs": in_place,
    "recomputed": lambda m, x: checkpoint(lambda z: m.b(F.gelu(m.a(z))), x, use_reentrant=False),
    "nothing depends on the input": lambda m, x: m.a(x.detach()),
    "a product with factors": lambda m, x: torch.addmm(m.a.bias, F.gelu(m.b(x)), m.a.weight.t(), beta=2.0, alpha=0.5),
    "a product with one factor": lambda m, x: torch.addmm(m.a.bias, F.gelu(m.b(x)), m.a.weight.t(), alpha=3.0),
    "a bias with a factor": lambda m, x: torch.addmm(m.a.bias, F.gelu(m.b(x)), m.a.weight.t(), beta=6.0),
    "no weight": lambda m, x: F.gelu(x) * 2,
}


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(function)] += 1
        return function(*args, **(kwargs or {}))


def forward(program: Any, m: Net, x: Tensor) -> tuple[list[Any], list[Tensor]]:
    made = program(m, x)
    outputs = list(made) if isinstance(made, tuple | list) else [made]
    generator = torch.Generator().manual_seed(1)
    return [get_gradient_edge(o) for o in outputs], [torch.randn(o.shape, generator=generator) for o in outputs]


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_halves_are_the_whole(name: str) -> None:
    torch.manual_seed(0)
    program, m, x = PROGRAMS[name], Net(), torch.randn(4, 4, requires_grad=True)
    edges, grads = forward(program, m, x)
    torch.autograd.backward(edges, grads)
    expected, of_x = {n: p.grad for n, p in m.named_parameters()}, x.grad
    x.grad = None
    m.zero_grad()
    edges, grads = forward(program, m, x)
    rest = input_half(edges, grads, [x])
    del edges
    if of_x is None:
        assert x.grad is None or not x.grad.any()
    else:
        torch.testing.assert_close(x.grad, of_x)
        early = {n for n, p in m.named_parameters() if p.grad is not None}
        assert early <= ({"w"} if "custom" in name else set()), f"{early} are made in I"
    x.grad = None
    rest.run()
    assert x.grad is None
    for n, p in m.named_parameters():
        assert (p.grad is None) == (expected[n] is None), n
        if p.grad is not None:
            torch.testing.assert_close(p.grad, expected[n], msg=lambda text, n=n: f"{n}: {text}")
    rest.run()  # a second time does nothing
    if m.a.weight.grad is not None:
        torch.testing.assert_close(m.a.weight.grad, expected["a.weight"])


def test_no_product_is_computed_twice() -> None:
    torch.manual_seed(0)
    m, x = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)]), torch.randn(4, 4)
    x.requires_grad_()
    counts = []
    for halves in (False, True):
        m.zero_grad()
        edges, grads = forward(lambda m, x: m(x), m, x)  # type: ignore[arg-type]
        with Count() as count:
            if halves:
                rest = input_half(edges, grads, [x])
                first = Counter(count.seen)
                rest.run()
                assert first["aten.mm.default"] == 3 and first["aten.gelu_backward.default"] == 3
            else:
                torch.autograd.backward(edges, grads)
        counts.append({k: count.seen[k] for k in ("aten.mm.default", "aten.gelu_backward.default")})
    assert counts == [{"aten.mm.default": 6, "aten.gelu_backward.default": 3}] * 2


def test_gradients_accumulate_and_frozen_weights_get_none() -> None:
    torch.manual_seed(0)
    m, x = Net(), torch.randn(4, 4, requires_grad=True)
    m.b.weight.requires_grad_(False)
    for _ in range(2):
        edges, grads = forward(PROGRAMS["residual"], m, x)
        input_half(edges, grads, [x]).run()
    found = m.a.weight.grad
    m.a.weight.grad = None
    edges, grads = forward(PROGRAMS["residual"], m, x)
    torch.autograd.backward(edges, grads)
    torch.testing.assert_close(found, 2 * m.a.weight.grad)
    assert m.b.weight.grad is None


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_that_are_there_are_added_to(name: str) -> None:
    """Where W adds a product in place, and where it may not: the same as three whole backwards."""
    torch.manual_seed(0)
    program, m, x = PROGRAMS[name], Net(), torch.randn(4, 4, requires_grad=True)
    found = []
    for halves in (False, True):
        m.zero_grad()
        for _ in range(3):
            edges, grads = forward(program, m, x)
            if halves:
                input_half(edges, grads, [x]).run()
            else:
                torch.autograd.backward(edges, grads)
        found.append({n: p.grad for n, p in m.named_parameters()})
    for n, expected in found[0].items():
        torch.testing.assert_close(found[1][n], expected, msg=lambda text, n=n: f"{n}: {text}")


def twice(m: nn.Module, x: Tensor) -> Counter[str]:
    """The operators of the second of two backwards in halves."""
    for _ in range(2):
        edges, grads = forward(lambda m, x: m(x), m, x)  # type: ignore[arg-type]
        with Count() as count:
            input_half(edges, grads, [x]).run()
    return count.seen


def test_a_product_is_added_in_place_unless_somebody_listens() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    assert twice(nn.Linear(4, 4), x)["aten.addmm_.default"] == 1
    assert twice(nn.Linear(4, 4, bias=False), x)["aten.addmm_.default"] == 1
    heard: list[Tensor] = []
    for hear in ("register_hook", "register_post_accumulate_grad_hook"):
        m = nn.Linear(4, 4)
        getattr(m.bias, hear)(lambda g: heard.append(g) or None)
        assert twice(m, x)["aten.addmm_.default"] == 0
        assert len(heard) == 2, hear
        heard.clear()
    frozen = nn.Linear(4, 4)
    frozen.bias.requires_grad_(False)
    twice(frozen, x)
    assert frozen.bias.grad is None and frozen.weight.grad is not None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        assert twice(nn.Linear(4, 4), x)["aten.addmm_.default"] == 0
    with torch.autocast("cpu", torch.bfloat16):
        m = nn.Linear(4, 4)
        assert twice(m, x)["aten.addmm_.default"] == 0 and m.weight.grad.dtype is torch.float32


def test_the_first_stage_does_all_at_once() -> None:
    m = nn.Linear(4, 4)
    edges, grads = forward(lambda m, x: m(x), m, torch.ones(4, 4))  # type: ignore[arg-type]
    rest = input_half(edges, grads, [])
    assert m.weight.grad is not None
    before = m.weight.grad.clone()
    rest.run()
    assert torch.equal(before, m.weight.grad)


def test_a_custom_function_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward makes both gradients in one piece: I does all of it, and W nothing."""
    count, was = [0], Scaled.backward

    def backward(ctx: Any, *grads: Tensor) -> Any:
        count[0] += 1
        return was(ctx, *grads)

    monkeypatch.setattr(Scaled, "backward", staticmethod(backward))
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    half = input_half([get_gradient_edge(Scaled.apply(x * 1, w))], [torch.ones(3, 4)], [x])
    half.run()
    assert count == [1] and torch.allclose(w.grad, x.sum(0))  # type: ignore[arg-type]


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="gradients have their leaf's dtype")
def test_a_gradient_in_another_dtype_is_added_by_autograd() -> None:
    m: Any = nn.Linear(4, 4).to(torch.bfloat16)
    for p in m.parameters():
        p.grad_dtype, p.grad = torch.float32, torch.zeros(p.shape)
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    input_half([get_gradient_edge(y := m(x))], [torch.ones_like(y)], [x]).run()
    assert m.weight.grad.dtype is torch.float32 and torch.equal(m.weight.grad[0], x.sum(0).float())
