"""Pointwise, reduction, softmax, normalization and loss rows on two ranks: what brute force in one process cannot show.

Each program runs on plain tensors and on DistTensors under every placement of its first operand (the others follow, or
stay replicated, or are pending), forward and backward; values and gradients must be those of one card.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

import onecard as oc
from onecard.comm.base import record
from onecard.rules.registry import rows
from onecard.testing import assert_close, multirank

Program = Callable[..., Any]
_norm = torch.linalg.vector_norm


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _targets(high: int, *shape: int, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(3))


def _leaf(value: Tensor) -> Tensor:
    return value.clone().requires_grad_(value.is_floating_point())


def _results(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in _results(v)]


def _aminmax(x: Tensor) -> Any:
    """With a gradient where torch has one (2.11 has not)."""
    try:
        torch.ones(2, requires_grad=True).aminmax(dim=0)[0].backward()
    except RuntimeError:
        x = x.detach()
    return x.aminmax(dim=0)


def _backward(results: Sequence[Tensor]) -> None:
    """Drive every floating-point result backward with numbers that depend on the place."""
    total = [
        (t * (torch.arange(t.numel(), dtype=t.dtype).sin() + 1.5).reshape(t.shape)).sum()
        for t in results
        if t.requires_grad
    ]
    if total:
        sum(total[1:], total[0]).backward()


def _run(program: Program, operands: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    results = _results(program(*operands))
    _backward(results)
    return results, [t.grad for t in operands]


def _placements(value: Tensor) -> list[Placement]:
    cuts: list[Placement] = [Shard(d) for d in range(value.dim()) if value.shape[d] > 1]
    return [Replicate(), *cuts, *([Partial()] if value.is_floating_point() else [])]


def _check(program: Program, *operands: Tensor, limit: int = 40) -> None:
    """The program gives on two ranks what it gives on one card, under (up to ``limit``) placements of its operands."""
    mesh = oc.ProcessMesh([0, 1], dim_names=["x"])
    results, grads = _run(program, [_leaf(t) for t in operands])
    every = list(product(*map(_placements, operands)))
    for chosen in every[:: -(-len(every) // limit)]:
        laid = [_lay(t, mesh, p) for t, p in zip(operands, chosen, strict=True)]
        try:
            got, got_grads = _run(program, laid)
            for ours, theirs in zip(got, results, strict=True):
                assert_close(ours, theirs.detach(), rtol=1e-5, atol=2e-6)
            for ours, theirs in zip(got_grads, grads, strict=True):
                assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
        except Exception as fault:
            fault.add_note(f"placements {chosen} of {[tuple(t.shape) for t in operands]}")
            raise


def _lay(value: Tensor, mesh: Any, placement: Placement) -> Tensor:
    if isinstance(placement, Partial):
        part = value * 0.25 if mesh.coordinate() == (0,) else value * 0.75
        return oc.from_local(part, mesh, [placement]).detach().requires_grad_()
    return _lay_whole(value, mesh, [placement])


def _lay_whole(value: Tensor, mesh: Any, placements: Sequence[Placement]) -> Tensor:
    return oc.shard_tensor(value, mesh, placements).requires_grad_(value.is_floating_point())


@contextmanager
def _messages() -> Iterator[list[record.Notice]]:
    seen: list[record.Notice] = []
    record.observers.here.append(seen.append)
    try:
        yield seen
    finally:
        record.observers.here.remove(seen.append)


X = _normal(5, 3)
IMAGE = _normal(5, 4, 3, 2)

POINTWISE = {
    "arithmetic": (lambda a, b: (a + b) * a - b / (a * a + 1), X, _normal(3)),
    "activations": (lambda a: F.gelu(a) + F.silu(a) + F.mish(a) + F.elu(a) + F.softplus(a) + F.logsigmoid(a), X),
    "clamps": (lambda a: F.hardtanh(a) + F.hardswish(a) + F.leaky_relu(a) + a.clamp(-0.5, 0.5) + F.hardshrink(a), X),
    "glu": (lambda a: F.glu(a, 1) + F.glu(a, -1), _normal(4, 6)),
    "prelu": (F.prelu, IMAGE, _normal(4)),
    "where": (lambda a, b: torch.where(b > 0, a, b), X, _normal(5, 1)),
    "lerp": (lambda a, b: torch.lerp(a, b, 0.3) + torch.addcmul(a, a, b) + torch.addcdiv(a, b, a * a + 1), X, X + 1),
    "casts": (lambda a: a.double().float() + a.clone(), X),
    "number": (lambda a: (a + 2.0) * 3.0 - 1.0 / (a * a + 1) + (2.0 - a), X),
    "in place": (lambda a: (a * 1).add_(1.0).mul_(2.0).relu_(), X),
}

REDUCTIONS = {
    "sum": (lambda a: (a.sum(), a.sum(0), a.sum(1, keepdim=True)), X),
    "mean": (lambda a: (a.mean(), a.mean(0), a.mean((0, 1), keepdim=True)), X),
    "prod": (lambda a: (a.prod(), a.prod(0)), X),
    "amax": (lambda a: (a.amax(0), a.amin(1), a.max(), a.min()), X),
    "max with places": (lambda a: (*a.max(0), *a.min(1), a.argmax(), a.argmin(0), a.argmax(1, keepdim=True)), X),
    "variance": (lambda a: (a.var(), a.std(0), *torch.var_mean(a, 1), *torch.std_mean(a, (0, 1), correction=0)), X),
    "norm": (lambda a: (_norm(a), _norm(a, 3, dim=0), a.norm(float("inf"), dim=1), _norm(a, 1)), X),
    "normalize": (lambda a: (F.normalize(a, dim=0), F.normalize(a, dim=1)), X),
    "norm of norms": (lambda a, b: _norm(torch.stack([_norm(a), _norm(b)])), X, _normal(4)),
    "running": (lambda a: (a.cumsum(0), a.cumprod(1), a.logcumsumexp(0)), X),
    "logsumexp": (lambda a: (a.logsumexp(0), a.logsumexp((0, 1)), a.logsumexp(1, keepdim=True)), X),
    "logical": (lambda a: ((a > 0).any(0), (a > -9).all(), (a > 0).sum(1), a.count_nonzero(0)), X),
    "median": (lambda a: (a.median(0)[0], _aminmax(a), a.nansum(0)), X),
    "one row": (lambda a: (a.amax(0), a.mean(0), a.var(1), a.sum(), a.argmax(0)), _normal(1, 3)),
}

SOFTMAX = {
    "softmax": (lambda a: (a.softmax(0), a.softmax(1), F.softmin(a, -1)), X),
    "log_softmax": (lambda a: (a.log_softmax(0), a.log_softmax(-1)), X),
    "large": (lambda a: ((a * 300).softmax(1), (a * 300).log_softmax(0)), X),
}

WEIGHTS = torch.tensor([0.5, 1.0, 2.0])
CLASSES = _targets(3, 5)


def _all_reductions(loss: Callable[..., Tensor]) -> Program:
    return lambda *operands: tuple(loss(*operands, reduction=r) for r in ("none", "mean", "sum"))


LOSSES = {
    "mse": (_all_reductions(F.mse_loss), X, X + 0.3),
    "smooth l1": (_all_reductions(F.smooth_l1_loss), X, _normal(5, 3, seed=1)),
    "huber": (_all_reductions(F.huber_loss), X, _normal(5, 3, seed=1)),
    "l1": (_all_reductions(F.l1_loss), X, _normal(5, 3, seed=1)),
    "bce": (lambda a, b: _all_reductions(F.binary_cross_entropy)(a.sigmoid(), b), X, (X > 0).float()),
    "bce with logits": (_all_reductions(F.binary_cross_entropy_with_logits), X, (X > 0).float()),
    "bce weighted": (
        lambda a, b: F.binary_cross_entropy_with_logits(a, b.float(), pos_weight=WEIGHTS),
        X,
        (X > 0).long(),
    ),
    "kl": (lambda a, b: F.kl_div(a, b.exp(), reduction="batchmean"), X, X / 2),
    "soft margin": (lambda a, b: F.soft_margin_loss(a, b.sign().detach()), X, X + 0.3),
    "nll": (_all_reductions(F.nll_loss), X, CLASSES),
    "cross entropy": (_all_reductions(F.cross_entropy), X, CLASSES),
    "ignored": (lambda a, t: F.cross_entropy(a, t, ignore_index=1), X, CLASSES),
    "weighted": (lambda a, t: F.cross_entropy(a, t, WEIGHTS, ignore_index=0), X, CLASSES),
    "smoothed": (lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1), X, CLASSES),
    "probabilities": (lambda a, t: F.cross_entropy(a, t.softmax(-1)), X, X + 1),
    "images": (_all_reductions(F.cross_entropy), IMAGE, _targets(4, 5, 3, 2)),
    "one sample": (lambda a, t: F.cross_entropy(a, t), _normal(1, 3), _targets(3, 1)),
}

NORMS = {
    "layer norm": (lambda a, w, b: F.layer_norm(a, (3,), w, b), _normal(5, 2, 3), _normal(3), _normal(3, seed=1)),
    "layer norm of two dims": (lambda a, w: F.layer_norm(a, (2, 3), w), _normal(5, 2, 3), _normal(2, 3)),
    "layer norm without weights": (lambda a: F.layer_norm(a, (3,)), X),
    "rms norm": (lambda a, w: F.rms_norm(a, (3,), w), _normal(5, 2, 3), _normal(3)),
    "group norm": (lambda a, w, b: F.group_norm(a, 2, w, b), IMAGE, _normal(4), _normal(4, seed=1)),
    "instance norm": (lambda a: F.instance_norm(a), IMAGE),
    "batch norm": (lambda a, w, b: F.batch_norm(a, None, None, w, b, True), IMAGE, _normal(4), _normal(4, seed=1)),
    "batch norm of rows": (lambda a, w: F.batch_norm(a, None, None, w, None, True), X, _normal(3)),
    "batch norm in evaluation": (
        lambda a, w, b: F.batch_norm(a, torch.arange(4.0), torch.arange(4.0) + 1, w, b),
        IMAGE,
        _normal(4),
        _normal(4, seed=1),
    ),
}

FAMILIES = {"pointwise": POINTWISE, "reduction": REDUCTIONS, "softmax": SOFTMAX, "loss": LOSSES, "norm": NORMS}


@pytest.mark.proof
@multirank(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_one_card(family):
    for name, (program, *operands) in FAMILIES[family].items():
        try:
            _check(program, *operands)
        except Exception as fault:
            fault.add_note(f"program {name!r}")
            raise


@pytest.mark.proof
@pytest.mark.share(1)
@multirank(4)
@pytest.mark.parametrize("family", ["reduction", "softmax", "loss", "norm"])
def test_two_axes(family):
    """On a 2x2 mesh, under placements drawn by lot (the same on every rank)."""
    mesh = oc.ProcessMesh([[0, 1], [2, 3]], dim_names=["x", "y"])
    lot = random.Random(family)
    for name, (program, *operands) in FAMILIES[family].items():
        results, grads = _run(program, [_leaf(t) for t in operands])
        for _ in range(3):
            cuts = [[p for p in _placements(t) if not isinstance(p, Partial)] for t in operands]
            chosen = [[lot.choice(options), lot.choice(options)] for options in cuts]
            got, got_grads = _run(program, [_lay_whole(t, mesh, p) for t, p in zip(operands, chosen, strict=True)])
            try:
                for ours, theirs in zip(got + got_grads, results + grads, strict=True):
                    assert_close(ours, None if theirs is None else theirs.detach(), rtol=1e-5, atol=2e-6)
            except AssertionError as fault:
                fault.add_note(f"program {name!r}, placements {chosen}")
                raise


@multirank(3)
def test_uneven_and_empty_shards():
    """Four and two rows on three ranks."""
    mesh = oc.ProcessMesh([0, 1, 2], dim_names=["x"])
    for rows_ in (4, 2):
        x, target = _normal(rows_, 3), _targets(3, rows_)
        for program in (
            lambda a: (a.mean(), a.amax(0), a.var(0), _norm(a), a.argmax(0), a.softmax(0), a.min()),
            lambda a: F.mse_loss(a, torch.zeros_like(a)),
            lambda a, t=target: F.cross_entropy(a, t),
            lambda a: F.cross_entropy(a.t(), torch.tensor([0, 1, 1])),
            lambda a: F.layer_norm(a, (3,)),
            lambda a: F.batch_norm(a, None, None, training=True),
            lambda a: F.group_norm(a, 3),
        ):
            results, grads = _run(program, [_leaf(x)])
            got, got_grads = _run(program, [oc.shard_tensor(x, mesh, [Shard(0)]).requires_grad_()])
            for ours, theirs in zip(got + got_grads, results + grads, strict=True):
                assert_close(ours, theirs.detach(), rtol=1e-5, atol=2e-6)


@multirank(2)
@pytest.mark.parametrize("distributed", [False, True])
def test_batch_norm_updates_its_running_statistics_as_on_one_card(distributed):
    mesh = oc.ProcessMesh([0, 1], dim_names=["x"])
    plain = torch.nn.BatchNorm2d(4)
    for placement in (Shard(0), Shard(1), Shard(2), Replicate()):
        plain.reset_parameters()
        ours = torch.nn.BatchNorm2d(4)
        if distributed:
            for name, value in list(ours.named_parameters()):
                setattr(ours, name, torch.nn.Parameter(oc.shard_tensor(value.detach(), mesh, [Replicate()])))
            for name in ("running_mean", "running_var"):
                setattr(ours, name, oc.shard_tensor(getattr(ours, name), mesh, [Replicate()]))
        for step in range(2):
            image = _normal(5, 4, 3, 2, seed=step)
            assert_close(ours(oc.shard_tensor(image, mesh, [placement])), plain(image), atol=2e-6)
        assert_close(ours.running_mean, plain.running_mean)
        assert_close(ours.running_var, plain.running_var)
        assert isinstance(ours.running_mean, oc.DistTensor) == distributed
        ours.eval(), plain.eval()
        image = _normal(5, 4, 3, 2, seed=9)
        assert_close(ours(oc.shard_tensor(image, mesh, [placement])), plain(image), atol=2e-6)
        plain.train()


@multirank(2)
def test_class_sharded_logits_are_never_gathered():
    """Only numbers for each row travel, forward and backward: maxima, sums, picked losses."""
    mesh = oc.ProcessMesh([0, 1], dim_names=["x"])
    batch, classes = 32, 4096
    logits = oc.shard_tensor(_normal(batch, classes), mesh, [Shard(1)]).requires_grad_()
    for program in (
        lambda a: F.cross_entropy(a, _targets(classes, batch)),
        lambda a: F.cross_entropy(a, _targets(classes, batch), reduction="none").sum(),
        lambda a: a.softmax(-1).square().sum(),
        lambda a: a.logsumexp(1).sum(),
        lambda a: a.argmax(1).sum() * a.sum(),
        lambda a: F.layer_norm(a, (classes,)).square().sum(),
        lambda a: F.rms_norm(a, (classes,)).square().sum(),
        lambda a: a.var(1).sum(),
    ):
        with _messages() as seen:
            program(logits).backward()
        assert seen
        worst = max(seen, key=lambda message: message.step.bytes)
        assert worst.step.bytes <= batch * 8, worst


@multirank(2)
def test_the_norm_of_all_gradients_is_one_message():
    """Norms of cut tensors stay pending through stack and through their own norm."""
    mesh = oc.ProcessMesh([0, 1], dim_names=["x"])
    whole = [_normal(5, 3), _normal(4), _normal(6, 2)]
    with _messages() as seen:
        norms = [_norm(oc.shard_tensor(t, mesh, [Shard(0)])) for t in whole]
        total = _norm(torch.stack(norms))
        assert str(total.placements[0]) == str(Partial("norm2.0"))
        total = total * 1.0
    assert_close(total, torch.cat([t.flatten() for t in whole]).norm())
    assert [m.step.kind for m in seen if m.step.bytes] == ["all_reduce"]


def test_fused_rms_norm_backward_equals_autograd():
    """CUDA only as an operator; what runs in its place where the normalized dims are cut is plain arithmetic."""
    x, w, grad = _leaf(_normal(5, 2, 3)), _leaf(_normal(3)), _normal(5, 2, 3, seed=2)
    out = F.rms_norm(x, (3,), w, 1e-5)
    out.backward(grad)
    with torch.no_grad():
        made, rstd = rows["_fused_rms_norm"].instead(x, [3], w, 1e-5)
        by_input, by_weight = rows["_fused_rms_norm_backward"].instead(grad, x, [3], rstd, w, [True, True])
    assert_close(made, out.detach())
    assert_close(by_input, x.grad, atol=1e-6)
    assert_close(by_weight, w.grad, atol=1e-6)


LOSSES = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.soft_margin_loss)


@multirank(3)
def test_losses_of_a_rank_without_elements():
    """Two rows over three ranks: a kernel's mean of nothing is NaN there, and so would be its gradient."""
    mesh = oc.ProcessMesh([0, 1, 2], ["dp"])
    for loss, recorded in product(LOSSES, (False, True)):
        x, y = _normal(2, 4096), _normal(2, 4096, seed=1)

        def step(x: Tensor, y: Tensor, loss: Any = loss) -> tuple[Tensor, Tensor]:
            leaf = x.detach().requires_grad_()
            found = loss(leaf, y)
            found.backward()
            return found.detach(), leaf.grad

        run = oc.to_static(step) if recorded else step
        parts = [oc.shard_tensor(t, mesh, [Shard(0)]) for t in (x, y)]
        for value, expected in zip(run(*parts), step(x, y), strict=True):
            assert_close(oc.unshard(value), expected)
