"""What a recording refuses, and when it is made anew: errors that name the line, and nothing baked in."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from static_programs import assert_replays, mixed
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError

X = torch.tensor([1.0, -2.0, 3.0])


def read_item(x: Tensor) -> Tensor:
    return x * x.sum().item()


def read_branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def read_mask(x: Tensor) -> Tensor:
    return x[x > 0]


def read_numpy(x: Tensor) -> Tensor:
    return x + float(x.numpy()[0])


def from_numpy(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.ones(3, dtype=np.float32))


def read_list(x: Tensor) -> Tensor:
    return x + x.tolist()[0]


def split_where_it_says(x: Tensor) -> Tensor:
    return torch.tensor_split(x, x.abs().to(torch.int64))[0]


def distribution(x: Tensor) -> Tensor:
    # Said, as torch's compiler turns it off for the whole process the first time that it runs.
    return torch.distributions.Normal(x, x.exp(), validate_args=True).log_prob(x)


WORDS = {
    distribution: r"torch.distributions at .*refusals.py:\d+ reads.*validate_args=False",
    read_item: r"refusals.py:\d+.*\.item\(\)", read_branch: "torch.where", read_mask: "indexing by a mask.*torch.where",
    split_where_it_says: "give them as a list", read_numpy: r"numpy\(\)",
    from_numpy: "pass it as an argument", read_list: r"tolist\(\)",
}  # fmt: skip


@pytest.mark.parametrize("step", WORDS, ids=lambda f: f.__name__)
def test_what_depends_on_values_is_refused(step: Callable[..., Any]) -> None:
    with pytest.raises(RecordingError, match=WORDS[step]):
        oc.record(step)(X.clone())
    oc.record(lambda x: x + 1)(X)  # nothing is left of the failed one


def test_numbers_that_python_computes_in_c_are_refused() -> None:
    with pytest.raises(RecordingError, match="Compute it before the step"):
        oc.record(lambda x, t: x * math.gamma(t))(X, 0.5)
    assert torch.equal(oc.to_static(lambda x, t: x * t)(X, 0.5), X * 0.5)


@pytest.mark.usefixtures("replays_only")
def test_floats_are_inputs() -> None:
    calls = []

    def step(x: Tensor, a: float, b: float) -> tuple[Tensor, float]:
        calls.append(a)
        return x * (a + 1.0) / b - torch.tensor(a), a * b

    static = oc.to_static(step)
    for a, b in ((1.0, 2.0), (0.5, 3.0), (-1.0, 7.0), (0.25, 0.5)):
        made, number = static(X, a, b)
        assert torch.equal(made, X * (a + 1.0) / b - torch.tensor(a)) and number == a * b
    assert calls[2:] == [] and len(static.recordings) == 1


def test_a_number_that_autograd_keeps_belongs_to_the_recording() -> None:
    w = torch.ones(3, requires_grad=True)

    def step(x: Tensor, scale: float) -> None:
        w.grad = None
        (w * x).pow(scale).sum().backward()

    static = oc.to_static(step)
    for i, scale in enumerate((2.0, 2.0, 3.0, 2.0, 3.0)):
        with pytest.warns(UserWarning, match="anew") if i == 2 else warnings.catch_warnings():
            static(X, scale)
        torch.testing.assert_close(w.grad, scale * X.pow(scale))
    assert len(static.recordings) == 2


def test_branches_on_numbers_are_asked_again() -> None:
    def step(x: Tensor, t: float) -> Tensor:
        return x + t if t < 1.0 else x - int(t)

    static = oc.to_static(step)
    for t in (0.5, 0.25, 0.75, 2.5, 2.25, 0.5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(static(X, t), step(X, t))
    assert len(static.recordings) == 3  # below one; two and a half; two and a quarter


def test_a_branch_on_a_step_count() -> None:
    """RAdam takes another formula from step 6 on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = assert_replays(partial(mixed, None, "radam"), recordings=2)
    assert any(i.kind == "state" and i.name.startswith("step of") for i in run.recordings[0].inputs)


def test_new_shapes_are_bounded_and_named() -> None:
    static = oc.to_static(lambda batch: batch * 2, limit=2)
    with pytest.warns(UserWarning) as seen:
        for n in (3, 3, 4, 5, 6, 7, 4):
            assert torch.equal(static(torch.ones(n)), torch.full((n,), 2.0))
    said = [str(w.message) for w in seen]
    assert len(static.recordings) == 2 and len(said) == 2
    assert "argument 'batch' was a tensor [3] float32 and is a tensor [4] float32" in said[0]
    assert "2 recordings, and none fits" in said[1]


def test_what_the_step_reads_by_name_is_watched() -> None:
    factor = 2
    layer = nn.Dropout(0.0)

    def step(x: Tensor) -> Tensor:
        return layer(x) * factor

    static = oc.to_static(step)
    assert [static(X).tolist() for _ in range(3)][2] == (X * 2).tolist()
    factor = 3
    with pytest.warns(UserWarning, match="factor, which the step reads, was 2 and is 3"):
        assert torch.equal(static(X), X * 3)
    layer.eval()
    with pytest.warns(UserWarning, match="layer.training was True and is False"):
        assert torch.equal(static(X), X * 3)


