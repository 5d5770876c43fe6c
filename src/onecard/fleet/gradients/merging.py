"""The strategy's gradient_merge: an optimizer steps at every k-th call, and with it whatever else is done once a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from onecard import recorded
from onecard.errors import RecordingError
from onecard.fleet.gradients import hooks
from onecard.fleet.gradients import sums as gradients
from onecard.fleet.gradients.twins import trained


class Merging:
    """Counts the calls of an optimizer's ``step``. The gradients of calls before the k-th stay, and are averaged."""

    def __init__(self, k_steps: int, average: bool) -> None:
        self.k_steps, self.average = k_steps, average
        self.calls, self._averaged = 0, False
        self.stepping = False  # within a k-th call, which is counted ahead of what it does

    def is_due(self) -> bool:
        """Whether the next call is a k-th."""
        return (self.calls + 1) % self.k_steps == 0

    def is_begun(self) -> bool:
        """Whether gradients of earlier calls wait for the k-th."""
        return self.calls % self.k_steps != 0

    def settle(self, optimizer: Optimizer) -> None:
        """Before the gradients of a k-th call are looked at: they are those of one step."""
        if self.average and not self._averaged:
            self._averaged = True
            mine = gradients.of_optimizer(optimizer)
            hooks.sync(mine)
            gradients.scale(mine, 1 / self.k_steps)

    def count(self) -> bool:
        """One more call; whether it was a k-th."""
        self.calls, self._averaged = self.calls + 1, False
        return self.calls % self.k_steps == 0


_known: WeakKeyDictionary[Optimizer, Merging] = WeakKeyDictionary()


def merge(optimizer: Any, k_steps: int, average: bool) -> None:
    """Have ``step`` and ``zero_grad`` do something at every k-th call only."""
    merging = _known[optimizer] = Merging(k_steps, average)
    step, zero = optimizer.step, optimizer.zero_grad

    def merged(self: Any, *args: Any, **kwargs: Any) -> Any:
        if recorded.recorder is not None and recorded.recorder.listens:
            raise RecordingError(
                "the strategy's gradient_merge counts calls in Python, which a replay would not: give the step that is recorded "
                f"the whole batch, and leave gradient_merge out: oc.to_static(step, k_steps={k_steps}, avg={average})"
            )
        if merging.is_due():
            merging.settle(self)
        if not merging.count():
            return None
        merging.stepping = True
        try:
            return step(*args, **kwargs)
        finally:
            merging.stepping = False

    def cleared(self: Any, *args: Any, **kwargs: Any) -> None:
        if not merging.is_begun():
            zero(*args, **kwargs)

    # Methods, as schedulers expect them.
    optimizer.step, optimizer.zero_grad = MethodType(merged, optimizer), MethodType(cleared, optimizer)


def merges(optimizer: Optimizer) -> bool:
    """Whether it steps at some of its calls only."""
    return optimizer in _known


def clear(model: nn.Module, zero_grad: Callable[[bool], None], set_to_none: bool) -> None:
    """A model's ``zero_grad``: gradients that wait for a k-th call of their optimizer's ``step`` stay, as by its own."""
    mine = [p for o, known in [*_known.items()] if known.is_begun() for p in gradients.of_optimizer(o)]
    begun = {id(x) for p in mine for x in (p, trained(p))}
    if not begun:
        zero_grad(set_to_none)
        return
    for p in model.parameters():
        if id(p) in begun:
            continue
        if set_to_none:
            p.grad = None
        elif p.grad is not None:
            p.grad.detach().zero_()


@contextmanager
def counted(optimizer: Optimizer) -> Iterator[None]:
    """A call that counts also where a scaler skips it, for an infinity."""
    merging = _known.get(optimizer)
    before = 0 if merging is None else merging.calls
    yield
    if merging is not None and merging.calls == before:
        merging.count()


def waits(optimizer: Optimizer) -> bool:
    """Whether the next call of its ``step`` only counts. If it does more, the gradients are those of a step from now on."""
    merging = _known.get(optimizer)
    if merging is None or merging.stepping:
        return False
    if merging.is_due():
        merging.settle(optimizer)
    return not merging.is_due()


def waiting(parameters: Iterable[Tensor]) -> bool:
    """Whether any of these is an optimizer's that waits: nothing is done to its gradients before the k-th call."""
    if not _known:
        return False
    mine = {id(p) for p in parameters}
    theirs = [o for o in [*_known] if any(id(p) in mine for p in gradients.of_optimizer(o))]
    return any([waits(optimizer) for optimizer in theirs])
