"""torch.optim, clipping, GradScaler, schedulers, autocast and accumulation on distributed parameters. Twin: plain torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.optim import lr_scheduler

import onecard as oc
from onecard.errors import LayoutError
from onecard.testing import assert_close, multirank

MESH = oc.ProcessMesh([0, 1], ["x"])
MESH_2D = oc.ProcessMesh([[0, 1], [2, 3]], ["dp", "tp"])
STEPS = 4
HIDDEN = 7  # and a batch of 5: shards of unequal sizes


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)


def loss_of(model: nn.Module, data: tuple[Tensor, ...]) -> Tensor:
    return ((model(data[0]) - data[1]) ** 2).mean()


CUTS = {"0.weight": oc.Shard(0), "0.bias": oc.Shard(0), "2.weight": oc.Shard(1)}


def shard_weights(name: str, layer: nn.Module, mesh: oc.ProcessMesh) -> None:
    for key, parameter in list(layer.named_parameters(recurse=False)):
        placements = [oc.Replicate()] * mesh.ndim
        placements[-1] = CUTS.get(f"{name}.{key}", oc.Replicate())
        setattr(layer, key, oc.shard_tensor(parameter, mesh, placements))


class Layout:
    """How the twin is divided: "tp" cuts the weights, "dp" the batch, "dp,tp" both, "plain dp" leaves the weights plain."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.mesh = MESH_2D if kind == "dp,tp" else MESH

    def model(self, model: nn.Module) -> nn.Module:
        if self.kind == "plain dp":
            return copy.deepcopy(model)
        return oc.shard_layer(copy.deepcopy(model), self.mesh, shard_weights if "tp" in self.kind else None)

    def data(self, data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        placements: list[Any] = [oc.Replicate()] * self.mesh.ndim
        if "dp" in self.kind:
            placements[0] = oc.Shard(0)
        return tuple(oc.shard_tensor(x, self.mesh, placements) for x in data)


def twins(kind: str) -> list[tuple[nn.Module, Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]]]:
    """The plain model and the distributed one, each with what lays out its batches."""
    layout, plain = Layout(kind), make_model()
    return [(plain, lambda data: data), (layout.model(plain), layout.data)]


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: oc.unshard(p.detach()) for name, p in model.named_parameters()}


def assert_same_parameters(plain: nn.Module, twin: nn.Module, rtol: float = 1e-5) -> None:
    moved = [not torch.equal(p, q) for p, q in zip(plain.parameters(), make_model().parameters(), strict=True)]
    assert any(moved), "nothing was trained"
    assert_close(parameters(twin), parameters(plain), rtol=rtol)


def train(
    model: nn.Module, lay_out: Any, optimizer: torch.optim.Optimizer, steps: int = STEPS, closures: bool = False
) -> None:
    for step in range(steps):
        data = lay_out(batch(step))

        def closure(data: Any = data) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            return loss

        if closures or isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


# every optimizer

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "RMSprop centered": (torch.optim.RMSprop, {"lr": 0.01, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 2.0}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 3}),
    "LBFGS line search": (torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
    "Muon": (getattr(torch.optim, "Muon", torch.optim.SGD), {"lr": 0.01}),
}
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")  # those with a fused CPU kernel


def make_optimizer(name: str, model: nn.Module, more: dict[str, Any]) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    trained = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]  # Muon takes matrices only
    return kind(trained, **options, **more)


def forms(name: str) -> list[dict[str, Any]]:
    base = name.split()[0]
    if base in ("LBFGS", "Muon"):
        return [{}]
    fused: list[dict[str, Any]] = [{"fused": True}] if base in FUSED else []
    return [{"foreach": False}, {"foreach": True}, *fused]


@pytest.mark.parametrize("name", OPTIMIZERS)
@multirank(2)
def test_optimizer(name: str) -> None:
    if name == "Rprop":  # it writes through a boolean mask, which gathers; the numbers must be right nevertheless
        warnings.simplefilter("ignore", oc.GatheredOperatorWarning)
    for kind in ("dp", "plain dp", "tp"):
        if (name, kind) == ("Muon", "tp"):
            # It orthogonalises in bfloat16, whose rounding shows where a sum was cut. The algorithm itself must agree.
            torch.Tensor.bfloat16 = lambda x: x  # type: ignore[method-assign]
        for more in forms(name):
            (plain, whole), (twin, lay_out) = twins(kind)
            train(plain, whole, make_optimizer(name, plain, more))
            train(twin, lay_out, oc.shard_optimizer(make_optimizer(name, twin, more)))
            assert_same_parameters(plain, twin)


