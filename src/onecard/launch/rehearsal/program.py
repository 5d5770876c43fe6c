"""A program's model, its batch and how its loss is made, taken from one of its steps: to be priced under another plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from onecard import recorded
from onecard._torch.names import in_backward, tree_flatten, tree_leaves, tree_map
from onecard.errors import PlanError
from onecard.launch.rehearsal.replicated import Replicated


class Program:
    """Listens to a program while its second step is written down.

    Attributes:
        model: the outermost module with parameters that ran first.
    """

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self._given: tuple[Any, Any] = ((), {})
        self._output: list[Any] = []
        self._calls: list[tuple[Any, Any, Any, list[Any]]] = []
        self._known: set[int] = set()
        self._loss: Tensor | None = None
        self._inside = 0
        self._done = False

    def __enter__(self) -> Program:
        self._hooks = ExitStack()
        self._hooks.callback(register_module_forward_pre_hook(self._begin).remove)
        self._hooks.callback(register_module_forward_hook(self._end, with_kwargs=True, always_call=True).remove)
        return self

    def __exit__(self, *fault: Any) -> None:
        self._hooks.close()

    def _begin(self, module: nn.Module, _: Any) -> None:
        if not self._inside and self.model is not None and self._is_part_of(module):
            self.model, self._calls = None, []  # what ran ahead was a part alone: a parametrized weight that was read
        if self._inside or (self.model is None and _trains(module)):
            self._inside += 1

    def _is_part_of(self, module: nn.Module) -> bool:
        return module is not self.model and self._loss is None and any(m is self.model for m in module.modules())

    def _end(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._inside:
            return
        self._inside -= 1
        if not self._inside and self.model is None and output is not None:
            self.model = module
            self._given = args, kwargs
            self._output = tree_leaves(output)
            self._known = {id(x) for x in self._output if isinstance(x, Tensor)}

    def heard(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A call of torch's, behind the model."""
        if self._done or self.model is None or self._inside or in_backward():
            return
        if func is Tensor.backward:
            self._loss, self._done = args[0], True
            return
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = tree_leaves(result)
        if any(id(x) in self._known for x in given) and any(isinstance(x, Tensor) for x in made):
            self._calls.append((func, args, kwargs, made))
            self._known |= {id(x) for x in made if isinstance(x, Tensor)}

    # -- as oc.price takes it --------------------------------------------------------------------------------------------

    def parts(self) -> tuple[nn.Module, tuple[Tensor, ...], Callable[..., Tensor]]:
        """The model, an example of a batch, and a function of both that gives the loss.

        Raises:
            PlanError: no model with parameters trained, or nothing was made of what it returns.
        """
        if self.model is None or self._loss is None:
            raise PlanError(
                "no model ran ahead of the program's backward(): --plan prices a module; without it, all that runs is"
            )
        rows = next((len(x) for x in tree_leaves(self._given) if isinstance(x, Tensor) and x.ndim), 0)
        made = {id(x) for *_, results in self._calls for x in results} | {id(x) for x in self._output}
        own = {id(p) for p in self.model.parameters()}
        outside = {
            id(x): x for x in tree_leaves((self._given, [call[1:3] for call in self._calls])) if isinstance(x, Tensor)
        }
        batch = {
            key: x for key, x in outside.items() if key not in made | own and x.ndim and len(x) == rows
        }  # fmt: skip
        model = self.model.module if isinstance(self.model, Replicated) else self.model
        return model, tuple(batch.values()), self._again([*batch])

    def _again(self, batch: list[int]) -> Callable[..., Tensor]:
        def loss(model: nn.Module, *parts: Tensor) -> Tensor:
            now: dict[int, Any] = dict(zip(batch, parts, strict=True))

            def put(x: Any) -> Any:
                if not isinstance(x, Tensor):
                    return x
                return now[id(x)] if id(x) in now else torch.zeros(x.shape, dtype=x.dtype)

            args, kwargs = tree_map(put, self._given)
            now |= _by_id(self._output, tree_flatten(model(*args, **kwargs))[0])
            for func, given, named, results in self._calls:
                given, named = tree_map(put, (given, named))
                now |= _by_id(results, tree_flatten(func(*given, **named))[0])
            return now[id(self._loss)]

        return loss


def _trains(module: nn.Module) -> bool:
    recording = recorded.recorder is not None
    return recording and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())


def _by_id(before: list[Any], now: list[Any]) -> dict[int, Any]:
    return {id(old): new for old, new in zip(before, now, strict=True) if isinstance(old, Tensor)}