def test_a_scheduler_inside_the_step_is_refused() -> None:
    w = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x: Tensor) -> None:
        (w * x).sum().backward()
        optimizer.step()
        schedule.step()

    step(X)
    with pytest.raises(RecordingError, match="scheduler"):
        oc.record(step)(X)


@pytest.mark.usefixtures("replays_only")
def test_backward_belongs_into_the_step() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(RecordingError, match=r"waits for backward\(\)"):
        oc.record(model)(X)
    static = oc.to_static(model)
    with torch.no_grad():
        assert all(torch.equal(static(X), model(X)) for _ in range(4)) and len(static.recordings) == 1

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    trains = oc.to_static(step)
    for _ in range(4):
        model.zero_grad()
        loss = trains(X)
    with pytest.raises(RecordingError, match="inside the recorded step"):
        (loss + model(X).sum()).backward()


def test_loaded_states_are_used() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    static = oc.to_static(step)
    for _ in range(3):
        static(X)
    saved = ({k: v.clone() for k, v in model.state_dict().items()}, copy.deepcopy(optimizer.state_dict()))
    first = [static(X).item() for _ in range(3)]
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert [static(X).item() for _ in range(3)] == first and len(static.recordings) == 1
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert [step(X).item() for _ in range(3)] == first


def test_loss_scaling_with_a_fused_optimizer() -> None:
    def run(static: bool) -> tuple[list[float], float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        call = oc.to_static(step) if static else step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [call(X * (torch.inf if i == 6 else 1)).item() for i in range(12)]
        if static:
            assert 1 <= len(call.recordings) <= 2
        return [loss for loss in losses if math.isfinite(loss)], scaler.get_scale()

    assert run(True) == run(False) and run(True)[1] != 8.0


def test_a_scaler_that_is_updated_behind_the_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x: Tensor) -> None:
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)

    with pytest.raises(RecordingError, match=r"Put scaler.update\(\) into the step, behind scaler.step"):
        call = oc.to_static(step)
        for _ in range(2):
            call(X)
            scaler.update()


def test_what_is_asked_before_each_replay() -> None:
    def step(x: Tensor, scale: Tensor) -> Tensor:
        y = x * scale
        return y + 1 if (y > 0).all() else y - 1

    static = oc.to_static(step, ask=True)
    one, signs = torch.ones(3), torch.tensor([1.0, -1.0, 1.0])
    for i, scale in enumerate((one * 1, one * 3, one * 2, signs, signs * 3, one)):
        with (
            pytest.warns(UserWarning, match=r"x, scale, which the step asks about at \S*test_static_refusals.py:\d+")
            if i == 3
            else warnings.catch_warnings()
        ):
            assert torch.equal(static(one, scale), step(one, scale))
    assert len(static.recordings) == 2
    drawn = oc.to_static(lambda x: x + 1 if torch.rand(1) < 2 else x, ask=True)
    drawn(one)
    with pytest.raises(RecordingError, match=r"depends on random numbers, drawn at \S*test_static_refusals.py:\d+"):
        drawn(one)


def test_attention_without_dropout_draws_nothing() -> None:
    def step(q: Tensor, rate: float) -> Tensor:
        y = torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=rate)
        return y + 1 if (y > 0).all() else y - 1

    q = torch.rand(1, 2, 4, 8)
    static = oc.to_static(step, ask=True)
    for _ in range(3):
        torch.testing.assert_close(static(q, 0.0), step(q, 0.0))
    assert len(static.recordings) == 1
    static = oc.to_static(step, ask=True)
    static(q, 0.5)
    with pytest.raises(RecordingError, match="depends on random numbers"):
        static(q, 0.5)


def equal_or_not(x: Tensor, y: Tensor) -> Tensor:
    return x + y if torch.equal(x, y) else x - y


def close_or_not(x: Tensor, y: Tensor) -> Tensor:
    return x + y if torch.allclose(x, y, rtol=0.1) else x - y


@pytest.mark.parametrize("step", [equal_or_not, close_or_not])
def test_comparing_tensors_reads_them(step: Callable[..., Any]) -> None:
    one = torch.ones(3)
    with pytest.raises(RecordingError, match="its value is read on the host"):
        oc.record(step)(one, one.clone())
    static = oc.to_static(step, ask=True)
    for i, y in enumerate((one, one.clone(), one.clone(), one * 3, one * 4, one.clone())):
        with pytest.warns(UserWarning, match="asks about") if i == 3 else warnings.catch_warnings():
            assert torch.equal(static(one.clone(), y), step(one, y))
    assert len(static.recordings) == 2


def test_comparing_what_no_data_can_change() -> None:
    """torch.cov looks at the number of observations that it has itself made a tensor of."""
    static = oc.to_static(torch.cov)
    for k in range(4):
        x = torch.arange(12.0).view(3, 4) ** (k / 2)
        assert torch.equal(static(x), torch.cov(x))
    assert len(static.recordings) == 1


def by_a_mask(x: Tensor) -> Tensor:
    return x[torch.tensor([True, False, True])]


