"""Habits (``habits_static.py``): what functions of C look up themselves, and what is asked of files and of the process."""

from __future__ import annotations

import builtins
import ctypes
import functools
import importlib
import io
import operator
import os
import sys
import tempfile
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from habits_static import Habit, habit
from torch import Tensor


class First:
    scale = 2.0


class Second:
    scale = 3.0


def _first(a: float, *_: float) -> float:
    return a


@habit
def a_list_is_all_that_is_spread() -> Habit:
    rates = [1.0, 2.0]
    return lambda x: x * _first(*rates), lambda i: rates.__setitem__(0, i + 0.5)


@habit
def a_list_of_an_object_is_all_that_is_spread() -> Habit:
    config = types.SimpleNamespace(betas=[1.0, 2.0])
    return lambda x: x * _first(*config.betas), lambda i: config.betas.__setitem__(0, i + 0.5)


@habit
def an_object_becomes_one_of_another_class() -> Habit:
    made: Any = First()
    return lambda x: x * (2.0 if isinstance(made, First) else 3.0), lambda i: setattr(made, "__class__", Second)


@habit
def an_attribute_of_another_class() -> Habit:
    made: Any = First()
    return lambda x: x * made.scale, lambda i: setattr(made, "__class__", Second if i % 2 else First)


@habit
def a_getter_of_a_path() -> Habit:
    config = types.SimpleNamespace(inner=types.SimpleNamespace(rate=1.0))
    read = operator.attrgetter("inner.rate")
    return lambda x: x * read(config), lambda i: setattr(config.inner, "rate", i + 0.5)


@habit
def a_dict_by_its_method() -> Habit:
    rates = {"a": 1.0, "b": 2.0}
    return lambda x: x * sum(map(rates.__getitem__, ["a", "b"])), lambda i: rates.update(b=i + 0.5)


@habit
def an_attribute_that_a_text_formats() -> Habit:
    config = types.SimpleNamespace(rate=1.0)
    return lambda x: x * float("{0.rate}".format(config)), lambda i: setattr(config, "rate", i + 0.5)  # noqa: UP030, UP032


@habit
def a_field_of_a_structure() -> Habit:
    class Rates(ctypes.Structure):
        _fields_ = (("rate", ctypes.c_double),)

    rates = Rates(1.0)
    return lambda x: x * rates.rate, lambda i: setattr(rates, "rate", i + 0.5)


@habit
def an_array_of_objects() -> Habit:
    rates = np.array([1.0, None], dtype=object)
    return lambda x: x * float(rates[0]), lambda i: rates.__setitem__(0, i + 0.5)


@habit
def a_masked_array() -> Habit:
    rates = np.ma.array([1.0, 5.0], mask=[0, 1])
    return lambda x: x * float(rates.sum()), lambda i: rates.__setitem__(0, i + 0.5)


@habit
def an_array_of_a_file() -> Habit:
    path = Path(tempfile.mkdtemp()) / "rate.npy"
    np.save(path, np.array(1.0))
    return lambda x: x * float(np.load(path)), lambda i: np.save(path, np.array(i + 0.5))


@habit
def whether_a_file_is_there() -> Habit:
    path = Path(tempfile.mkdtemp()) / "stop"
    return lambda x: x * (2.0 if os.path.exists(path) else 1.0), lambda i: path.touch() if i > 2 else None


@habit
def whether_a_path_is_a_file() -> Habit:
    path = Path(tempfile.mkdtemp()) / "stop"
    return lambda x: x * (2.0 if path.is_file() else 1.0), lambda i: path.touch() if i > 2 else None


@habit
def how_many_files_there_are() -> Habit:
    folder = Path(tempfile.mkdtemp())
    return lambda x: x * len(os.listdir(folder)), lambda i: (folder / str(i)).touch()


@habit
def the_size_of_a_file_by_its_state() -> Habit:
    path = Path(tempfile.mkdtemp()) / "log"
    path.write_text("a")
    return lambda x: x * path.stat().st_size, lambda i: path.write_text("a" * (i + 2))


@habit
def a_variable_of_the_process_in_a_text() -> Habit:
    os.environ["ONECARD_TEST_RATE"] = "1.0"
    change: Callable[[int], Any] = lambda i: os.environ.__setitem__("ONECARD_TEST_RATE", str(i + 0.5))  # noqa: E731
    return lambda x: x * float(os.path.expandvars("$ONECARD_TEST_RATE")), change


@habit
def a_text_in_memory() -> Habit:
    text = io.StringIO("1.0")

    def change(i: int) -> None:
        text.seek(0)
        text.write(str(i + 0.5))

    return lambda x: x * float(text.getvalue()), change


@habit
def an_event_of_threads() -> Habit:
    event = threading.Event()
    return lambda x: x * (2.0 if event.is_set() else 1.0), lambda i: event.set() if i % 2 else event.clear()


@habit
def a_name_among_the_builtins() -> Habit:
    held: Any = builtins
    held.onecard_test_rate = 1.0
    return lambda x: x * onecard_test_rate, lambda i: setattr(held, "onecard_test_rate", i + 0.5)  # type: ignore[name-defined]  # noqa: F821


@habit
def a_module_by_its_name() -> Habit:
    made: Any = types.ModuleType("onecard_test_rates")
    made.rate = 1.0
    sys.modules["onecard_test_rates"] = made
    return lambda x: x * importlib.import_module("onecard_test_rates").rate, lambda i: setattr(made, "rate", i + 0.5)


@habit
def a_setting_of_torch() -> Habit:
    def change(i: int) -> None:
        torch._C._set_cudnn_benchmark(bool(i % 2))  # by its own name it may be forbidden by now

    change(0)
    return lambda x: x * (2.0 if torch.backends.cudnn.benchmark else 1.0), change


@habit
def a_list_in_a_list_of_the_step() -> Habit:
    rates = [1.0, 2.0]

    def step(x: Tensor) -> Tensor:
        both = [rates, [3.0]]
        return x * functools.reduce(lambda a, b: a + sum(b), both, 0.0)

    return step, lambda i: rates.__setitem__(0, i + 0.5)
