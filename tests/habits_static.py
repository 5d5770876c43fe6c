"""Ways in which a step reads what the program changes between its calls: small steps, each with its change.

A habit is a function that gives the step (of a tensor) and what comes between its calls (of their number). ``BY_CHECKING`` are
those that no guard can know; a recording that checks itself tells of them at its next check. ``habits_static_*.py`` hold more.
"""

from __future__ import annotations

import argparse
import contextvars
import dataclasses
import enum
import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Habit = tuple[Callable[[Tensor], Any], Callable[[int], Any]]
HABITS: dict[str, Callable[[], Habit]] = {}
BY_CHECKING: dict[str, Callable[[], Habit]] = {}
settings: Any = types.ModuleType("habits_settings")
sys.modules["habits_settings"] = settings
GLOBAL: dict[str, Any] = {"scale": 1.0}
SCALE = 1.0
variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)


def habit(make: Callable[[], Habit]) -> Callable[[], Habit]:
    HABITS[make.__name__] = make
    return make


def checked(make: Callable[[], Habit]) -> Callable[[], Habit]:
    BY_CHECKING[make.__name__] = make
    return make


def nothing(i: int) -> None:
    """Nothing changes but what the step changes itself."""


class Box:
    """An object of the program's."""

    kind = 1.0

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


# -- names ---------------------------------------------------------------------------------------------------------------


@habit
def a_closure() -> Habit:
    scale = 1.0

    def then(i: int) -> None:
        nonlocal scale
        scale = i + 0.5

    return lambda x: x * scale, then


@habit
def a_global() -> Habit:
    globals().update(SCALE=1.0)
    return lambda x: x * SCALE, lambda i: globals().update(SCALE=i + 0.5)


@habit
def a_global_that_comes_up() -> Habit:
    globals().pop("LATER", None)

    def step(x: Tensor) -> Tensor:
        return x * (LATER if "LATER" in globals() else 1.0)  # type: ignore[name-defined]  # noqa: F821

    return step, lambda i: globals().update(LATER=float(i)) if i > 2 else None


def fifth(x: Tensor) -> Tensor:
    return x * GLOBAL["scale"]


@habit
def a_global_in_the_fifth_helper() -> Habit:
    GLOBAL.update(scale=1.0)

    def fourth(x: Tensor) -> Tensor:
        return fifth(x)

    def third(x: Tensor) -> Tensor:
        return fourth(x)

    def second(x: Tensor) -> Tensor:
        return third(x)

    def first(x: Tensor) -> Tensor:
        return second(x)

    return lambda x: first(x), lambda i: GLOBAL.update(scale=i + 0.5)


@habit
def a_chain_of_attributes() -> Habit:
    cfg = Box(a=Box(b=Box(c=Box(d=Box(v=1.0)))))
    return lambda x: x * cfg.a.b.c.d.v, lambda i: setattr(cfg.a.b.c.d, "v", i + 0.5)


@habit
def the_middle_of_a_chain() -> Habit:
    cfg = Box(a=Box(b=Box(v=1.0)))
    return lambda x: x * cfg.a.b.v, lambda i: setattr(cfg.a, "b", Box(v=i + 0.5))


@habit
def getattr_with_a_default() -> Habit:
    cfg = Box()
    return lambda x: x * getattr(cfg, "gain", 1.0), lambda i: setattr(cfg, "gain", float(i)) if i > 1 else None


@habit
def getattr_by_a_name_that_is_computed() -> Habit:
    cfg = Box(gain1=1.0)
    return lambda x: x * getattr(cfg, "gain" + str(1)), lambda i: setattr(cfg, "gain1", i + 0.5)


@habit
def hasattr_() -> Habit:
    cfg = Box()
    return lambda x: x * 2 if hasattr(cfg, "fast") else x, lambda i: setattr(cfg, "fast", True) if i > 2 else None


@habit
def an_attribute_that_is_deleted() -> Habit:
    cfg = Box(kind=3.0)
    return lambda x: x * cfg.kind, lambda i: cfg.__dict__.pop("kind", None) if i > 2 else None


