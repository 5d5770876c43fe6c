"""Where programs keep what changes between steps: in lists, dicts, objects, classes, files of settings, states of their own.

A replay must give what the step itself gives, or refuse; never repeat what was there when it was recorded.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecard as oc
from onecard.errors import RecordingError

CALLS = 6
Habit = tuple[Callable[[Tensor], Any], Callable[[int], None]]
settings = types.ModuleType("settings")
settings.scale = 1.0  # type: ignore[attr-defined]


def still(i: int) -> None:
    """Nothing changes between the calls."""


def number_in_a_list() -> Habit:
    coefficients = [1.0, 2.0]
    return lambda x: x * coefficients[1], lambda i: coefficients.__setitem__(1, float(i))


def number_in_a_dict() -> Habit:
    options = {"loss": {"scale": 1.0}}
    return lambda x: x * options["loss"]["scale"], lambda i: options["loss"].update(scale=i + 0.5)


class Registry(dict[str, Any]):
    """As libraries keep what they know of classes: found by an object, never None."""

    def get(self, x: Any, default: Any = None) -> Any:
        return super().get(type(x).__name__) or {}


def number_in_a_dict_of_its_own_kind() -> Habit:
    known = Registry(Tensor=1.0, Linear=None)
    return lambda x: x * known.get(x), lambda i: known.update(Tensor=i + 0.5)


def number_in_a_nested_object() -> Habit:
    options = types.SimpleNamespace(train=types.SimpleNamespace(scale=1.0, dims=[1, 2]))
    return lambda x: x * options.train.scale + options.train.dims[0], lambda i: setattr(
        options.train, "scale", float(i)
    )


def number_of_a_class() -> Habit:
    class Settings:
        scale = 1.0

    return lambda x: x * Settings.scale, lambda i: setattr(Settings, "scale", float(i))


def number_of_an_objects_class() -> Habit:
    class Settings:
        scale = 1.0

    here = Settings()
    return lambda x: x * here.scale, lambda i: setattr(Settings, "scale", float(i))


def number_of_a_file() -> Habit:
    settings.scale = 1.0  # type: ignore[attr-defined]
    return lambda x: x * settings.scale, lambda i: setattr(settings, "scale", float(i))


def number_behind_a_property() -> Habit:
    class Schedule:
        def __init__(self) -> None:
            self.count = 0

        @property
        def scale(self) -> float:
            return 1.0 / (1 + self.count)

    schedule = Schedule()
    return lambda x: x * schedule.scale, lambda i: setattr(schedule, "count", i)


def a_partial() -> Habit:
    options = {"scale": 1.0}

    def step(factor: float, x: Tensor) -> Tensor:
        return x * factor * options["scale"]

    return functools.partial(step, 3.0), lambda i: options.update(scale=float(i))


def a_callable_object() -> Habit:
    class Step:
        scale = 1.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.scale

    step = Step()
    return step, lambda i: setattr(step, "scale", float(i))


def average_in_a_dict() -> Habit:
    state = {"average": torch.zeros(3)}

    def step(x: Tensor) -> Tensor:
        state["average"] = 0.9 * state["average"] + 0.1 * x
        return state["average"] * 2

    return step, still


def average_in_a_list() -> Habit:
    state = [torch.zeros(3)]

    def step(x: Tensor) -> Tensor:
        state[0] = 0.9 * state[0] + 0.1 * x
        return state[0] * 2

    return step, still


def average_in_a_module() -> Habit:
    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.average = torch.zeros(3)

        def forward(self, x: Tensor) -> Tensor:
            self.average = 0.9 * self.average + 0.1 * x
            return self.average * 2

    model = Averaged()
    return lambda x: model(x), still


def average_in_an_object() -> Habit:
    state = types.SimpleNamespace(inner=types.SimpleNamespace(average=torch.zeros(3)))

    def step(x: Tensor) -> Tensor:
        state.inner.average = 0.9 * state.inner.average + 0.1 * x
        return state.inner.average * 2

    return step, still


def tensor_that_is_exchanged() -> Habit:
    tables = {"mask": torch.ones(3)}
    return lambda x: x * tables["mask"], lambda i: tables.update(mask=torch.full((3,), float(i)))


def count_of_calls() -> Habit:
    state = {"count": 0}

    def step(x: Tensor) -> Tensor:
        state["count"] += 1
        return x * state["count"]

    return step, still


class Counting(torch.optim.Optimizer):
    """Its step count is a number of Python, as in optimizers that people write themselves."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["average"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["average"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(state["average"] / (1 - 0.9 ** state["step"]) * group["lr"])