@pytest.mark.parametrize("name", ["maximum", "minimum"])
@multirank(2)
def test_foreach_forms_of_maximum(name: str) -> None:
    """Adamax and amsgrad use them in place, which single tensors cannot; elements may be cut, whole or pending."""
    layouts = [oc.Shard(0), oc.Shard(1), oc.Replicate(), oc.Partial()]
    inputs = [torch.randn(5, 3, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    ours = [oc.shard_tensor(x, MESH, [p]) for x, p in zip(inputs, layouts * 2, strict=True)]
    others: tuple[Any, ...] = (inputs[4:], 0.25, [0.5, -0.5, 0.1, 0.0])
    for other in others:
        twin_other = ours[4:] if other is others[0] else other
        for suffix in ("", "_"):
            plain, twin = [x.clone() for x in inputs[:4]], [x.clone() for x in ours[:4]]
            operator = getattr(torch, f"_foreach_{name}{suffix}")
            results, twins_of = operator(plain, other), operator(twin, twin_other)
            assert_close(twin if suffix else twins_of, plain if suffix else results)


@multirank(4)
def test_both_axes() -> None:
    for more in forms("AdamW"):
        (plain, whole), (twin, lay_out) = twins("dp,tp")
        train(plain, whole, make_optimizer("AdamW", plain, more))
        train(twin, lay_out, oc.shard_optimizer(make_optimizer("AdamW", twin, more)))
        assert twin[0].weight.placements == (oc.Replicate(), oc.Shard(0))
        assert_same_parameters(plain, twin)


@multirank(2)
def test_without_shard_optimizer() -> None:
    """It only gathers messages into buckets; an optimizer that knows nothing of the mesh is right as well."""
    for kind in ("tp", "dp", "plain dp"):
        (plain, whole), (twin, lay_out) = twins(kind)
        train(plain, whole, make_optimizer("AdamW", plain, {}))
        train(twin, lay_out, make_optimizer("AdamW", twin, {}))
        assert_same_parameters(plain, twin)


@multirank(2)
def test_two_parameter_groups_and_a_frozen_parameter() -> None:
    (plain, whole), (twin, lay_out) = twins("tp")
    for model, lay in ((plain, whole), (twin, lay_out)):
        model[0].bias.requires_grad_(False)
        groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
        train(model, lay, oc.shard_optimizer(torch.optim.SGD(groups, lr=0.1)))
    assert_same_parameters(plain, twin)


# clipping


def backward(model: nn.Module, lay_out: Any, step: int = 0) -> None:
    loss_of(model, lay_out(batch(step))).backward()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: oc.unshard(p.grad) for name, p in model.named_parameters() if p.grad is not None}


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
    from onecard.tensor.dispatch import programs

    _, (twin, lay_out) = twins("tp")
    optimizer = oc.shard_optimizer(torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9))
    sizes = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        train(twin, lay_out, optimizer, steps=1)
        sizes.append(len(programs))
    assert len(set(sizes[2:])) == 1


# autocast


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


# accumulation and buckets


def accumulate(model: nn.Module, lay_out: Any, optimizer: torch.optim.Optimizer) -> None:
    """One step over three microbatches."""
    optimizer.zero_grad()
    for micro in range(3):
        (loss_of(model, lay_out(batch(micro))) / 3).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["dp", "plain dp"])
@multirank(2)
def test_accumulation_sends_one_bucket_each_step(kind: str) -> None:
    (plain, whole), (twin, lay_out) = twins(kind)
    accumulate(plain, whole, make_optimizer("AdamW", plain, {}))
    optimizer = oc.shard_optimizer(make_optimizer("AdamW", twin, {}))
    with oc.explain() as report:
        accumulate(twin, lay_out, optimizer)
    sent = [m for m in report.messages if m.step.bytes]
    assert [(m.step.kind, m.operator, m.tensors) for m in sent] == [("all_reduce", "gradients", 4)]
    assert sent[0].step.bytes == 4 * sum(p.numel() for p in plain.parameters())
    assert_same_parameters(plain, twin)


