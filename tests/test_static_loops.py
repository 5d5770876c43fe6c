"""Training loops as people write them, in recordings: recorded once, without a word, and the same numbers; or told."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import classifier_step
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.flop_counter import FlopCounterMode

import onecard as oc
from onecard.errors import RecordingError
from onecard.testing import run_ranks

CALLS, CLASSES = 6, 3
PIPELINE = oc.Plan(pp=2, microbatches=2)


class Lion(torch.optim.Optimizer):
    """As optimizers are that people write: states made at the first step, two numbers in a tuple."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                update = state["m"].mul(group["betas"][0]).add(p.grad, alpha=1 - group["betas"][0])
                p.add_(update.mul(20).tanh(), alpha=-group["lr"])
                state["m"].mul_(group["betas"][1]).add_(p.grad, alpha=1 - group["betas"][1])


def loop(
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    optimizer: Any = torch.optim.SGD,
    zero: str = "after",
    hook: Any = None,
    after: Any = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """A step of a small net."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    made = optimizer(net.parameters(), lr=0.1)
    for p in net.parameters():
        if hook is not None:
            p.register_hook(hook)
        if after is not None:
            p.register_post_accumulate_grad_hook(after)

    def step(x: Tensor, y: Tensor) -> Tensor:
        if zero == "before":
            made.zero_grad()
        found = loss(net(x), y)
        found.backward()
        made.step()
        if zero == "after":
            made.zero_grad()
        elif zero == "kept":
            made.zero_grad(set_to_none=False)
        return found.detach()

    return step


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 4), torch.randint(CLASSES, (8,))


def losses(step: Any) -> list[float]:
    return [step(*batch()).item() for _ in range(CALLS)]


def one_hot(o: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(o, F.one_hot(y, num_classes=CLASSES).float())


@pytest.mark.share(1)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    "of",
    [{"optimizer": Lion}, {"loss": one_hot}, {"loss": F.multi_margin_loss}, {"zero": "before"}],
    ids=["lion", "one_hot", "margin", "zero"],
)
def test_one_recording_and_no_word(of, k):
    """Warnings are errors here: of a step that is recorded anew, and of one that is not what was recorded."""
    step = oc.to_static(loop(**of), k_steps=k)
    assert losses(step) == pytest.approx(losses(loop(**of)), rel=1e-5)
    assert len(step.recordings) == 1


def dropped(o: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(torch.native_dropout(o, 0.0, True)[0], y)


def test_dropout_as_gpus_compute_it_leaves_rows_apart():
    """``F.dropout`` is this operator there. Warnings are errors here."""
    step = oc.to_static(loop(dropped), k_steps=2)
    assert losses(step) == pytest.approx(losses(loop(dropped)), rel=1e-5)


def cut(of: dict[str, Any], lists: bool = False) -> tuple[list[float], int]:
    if lists:  # torch's optimizers choose operators on lists by themselves, as on GPUs
        vars(sys.modules["torch.optim.optimizer"])["_get_foreach_kernels_supported_devices"] = lambda: ["cpu"]
    step = oc.to_static(loop(**of), plan=PIPELINE)
    return losses(step), len(step.recordings)


@pytest.mark.proof
@pytest.mark.parametrize(
    "of", [{"optimizer": Lion}, {"loss": one_hot}, {"zero": "before"}], ids=["Lion", "one_hot", "zero"]
)
def test_in_a_pipeline(of):
    for found, recordings in run_ranks(cut, 2, of):
        assert found == pytest.approx(losses(loop(**of)), rel=1e-5)
        assert recordings == 1


@pytest.mark.proof
def test_in_a_pipeline_on_gpus():
    for found, recordings in run_ranks(cut, 2, {"zero": "before"}, lists=True):
        assert found == pytest.approx(losses(loop(zero="before")), rel=1e-5)
        assert recordings == 1


def normed() -> Callable[[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, CLASSES))
    return classifier_step(net, torch.optim.SGD(net.parameters(), lr=0.1))


def cut_normed() -> list[float]:
    return losses(oc.to_static(normed(), plan=oc.Plan(dp=2, pp=2, microbatches=2)))


@pytest.mark.proof
def test_operators_without_a_row_in_a_pipeline_beside_dp():
    """Their shapes are asked on tensors without data, which no recording sees."""
    for found in run_ranks(cut_normed, 4):
        assert found == pytest.approx(losses(normed()), rel=1e-5)


def zeros_kept() -> str:
    step = oc.to_static(loop(zero="kept"), plan=PIPELINE)
    with pytest.raises(RecordingError) as refused:
        losses(step)
    return str(refused.value)


@pytest.mark.proof
def test_gradients_that_stay_between_steps_of_a_pipeline_are_refused():
    """By each rank that has some; the others stop with it."""
    words = run_ranks(zeros_kept, 2)
    assert any("not with set_to_none=False" in said for said in words), words
    assert all("set_to_none" in said or "could not record this step" in said for said in words), words


def test_a_class_that_is_too_large_is_refused_as_by_torch():
    step, (x, y) = oc.to_static(loop(one_hot)), batch()
    losses(step)
    with pytest.raises(RuntimeError, match=r"out of bounds|must be smaller"):
        step(x, y + CLASSES)


def clamped(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.clamp_(-0.01, 0.01)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own
@pytest.mark.parametrize("options", [{}, {"k_steps": 2}])
def test_compiled_functions_are_recorded_as_they_were_written(options: dict[str, Any]) -> None:
    """The compiler would take the recorder for a part of the program: minutes, and words about lines of ours."""
    compiled = []

    def backend(graph: Any, given: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y) + 0.01 * z.square().mean()

    assert losses(oc.to_static(loop(torch.compile(loss, backend=backend)), **options)) == pytest.approx(
        losses(loop(loss)), rel=1e-5
    )
    assert len(compiled) == 1  # where the step runs as it is


def through_memory(g: Tensor) -> Tensor:
    """What is bent is not what an operator gave, but the memory that it wrote to."""
    kept = torch.zeros(g.shape)
    kept[:] = g
    return kept.clamp(-0.01, 0.01)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.01, 0.01)


@pytest.mark.share(1)
@pytest.mark.parametrize(
    ("of", "operator"),
    [
        ({"hook": lambda g: g.clamp(-0.01, 0.01)}, "clamp"),
        ({"hook": lambda g: g / (g.norm() + 1)}, "linalg_vector_norm"),
        ({"hook": lambda g: g * g}, "mul"),
        ({"after": clamped}, "clamp_"),
        ({"hook": through_memory}, "clamp"),
        ({"hook": torch.sinh}, "sinh"),  # no line of Python's between autograd and the operator
        ({"loss": lambda o, y: F.cross_entropy(Clipped.apply(o), y)}, "clamp"),
    ],
)
def test_hooks_that_bend_a_microbatchs_gradient_are_refused(of, operator):
    said = f"k_steps=2: {operator} at .*, in a hook or a Function, is not linear in the gradient"
    with pytest.raises(RecordingError, match=said):
        losses(oc.to_static(loop(**of), k_steps=2))
    with pytest.warns(UserWarning, match=said):
        found = losses(oc.to_static(loop(**of), k_steps=2, avg=True))
    assert found != pytest.approx(losses(loop(**of)), rel=1e-5)


def scaled(fused: bool) -> Callable[[Tensor, Tensor], Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, eps=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def test_a_scaler_is_told_of_an_optimizer_that_skips_by_itself():
    with pytest.raises(RecordingError, match=r"GradScaler.step at .* fused=True"):
        losses(oc.to_static(scaled(False)))
    assert losses(oc.to_static(scaled(True))) == pytest.approx(losses(scaled(False)), rel=1e-5)


def cut_scaled() -> Any:
    with pytest.raises(RecordingError, match=r"GradScaler.step at .* fused=True"):
        losses(oc.to_static(scaled(False), plan=PIPELINE))
    return losses(oc.to_static(scaled(True), plan=PIPELINE))


@pytest.mark.proof
def test_a_scaler_in_a_pipeline():
    for found in run_ranks(cut_scaled, 2):
        assert found == pytest.approx(losses(scaled(False)), rel=1e-5)


def later(loss: Any, ranks: bool = False) -> list[str]:
    """The first batches are such that it is the same for each microbatch."""
    step = oc.to_static(loop(loss), k_steps=2, avg=True)
    x, y = batch()
    y = torch.arange(len(y)) % 2
    if ranks:
        mesh = oc.ProcessMesh([0, 1], ["dp"])
        x, y = (oc.shard_tensor(v, mesh, [oc.Replicate()]) for v in (x, y))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            step(x, y)
        assert not told
        y[-1] = 2
        for _ in range(4):
            step(x, y)
    return [str(w.message) for w in told]


def by_largest(o: Tensor, y: Tensor) -> Tensor:
    """Divides by what is no sum over rows, which is not taken ahead of all microbatches."""
    return F.cross_entropy(o, y) / (1 + y.max())


def test_a_divisor_that_differs_in_a_later_batch_is_told():
    (said,) = later(by_largest)
    assert "of which each microbatch has its own" in said


def test_a_divisor_that_differs_in_a_later_batch_is_told_by_ranks():
    said = run_ranks(later, 2, by_largest, True)
    assert all(words and "of which each microbatch has its own" in words[0] for words in said), said


def own_backwards(o: Tensor, y: Tensor) -> Tensor:
    """Autograd's own gradients of these are made by way of a logarithm, a sign, a power, a sort."""
    made = torch.logcumsumexp(o, 1) + torch.linalg.vector_norm(o, 3, 1, True) + o.cumprod(1) + o.sort(1)[0]
    return F.cross_entropy(made, y)


@pytest.mark.parametrize("mode", [nullcontext, partial(FlopCounterMode, display=False)])
def test_what_autograd_does_is_no_hook(mode):
    """Nor where operators come by way of a mode of Python's."""
    step = oc.to_static(loop(own_backwards), k_steps=2)
    with mode():
        found = losses(step)
    assert found == pytest.approx(losses(loop(own_backwards)), rel=1e-5)


@pytest.mark.parametrize("hook", [lambda g: g * 0.5, lambda g: g.flip(0).cumsum(0), torch.neg])
def test_hooks_that_are_linear_are_one_cards(hook):
    of = {"hook": hook}
    assert losses(oc.to_static(loop(**of), k_steps=2)) == pytest.approx(losses(loop(**of)), rel=1e-5)
