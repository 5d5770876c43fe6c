"""capture: run a program and keep every ATen call that it makes below autograd, with copies of its arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onecard._torch.names import TorchDispatchMode, tree_leaves, tree_map
from onecard.rules.call import schema_of

UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """One call of an operator with its concrete arguments; ``where`` is the program that made it."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    where: str = ""

    @property
    def name(self) -> str:
        """The operator's name with its overload."""
        schema = schema_of(self.func)
        return f"{schema.name}.{schema.overload or 'default'}"

    @property
    def key(self) -> Any:
        """Equal for calls that mean the same work on other numbers."""
        return (self.func, _key(self.args), _key(tuple(self.kwargs.items())))


def capture(program: Callable[[], Any], where: str = "", seed: int = 0) -> list[Captured]:
    """The calls that a program makes, forward and (where its result requires gradients) backward.

    Args:
        program: takes no arguments; returns what it computes.
        where: kept with each call, to say where it came from.
        seed: of ``torch.random``, whose state is put back afterwards.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> [call.name for call in capture(lambda: x.exp()) if call.name in ("exp.default", "mul.Tensor")]
        ['exp.default', 'mul.Tensor']
    """
    recorder = _Recorder(where)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with recorder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch thinks of a sample is not the question here
            results = [t for t in tree_leaves(program()) if isinstance(t, Tensor) and t.requires_grad]
            if results:
                _backward(results)
    return recorder.calls


def _backward(results: list[Tensor]) -> None:
    try:
        torch.autograd.backward(results, [torch.randn_like(t) for t in results])
    except RuntimeError as fault:
        if "derivative for" not in str(fault):  # this version of torch has none
            raise


def copied(value: Any) -> Any:
    """The same arguments on tensors of their own (strides kept where they are dense)."""
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)


class _Recorder(TorchDispatchMode):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.calls: list[Captured] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, Tensor) for value in tree_leaves((args, kwargs))):
            # Before the call: it may write to its arguments.
            self.calls.append(Captured(func, copied(tuple(args)), copied(kwargs), self.where))
        result = func(*args, **kwargs)
        # What happens to lie in new memory may be infinite, and then less can be proved of the operator that fills it.
        return result.zero_() if schema_of(func).name in UNINITIALISED else result


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.dtype, value.stride())
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    return (type(value), value)
