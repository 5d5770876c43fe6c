"""Ways into autograd: torch.func, higher derivatives, hooks, checkpoints, functions of users. Twin: the same on one card."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fa
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from twins import MESH

import onecard as oc
from onecard.errors import LayoutError
from onecard.testing import assert_close, multirank

Put = Callable[..., Any]  # lays a tensor out along a dim, or leaves it plain


def whole(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [whole(part) for part in x]
    if isinstance(x, dict):
        return {key: whole(value) for key, value in x.items()}
    return x.full_tensor().detach() if isinstance(x, oc.DistTensor) else x.detach() if isinstance(x, Tensor) else x


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(put: Put) -> tuple[Tensor, Tensor]:
    return put(randn(5, 4), 0).requires_grad_(), put(randn(4, 3, seed=1), 1).requires_grad_()


def loss(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).square().sum()


def func_grad(put: Put) -> Any:
    x, w = problem(put)
    return torch.func.grad(loss, argnums=(0, 1))(x.detach(), w.detach())


def func_value_and_grad(put: Put) -> Any:
    x, w = problem(put)
    return torch.func.grad_and_value(loss)(x.detach(), w.detach())


def func_vjp_jvp(put: Put) -> Any:
    x, w = (t.detach() for t in problem(put))
    out, pull = torch.func.vjp(lambda a: torch.tanh(a @ w), x)
    return [out, pull(torch.ones_like(out)), torch.func.jvp(lambda a: torch.tanh(a @ w), (x,), (torch.ones_like(x),))]


def func_hessian(put: Put) -> Any:
    x, w = (t.detach() for t in problem(put))
    return torch.func.grad(lambda a: torch.func.grad(loss)(a, w).square().sum())(x)


def func_vmap(put: Put) -> Any:
    x, w = (t.detach() for t in problem(put))
    return torch.func.vmap(lambda row: torch.tanh(row @ w).sum())(x)


def per_sample_gradients(put: Put) -> Any:
    x, w = (t.detach() for t in problem(put))
    return torch.func.vmap(torch.func.grad(lambda w, row: loss(row, w)), in_dims=(None, 0))(w, x)


def functional_call(put: Put) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    weights = {name: put(p.detach(), 0).requires_grad_() for name, p in net.named_parameters()}
    out = torch.func.functional_call(net, weights, (put(randn(5, 4), 0),))
    out.square().sum().backward()
    return [out, {name: p.grad for name, p in weights.items()}]


def double_backward(put: Put) -> Any:
    x, w = problem(put)
    first = torch.autograd.grad(loss(x, w), (x, w), create_graph=True)
    penalty = sum(g.square().sum() for g in first)
    return torch.autograd.grad(penalty, (x, w), create_graph=True)


def third_derivative(put: Put) -> Any:
    x = put(randn(5), 0).requires_grad_()
    y = (x**4).sum()
    for _ in range(3):
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        y = g.sum()
    return g


def jacobian(put: Put) -> Any:
    x, w = (t.detach() for t in problem(put))
    return torch.autograd.functional.jacobian(lambda a: torch.tanh(a @ w), x)


def hvp(put: Put) -> Any:
    x, w = (t.detach() for t in problem(put))
    return torch.autograd.functional.hvp(lambda a: loss(a, w), x, torch.ones_like(x))


def vhp_and_hessian(put: Put) -> Any:
    x = put(randn(3), 0)
    f = lambda a: (a**3).sum()  # noqa: E731
    return [torch.autograd.functional.vhp(f, x, torch.ones_like(x)), torch.autograd.functional.hessian(f, x)]


def tensor_hooks(put: Put) -> Any:
    x, w = problem(put)
    seen: list[Any] = []
    h = x @ w
    h.register_hook(lambda g: g * 2)
    x.register_hook(lambda g: seen.append(g.clone()))
    h.retain_grad()
    handle = w.register_hook(lambda g: g * 100)
    handle.remove()
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.mul_(0.5)))
    torch.tanh(h).sum().backward()
    return [seen, h.grad, x.grad, w.grad]


def module_hooks(put: Put) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    for key, p in list(net[0].named_parameters()):
        setattr(net[0], key, nn.Parameter(put(p.detach(), 0)))
    seen: list[Any] = []
    net[0].register_forward_hook(lambda m, args, out: out * 2)
    net[0].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    net.register_full_backward_hook(lambda m, grads, outs: seen.append([grads[0].clone(), outs[0].clone()]))
    net[0].register_full_backward_pre_hook(lambda m, outs: (outs[0] * 3,))
    x = put(randn(5, 4), 0).requires_grad_()
    net(x).sum().backward()
    return [seen, x.grad, net[0].weight.grad]


def optimizer_in_backward(put: Put) -> Any:
    _, w = problem(put)
    optimizer = torch.optim.SGD([w], lr=0.1)

    def step(p: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    w.register_post_accumulate_grad_hook(step)
    for seed in range(2):
        loss(put(randn(5, 4, seed=seed), 0), w).backward()
    return [w, w.grad is None]


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


class ScaleInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        x.mul_(by)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.by, None


def own_functions(put: Put) -> Any:
    x, w = problem(put)
    h = Cube.apply(x @ w)
    scaled = ScaleInPlace.apply(h + 0, 3.0)
    part = (x * 2)[1:4]
    changed = ScaleInPlace.apply(part, 2.0)
    first = torch.autograd.grad(scaled.sum() + changed.square().sum(), (x, w), create_graph=True)
    return [*first, torch.autograd.grad(first[1].sum(), x)]


def checkpoints(put: Put) -> Any:
    x, w = problem(put)
    for reentrant in (True, False):
        checkpoint(lambda a, b: torch.tanh(a @ b)[1:4].square(), x, w, use_reentrant=reentrant).sum().backward()
    layers = nn.Sequential(nn.Tanh(), nn.Softmax(-1), nn.Sigmoid())
    checkpoint_sequential(layers, 2, x, use_reentrant=False).square().sum().backward()
    return [x.grad, w.grad]


def saved_tensors(put: Put) -> Any:
    x, w = problem(put)
    packed: list[int] = []

    def pack(t: Tensor) -> Any:
        packed.append(t.dim())
        return t.detach().to(torch.float64)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.to(torch.float32)):
        y = torch.tanh(x @ w)[1:4].square().sum()
    with torch.autograd.graph.save_on_cpu():
        y = y + torch.tanh(x @ w).sum()
    y.backward()
    return [len(packed), x.grad, w.grad]


def in_place_in_the_graph(put: Put) -> Any:
    x, w = problem(put)
    h = x @ w
    h[1:4] *= 2
    h[0].copy_(w[0] * 3)
    h.t()[1].add_(1)
    h.view(-1)[2:7].mul_(0.5)
    loss(h, w.t()).backward()
    return [h, x.grad, w.grad]


def versions(put: Put) -> Any:
    x, _ = problem(put)
    h = x * 1
    part = h[1:4]
    part.add_(1)
    torch._foreach_mul_([h], 2)
    torch.add(h.detach(), 1, out=h.detach())
    h.data.add_(1)
    return [h._version, part._version, h.is_leaf, part._is_view(), part._base is h]


def anomalies(put: Put) -> Any:
    x, w = problem(put)
    with warnings.catch_warnings(), torch.autograd.detect_anomaly(check_nan=True):
        warnings.simplefilter("ignore")
        loss(x, w).backward()
    return [x.grad, w.grad]


WAYS = [
    func_grad, func_value_and_grad, func_vjp_jvp, func_hessian, func_vmap, per_sample_gradients, functional_call,
    double_backward, third_derivative, jacobian, hvp, vhp_and_hessian, tensor_hooks, module_hooks, optimizer_in_backward,
    own_functions, checkpoints, saved_tensors, in_place_in_the_graph, versions, anomalies,
]  # fmt: skip


@pytest.mark.share(1)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@multirank(2)
def test_way(way: Any) -> None:
    warnings.simplefilter("ignore")
    expected = whole(way(lambda x, dim: x.clone()))
    for put in (
        lambda x, dim: oc.shard_tensor(x, MESH, [oc.Shard(dim)]),
        lambda x, dim: oc.shard_tensor(x, MESH, [oc.Shard(0)]),
        lambda x, dim: oc.shard_tensor(x, MESH, [oc.Replicate()]),
    ):
        same(whole(way(put)), expected)


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, Tensor):
        assert_close(found, expected)
    else:
        assert found == expected


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode() -> None:
    """Of distributed tensors it is torch's; what would lose a tangent is refused."""
    mesh, (x, v, w) = oc.ProcessMesh([0], ["x"]), torch.randn(3, 6, 4).unbind()
    lay = lambda t: oc.shard_tensor(t, mesh, [oc.Shard(0)])  # noqa: E731
    with fa.dual_level():
        plain = fa.make_dual(x, v)
        wanted = fa.unpack_dual(F.linear(plain.sin(), w) + torch.matmul(plain[None], w.t())).tangent
        dual = fa.make_dual(lay(x), lay(v))
        found = fa.unpack_dual(F.linear(dual.sin(), lay(w)) + torch.matmul(dual[None], lay(w).t())).tangent
        torch.testing.assert_close(oc.unshard(found), wanted)
        with pytest.raises(LayoutError, match=r"shard_tensor.*: a dual tensor .* would lose its tangent"):
            lay(plain)
        assert lay(x).shape == x.shape  # a constant


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_forward_mode_under_a_plan() -> None:
    torch.manual_seed(0)
    model, (x, v) = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(2, 6, 4).unbind()

    def tangent() -> Tensor:
        with fa.dual_level():
            made = fa.unpack_dual(2 * fa.make_dual(x, v) + model(fa.make_dual(x, v))).tangent.detach()
        return oc.unshard(made) if isinstance(made, oc.DistTensor) else made

    wanted = tangent()
    oc.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), plan=oc.Plan(dp=1, tp=1))
    torch.testing.assert_close(tangent(), wanted)
    model(x).sum().backward()  # it is laid out by now
    torch.testing.assert_close(tangent(), wanted)
