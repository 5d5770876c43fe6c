"""What a step has changed in the program, taken back: for one that is recorded on a part of its data and not to be done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from onecard._torch import names as _torch
from onecard.static.guards.before import Before
from onecard.tensor.dist_tensor import DistTensor
from onecard.train import unreduced


class Undo:
    """Copies of what is about to be written to, made at the first write.

    Gradients, states and places of distributed tensors are noted when the step begins, the states of torch's own generators
    too; those of the program's when they are first drawn from.
    """

    def __init__(self, before: Before) -> None:
        alive = [x for held in before.alive.values() if (x := held()) is not None]
        self._known = {_memory(x) for x in alive if _has_memory(x)}
        self._copies: dict[int, tuple[Any, Any]] = {}
        leaves = [x for key in before.gradients if (x := before.alive[key]()) is not None]
        self._grads = [(x, _torch.gradient(x)) for x in leaves]
        self._unreduced = [(state, state.noted()) for x in leaves if (state := unreduced.watched(x)) is not None]
        self._places = [
            (x, x._local, x._spec, x._memory) for x in alive if isinstance(x, DistTensor) and hasattr(x, "_local")
        ]
        optimizers = [optimizer for optimizer, _ in before.groups]
        self._states = [(o, [(p, held, dict(held)) for p, held in o.state.items()]) for o in optimizers]
        self._groups = [(group, dict(group)) for o in optimizers for group in o.param_groups]
        self._random = _generators()

    def note(self, written: Iterable[Any]) -> None:
        """These are about to be written to; a generator is by who draws from it."""
        for x in written:
            if isinstance(x, torch.Generator):
                self._drawn_from(x)
            elif isinstance(x, Tensor) and _has_memory(x) and _memory(x) in self._known:
                storage = x.untyped_storage()
                self._known.discard(storage._cdata)
                self._copies[storage._cdata] = (storage, storage.clone())

    def _drawn_from(self, x: torch.Generator) -> None:
        if all(x is not known for known, _ in self._random):
            self._random.append((x, x.get_state()))

    def back(self, counts: bool = False) -> None:
        """Everything as it was.

        Args:
            counts: numbers of Python that an optimizer has put into a state for the first time stay: they are no part of a
                recording, and the next one finds whether the optimizer counts in them.
        """
        for storage, copy in self._copies.values():
            storage.copy_(copy)
        for x, local, spec, memory in self._places:
            x._local, x._spec, x._memory = local, spec, memory
        for x, grad in self._grads:
            if _torch.gradient(x) is not grad:
                x.grad = grad
        for known, noted in self._unreduced:
            known.back(noted)
        for optimizer, states in self._states:
            made = _numbers_of_states(optimizer) if counts else {}
            optimizer.state.clear()
            for p, held, values in states:
                held.clear()
                held.update(values)
                optimizer.state[p] = held
            for p, numbers in made.items():
                optimizer.state[p].update({key: n for key, n in numbers.items() if key not in optimizer.state[p]})
        for group, values in self._groups:
            group.update(values)
        for generator, state in self._random:
            generator.set_state(state)
        # Who recorded names this, and this him: gradients and copies are not for Python's collector to come by.
        for kept in (
            self._copies,
            self._grads,
            self._unreduced,
            self._places,
            self._states,
            self._groups,
            self._random,
        ):
            kept.clear()


def _numbers_of_states(optimizer: Any) -> dict[Any, dict[Any, Any]]:
    """What an optimizer keeps of each parameter as a number of Python."""
    found = {p: {k: v for k, v in held.items() if type(v) in (int, float)} for p, held in optimizer.state.items()}
    return {p: numbers for p, numbers in found.items() if numbers}


def _has_memory(x: Tensor) -> bool:
    return not isinstance(x, DistTensor) and x.layout is torch.strided and not x.is_meta


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _generators() -> list[tuple[torch.Generator, Tensor]]:
    found = [torch.default_generator]
    if torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    return [(g, g.get_state()) for g in found]