@habit
def a_class_attribute_then_set_on_the_instance() -> Habit:
    cfg = Box()
    return lambda x: x * cfg.kind, lambda i: setattr(cfg, "kind", i + 0.5) if i > 2 else None


@habit
def a_class_attribute() -> Habit:
    class Settings(Box):
        scale = 1.0

    here = Settings()
    return lambda x: x * here.scale, lambda i: setattr(Settings, "scale", i + 0.5)


@habit
def a_class_between() -> Habit:
    class Lower:
        scale = 1.0

    class Middle(Lower):
        pass

    here = type("Upper", (Middle,), {})()
    return lambda x: x * here.scale, lambda i: setattr(Middle, "scale", float(i)) if i > 2 else None


@habit
def slots() -> Habit:
    class Slotted:
        __slots__ = ("scale",)

    here = Slotted()
    here.scale = 1.0
    return lambda x: x * here.scale, lambda i: setattr(here, "scale", i + 0.5)


@habit
def a_dataclass_with_slots() -> Habit:
    @dataclasses.dataclass(slots=True)
    class Settings:
        scale: float = 1.0

    here = Settings()
    return lambda x: x * here.scale, lambda i: setattr(here, "scale", i + 0.5)


@habit
def a_frozen_dataclass_that_is_replaced() -> Habit:
    @dataclasses.dataclass(frozen=True)
    class Settings:
        scale: float = 1.0

    held = {"settings": Settings()}

    def step(x: Tensor) -> Tensor:
        return x * held["settings"].scale

    return step, lambda i: held.update(settings=dataclasses.replace(held["settings"], scale=i + 0.5))


@habit
def a_named_tuple() -> Habit:
    class Settings(NamedTuple):
        scale: float

    held = [Settings(1.0)]
    return lambda x: x * held[0].scale, lambda i: held.__setitem__(0, Settings(i + 0.5))


@habit
def an_attribute_of_a_function() -> Habit:
    def step(x: Tensor) -> Tensor:
        return x * step.scale  # type: ignore[attr-defined]

    step.scale = 1.0  # type: ignore[attr-defined]
    return step, lambda i: setattr(step, "scale", i + 0.5)


@habit
def a_callable_object() -> Habit:
    class Scaled:
        def __init__(self) -> None:
            self.scale = 1.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.scale

    scaled = Scaled()
    return lambda x: scaled(x), lambda i: setattr(scaled, "scale", i + 0.5)


@habit
def the_step_is_a_callable_object() -> Habit:
    class Step:
        def __init__(self) -> None:
            self.inner = Box(scale=1.0)

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.inner.scale

    step = Step()
    return step, lambda i: setattr(step.inner, "scale", i + 0.5)


@habit
def a_property() -> Habit:
    class Schedule:
        count = 0

        @property
        def scale(self) -> float:
            return 1.0 / (1 + self.count)

    schedule = Schedule()
    return lambda x: x * schedule.scale, lambda i: setattr(schedule, "count", i)


@habit
def a_cached_property() -> Habit:
    class Schedule:
        count = 0

        @functools.cached_property
        def scale(self) -> float:
            return 1.0 / (1 + self.count)

    schedule = Schedule()

    def then(i: int) -> None:
        schedule.count = i
        schedule.__dict__.pop("scale", None)

    return lambda x: x * schedule.scale, then


@habit
def a_descriptor() -> Habit:
    class Times:
        def __get__(self, x: Any, kind: Any) -> float:
            return float(x.count * 2)

    class Schedule:
        count = 1
        scale = Times()

    schedule = Schedule()
    return lambda x: x * schedule.scale, lambda i: setattr(schedule, "count", i)


@habit
def an_object_with_getitem() -> Habit:
    class Table:
        def __init__(self) -> None:
            self.held = {"scale": 1.0}

        def __getitem__(self, key: str) -> float:
            return self.held[key]

    table = Table()
    return lambda x: x * table["scale"], lambda i: table.held.update(scale=i + 0.5)


