"""Habits (``habits_static.py``) whose instructions differ between versions of Python: super, comprehensions, large functions."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from habits_static import Box, Habit, habit
from torch import Tensor


class _Base:
    scale = 1.0

    def by(self) -> float:
        return self.scale


class _Sub(_Base):
    pass


def _set(i: int) -> None:
    _Base.scale = i + 0.5


@habit
def an_attribute_by_super() -> Habit:
    class Local(_Base):
        scale = 7.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * super().scale

    _Base.scale = 1.0
    return Local(), _set


@habit
def an_attribute_by_super_with_arguments() -> Habit:
    class Local(_Sub):
        scale = 7.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * super(_Sub, self).scale

    _Base.scale = 1.0
    return Local(), _set


def _large(names: int) -> Any:
    """A function of so many names that each instruction at its end has more than one word."""
    lines = [f"    unused = cfg.a{i} if False else 0" for i in range(names)]
    body = "\n".join(["def step(x, cfg=cfg):", *lines, "    return x * cfg.scale * SCALE * (1.5 if cfg.flag else 2.0)"])
    space: dict[str, Any] = {"cfg": Box(scale=1.0, flag=True), "SCALE": 1.0, "__name__": __name__}
    exec(compile(body, __file__, "exec"), space)
    return space


@habit
def a_large_function_reads_an_attribute() -> Habit:
    space = _large(300)
    return space["step"], lambda i: setattr(space["cfg"], "scale", i + 0.5)


@habit
def a_large_function_reads_a_global() -> Habit:
    space = _large(300)
    return space["step"], lambda i: space.update(SCALE=i + 0.5)


@habit
def a_large_function_takes_a_branch() -> Habit:
    space = _large(300)
    return space["step"], lambda i: setattr(space["cfg"], "flag", i % 2 == 0)


@habit
def a_call_with_all_arguments_unpacked() -> Habit:
    class Scaled:
        by = 1.0

        def __call__(self, x: Tensor, *, more: float) -> Tensor:
            return x * self.by * more

    scaled, more = Scaled(), {"more": 2.0}
    return lambda x: scaled(*(x,), **more), lambda i: setattr(scaled, "by", i + 0.5)


@habit
def an_entry_that_is_unpacked_into_keywords() -> Habit:
    more = {"alpha": 1.0}
    return lambda x: torch.add(x, x, **more), lambda i: more.update(alpha=i + 0.5)


@habit
def a_comprehension_in_a_comprehension() -> Habit:
    rows = [[Box(by=1.0), Box(by=2.0)], [Box(by=3.0)]]
    return (
        lambda x: x * sum([sum([cell.by for cell in row]) for row in rows]),
        lambda i: setattr(rows[1][0], "by", i + 0.5),
    )


@habit
def a_comprehension_of_a_dict_with_a_condition() -> Habit:
    cells = {"a": Box(by=1.0, on=True), "b": Box(by=2.0, on=True)}

    def step(x: Tensor) -> Tensor:
        kept = {name: cell.by for name, cell in cells.items() if cell.on}
        return x * sum(kept.values())

    return step, lambda i: setattr(cells["b"], "on", i % 2 == 0)


@habit
def a_name_given_inside_a_comprehension() -> Habit:
    cells = [Box(by=1.0), Box(by=2.0)]

    def step(x: Tensor) -> Tensor:
        doubled = [(last := cell).by * 2 for cell in cells]
        return x * doubled[0] * last.by

    return step, lambda i: setattr(cells[1], "by", i + 0.5)


@habit
def names_of_two_in_one_line() -> Habit:
    pair = (Box(by=1.0), Box(by=2.0))

    def step(x: Tensor) -> Tensor:
        one, other = pair
        one, other = other, one
        return x * one.by + other.by

    return step, lambda i: setattr(pair[i % 2], "by", i + 0.5)


@habit
def the_first_that_is_true() -> Habit:
    none, cfg = Box(scale=0.0), Box(scale=1.0)

    def step(x: Tensor) -> Tensor:
        return x * (none.scale or cfg.scale)

    return step, lambda i: setattr((none, cfg)[i % 2], "scale", i + 0.5)


@habit
def an_object_by_a_condition() -> Habit:
    one, other, which = Box(by=1.0), Box(by=2.0), Box(first=True)

    def step(x: Tensor) -> Tensor:
        return x * (one if which.first else other).by

    return step, lambda i: setattr((one, other)[i % 2], "by", i + 0.5)


@habit
def a_comparison_of_three() -> Habit:
    cfg = Box(low=0.0, at=1.0, high=3.0)
    return lambda x: x * 2 if cfg.low < cfg.at < cfg.high else x, lambda i: setattr(cfg, "at", float(i))


@habit
def a_match_of_an_attribute() -> Habit:
    cfg = Box(kind="double")

    def step(x: Tensor) -> Tensor:
        match cfg.kind:
            case "double":
                return x * 2
            case _:
                return x * 3

    return step, lambda i: setattr(cfg, "kind", ("double", "triple")[i % 2])


@habit
def a_match_of_a_class_with_its_attributes() -> Habit:
    cfg = Box(by=1.0, flag=True)

    def step(x: Tensor) -> Tensor:
        match cfg:
            case Box(flag=True, by=by):
                return x * by
            case _:
                return x

    return step, lambda i: setattr(cfg, "by", i + 0.5)


@habit
def what_a_context_has_entered_with() -> Habit:
    class Context:
        def __init__(self) -> None:
            self.by = 1.0

        def __enter__(self) -> Context:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    context = Context()

    def step(x: Tensor) -> Tensor:
        with suppress(KeyError), context as held:
            return x * held.by
        raise AssertionError

    return step, lambda i: setattr(context, "by", i + 0.5)


@habit
def an_attribute_in_a_handler_of_errors() -> Habit:
    cfg = Box(by=1.0)

    def step(x: Tensor) -> Tensor:
        try:
            raise KeyError("none")
        except KeyError:
            return x * cfg.by
        finally:
            x = x + 1

    return step, lambda i: setattr(cfg, "by", i + 0.5)


@habit
def a_slice_of_a_list_of_numbers() -> Habit:
    numbers = [1.0, 2.0, 3.0]
    return lambda x: x * sum(numbers[1:]), lambda i: numbers.__setitem__(2, i + 0.5)


@habit
def an_item_added_to_in_place() -> Habit:
    counts = {"steps": 1}

    def step(x: Tensor) -> Tensor:
        counts["steps"] += 1
        return x * counts["steps"]

    return step, lambda i: None


@habit
def a_class_body_that_reads_a_name_around_it() -> Habit:
    cfg = Box(by=1.0)

    def step(x: Tensor) -> Tensor:
        by = cfg.by

        class Local:
            scale = by * 2

        return x * Local.scale

    return step, lambda i: setattr(cfg, "by", i + 0.5)


@habit
def a_global_in_a_class_body() -> Habit:
    globals()["OF_A_BODY"] = 1.0

    def step(x: Tensor) -> Tensor:
        class Local:
            scale = OF_A_BODY  # type: ignore[name-defined]  # noqa: F821

        return x * Local.scale

    return step, lambda i: globals().update(OF_A_BODY=i + 0.5)


@habit
def a_decorator_made_of_an_object() -> Habit:
    class Scaled:
        by = 1.0

        def __call__(self, f: Any) -> Any:
            return lambda x: f(x) * self.by

    scaled = Scaled()

    def step(x: Tensor) -> Tensor:
        @scaled
        def inner(x: Tensor) -> Tensor:
            return x + 1

        result: Tensor = inner(x)
        return result

    return step, lambda i: setattr(scaled, "by", i + 0.5)


@habit
def a_text_with_an_attribute_in_it() -> Habit:
    cfg = Box(name="a")
    scales = {"a-x": 1.0, "b-x": 2.0}
    return lambda x: x * scales[f"{cfg.name!s:>1}-x"], lambda i: setattr(cfg, "name", "ab"[i % 2])


@habit
def a_match_of_a_dataclass_by_places() -> Habit:
    @dataclass
    class Point:
        x: float
        y: float

    point = Point(1.0, 2.0)

    def step(x: Tensor) -> Tensor:
        match point:
            case Point(a, b):
                return x * a + b
        raise AssertionError

    return step, lambda i: setattr(point, "xy"[i % 2], i + 0.5)