@multirank(2)
def test_gradients_made_by_a_closure_travel_in_buckets_too() -> None:
    for name, given in (("SGD", "position"), ("SGD", "keyword"), ("LBFGS", "position")):
        (plain, whole), (twin, lay_out) = twins("dp")
        train(plain, whole, make_optimizer(name, plain, {}), steps=1, closures=True)
        optimizer = oc.shard_optimizer(make_optimizer(name, twin, {}))
        step = optimizer.step
        if given == "keyword":
            optimizer.step = lambda closure, step=step: step(closure=closure)  # type: ignore[method-assign]
        with oc.explain() as report:
            train(twin, lay_out, optimizer, steps=1, closures=True)
        reduced = [m for m in report.messages if m.step.kind == "all_reduce" and m.shape]  # all but scalars
        assert reduced and all((m.operator, m.tensors) == ("gradients", 4) for m in reduced)
        assert_same_parameters(plain, twin)


@multirank(2)
def test_large_gradients_fill_several_buckets() -> None:
    from onecard.tensor import foreach

    foreach.BUCKET_BYTES = 4 * (HIDDEN * 6 + HIDDEN)  # the first layer fills one
    (plain, whole), (twin, lay_out) = twins("dp")
    train(plain, whole, make_optimizer("SGD", plain, {}), steps=1)
    with oc.explain() as report:
        train(twin, lay_out, oc.shard_optimizer(make_optimizer("SGD", twin, {})), steps=1)
    assert [m.tensors for m in report.messages if m.operator == "gradients"] == [2, 2]
    assert_same_parameters(plain, twin)


# states


@multirank(2)
def test_states_follow_their_parameter() -> None:
    _, (twin, lay_out) = twins("tp")
    optimizer = oc.shard_optimizer(make_optimizer("AdamW", twin, {}))
    train(twin, lay_out, optimizer)
    for p in twin.parameters():
        state = optimizer.state[p]
        assert state["exp_avg"].layout is state["exp_avg_sq"].layout is p.layout


@multirank(2)
def test_shard_fn_lays_out_states() -> None:
    """The first moments of replicated parameters are divided between the ranks, as in ZeRO stage 1."""
    seen: list[tuple[str, tuple[int, ...]]] = []

    def shard_fn(key: str, parameter: Any, state: Any) -> Any:
        seen.append((key, tuple(parameter.shape)))
        return oc.reshard(state, MESH, [oc.Shard(0)]) if key == "exp_avg" else state

    for more in forms("AdamW"):
        seen.clear()
        (plain, whole), (twin, lay_out) = twins("dp")
        train(plain, whole, make_optimizer("AdamW", plain, more))
        optimizer = oc.shard_optimizer(make_optimizer("AdamW", twin, more), shard_fn)
        train(twin, lay_out, optimizer)
        assert sorted(seen) == sorted(
            (k, tuple(p.shape)) for p in plain.parameters() for k in ("exp_avg", "exp_avg_sq")
        )
        for p in twin.parameters():
            assert optimizer.state[p]["exp_avg"].placements == (oc.Shard(0),)
            assert optimizer.state[p]["exp_avg_sq"].placements == (oc.Replicate(),)
        assert_same_parameters(plain, twin)


@multirank(2)
def test_shard_fn_must_return_the_state() -> None:
    _, (twin, lay_out) = twins("dp")
    optimizer = oc.shard_optimizer(make_optimizer("AdamW", twin, {}), lambda key, parameter, state: None)
    with pytest.raises(
        LayoutError, match=r"shard_fn\('exp_avg', ...\) returned NoneType.*must return the state \[7, 6\]"
    ):
        train(twin, lay_out, optimizer, steps=1)


@multirank(2)
def test_state_dict_goes_on_where_it_stopped() -> None:
    (plain, whole), (twin, lay_out) = twins("tp")
    train(plain, whole, make_optimizer("AdamW", plain, {}), steps=4)
    first = oc.shard_optimizer(make_optimizer("AdamW", twin, {}))
    train(twin, lay_out, first, steps=2)
    second = oc.shard_optimizer(make_optimizer("AdamW", twin, {}))
    second.load_state_dict(first.state_dict())
    for step in (2, 3):
        second.zero_grad()
        loss_of(twin, lay_out(batch(step))).backward()
        second.step()
    assert_same_parameters(plain, twin)


@multirank(2)
def test_states_of_one_card_are_taken_over() -> None:
    """A plain state dict: its states stay plain tensors, which count as replicated, and go on as they are."""
    for kind in ("tp", "dp"):
        for more in forms("AdamW"):
            (plain, whole), (twin, lay_out) = twins(kind)
            first = make_optimizer("AdamW", plain, more)
            train(plain, whole, first, steps=2)
            twin.load_state_dict(plain.state_dict())
            second = oc.shard_optimizer(make_optimizer("AdamW", twin, more))
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            train(plain, whole, first, steps=2)
            train(twin, lay_out, second, steps=2)
            assert_same_parameters(plain, twin)
