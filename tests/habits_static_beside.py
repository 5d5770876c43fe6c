"""Habits (``habits_static.py``): files, threads, buffers and views that a step reads, and objects of C that it asks."""

from __future__ import annotations

import collections
import concurrent.futures
import ctypes
import json
import logging
import mmap
import operator
import random
import sqlite3
import tempfile
import threading
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
from habits_static import Box, Habit, habit
from torch import Tensor


def _file(text: str) -> Path:
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write(text)
    return Path(file.name)


@habit
def a_file_that_is_read() -> Habit:
    path = _file("1.0")

    def step(x: Tensor) -> Tensor:
        with open(path) as file:
            return x * float(file.read())

    return step, lambda i: _nothing_of(path.write_text(f"{i + 0.5}"))


@habit
def a_path_that_is_read() -> Habit:
    path = _file("1.0")
    return lambda x: x * float(path.read_text()), lambda i: _nothing_of(path.write_text(f"{i + 0.5}"))


@habit
def settings_in_a_json_file() -> Habit:
    path = _file(json.dumps({"scale": 1.0}))

    def step(x: Tensor) -> Tensor:
        with path.open() as file:
            return x * float(json.load(file)["scale"])

    return step, lambda i: _nothing_of(path.write_text(json.dumps({"scale": i + 0.5})))


def _nothing_of(_: Any) -> None:
    pass


@habit
def an_attribute_read_in_a_thread() -> Habit:
    cfg = Box(scale=1.0)

    def step(x: Tensor) -> Tensor:
        found: list[float] = []
        thread = threading.Thread(target=lambda: found.append(cfg.scale))
        thread.start()
        thread.join()
        return x * found[0]

    return step, lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def an_attribute_read_by_an_executor() -> Habit:
    cfg, pool = Box(scale=1.0), concurrent.futures.ThreadPoolExecutor(1)
    return lambda x: x * pool.submit(lambda: cfg.scale).result(), lambda i: setattr(cfg, "scale", i + 0.5)


@habit
def an_array_of_c() -> Habit:
    held = (ctypes.c_double * 2)(1.0, 2.0)
    return lambda x: x * held[1], lambda i: held.__setitem__(1, i + 0.5)


@habit
def a_view_of_bytes() -> Habit:
    held = memoryview(bytearray([1, 2]))
    return lambda x: x * held[0], lambda i: held.__setitem__(0, i + 1)


@habit
def a_mapped_file() -> Habit:
    held = mmap.mmap(-1, 8)
    return lambda x: x * held[0], lambda i: held.__setitem__(0, i + 1)


@habit
def a_proxy_of_a_dict() -> Habit:
    behind = {"scale": 1.0}
    shown = types.MappingProxyType(behind)
    return lambda x: x * shown["scale"], lambda i: behind.update(scale=i + 0.5)


@habit
def values_of_a_proxy() -> Habit:
    behind = {"scale": 1.0}
    shown = types.MappingProxyType(behind)
    return lambda x: x * sum(shown.values()), lambda i: behind.update(scale=i + 0.5)


@habit
def a_view_of_a_dict_that_is_kept() -> Habit:
    behind = {"scale": 1.0}
    values = behind.values()
    return lambda x: x * sum(values), lambda i: behind.update(scale=i + 0.5)


@habit
def the_order_of_an_ordered_dict() -> Habit:
    held = collections.OrderedDict(a=1.0, b=2.0)
    return lambda x: x * next(iter(held.values())), lambda i: held.move_to_end("ab"[i % 2], last=False)


@habit
def the_level_of_a_log() -> Habit:
    log = logging.getLogger("habits.level")
    log.setLevel(10)
    return lambda x: x * (log.getEffectiveLevel() + 1.0), lambda i: log.setLevel(10 + i % 3)


@habit
def the_largest_by_an_attribute() -> Habit:
    cells = [Box(key=1.0, by=3.0), Box(key=2.0, by=5.0)]
    return lambda x: x * max(cells, key=operator.attrgetter("key")).by, lambda i: setattr(
        cells[0], "key", (1.0, 9.0)[i % 2]
    )


@habit
def an_attribute_of_a_metaclass() -> Habit:
    class Meta(type):
        scale = 1.0

    class Cell(metaclass=Meta):
        pass

    return lambda x: x * Cell.scale, lambda i: setattr(Meta, "scale", i + 0.5)


@habit
def an_attribute_that_a_metaclass_makes() -> Habit:
    class Meta(type):
        scale = 1.0

        def __getattr__(cls, name: str) -> float:
            return cls.scale * 2

    class Cell(metaclass=Meta):
        pass

    return lambda x: x * Cell.anything, lambda i: setattr(Meta, "scale", i + 0.5)  # type: ignore[attr-defined]


@habit
def an_entry_by_a_weak_key() -> Habit:
    key = Box(at=0)
    held = weakref.WeakKeyDictionary({key: 1.0})
    return lambda x: x * held[key], lambda i: held.__setitem__(key, i + 0.5)


OPEN: list[sqlite3.Connection] = []  # not closed by their end, which is a warning
# -- told, and believed: what these answer nobody can look into --------------------------------------------------------------


def a_generator_of_its_own() -> tuple[Callable[[Tensor], Tensor], str]:
    drawn = random.Random(0)
    return lambda x: x * drawn.random(), "draws from drawn"


def a_generator_of_numpy() -> tuple[Callable[[Tensor], Tensor], str]:
    drawn = numpy.random.default_rng(0)
    return lambda x: x * drawn.random(), "draws from drawn"


def a_database() -> tuple[Callable[[Tensor], Tensor], str]:
    held = sqlite3.connect(":memory:")
    OPEN.append(held)
    return lambda x: x * float(held.execute("select 2").fetchone()[0]), "asks held, a Connection,"


def a_value_of_c() -> tuple[Callable[[Tensor], Tensor], str]:
    words = frozenset({"a"})
    text = "a b".split
    return lambda x: x * len(text()) * len(words.union({"b"})), ""


TOLD = (a_generator_of_its_own, a_generator_of_numpy, a_database, a_value_of_c)
