"""What a program changes between the calls of a recorded step: the recording notices, each was repeated as it was, silently."""

from __future__ import annotations

import copy
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import onecard as oc
from onecard.errors import RecordingError

CALLS = 6
Case = tuple[
    Callable[..., Any], Callable[[int], Any], list[Any]
]  # the step, what comes before each call, what holds tensors


def network() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def update(optimizer: Any, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def trained(then: Callable[[nn.Sequential, Any], Callable[[int], Any]]) -> Case:
    model, optimizer = network()
    return lambda x, y: update(optimizer, cross_entropy(model(x), y)), then(model, optimizer), [model]


def at(call: int, change: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda i: change() if i == call else None


def a_hook_of_a_module_is_added() -> Case:
    return trained(lambda m, _: at(3, lambda: m[1].register_forward_hook(lambda module, given, out: out * 1.5)))


def a_hook_of_a_module_is_removed() -> Case:
    def then(model: nn.Sequential, _: Any) -> Callable[[int], Any]:
        return at(3, model[1].register_forward_pre_hook(lambda module, given: (given[0] * 1.5,)).remove)

    return trained(then)


def a_hook_of_a_parameter_is_added() -> Case:
    return trained(lambda m, _: at(3, lambda: m[0].weight.register_hook(lambda grad: grad * 0.1)))


def what_a_hook_reads() -> Case:
    scale = [1.0]

    def then(model: nn.Sequential, _: Any) -> Callable[[int], Any]:
        model[0].weight.register_hook(lambda grad: grad * scale[0])
        return lambda i: scale.__setitem__(0, 0.1 if i >= 3 else 1.0)

    return trained(then)


def a_forward_of_its_own() -> Case:
    return trained(lambda m, _: at(3, lambda: setattr(m[1], "forward", torch.tanh)))


def parameters_are_exchanged_below_the_optimizer() -> Case:
    """``load_state_dict(assign=True)``: the optimizer goes on with the old ones."""

    def then(model: nn.Sequential, _: Any) -> Callable[[int], Any]:
        state = copy.deepcopy(model.state_dict())
        return at(4, lambda: model.load_state_dict(state, assign=True))

    return trained(then)


def a_list_grows_outside() -> Case:
    model, optimizer = network()
    factors = [1.0, 0.5]

    def step(x: Tensor, y: Tensor) -> Tensor:
        return update(optimizer, sum(cross_entropy(model(x) * f, y) for f in factors))  # type: ignore[arg-type]

    return step, at(3, lambda: factors.append(0.25)), [model]


def a_list_grows_in_the_step_and_is_read() -> Case:
    model, optimizer = network()
    history: list[Tensor] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        history.append(update(optimizer, cross_entropy(model(x), y)))
        return torch.stack(history).mean()

    return step, lambda i: None, [model]


def exchanged(key: str) -> Case:
    model, optimizer = network()
    other = copy.deepcopy(model)
    box: dict[str, Any] = {"act": torch.relu, "model": model, "optimizer": optimizer}
    new: dict[str, Any] = {"act": torch.tanh, "model": other, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def step(x: Tensor, y: Tensor) -> Tensor:
        return update(box["optimizer"], cross_entropy(box["act"](box["model"](x)), y))

    return step, at(3, lambda: box.__setitem__(key, new[key])), [model, other]


def a_function_is_exchanged() -> Case:
    return exchanged("act")


def a_module_is_exchanged() -> Case:
    return exchanged("model")


def an_optimizer_is_exchanged() -> Case:
    return exchanged("optimizer")


class Average(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        result: Tensor = self.linear(x - self.mean)
        return result


def a_buffer_is_replaced_in_forward() -> Case:
    model = Average()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return lambda x, y: update(optimizer, cross_entropy(model(x), y)), lambda i: None, [model]


def the_default_dtype() -> Case:
    model, optimizer = network()
    model.double()

    def step(x: Tensor, y: Tensor) -> Tensor:
        return update(optimizer, cross_entropy(model(x.double()), y)) + torch.zeros(2)

    return step, lambda i: torch.set_default_dtype(torch.float64 if i >= 3 else torch.float32), [model]


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor


HABITS = [
    a_hook_of_a_module_is_added,
    a_hook_of_a_module_is_removed,
    a_hook_of_a_parameter_is_added,
    what_a_hook_reads,
    a_forward_of_its_own,
    parameters_are_exchanged_below_the_optimizer,
    a_list_grows_outside,
    a_list_grows_in_the_step_and_is_read,
    a_function_is_exchanged,
    a_module_is_exchanged,
    an_optimizer_is_exchanged,
    a_buffer_is_replaced_in_forward,
    the_default_dtype,
]


@pytest.fixture(autouse=True)
def dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def batch(i: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(i)
    return torch.randn(8, 4, generator=generator, dtype=torch.float32), torch.randint(0, 2, (8,), generator=generator)


def called(habit: Callable[[], Case], static: bool) -> list[list[Tensor]]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    step, before, held = habit()
    run = oc.to_static(step) if static else step
    found = []
    for i in range(CALLS):
        before(i)
        given = batch(i)
        seen = [run(*given).clone()]
        for module in held:
            seen += [x.detach().clone() for x in (*module.parameters(), *module.buffers())]
            seen += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        found.append(seen)
    return found


@pytest.mark.share(1)
@pytest.mark.parametrize("habit", HABITS)
def test_a_change_between_calls_is_noticed(habit: Callable[[], Case]) -> None:
    expected = called(habit, False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = called(habit, True)
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert len(a) == len(b), f"call {i}"
        assert all(x.dtype is y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)), f"call {i}"


def test_a_log_that_the_step_only_appends_to_is_no_reason() -> None:
    model, optimizer = network()
    log: list[Tensor] = []

    @oc.to_static
    def step(x: Tensor, y: Tensor) -> None:
        log.append(update(optimizer, cross_entropy(model(x), y)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="step: the step adds to log .* which a replay does not repeat")
        for i in range(CALLS):
            step(*batch(i))
    assert len(step.recordings) == 1


def test_a_dataclass_of_tensors_is_another_object() -> None:
    """Its ``==`` compares tensors, which was an error of torch's."""
    model, optimizer = network()
    run = oc.to_static(lambda b: update(optimizer, cross_entropy(model(b.x), b.y)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(3):
            run(Batch(*batch(i)))
    assert "argument 'b' was Batch(" in str(said[0].message)


def test_autocast_around_a_call_is_noticed() -> None:
    model, optimizer = network()
    run = oc.to_static(lambda x, y: update(optimizer, cross_entropy(model(x).float(), y)))
    for i in range(5):
        with torch.autocast("cpu", torch.bfloat16, enabled=i >= 3), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(*batch(i))
    assert len(run.recordings) == 2


def test_a_method_is_decorated() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = network()

        @oc.to_static
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            return update(self.optimizer, cross_entropy(self.model(x), y))

    torch.manual_seed(0)
    mine = Trainer()
    torch.manual_seed(0)
    model, optimizer = network()
    for i in range(4):
        x, y = batch(i)
        assert torch.equal(mine.step(x, y), update(optimizer, cross_entropy(model(x), y)))
    assert len(Trainer.step.recordings) == 1


def test_what_cannot_be_recorded_says_so() -> None:
    def generator(x: Tensor) -> Iterator[Tensor]:
        yield from x

    with pytest.raises(RecordingError, match="generator is a generator: its body runs after the call"):
        oc.to_static(generator)
    table = nn.Embedding(10, 4, sparse=True)
    for step, given in (
        (lambda i: table(i).sum().backward(), torch.tensor([1, 2])),
        (lambda x: torch.sparse.mm(torch.eye(2).to_sparse(), x), torch.ones(2, 2)),
    ):
        with pytest.raises(RecordingError, match=re.escape("sparse tensors cannot be recorded")):
            oc.record(step)(given)


def test_what_has_the_identity_of_something_that_is_gone_is_new() -> None:
    """Python gives a freed gradient's place to the next object: the new gradient is one, though its ``id`` is the same."""
    from onecard.static.guards.before import Before

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    before, new = Before(), torch.zeros(2)
    kept = weight.grad
    assert before.still_is(kept, id(kept)) and before.still_is(None, id(None))
    before.alive[id(new)] = before.alive[id(kept)]  # as if it were where that one was
    assert not before.still_is(new, id(new))
