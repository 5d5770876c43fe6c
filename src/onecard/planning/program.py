"""A program's model, its batch and how its loss is made, taken from one of its steps: to be priced under another plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from onecard import recorded
from onecard._torch.hooks import after_all_modules
from onecard._torch.names import in_backward, tree_leaves, tree_map
from onecard._torch.uncompiled import is_wrapper
from onecard.comm.base.record import on_behalf_of, user_line
from onecard.errors import PlanError
from onecard.static.guards.numbers import plain


@dataclass(frozen=True, eq=False)
class _Call:
    """A call of the step: of torch's, or (without ``func``) of its model; ``line``: the user's."""

    func: Callable[..., Any] | None
    args: Any
    kwargs: Any
    results: list[Any]
    grad: bool
    line: str

    def given(self) -> Iterator[Tensor]:
        return (x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor))

    def makes(self, ids: set[int]) -> bool:
        return any(id(x) in ids for x in self.results)


class HeardProgram:
    """Listens to a program while a step of it is written down: what the model is called with, what is made before and behind it.

    Args:
        wrappers: classes of modules that stand for their ``module`` on several ranks.
        rows: of the batch; 0: those of the first tensor that enters the model.

    Attributes:
        model: the outermost module with parameters that ran first; backwards: how often ``backward`` was called.
    """

    def __init__(self, wrappers: tuple[type[nn.Module], ...] = (), rows: int = 0) -> None:
        self._wrappers, self._rows = wrappers, rows
        self.model: nn.Module | None = None
        self.backwards = 0
        self._calls: list[_Call] = []
        self._loss: Tensor | None = None
        self._inside = 0

    def __enter__(self) -> HeardProgram:
        self._hooks = ExitStack()
        self._hooks.callback(register_module_forward_pre_hook(self._begin).remove)
        self._hooks.callback(after_all_modules(self._end))
        return self

    def __exit__(self, *fault: Any) -> None:
        self._hooks.close()

    def _begin(self, module: nn.Module, _: Any) -> None:
        if is_wrapper(module):
            return
        if not self._inside and self.model is not None and self._is_part_of(module):
            self.model = None  # what ran ahead was a part alone: a parametrized weight that was read
            self._calls = [call for call in self._calls if call.func is not None]
        if self._inside or module is self.model or (self.model is None and _trains(module)):
            self._inside += 1

    def _is_part_of(self, module: nn.Module) -> bool:
        return module is not self.model and self._loss is None and any(m is self.model for m in module.modules())

    def _end(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """``rest``: keywords and the output; of a forward that has failed torch leaves the keywords out."""
        if not self._inside or is_wrapper(module):
            return
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        self._inside -= 1
        if not self._inside and self.model in (None, module) and output is not None and self._loss is None:
            self.model = module
            given = plain(args), plain(kwargs)
            self._calls.append(_Call(None, *given, _leaves(output), torch.is_grad_enabled(), user_line()))

    def heard(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A call of torch's, before or behind the model."""
        if self._inside or recorded.recorder is None or in_backward():
            return
        if func is Tensor.backward:
            self.backwards += 1
            self._loss = args[0] if self._loss is None else self._loss
        elif self._loss is None:
            call = _Call(func, plain(args), plain(kwargs), tree_leaves(result), torch.is_grad_enabled(), user_line())
            if any(True for _ in call.given()) and any(isinstance(x, Tensor) for x in call.results):
                self._calls.append(call)

    def told(self) -> str:
        """What a price of its parts leaves out."""
        if self.backwards < 2:
            return ""
        return (
            f"the program calls backward() {self.backwards} times a step; priced is a step with one. Where these add up "
            f"gradients, its step takes forward, backward and their messages {self.backwards} times, and the optimizer once"
        )

    # -- as oc.price takes it --------------------------------------------------------------------------------------------

    def parts(self) -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
        """The model, an example of a batch, and a function of both that gives the loss.

        Raises:
            PlanError: no model with parameters trained, or nothing was made of what it returns.
        """
        calls = self._needed()
        if self.model is None or all(call.func is not None for call in calls):
            raise PlanError(
                "what backward() begins with is made by no module's forward (of parameters themselves, by torch.func's "
                "functional_call), and a plan is of a module"
            )
        enters = next(i for i, call in enumerate(calls) if call.func is None)
        first = [*_sources(calls[: enters + 1])]
        rows = self._rows or next((len(x) for x in [*calls[enters].given(), *first] if _is_batch(x)), 0)
        calls = [call for call in calls if not _cuts_out(call, rows)]
        batch = [x for x in _sources(calls) if _is_batch(x) and len(x) == rows]
        return self._module(), tuple(batch), self._again(calls, [id(x) for x in batch], self._loss)

    def parts_of_model(self) -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
        """The same of the model alone, where what is made of its results cannot be looked at: their squares are its loss.

        Raises:
            PlanError: as for ``parts``.
        """
        calls = [call for call in self._needed() if call.func is None]
        if not calls:
            raise PlanError("what backward() begins with is made by no module's forward: nothing can be priced")
        given = [x for x in _sources(calls) if _is_batch(x)]
        batch = [x for x in given if len(x) == len(given[0])]
        again = self._again(calls, [id(x) for x in batch], calls[-1].results)
        return self._module(), tuple(batch), lambda model, *parts: _squares(again(model, *parts))

    def _module(self) -> nn.Module:
        model: Any = self.model.module if isinstance(self.model, self._wrappers) else self.model
        found: nn.Module = model
        return found

    def _needed(self) -> list[_Call]:
        """The calls of which the loss is made, in their order."""
        wanted, found = {id(self._loss)}, []
        for call in reversed(self._calls):
            if call.makes(wanted):
                wanted |= {id(x) for x in call.given()}
                found.append(call)
        return found[::-1]

    @staticmethod
    def _again(calls: Sequence[_Call], batch: list[int], wanted: Any) -> Callable[..., Any]:
        def made_again(model: nn.Module, *parts: Tensor) -> Any:
            now: dict[int, Any] = dict(zip(batch, parts, strict=True))

            def put(x: Any) -> Any:
                if not isinstance(x, Tensor):
                    return x
                return now[id(x)] if id(x) in now else torch.zeros(x.shape, dtype=x.dtype, device="cpu")

            for call in calls:
                args, kwargs = tree_map(put, (call.args, call.kwargs))
                with torch.set_grad_enabled(call.grad), on_behalf_of(call.line):
                    made = (call.func or model)(*args, **kwargs)
                now |= _by_id(call.results, tree_leaves(made) if call.func else _leaves(made))
            return tree_map(lambda x: now[id(x)] if isinstance(x, Tensor) else x, wanted)

        return made_again