@habit
def an_object_with_getattr() -> Habit:
    class Settings:
        def __init__(self) -> None:
            self.held = {"scale": 1.0}

        def __getattr__(self, name: str) -> float:
            return self.held[name]

    cfg = Settings()
    return lambda x: x * cfg.scale, lambda i: cfg.held.update(scale=i + 0.5)


@habit
def an_object_with_getattribute() -> Habit:
    class Settings:
        def __init__(self) -> None:
            self.scale = 1.0

        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name)

    cfg = Settings()
    return lambda x: x * cfg.scale, lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def an_object_with_len_and_iter() -> Habit:
    class Bag:
        def __init__(self) -> None:
            self.held = [1.0]

        def __len__(self) -> int:
            return len(self.held)

        def __iter__(self) -> Any:
            return iter(self.held)

    bag = Bag()
    return lambda x: x * len(bag) + sum(bag), lambda i: bag.held.append(float(i))


@habit
def a_method_of_a_dict_class() -> Habit:
    class Settings(dict[str, Any]):
        __getattr__ = dict.__getitem__

    cfg = Settings(scale=1.0)
    return lambda x: x * cfg.scale, lambda i: cfg.update(scale=i + 0.5)


@habit
def the_result_of_a_function() -> Habit:
    cfg = Box(inner=Box(v=1.0))

    def found() -> Any:
        return cfg.inner

    return lambda x: x * found().v, lambda i: setattr(cfg.inner, "v", i + 0.5)


@habit
def one_or_the_other() -> Habit:
    one, other = Box(v=1.0), Box(v=2.0)
    held: dict[str, Any] = {"one": None}
    return (
        lambda x: x * (held["one"] or other).v,
        lambda i: other.__dict__.update(v=i + 0.5) if i < 3 else held.update(one=one),
    )


@habit
def a_weak_reference() -> Habit:
    cfg = Box(v=1.0)
    ref = weakref.ref(cfg)
    return lambda x, keep=cfg: x * ref().v, lambda i: setattr(cfg, "v", i + 0.5)  # type: ignore[misc,union-attr]


@habit
def an_attrgetter() -> Habit:
    cfg = Box(v=1.0)
    get = operator.attrgetter("v")
    return lambda x: x * get(cfg), lambda i: setattr(cfg, "v", i + 0.5)


@habit
def vars_of_an_object() -> Habit:
    cfg = Box(v=1.0)
    return lambda x: x * vars(cfg)["v"], lambda i: setattr(cfg, "v", i + 0.5)


@habit
def dict_of_an_object() -> Habit:
    cfg = Box(v=1.0)
    return lambda x: x * sum(cfg.__dict__.values()), lambda i: setattr(cfg, "v", i + 0.5)


@habit
def as_a_dict() -> Habit:
    @dataclasses.dataclass
    class Settings:
        scale: float = 1.0

    here = Settings()
    return lambda x: x * dataclasses.asdict(here)["scale"], lambda i: setattr(here, "scale", i + 0.5)


@habit
def a_namespace_of_arguments() -> Habit:
    args = argparse.Namespace(scale=1.0)
    return lambda x: x * args.scale, lambda i: setattr(args, "scale", i + 0.5)


@habit
def an_enum() -> Habit:
    class Mode(enum.Enum):
        ONE = 1
        TWO = 2

    cfg = Box(mode=Mode.ONE)

    def step(x: Tensor) -> Tensor:
        return x if cfg.mode is Mode.ONE else x * 2

    return step, lambda i: setattr(cfg, "mode", Mode.TWO if i > 2 else Mode.ONE)


@habit
def a_tuple_of_settings() -> Habit:
    cfg = Box(betas=(0.9, 0.99))
    return lambda x: x * cfg.betas[1], lambda i: setattr(cfg, "betas", (0.9, float(i)))


@habit
def an_attribute_of_a_parameter() -> Habit:
    weight: Any = nn.Parameter(torch.ones(3))
    weight.scale = 1.0

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x * weight * getattr(weight, "scale", 2.0)

    return step, lambda i: setattr(weight, "scale", i + 0.5)