def training(weight: nn.Parameter, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        (weight * x).square().sum().backward()
        optimizer.step()
        return weight.detach().clone()

    return step


def optimizer_that_counts() -> Habit:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Counting([weight], 0.1)
    return training(weight, optimizer), still


class Halved(torch.optim.AdamW):
    """A user's optimizer that is made from one of torch's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        result = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - 0.1 * group["lr"])
        return result


def optimizer_made_from_one_of_torch() -> Habit:
    torch.optim.AdamW(
        [nn.Parameter(torch.ones(1))]
    )  # from now on its ``step`` calls torch's hooks: twice, with that of Halved
    weight = nn.Parameter(torch.ones(3))
    optimizer = Halved([weight], lr=0.1)
    return training(weight, optimizer), lambda i: optimizer.param_groups[0].update(lr=0.1 + 0.01 * i)


def count_of_a_module() -> Habit:
    class Warming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return x * min(self.seen, 4)

    model = Warming()
    return lambda x: model(x), still


class Itself(torch.optim.SGD):
    """It keeps its count in a place that the test chooses, as schedule-free and look-ahead optimizers do."""

    def __init__(self, params: Any, kept: str) -> None:
        super().__init__(params, lr=0.1)
        self.count, self.counts, self.kept = 0, {"steps": 0}, kept
        self.param_groups[0]["count"] = 0

    def counted(self) -> int:
        if self.kept == "attribute":
            self.count += 1
        elif self.kept == "dict":
            self.counts["steps"] += 1
        else:
            self.param_groups[0]["count"] += 1
        return self.count + self.counts["steps"] + self.param_groups[0]["count"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = self.counted()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"], alpha=1 / count)


def optimizer_that_counts_itself(kept: str) -> Habit:
    weight = nn.Parameter(torch.ones(3))
    optimizer = Itself([weight], kept)
    return training(weight, optimizer), still


def optimizer_counts_in_an_attribute() -> Habit:
    return optimizer_that_counts_itself("attribute")


def optimizer_counts_in_a_dict() -> Habit:
    return optimizer_that_counts_itself("dict")


def optimizer_counts_in_its_group() -> Habit:
    return optimizer_that_counts_itself("group")


def modes_within_the_step() -> Habit:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))

    def step(x: Tensor) -> Tensor:
        model.train()
        with torch.no_grad():
            model(x.expand(4, 3) * torch.arange(4.0)[:, None])
            model.eval()
            return model(x[None])

    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    return step, lambda i: model.train(i % 2 == 0) and None


HABITS = (
    number_in_a_list, number_in_a_dict, number_in_a_dict_of_its_own_kind, number_in_a_nested_object,
    number_of_a_class, number_of_an_objects_class, number_of_a_file, number_behind_a_property, a_partial,
    a_callable_object, average_in_a_dict, average_in_a_list, average_in_a_module, average_in_an_object,
    tensor_that_is_exchanged, count_of_calls, optimizer_that_counts, optimizer_made_from_one_of_torch,
    count_of_a_module, optimizer_counts_in_an_attribute, optimizer_counts_in_a_dict, optimizer_counts_in_its_group,
    modes_within_the_step,
)  # fmt: skip


def called(habit: Callable[[], Habit], static: bool) -> list[Tensor]:
    step, between = habit()
    run = oc.to_static(step) if static else step
    found = []
    for i in range(CALLS):
        found.append(run(torch.arange(1.0, 4.0) + i).clone())
        between(i)
    return found


@pytest.mark.share(6)
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_what_changes_between_steps_is_not_repeated(habit: Callable[[], Habit]) -> None:
    expected = called(habit, static=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = called(habit, static=True)
        except RecordingError:
            return
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


def test_what_the_step_does_not_name_may_change() -> None:
    """A progress bar, a log: no reason to record anew."""
    bar = types.SimpleNamespace(count=0, width=80, text="")
    history: list[float] = []

    def step(x: Tensor) -> Tensor:
        return x * (bar.width / 80)

    run = oc.to_static(step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(5):
            history.append(run(torch.ones(3)).sum().item())
            bar.count, bar.text = i, f"step {i}"
    assert history == [3.0] * 5 and len(run.recordings) == 1


def test_a_dict_of_its_own_kind_that_stays_as_it_is() -> None:
    """A registry whose ``get`` never says None, as transformers keeps one: no reason to record anew."""
    known = Registry(Tensor=2.0, Linear=None)
    run = oc.to_static(lambda x: x * known.get(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [run(torch.ones(3)).sum().item() for _ in range(5)]
    assert found == [6.0] * 5 and len(run.recordings) == 1


def test_an_optimizer_made_from_one_of_torch_is_recorded_once() -> None:
    step, between = optimizer_made_from_one_of_torch()
    run = oc.to_static(step)
    for i in range(4):
        run(torch.ones(3))
        between(i)
    assert len(run.recordings) == 1


@pytest.mark.parametrize(
    ("habit", "said"),
    [
        (count_of_a_module, r"seen was 1 and is 2"),
        (optimizer_counts_in_its_group, r"param_groups\[0\]\['count'\], which the step reads, was 1 and is 2"),
        (optimizer_counts_in_an_attribute, r"self.count, which the step reads, was 1 and is 2"),
    ],
)
def test_a_count_is_named(habit: Callable[[], Habit], said: str) -> None:
    """What the step counts in Python is recorded anew each time; the warning says which number it is."""
    step, _ = habit()
    run = oc.to_static(step)
    run(torch.ones(3))
    run(torch.ones(3))
    with pytest.warns(UserWarning, match=said):
        run(torch.ones(3))


def test_an_optimizer_that_steps_within_backward_is_told() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step() and None)
    with pytest.raises(RecordingError, match=r"SGD.step\(\) is called within backward\(\)"):
        oc.record(lambda x: (weight * x).sum().backward())(torch.ones(3))


def test_an_optimizer_that_counts_in_python_is_told() -> None:
    step, _ = optimizer_that_counts()
    step(torch.ones(3))
    with pytest.raises(RecordingError, match=r"Counting keeps its state 'step' as a number of Python"):
        oc.record(step)(torch.ones(3))


def test_a_view_that_is_written_to_without_gradients_keeps_its_gradient() -> None:
    """Only to be looked at while it is recorded, it lost it: the step was done, and replayed, without."""
    mesh = oc.ProcessMesh([0], ["x"])
    weight = nn.Parameter(oc.shard_tensor(torch.tensor([1.0, 2.0]), mesh, [oc.Replicate()]))

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        y = (weight * x).view(2, 1)
        with torch.no_grad():
            y.add_(1.0)
        (y * y).sum().backward()
        assert weight.grad is not None
        return weight.grad * 1

    run = oc.to_static(step)
    for i in range(4):
        x = torch.tensor([3.0, float(i)])
        expected = 2 * (weight.to_local().detach() * x + 1) * x
        assert torch.equal(run(x).to_local(), expected), i