def _sources(calls: Sequence[_Call]) -> Iterator[Tensor]:
    """What calls are given that none of those before has made, each once."""
    known = set[int]()
    for call in calls:
        for x in call.given():
            if id(x) not in known:
                known.add(id(x))
                yield x
        known |= {id(x) for x in call.results}


def _cuts_out(call: _Call, rows: int) -> bool:
    """Whether a call takes the batch out of what is longer (``data[i : i + 32]``): what it makes is the batch."""
    made = [x for x in call.results if isinstance(x, Tensor) and _is_batch(x) and len(x) == rows]
    given = any(_is_batch(x) and len(x) == rows for x in call.given())
    return call.func is not None and bool(made) and not given and not any(x.requires_grad for x in made)


def _leaves(output: Any) -> list[Any]:
    """What a model returns; objects of classes that torch knows nothing of (a program's own dataclass) are opened."""
    found = []
    for x in tree_leaves(output):
        names = [f.name for f in fields(x)] if is_dataclass(x) else [*getattr(x, "__dict__", ())]
        own = [] if isinstance(x, Tensor | nn.Module | type) else [getattr(x, name, None) for name in names]
        found += _leaves(own) if any(isinstance(v, Tensor) for v in tree_leaves(own)) else [x]
    return found


def _squares(results: Any) -> Tensor:
    found = [x.square().sum() for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
    return torch.stack(found).sum()


def _is_batch(x: Tensor) -> bool:
    return x.ndim > 0 and not isinstance(x, nn.Parameter)


def _trains(module: nn.Module) -> bool:
    recording = recorded.recorder is not None
    return recording and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _by_id(before: list[Any], now: list[Any]) -> dict[int, Any]:
    return {id(old): new for old, new in zip(before, now, strict=True) if isinstance(old, Tensor)}
