"""Clipping, GradScaler, learning-rate schedulers and autocast on distributed parameters. Twin: plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import lr_scheduler
from twins import STEPS, assert_same_parameters, batch, loss_of, make_optimizer, parameters, train, twins

import onecard as oc
from onecard.testing import assert_close, multirank

# clipping


def backward(model: nn.Module, lay_out: Any, step: int = 0) -> None:
    loss_of(model, lay_out(batch(step))).backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: oc.unshard(p.grad) for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["tp", "dp", "plain dp"])
@multirank(2)
def test_clip_grad_norm(kind: str) -> None:
    for norm_type in (1.0, 2.0, 3.0, float("inf"), 0.5):
        for foreach in (None, True, False):
            norms = []
            (plain, _), (twin, _) = pairs = twins(kind)
            for model, lay_out in pairs:
                backward(model, lay_out)
                norm = clip_grad_norm_(model.parameters(), 0.1, norm_type, error_if_nonfinite=True, foreach=foreach)
                total = get_total_norm([p.grad for p in model.parameters()], norm_type, foreach=foreach)
                norms.append((oc.unshard(norm), oc.unshard(total)))
            assert norms[0][0] > 0.1, "nothing was clipped"
            assert_close(norms[1], norms[0])
            assert_close(gradients(twin), gradients(plain))


@multirank(4)
def test_clip_grad_norm_on_two_axes() -> None:
    norms = []
    (plain, _), (twin, _) = pairs = twins("dp,tp")
    for model, lay_out in pairs:
        backward(model, lay_out)
        norms.append(clip_grad_norm_(model.parameters(), 0.1).item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    assert_close(gradients(twin), gradients(plain))


@pytest.mark.share(1)
@pytest.mark.parametrize("kind", ["tp", "dp", "plain dp"])
@multirank(2)
def test_clip_grad_value(kind: str) -> None:
    for foreach in (None, True, False):
        (plain, _), (twin, _) = pairs = twins(kind)
        for model, lay_out in pairs:
            backward(model, lay_out)
            before = gradients(model)
            clip_grad_value_(model.parameters(), 0.05, foreach=foreach)
        after = gradients(plain)
        assert any(not torch.equal(before[name], after[name]) for name in before), "nothing was clipped"
        assert_close(gradients(twin), after)


@multirank(2)
def test_a_norm_that_is_not_finite_raises_on_every_rank() -> None:
    _, (twin, lay_out) = twins("tp")
    backward(twin, lay_out)
    poison(twin)
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(twin.parameters(), 1.0, error_if_nonfinite=True)


# GradScaler


def poison(model: nn.Module) -> None:
    """Make the last element of the first weight's gradient infinite: on the mesh, one shard only has it."""
    weight = model[0].weight
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    mask[-1, -1] = True
    weight.grad = weight.grad.masked_fill(mask, float("inf"))


def scaled_run(
    model: nn.Module, lay_out: Any, optimizer: torch.optim.Optimizer, clip: bool
) -> list[tuple[float, dict[str, Tensor]]]:
    """Scale and parameters after each of four steps; the gradient of the second is infinite in one place."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, lay_out(batch(step)))).backward()
        if step == 1:
            poison(model)
        if clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), {n: p.clone() for n, p in parameters(model).items()}))
    return history


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["tp", "dp", "plain dp"])
@multirank(2)
def test_grad_scaler(kind: str) -> None:
    for clip in (False, True):
        for name, more in (("SGD", {"foreach": False}), ("AdamW", {"foreach": True}), ("AdamW", {"fused": True})):
            histories = []
            for model, lay_out in twins(kind):
                optimizer = oc.shard_optimizer(make_optimizer(name, model, more))
                histories.append(scaled_run(model, lay_out, optimizer, clip))
            plain, twin = histories
            assert [scale for scale, _ in twin] == [scale for scale, _ in plain] == [512.0, 256.0, 512.0, 1024.0]
            assert_close(plain[1][1], plain[0][1])  # the second step was skipped
            for step in range(STEPS):
                assert_close(twin[step][1], plain[step][1])


# schedulers

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=1.0),
}


def scheduled_run(name: str, model: nn.Module, lay_out: Any, lr: Any) -> list[float]:
    optimizer = oc.shard_optimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, lay_out(batch(step)))
        loss.backward()
        optimizer.step()
        scheduler.step(*([loss.detach()] if name == "ReduceLROnPlateau" else []))
        rates.append(float(optimizer.param_groups[0]["lr"]))
    return rates


@pytest.mark.proof
@multirank(2)
def test_schedulers() -> None:
    for name in SCHEDULERS:
        for kind in ("tp", "dp"):
            (plain, whole), (twin, lay_out) = twins(kind)
            expected = scheduled_run(name, plain, whole, 0.1)
            assert scheduled_run(name, twin, lay_out, 0.1) == pytest.approx(expected)
            assert len(set(expected)) > 2, "the rate never changed"
            assert_same_parameters(plain, twin)
    (plain, whole), (twin, lay_out) = twins("tp")
    scheduled_run("StepLR", plain, whole, torch.tensor(0.1))  # a rate in a tensor, as compiled optimizers want it
    scheduled_run("StepLR", twin, lay_out, torch.tensor(0.1))
    assert_same_parameters(plain, twin)


@multirank(2)
def test_a_rate_that_changes_each_step_decides_nothing_again() -> None:
    from onecard.tensor.dispatch.entry import programs

    _, (twin, lay_out) = twins("tp")
    optimizer = oc.shard_optimizer(torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9))
    sizes = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        train(twin, lay_out, optimizer, steps=1)
        sizes.append(len(programs.here))
    assert len(set(sizes[2:])) == 1


# autocast


@pytest.mark.share(1)
@pytest.mark.parametrize("kind", ["tp", "dp", "plain dp"])
@multirank(2)
def test_autocast(kind: str) -> None:
    """bfloat16 keeps 8 bits. A sum over a cut dim is rounded once on each rank and once more when they are added, so
    results agree to a few of its units (2**-8), not to 1e-5; where no sum is cut they agree as float32 does."""
    results, single = [], []
    for model, lay_out in twins(kind):
        data = lay_out(batch(0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(data[0])
            assert out.dtype is torch.bfloat16
            loss = loss_of(model, data)
        loss.backward()
        results.append((oc.unshard(out.detach()).float(), oc.unshard(loss.detach()), gradients(model)))
        assert all(g.dtype is torch.float32 for g in results[-1][2].values())
        single.append(oc.unshard(model(data[0]).detach()))
    assert_close(results[1], results[0], rtol=4 * 2**-8)
    assert_close(single[1], single[0])
    assert (results[0][0] - single[0]).abs().max() > 1e-4, "autocast changed nothing"
    if kind == "dp":
        assert_close(results[1][0], results[0][0])
