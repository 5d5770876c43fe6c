"""Faults put into the engine on purpose, in the ranks alone: what ``make fuzz`` must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

import onecard as oc
from onecard.comm.issue import collectives
from onecard.rules import Form
from onecard.rules.registry import Row, rows
from onecard.tensor.aliasing import memory
from onecard.tensor.dispatch import entry as dispatch

_clip_value = torch.nn.utils.clip_grad_value_
_all_gather = collectives.all_gather


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with a fault of ``PLANTS``; "": with none."""
    if not name:
        yield
        return
    with PLANTS[name]():
        dispatch.programs.here.clear()
        yield
    dispatch.programs.here.clear()


def _row(name: str, form: Form, **options: Any) -> Callable[[], Any]:
    return lambda: mock.patch.dict(rows, {name: Row((name,), form, **options)})


def _flipped(local: Any, *args: Any, **kwargs: Any) -> Any:
    """A part that arrives in another rank's place."""
    made = _all_gather(local, *args, **kwargs)
    return made.flip(args[1]) if made.dim() else made


PLANTS: dict[str, Callable[[], Any]] = {
    "a pending sum passes tanh": _row("tanh", Form("... -> ...", linear="self")),
    "cumsum over a cut dim": _row("cumsum", Form("... -> ...", moves=True)),
    "gathered parts change places": lambda: mock.patch.object(collectives, "all_gather", _flipped),
    "in-place writes do not reach copied views": lambda: mock.patch.object(memory, "wrote", lambda x: None),
    "one rank clips otherwise": lambda: mock.patch.object(
        torch.nn.utils, "clip_grad_value_", lambda p, v, **_: _clip_value(p, v * (1 + oc.get_rank()))
    ),
}
