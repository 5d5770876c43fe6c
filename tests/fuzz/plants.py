"""Faults put into the engine on purpose, in the ranks alone: what ``make fuzz`` must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from onecard.parallel import optimizer
from onecard.rules import Form
from onecard.rules.registry import Row, rows
from onecard.tensor import dispatch


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with a fault of ``PLANTS``; "": with none."""
    if not name:
        yield
        return
    with PLANTS[name]():
        dispatch.programs.clear()
        yield
    dispatch.programs.clear()


def _row(name: str, form: Form, **options: Any) -> Callable[[], Any]:
    return lambda: mock.patch.dict(rows, {name: Row((name,), form, **options)})


PLANTS: dict[str, Callable[[], Any]] = {
    "a pending sum passes tanh": _row("tanh", Form("... -> ...", linear="self")),
    "cumsum over a cut dim": _row("cumsum", Form("... -> ...", moves=True)),
    "gradients are not settled before a step": lambda: mock.patch.object(optimizer, "settle_all", lambda *a, **k: None),
}
