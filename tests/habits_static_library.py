"""Habits (``habits_static.py``): states of the language and its library, optimizers, results; what no guard knows."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import os
import tempfile
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from habits_static import Box, Habit, checked, habit, nothing, settings, variable
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

# -- states of the language and the standard library ---------------------------------------------------------------------


@habit
def a_count() -> Habit:
    counter = itertools.count(1)
    return lambda x: x * next(counter), nothing


@habit
def a_cycle() -> Habit:
    cycle = itertools.cycle([1.0, 2.0, 3.0])
    return lambda x: x * next(cycle), nothing


@habit
def an_iterator_of_a_list() -> Habit:
    values = iter([float(i) for i in range(20)])

    def step(x: Tensor) -> Tensor:
        for v in values:
            return x * v
        return x

    return step, nothing


@habit
def a_generator_that_goes_on() -> Habit:
    def values() -> Any:
        n = 0
        while True:
            n += 1
            yield n

    held = values()
    return lambda x: x * next(held), nothing


@habit
def an_average_over_all_calls() -> Habit:
    count, average = torch.tensor(0), torch.zeros(3)

    def step(x: Tensor) -> Tensor:
        count.add_(1)
        average.lerp_(x, 1.0 / count.item())
        return average * 2

    return step, nothing


@habit
def a_nonlocal_count() -> Habit:
    n = 0

    def step(x: Tensor) -> Tensor:
        nonlocal n
        n += 1
        return x * n

    return step, nothing


@habit
def a_generator_that_is_sent_to() -> Habit:
    def values() -> Any:
        n = 1.0
        while True:
            n = n + (yield n)

    held = values()
    next(held)
    return lambda x: x * held.send(1.0), nothing


@habit
def the_environment() -> Habit:
    os.environ["HABITS_SCALE"] = "1"
    return lambda x: x * int(os.environ["HABITS_SCALE"]), lambda i: os.environ.update(HABITS_SCALE=str(i))


@habit
def the_environment_by_get() -> Habit:
    os.environ.pop("HABITS_GET", None)
    return lambda x: x * int(os.environ.get("HABITS_GET", "1")), lambda i: os.environ.update(HABITS_GET=str(i))


@habit
def the_environment_by_getenv() -> Habit:
    os.environ["HABITS_GETENV"] = "1"
    return lambda x: x * int(os.getenv("HABITS_GETENV") or 0), lambda i: os.environ.update(HABITS_GETENV=str(i))


@habit
def what_is_in_the_environment() -> Habit:
    os.environ.pop("HABITS_FAST", None)
    return (
        lambda x: x * 2 if "HABITS_FAST" in os.environ else x,
        lambda i: os.environ.update(HABITS_FAST="1") if i > 2 else None,
    )


@habit
def a_context_variable() -> Habit:
    variable.set(1.0)
    return lambda x: x * variable.get(), lambda i: variable.set(i + 0.5)


@habit
def a_thread_local() -> Habit:
    local = threading.local()
    local.scale = 1.0
    return lambda x: x * local.scale, lambda i: setattr(local, "scale", i + 0.5)


@habit
def a_cache_of_a_function() -> Habit:
    cfg = Box(scale=1.0)

    @functools.lru_cache
    def scale() -> float:
        return float(cfg.scale)

    def then(i: int) -> None:
        cfg.scale = i + 0.5
        scale.cache_clear()

    return lambda x: x * scale(), then


@habit
def a_cache_of_a_method() -> Habit:
    cfg = Box(scale=1.0)

    class Cached:
        @functools.cache  # noqa: B019
        def scale(self) -> float:
            return float(cfg.scale)

    cached = Cached()

    def then(i: int) -> None:
        cfg.scale = i + 0.5
        Cached.scale.cache_clear()

    return lambda x: x * cached.scale(), then


@habit
def an_import_inside() -> Habit:
    settings.scale = 1.0

    def step(x: Tensor) -> Tensor:
        import habits_settings

        return x * habits_settings.scale

    return step, lambda i: setattr(settings, "scale", i + 0.5)


@habit
def a_name_imported_inside() -> Habit:
    settings.scale = 1.0

    def step(x: Tensor) -> Tensor:
        from habits_settings import scale

        return x * scale

    return step, lambda i: setattr(settings, "scale", i + 0.5)


@habit
def a_text_that_is_evaluated() -> Habit:
    cfg = Box(scale=1.0)
    return lambda x: x * eval("cfg.scale", {"cfg": cfg}), lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_text_with_numbers() -> Habit:
    cfg = Box(scale=1.0)
    return lambda x: x * float(f"{cfg.scale:.3f}"), lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_format_of_a_dict() -> Habit:
    cfg = {"scale": 1.0}
    return lambda x: x * float("{scale}".format(**cfg)), lambda i: cfg.update(scale=i + 0.5)


@habit
def a_copy_of_an_object() -> Habit:
    cfg = Box(scale=1.0)
    return lambda x: x * copy.copy(cfg).scale, lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_deep_copy_of_a_dict() -> Habit:
    cfg = {"a": {"scale": 1.0}}
    return lambda x: x * copy.deepcopy(cfg)["a"]["scale"], lambda i: cfg["a"].update(scale=i + 0.5)


@habit
def a_match() -> Habit:
    cfg: dict[str, Any] = {"mode": "one"}

    def step(x: Tensor) -> Tensor:
        match cfg:
            case {"mode": "one"}:
                return x
            case _:
                return x * 2

    return step, lambda i: cfg.update(mode="two") if i == 3 else None


# -- optimizers and schedules --------------------------------------------------------------------------------------------


def trained(read: Callable[[Any, Any], float]) -> Habit:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        with torch.no_grad():
            weight.sub_(weight.grad * read(optimizer, schedule))  # type: ignore[operator]
        return weight.detach().clone()

    def then(i: int) -> None:
        optimizer.step()
        schedule.step()
        optimizer.defaults["lr"] = i + 0.5

    return step, then


@habit
def the_rate_by_hand() -> Habit:
    return trained(lambda o, s: o.param_groups[0]["lr"])


@habit
def the_defaults_of_an_optimizer() -> Habit:
    return trained(lambda o, s: o.defaults["lr"])


@habit
def the_last_epoch() -> Habit:
    return trained(lambda o, s: s.last_epoch * 0.1)


@habit
def the_last_rate() -> Habit:
    return trained(lambda o, s: s.get_last_lr()[0])


@habit
def the_state_of_a_schedule() -> Habit:
    return trained(lambda o, s: s.state_dict()["last_epoch"] * 0.1)


@habit
def a_hook_of_an_optimizer() -> Habit:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        return weight.detach().clone()

    def halve(*_: Any) -> None:
        weight.grad.mul_(0.5)  # type: ignore[union-attr]

    return step, lambda i: optimizer.register_step_pre_hook(halve) if i == 3 else None


@habit
def a_hook_of_all_optimizers() -> Habit:
    step, _ = a_hook_of_an_optimizer()
    held: list[Any] = []

    def doubled(optimizer: Any, *_: Any) -> None:
        optimizer.param_groups[0]["params"][0].grad.mul_(2)

    def then(i: int) -> None:
        if i == 3:
            held.append(
                register_optimizer_step_pre_hook(
                    lambda o, *_: o.param_groups[0]["params"][0].grad.mul_(2) is None or None
                )
            )
        elif i == 5:
            held.pop().remove()

    return step, then


# -- results -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    loss: Tensor
    note: Any = None


@habit
def a_dataclass_returned() -> Habit:
    return lambda x: Result(x * 2), nothing


@habit
def a_nested_dataclass_returned() -> Habit:
    return lambda x: {"a": [Result(x * 2, Result(x + 1))]}, nothing


@habit
def a_namespace_returned() -> Habit:
    return lambda x: types.SimpleNamespace(loss=x * 2), nothing


@habit
def a_distribution_returned() -> Habit:
    return lambda x: torch.distributions.Normal(x, x.abs() + 1, validate_args=False), nothing


@habit
def an_object_returned() -> Habit:
    return lambda x: Box(loss=x * 2), nothing


@habit
def an_object_with_slots_returned() -> Habit:
    class Slotted:
        __slots__ = ("loss",)

        def __init__(self, loss: Tensor) -> None:
            self.loss = loss

    return lambda x: Slotted(x * 2), nothing


@habit
def an_object_that_was_there_returned() -> Habit:
    cfg = Box(loss=torch.zeros(3))

    def step(x: Tensor) -> Any:
        cfg.loss = x * 2
        return cfg

    return step, nothing


@habit
def a_set_of_tensors_returned() -> Habit:
    return lambda x: {x * 2}, nothing


@habit
def a_function_returned() -> Habit:
    def step(x: Tensor) -> Any:
        y = x * 2
        return lambda: y

    return step, nothing


@habit
def a_dict_of_numbers_returned() -> Habit:
    cfg = Box(scale=1.0)
    return lambda x: {"loss": x * 2, "scale": cfg.scale}, lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_list_that_was_there_returned() -> Habit:
    table = [1.0, 2.0]
    return lambda x: (x * 2, table), lambda i: table.append(i + 0.5)


# -- what no guard knows: the recording has to check itself --------------------------------------------------------------


@habit
def the_size_of_a_file() -> Habit:
    path = Path(tempfile.mkdtemp()) / "scale"
    path.write_text("1")
    return lambda x: x * len(path.read_bytes()), lambda i: path.write_text("1" * (i + 1)) and None


@checked
def a_clock() -> Habit:
    import time

    start = time.perf_counter()
    return lambda x: x * (time.perf_counter() - start), nothing


@habit
def a_file_that_the_step_writes_and_reads() -> Habit:
    path = Path(tempfile.mkdtemp()) / "log"
    path.write_text("")

    def step(x: Tensor) -> Tensor:
        with path.open("a") as file:
            file.write("1")
        return x * len(path.read_text())

    return step, nothing
