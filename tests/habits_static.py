"""Ways in which a step reads what the program changes between its calls: small steps, each with its change.

A habit is a function that gives the step (of a tensor) and what comes between its calls (of their number). ``BY_CHECKING`` are
those that no guard can know; a recording that checks itself tells of them by call 4.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import itertools
import operator
import os
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

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


# -- containers ----------------------------------------------------------------------------------------------------------


@habit
def a_list_appended_to_and_read() -> Habit:
    log: list[int] = []

    def step(x: Tensor) -> Tensor:
        log.append(0)
        return x * len(log)

    return step, nothing


@habit
def a_list_appended_to_under_another_name() -> Habit:
    log: list[int] = []

    def step(x: Tensor) -> Tensor:
        mine = log
        mine.append(0)
        return x * len(mine)

    return step, nothing


@habit
def the_last_of_a_list() -> Habit:
    log = [1.0]
    return lambda x: x * log[-1], lambda i: log.append(float(i))


@habit
def a_slice_of_a_list() -> Habit:
    log = [1.0, 2.0]
    return lambda x: x * sum(log[-2:]), lambda i: log.append(float(i))


@habit
def a_list_in_a_condition() -> Habit:
    todo: list[int] = []
    return lambda x: x * 2 if todo else x, lambda i: todo.append(i) if i > 2 else None


@habit
def a_list_unpacked() -> Habit:
    pair = [1.0, 2.0]

    def step(x: Tensor) -> Tensor:
        a, b = pair
        return x * a + b

    return step, lambda i: pair.__setitem__(1, i + 0.5)


@habit
def a_list_spread_into_a_call() -> Habit:
    pair = [1.0, 2.0]

    def both(x: Tensor, a: float, b: float) -> Tensor:
        return x * a + b

    return lambda x: both(x, *pair), lambda i: pair.__setitem__(1, i + 0.5)


@habit
def a_dict_spread_into_a_call() -> Habit:
    given = {"a": 1.0}

    def both(x: Tensor, a: float) -> Tensor:
        return x * a

    return lambda x: both(x, **given), lambda i: given.update(a=i + 0.5)


@habit
def a_list_zipped() -> Habit:
    weights = [1.0, 2.0]
    return lambda x: sum(x * w for w, _ in zip(weights, "ab", strict=True)), lambda i: weights.__setitem__(0, i + 0.5)  # type: ignore[return-value]


@habit
def a_comprehension_over_objects() -> Habit:
    objects = [Box(v=1.0), Box(v=2.0), Box(v=3.0)]
    return lambda x: x * sum([o.v for o in objects]), lambda i: setattr(objects[2], "v", i + 0.5)


@habit
def a_loop_over_objects_on_one_line() -> Habit:
    objects = [Box(v=1.0), Box(v=2.0), Box(v=3.0)]

    def step(x: Tensor) -> Tensor:
        for o in objects: x = x * o.v  # noqa: E701  # fmt: skip
        return x

    return step, lambda i: setattr(objects[2], "v", i + 0.5)


@habit
def a_tensor_of_a_list() -> Habit:
    rows = [[1.0, 2.0], [3.0, 4.0]]
    return lambda x: x * torch.tensor(rows).sum(), lambda i: rows[1].__setitem__(0, i + 0.5)


@habit
def a_dict_of_defaults() -> Habit:
    cfg: dict[str, float] = {}
    return lambda x: x * cfg.get("scale", 1.0), lambda i: cfg.update(scale=float(i)) if i > 1 else None


@habit
def a_key_in_a_dict() -> Habit:
    cfg: dict[str, float] = {}
    return lambda x: x * 2 if "fast" in cfg else x, lambda i: cfg.update(fast=1.0) if i > 2 else None


@habit
def a_dict_gone_through() -> Habit:
    cfg = {"a": 1.0}

    def step(x: Tensor) -> Tensor:
        for _, v in cfg.items():
            x = x * v
        return x

    return step, lambda i: cfg.update({str(i): i + 0.5})


@habit
def the_order_of_a_dict() -> Habit:
    cfg = {"a": 1.0, "b": 2.0}

    def step(x: Tensor) -> Tensor:
        return x * next(iter(cfg.values()))

    return step, lambda i: cfg.update(a=cfg.pop("a")) if i == 3 else None


@habit
def a_dict_by_a_key_that_is_computed() -> Habit:
    table = {"scale1": 1.0}
    return lambda x: x * table["scale" + str(len("a"))], lambda i: table.update(scale1=i + 0.5)


@habit
def a_default_dict() -> Habit:
    table: Any = collections.defaultdict(lambda: 1.0)
    return lambda x: x * table["scale"], lambda i: table.update(scale=i + 0.5)


@habit
def an_object_from_a_dict() -> Habit:
    cfgs = {"a": Box(v=1.0)}
    return lambda x: x * cfgs.get("a").v, lambda i: setattr(cfgs["a"], "v", i + 0.5)  # type: ignore[union-attr]


@habit
def a_chain_map() -> Habit:
    over: dict[str, float] = {}
    cfg = collections.ChainMap(over, {"scale": 1.0})
    return lambda x: x * cfg["scale"], lambda i: over.update(scale=float(i)) if i > 2 else None


@habit
def a_counter() -> Habit:
    seen = collections.Counter("aab")
    return lambda x: x * seen["a"], lambda i: seen.update("a")


@habit
def a_user_dict() -> Habit:
    cfg = collections.UserDict(scale=1.0)
    return lambda x: x * cfg["scale"], lambda i: cfg.__setitem__("scale", i + 0.5)


@habit
def the_length_of_a_set() -> Habit:
    seen = {0}
    return lambda x: x * len(seen), lambda i: seen.add(i)


@habit
def what_is_in_a_set() -> Habit:
    seen = {0}
    return lambda x: x * 2 if 3 in seen else x, lambda i: seen.add(i)


@habit
def entries_of_a_deque() -> Habit:
    last = collections.deque([1.0], maxlen=2)
    return lambda x: x * last[0], lambda i: last.append(float(i))


@habit
def the_mean_of_a_deque() -> Habit:
    last = collections.deque([1.0], maxlen=3)
    return lambda x: x * (sum(last) / len(last)), lambda i: last.append(float(i))


@habit
def the_left_of_a_deque() -> Habit:
    todo = collections.deque([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0])
    return lambda x: x * todo.popleft(), nothing


@habit
def a_queue() -> Habit:
    todo: queue.Queue[float] = queue.Queue()
    for i in range(9):
        todo.put(float(i))
    return lambda x: x * todo.get(), nothing


@habit
def a_long_list() -> Habit:
    table = [1.0] * 1000
    return lambda x: x * table[777], lambda i: table.__setitem__(777, i + 0.5)


@habit
def a_long_dict() -> Habit:
    table = dict.fromkeys(range(1000), 1.0)
    return lambda x: x * table[777], lambda i: table.update({777: i + 0.5})


@habit
def the_sum_of_a_long_list() -> Habit:
    table = [1.0] * 1000
    return lambda x: x * sum(table), lambda i: table.__setitem__(777, i + 0.5)


@habit
def an_entry_of_numpy() -> Habit:
    table = np.ones(4)
    return lambda x: x * float(table[2]), lambda i: table.__setitem__(2, i + 0.5)


@habit
def the_sum_of_numpy() -> Habit:
    table = np.ones(4)
    return lambda x: x * float(table.sum()), lambda i: table.__setitem__(2, i + 0.5)


@habit
def a_number_of_numpy() -> Habit:
    cfg = Box(scale=np.float64(1.0))
    return lambda x: x * float(cfg.scale), lambda i: setattr(cfg, "scale", np.float64(i + 0.5))


@habit
def an_array_of_bytes() -> Habit:
    flags = bytearray(4)
    return lambda x: x * (1 + flags[2]), lambda i: flags.__setitem__(2, i)


@habit
def an_array_of_the_standard_library() -> Habit:
    table = array.array("d", [1.0, 2.0])
    return lambda x: x * table[1], lambda i: table.__setitem__(1, i + 0.5)


@habit
def a_nested_container() -> Habit:
    cfg: Any = {"layers": [{"scale": 1.0}, {"scale": 2.0}]}
    return lambda x: x * cfg["layers"][1]["scale"], lambda i: cfg["layers"][1].update(scale=i + 0.5)


@habit
def a_list_by_an_index_that_changes() -> Habit:
    table, cfg = [1.0, 2.0, 3.0], Box(i=0)
    return lambda x: x * table[cfg.i], lambda i: setattr(cfg, "i", i % 3)


@habit
def a_list_that_is_sorted() -> Habit:
    table = [3.0, 1.0, 2.0]
    return lambda x: x * sorted(table)[0], lambda i: table.append(1.0 / (i + 1))


@habit
def a_popped_entry() -> Habit:
    todo = [float(i) for i in range(9)]
    return lambda x: x * todo.pop(), nothing


@habit
def a_memo_of_the_step() -> Habit:
    memo: dict[str, float] = {}

    def step(x: Tensor) -> Tensor:
        if "scale" not in memo:
            memo["scale"] = 2.0
            return x
        return x * memo["scale"]

    return step, lambda i: memo.clear() if i == 4 else None


# -- defaults, functions, methods ----------------------------------------------------------------------------------------


@habit
def a_list_as_a_default_argument() -> Habit:
    def step(x: Tensor, log: list[int] = []) -> Tensor:  # noqa: B006
        log.append(0)
        return x * len(log)

    return step, nothing


@habit
def an_entry_of_a_default_argument() -> Habit:
    options = {"scale": 1.0}

    def step(x: Tensor, options: dict[str, float] = options) -> Tensor:
        return x * options["scale"]

    return step, lambda i: options.update(scale=i + 0.5)


@habit
def default_arguments_replaced() -> Habit:
    def helper(x: Tensor, scale: float = 1.0) -> Tensor:
        return x * scale

    return lambda x: helper(x), lambda i: setattr(helper, "__defaults__", (i + 0.5,))


@habit
def keyword_defaults_replaced() -> Habit:
    def helper(x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x * scale

    return lambda x: helper(x), lambda i: setattr(helper, "__kwdefaults__", {"scale": i + 0.5})


@habit
def code_replaced() -> Habit:
    """As editors that reload functions in place do."""

    def helper(x: Tensor) -> Tensor:
        return x * 2

    def other(x: Tensor) -> Tensor:
        return x * 3

    return lambda x: helper(x), lambda i: setattr(helper, "__code__", other.__code__) if i == 3 else None


@habit
def a_function_in_a_dict() -> Habit:
    table: dict[str, Any] = {"act": torch.sin}
    return lambda x: table["act"](x), lambda i: table.update(act=torch.cos) if i == 3 else None


@habit
def a_method_replaced() -> Habit:
    class Scaled:
        def by(self) -> float:
            return 1.0

    scaled = Scaled()
    return lambda x: x * scaled.by(), lambda i: setattr(Scaled, "by", lambda self: i + 0.5)


@habit
def a_method_of_one_object_replaced() -> Habit:
    class Scaled:
        def by(self) -> float:
            return 1.0

    scaled = Scaled()
    return lambda x: x * scaled.by(), lambda i: setattr(scaled, "by", lambda: i + 0.5)


@habit
def an_operator_of_a_class_replaced() -> Habit:
    class Scaled:
        def __rmul__(self, x: Tensor) -> Tensor:
            return x * 2

    scaled: Any = Scaled()
    return lambda x: x * scaled, lambda i: setattr(Scaled, "__rmul__", lambda self, x: x * (i + 0.5))


@habit
def a_function_of_torch_replaced() -> Habit:
    old = torch.sigmoid

    def then(i: int) -> None:
        torch.sigmoid = torch.tanh if i == 3 else old  # type: ignore[assignment]

    return lambda x: torch.sigmoid(x), then


@habit
def a_base_class_replaced() -> Habit:
    class Lower:
        def by(self) -> float:
            return 1.0

    class Upper(Lower):
        def by(self) -> float:
            return super().by() * 2

    scaled = Upper()
    return lambda x: x * scaled.by(), lambda i: setattr(Lower, "by", lambda self: i + 0.5)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self._hidden, self.table = 1.0, 1.0, [1.0, 2.0]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self._hidden * self.table[0]


@habit
def forward_of_a_class_replaced() -> Habit:
    kind: Any = type("Mine", (Layer,), {"forward": Layer.forward})
    model = kind()
    return lambda x: model(x), lambda i: setattr(kind, "forward", lambda self, x: x * (i + 0.5))


@habit
def forward_of_a_class_of_torch_replaced() -> Habit:
    model, old = nn.Softplus(), nn.Softplus.forward

    def then(i: int) -> None:
        nn.Softplus.forward = (lambda self, x: x * 2) if i == 3 else old  # type: ignore[method-assign,assignment]

    return lambda x: model(x), then


@habit
def the_class_of_a_module_replaced() -> Habit:
    model = Layer()
    other = type("Other", (Layer,), {"forward": lambda self, x: x * 3})
    return lambda x: model(x), lambda i: setattr(model, "__class__", other) if i == 3 else None


@habit
def numbers_of_a_module() -> Habit:
    model = Layer()

    def then(i: int) -> None:
        model._hidden = i + 0.5
        model.table[0] = float(i)

    return lambda x: model(x), then


@habit
def a_hook_of_all_modules() -> Habit:
    model = nn.Softplus()
    held: list[Any] = []

    def then(i: int) -> None:
        if i == 3:
            held.append(nn.modules.module.register_module_forward_hook(lambda m, given, out: out * 2))
        elif i == 5:
            held.pop().remove()

    return lambda x: model(x), then


@habit
def a_partial() -> Habit:
    options = {"scale": 1.0}

    def helper(options: dict[str, float], x: Tensor) -> Tensor:
        return x * options["scale"]

    part = functools.partial(helper, options)
    return lambda x: part(x), lambda i: options.update(scale=i + 0.5)


@habit
def a_decorated_function() -> Habit:
    cfg = Box(scale=1.0)

    def decorated(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        @functools.wraps(f)
        def inner(x: Tensor) -> Tensor:
            return f(x) * cfg.scale

        return inner

    helper = decorated(lambda x: x * 2)
    return lambda x: helper(x), lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_function_under_no_grad() -> Habit:
    cfg = Box(scale=1.0)

    @torch.no_grad()
    def helper(x: Tensor) -> Tensor:
        return x * cfg.scale

    return lambda x: helper(x), lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_function_that_is_recomputed() -> Habit:
    from torch.utils.checkpoint import checkpoint

    cfg = Box(scale=1.0)
    weight = nn.Parameter(torch.ones(3))

    def block(x: Tensor) -> Tensor:
        return x * weight * cfg.scale

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        checkpoint(block, x, use_reentrant=False).sum().backward()  # type: ignore[union-attr]
        return weight.grad.clone()  # type: ignore[union-attr]

    return step, lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_function_of_autograd() -> Habit:
    cfg = Box(scale=1.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * cfg.scale

    weight = nn.Parameter(torch.ones(3))

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        (Scaled.apply(weight) * x).sum().backward()  # type: ignore[no-untyped-call]
        return weight.grad.clone()  # type: ignore[union-attr]

    return step, lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def a_generator_inside() -> Habit:
    cfg = Box(scales=[1.0, 2.0])

    def scales() -> Any:
        yield from cfg.scales

    def step(x: Tensor) -> Tensor:
        for s in scales():
            x = x * s
        return x

    return step, lambda i: cfg.scales.append(i + 0.5)


@habit
def a_map_and_a_lambda() -> Habit:
    cfg = Box(scale=1.0)
    return lambda x: sum(map(lambda k: x * k * cfg.scale, (1, 2))), lambda i: setattr(cfg, "scale", i + 0.5)  # type: ignore[return-value]


@habit
def a_reduction() -> Habit:
    table = [1.0, 2.0]
    return lambda x: x * functools.reduce(operator.mul, table), lambda i: table.append(i + 0.5)


@habit
def a_context_manager() -> Habit:
    class Scaling:
        def __init__(self) -> None:
            self.by = 1.0

        def __enter__(self) -> Scaling:
            return self

        def __exit__(self, *_: Any) -> None:
            pass

    scaling = Scaling()

    def step(x: Tensor) -> Tensor:
        with scaling as s:
            return x * s.by

    return step, lambda i: setattr(scaling, "by", i + 0.5)


@habit
def a_class_that_is_made_inside() -> Habit:
    cfg = Box(scale=1.0)

    def step(x: Tensor) -> Tensor:
        class Local:
            by = cfg.scale

        return x * Local.by

    return step, lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def an_object_that_is_made_inside() -> Habit:
    options = {"scale": 1.0}

    class View:
        def __init__(self, held: dict[str, float]) -> None:
            self.held = held

        def by(self) -> float:
            return self.held["scale"]

    return lambda x: x * View(options).by(), lambda i: options.update(scale=i + 0.5)


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


@checked
def the_size_of_a_file() -> Habit:
    import tempfile
    from pathlib import Path

    path = Path(tempfile.mkdtemp()) / "scale"
    path.write_text("1")
    return lambda x: x * len(open(path).read()), lambda i: path.write_text("1" * (i + 1)) and None


@checked
def a_clock() -> Habit:
    import time

    start = time.perf_counter()
    return lambda x: x * (time.perf_counter() - start), nothing
