"""Habits (``habits_static.py``): what steps read of lists, dicts, sets, deques, arrays."""

from __future__ import annotations

import array
import collections
import queue
from typing import Any

import numpy as np
import torch
from habits_static import Box, Habit, habit, nothing
from torch import Tensor


@habit
def a_list_appended_to_and_read() -> Habit:
    log: list[int] = []

    def step(x: Tensor) -> Tensor:
        log.append(0)
        return x * len(log)

    return step, nothing


@habit
def a_list_extended_in_place_and_read() -> Habit:
    log: list[float] = []

    def step(x: Tensor) -> Tensor:
        nonlocal log
        log += [0.5]
        log.__iadd__([0.5])
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