def as_long_as_is_said(x: Tensor) -> Tensor:
    return x.repeat_interleave(x.abs().to(torch.int64).clamp(1, 1), output_size=3)


@pytest.mark.parametrize("step", [torch.combinations, by_a_mask, as_long_as_is_said])
def test_shapes_that_no_data_can_change(step: Callable[..., Any]) -> None:
    static = oc.to_static(step)
    for k in range(4):
        assert torch.equal(static(X * k), step(X * k))
    assert len(static.recordings) == 1


def test_a_shape_that_a_counter_changes() -> None:
    """It is asked before each replay, and a recording of another shape is another recording."""
    count = torch.zeros(())

    def step(x: Tensor) -> Tensor:
        count.add_(1)
        return x[torch.arange(3) < count]

    static = oc.to_static(step)
    for i in range(5):
        with pytest.warns(UserWarning, match="asks about") if i == 2 else warnings.catch_warnings():
            assert static(X).shape == (min(i + 1, 3),)
    assert len(static.recordings) == 2


def test_an_argument_that_is_given_twice() -> None:
    static = oc.to_static(lambda x, y: x * 2 + y)
    one, two = torch.ones(3), torch.full((3,), 2.0)
    for i, (x, y) in enumerate(((one, one), (one, one), (two, two), (one, two), (two, one), (two, two))):
        with pytest.warns(UserWarning, match="two arguments were one tensor") if i == 3 else warnings.catch_warnings():
            assert torch.equal(static(x, y), x * 2 + y)


def test_an_argument_that_is_the_programs_own() -> None:
    net = torch.nn.Linear(3, 3)
    static = oc.to_static(lambda x, w: (net(x) * w).sum().detach())
    for given in (net.weight, net.weight):  # the first call only runs
        warm = given is net.weight and not static._warm
        with warnings.catch_warnings() if warm else pytest.raises(RecordingError, match=r"argument 'w' is .*weight of"):
            static(torch.ones(2, 3)[:1].expand(3, 3), given)
    assert torch.equal(
        static(torch.ones(3, 3), net.weight.detach().clone()), (net(torch.ones(3, 3)) * net.weight).sum()
    )


def test_a_list_operator_that_writes_to_a_view() -> None:
    """Found by random programs: under a mode torch does not count such writes, and the gradient went past them."""
    weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3))

    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        y = (x * weight)[0]
        torch._foreach_mul_([y, y[1:]], 0.5)
        y.square().sum().backward()
        return y.detach()

    static = oc.to_static(step)
    for i in range(1, 5):
        x = torch.full((2, 3), float(i))
        expected = step(x), weight.grad.clone()
        assert torch.equal(static(x), expected[0]) and torch.equal(weight.grad, expected[1]), i


def test_a_step_in_which_an_optimizer_makes_its_states_is_not_replayed() -> None:
    """Found by random programs: accumulation over calls, so that the optimizer steps for the first time when it is recorded."""

    def trained(static: bool) -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x: Tensor, now: bool) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            if now:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        run = oc.to_static(step) if static else step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            losses = [run(X * (i + 1), i % 2 == 1).item() for i in range(8)]
        assert not static or [len(run.recordings), run.recordings[0].makes_states] == [2, False]
        return losses, {f"{i} {k}": v for i, s in enumerate(optimizer.state.values()) for k, v in s.items()}

    (losses, states), (expected, others) = trained(True), trained(False)
    assert losses == expected and all(torch.equal(states[k], others[k]) for k in others) and states["0 step"] == 4


def test_a_record_of_first_states_is_read_and_not_replayed() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    first = oc.record(step)(X)
    assert first.makes_states and first.cost().flops > 0
    for again in (lambda: first(X), lambda: first.bind(model=model, optimizer=optimizer)):
        with pytest.raises(RecordingError, match="Run the step once, then record it"):
            again()
    second = oc.record(step)(X)
    second(X)
    assert optimizer.state[model.weight]["step"] == 3


@pytest.mark.parametrize(
    "lengths", [[(5, 5, 5), (2, 2, 2)], [torch.full((3,), 5), torch.full((3,), 2)]], ids=["numbers", "a tensor"]
)
def test_ctc_loss_is_told_where_it_runs(lengths: Any) -> None:
    """No mask is at fault, and nothing that the program reads."""

    def step(x: torch.Tensor) -> torch.Tensor:
        scores = x.log_softmax(2).requires_grad_()
        return torch.nn.functional.ctc_loss(scores, torch.ones(3, 2, dtype=torch.long), *lengths)

    with pytest.raises(RecordingError, match=r"CTC loss at .*: torch's kernel .* onecard run --auto"):
        oc.record(step)(torch.randn(5, 3, 4))


def test_counts_of_numbers_are_told_what_counts_them():
    """A mask would not help."""
    step = oc.to_static(lambda x: torch.bincount(x, minlength=4).float().sum())
    step(torch.tensor([1, 2, 2]))
    with pytest.raises(RecordingError, match=r"bincount at .*one_hot\(numbers, n\).sum\(0\) or torch.histc") as told:
        step(torch.tensor([1, 2, 2]))
    assert "mask" not in str(told.value)
