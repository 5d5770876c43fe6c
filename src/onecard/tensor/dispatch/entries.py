"""What operators mean for which the rules have no row: one table, in which each entry is of one kind.

* ``handler``: runs in place of the operator, below autograd: (func, args, kwargs) -> result.
* ``program``: decides, below autograd: (func, args, kwargs) -> a program, which is kept for all calls alike.
* ``whole``: runs above autograd, before torch takes a composite operator apart (see ``intercept``):
  (keyset, *args, **kwargs) -> result.

Each is a decorator of such a function, with the operators that it is for. An operator has one entry at most on each side of
autograd; below it that comes before a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from onecard._torch.names import OpOverload
from onecard.tensor.dispatch.intercept import intercept

Handler = Callable[[Any, Any, Any], Any]
F = TypeVar("F", bound=Callable[..., Any])

builders: dict[OpOverload, Handler] = {}  # below autograd; a program is called with (args, kwargs)
wholes: dict[OpOverload, Callable[..., Any]] = {}  # above autograd
drawing: dict[OpOverload, Handler] = {}  # handlers that draw: under ``one_card_random`` they serve plain tensors, too


class Direct:
    """A program that runs a handler: (func, args, kwargs) -> result."""

    simple = False

    def __init__(self, func: Any, handler: Handler) -> None:
        self.func, self.handler = func, handler

    def __call__(self, args: Any, kwargs: Any) -> Any:
        return self.handler(self.func, args, kwargs)


def handler(*ops: OpOverload, draws: bool = False) -> Callable[[F], F]:
    """Run operators by a function in place of a rule.

    Args:
        draws: it draws random numbers, as a function of their place: also for plain tensors under ``one_card_random``.
    """

    def enter(run: F) -> F:
        for op in ops:
            _add(builders, op, lambda func, args, kwargs: Direct(func, run))
            if draws:
                drawing[op] = run
        return run

    return enter


def program(*ops: OpOverload) -> Callable[[F], F]:
    """Decide operators by a function in place of a rule. What it returns is called with (args, kwargs) each time; its
    ``simple`` is false."""

    def enter(build: F) -> F:
        for op in ops:
            _add(builders, op, build)
        return build

    return enter


def whole(*ops: OpOverload) -> Callable[[F], F]:
    """Run operators by a kernel(keyset, *args, **kwargs) wherever a DistTensor is among their operands, above autograd."""

    def enter(kernel: F) -> F:
        for op in ops:
            _add(wholes, op, kernel)
            intercept(op, kernel)
        return kernel

    return enter


def _add(table: dict[OpOverload, Any], op: OpOverload, run: Any) -> None:
    if op in table:
        raise ValueError(f"a second entry for {op}")
    table[op] = run
