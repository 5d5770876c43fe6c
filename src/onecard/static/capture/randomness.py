"""Random states while a step is recorded: read and set by nodes of the graph, or refused; never left out without a word.

Recomputation (``torch.utils.checkpoint``), ``fork_rng`` and the named states of the manual level set a generator back and
forth within a step. torch does that below all that a mode sees, so its generators are replaced for as long as it is recorded.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from onecard import recorded
from onecard.comm.base import record
from onecard.comm.issue import trace
from onecard.errors import RecordingError
from onecard.recorded import one_node


@one_node()
def get_state(device: str) -> Tensor:
    """The state of a device's default generator, at this place of the step."""
    return _generator(device).get_state()


@one_node()
def set_state(device: str, state: Tensor) -> None:
    """Set it."""
    _generator(device).set_state(state)


def _generator(device: str) -> torch.Generator:
    kind, _, index = device.partition(":")
    found = torch.default_generator if kind == "cpu" else getattr(torch, kind).default_generators[int(index)]
    return found._real if isinstance(found, _SeenGenerator) else found


class _SeenGenerator:
    """Stands for a default generator where torch's functions of Python look it up."""

    def __init__(self, device: str) -> None:
        self._device, self._real = device, _generator(device)

    def get_state(self) -> Tensor:
        return get_state(self._device)

    def set_state(self, state: Tensor) -> None:
        set_state(self._device, state)

    def manual_seed(self, seed: int) -> torch.Generator:
        _refuse_if_listening("torch.manual_seed")
        return self._real.manual_seed(seed)

    def seed(self) -> int:
        _refuse_if_listening("torch.seed")
        return self._real.seed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _refuse_if_listening(what: str) -> None:
    if recorded.recorder is not None and recorded.recorder.listens:
        raise _refused(f"{what} is called")


def _refused(what: str) -> RecordingError:
    return RecordingError(
        f"{what} inside the step, at {record.user_line()}, which a replay would not repeat. Seed before the recorded step; to "
        "set a state back within it: state = torch.get_rng_state() and torch.set_rng_state(state), or torch.random.fork_rng()"
    )


@contextmanager
def seen() -> Iterator[None]:
    """Inside, what sets or reads a default generator goes by this module."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.random, "default_generator", _SeenGenerator("cpu")))
        if torch.cuda.is_initialized():
            each = tuple(_SeenGenerator(f"cuda:{i}") for i in range(len(torch.cuda.default_generators)))
            stack.enter_context(patch.object(torch.cuda, "default_generators", each))
        yield


class GeneratorWatch:
    """Finds what has set torch's default generator in another way, and draws that are none of torch's.

    Attributes:
        repeated: what each replay gives again, in words, and whether it was drawn.
    """

    def __init__(self) -> None:
        self.repeated: dict[str, bool] = {}
        self._state = _state()
        self._python, self._numpy = random.getstate(), _numpy()

    def check(self) -> None:
        """Before a draw, and at the end.

        Raises:
            RecordingError: the generator is not as the last draw left it.
        """
        if _state() != self._state:
            raise _refused("torch.default_generator is seeded or set")

    def note(self) -> None:
        """After a draw."""
        self._state = _state()

    def end(self) -> None:
        """After the step. What was drawn in Python is a part of the recording, which is said.

        Raises:
            RecordingError: the generator is not as the last draw left it.
        """
        self.check()
        if trace.faking():
            return  # fake tensors draw themselves
        for what, before, now in (("Python's", self._python, random.getstate()), ("NumPy's", self._numpy, _numpy())):
            if now != before:
                self.repeated[
                    f"the step draws from {what} random; every replay repeats what was drawn while it was recorded. Draw before "
                    "the step, and pass the numbers as arguments"
                ] = True


def _state() -> bytes:
    """That of torch's default generator: not as a tensor, which no mode may see."""
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def _numpy() -> Any:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    kind, keys, *rest = numpy.random.get_state()
    return kind, keys.tobytes(), *rest
