"""Sums of gradients: a bucket's in one message, while ``backward`` still runs where that was asked for.

What is started is awaited at the end of ``backward``, or by whoever reads one of its gradients before (``memory.UnderWay``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate

from onecard._torch import leaves
from onecard._torch import names as _torch
from onecard.comm.issue.ranks import of_ranks
from onecard.tensor import DistTensor
from onecard.tensor.aliasing import memory, strides
from onecard.tensor.buckets import Cut, fill, start_reduce, start_scatter
from onecard.tensor.convert import shard_tensor
from onecard.tensor.dist_tensor import wrap
from onecard.tensor.room import Room
from onecard.tensor.spec import Spec, contiguous_stride
from onecard.train.summands import anywhere
from onecard.train.zero import undivided

SHARES, LEAST = 24, 2**20  # buckets of a model whose sums overlap with backward, at least; bytes of one, at least
AT_ONCE = 4  # buckets under way, each with a copy of its gradients, before the oldest is awaited

Cutter = Callable[[DistTensor], Cut | None]


@dataclass(eq=False)
class _Sum:
    """The sums of one bucket, started."""

    end: Callable[[], None]
    params: list[DistTensor]
    guards: list[memory.UnderWay] = field(default_factory=list)


class Reducer:
    """Sums the gradients of some parameters, and cuts them if it is told how.

    Args:
        params: of one optimizer.
        cut: how a parameter's gradient is to be cut; None: it is not.
        every: sum what each ``backward`` has made, as soon as it has it (ZeRO stages 2 and 3). What a parameter has from earlier
            ones is put aside until this one's part can be added to it. Otherwise gradients add up first, and are summed
            once: when somebody reads them, or in the last ``backward`` before a step, if sums overlap with it.
        overlap: start a bucket's sum when ``backward`` has the last of its gradients, and go on. Which ``backward`` is the
            last is known from the step before.
        zero: the parameters are not autograd's: ``before`` and ``after`` are called around each gradient. Ranks then run
            programs of their own, in which a branch may leave a parameter out: without overlap they ask each other, and it
            gets this gradient. None: one program, in which a gradient is there on all ranks or on none.
        dtype: in which the sums are made; the gradients' own if left out.
    """

    def __init__(
        self,
        params: Sequence[DistTensor],
        cut: Cutter | None,
        every: bool,
        overlap: bool,
        zero: Callable[[DistTensor], DistTensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._zero, self._dtype, self._room = zero, dtype, Room()
        self._cut, self._every, self._overlap = cut, every, overlap
        self._kept: dict[DistTensor, DistTensor] = {}
        self._guards: dict[DistTensor, memory.UnderWay] = {}  # of gradients that lack what was put aside
        self._bucket_of: dict[DistTensor, int] = {}
        self._left: list[set[DistTensor]] = []
        self._ready: list[dict[DistTensor, None]] = []
        self._started: list[_Sum] = []
        self._tasks: set[int] = set()  # backwards that run now, one inside the other with reentrant checkpoints
        self._backwards, self._expected = 0, inf  # since the last step; in the one before it
        self._now = every
        # backward comes to the last parameters first; one that is frozen now may be trained later
        # What is under way is there twice: of a small model, too, a part.
        most = max(sum(p.numel() * p.element_size() for p in params) // SHARES, LEAST) if overlap else None
        for number, bucket in enumerate(fill(reversed(params), lambda p: p.numel() * p.element_size(), most)):
            self._bucket_of |= dict.fromkeys(bucket, number)
            self._left.append({p for p in bucket if p.requires_grad})
            self._ready.append({})
            for param in bucket:
                param._summed_by = self
                if zero is None:
                    hook(param, self._before_hook(param), self.after)

    def finish(self) -> None:
        """Sum now what is pending."""
        self._await()
        for param in self._fill():  # summed here: the end of the next backward has nothing to do with it
            self._ready[self._bucket_of[param]].pop(param, None)
        for number in range(len(self._left)):
            self._sum(number, [p for p in self._members(number) if _pending(p.grad)], later=False)

    def sum_of(self, params: Collection[DistTensor]) -> None:
        """Sum now the pending gradients of these, which all ranks of their meshes have: nobody else is asked."""
        for number in range(len(self._left)):
            self._sum(number, [p for p in self._members(number) if p in params and _pending(p.grad)], later=False)

    def before_step(self) -> None:
        """The optimizer is about to read the gradients."""
        self.finish()
        self._expected = self._backwards or self._expected
        self._backwards = 0

    # -- what autograd calls -------------------------------------------------------------------------------------------

    def _before_hook(self, param: DistTensor) -> Callable[[Any], None]:
        return lambda grad: self.before(param)

    def before(self, param: DistTensor) -> None:
        """A gradient is about to be added."""
        if param._summed_by is not self:  # another optimizer has the same parameters now
            return
        self._enter()
        if isinstance(param.grad, DistTensor):
            param.grad._refresh()  # a sum that is under way
            if not param.grad._spec.layout.pending:
                self._kept[param], param.grad = param.grad, None

    def after(self, param: Any) -> None:
        """A gradient has been added."""
        if not isinstance(param.grad, DistTensor) or param._summed_by is not self:
            return
        param.grad._due = self.finish
        number = self._bucket_of[param]
        if self._now or param in self._kept:
            self._ready[number][param] = None
        if param in self._kept:
            self._guards[param] = memory.UnderWay(param.grad, partial(self._start, number, False))
        self._left[number].discard(param)
        if self._now and not self._left[number] and (self._zero is None or self._overlap):
            self._start(number)

    def _enter(self) -> None:
        task = _torch.graph_task()
        if task in self._tasks:
            return
        self._tasks.add(task)
        if self._every and self._zero is None:  # what it sums is cut, and computed with, before the step
            undivided.tell(self._bucket_of)
        if all(p.grad is None for p in self._bucket_of) and not self._kept:
            self._backwards = 0
        self._backwards += 1
        self._now = self._every or (self._overlap and self._backwards >= self._expected)
        _torch.queue_callback(partial(self._finish, task))

    def _finish(self, task: int) -> None:
        """The end of a backward: buckets of which it had not all gradients, and what is under way."""
        self._tasks.discard(task)
        if self._now:
            self._fill()
        for number in range(len(self._ready)):
            self._start(number)
        self._await()
        for param, kept in self._kept.items():  # whose gradient was asked for by torch.autograd.grad
            param.grad = kept
        self._kept.clear()

    def _fill(self) -> list[DistTensor]:
        """Zeros for gradients that only other ranks have; which those are."""
        params = [*self._bucket_of]
        if self._zero is None or self._overlap or not params:
            return []
        by_mesh: dict[Any, list[DistTensor]] = {}
        for param in params:
            by_mesh.setdefault(param.mesh, []).append(param)
        used_of = {p: used for alike in by_mesh.values() for p, used in zip(alike, _anywhere(alike), strict=True)}
        filled = []
        for param, used in used_of.items():
            if used and not _pending(param.grad):
                if param.grad is not None:
                    self._kept[param] = param.grad  # type: ignore[assignment]
                param.grad = self._zero(param)
                self._ready[self._bucket_of[param]][param] = None
                filled.append(param)
        return filled

    # -- sums ----------------------------------------------------------------------------------------------------------

    def _members(self, number: int) -> list[DistTensor]:
        return [p for p, bucket in self._bucket_of.items() if bucket == number]

    def _start(self, number: int, later: bool = True) -> None:
        members, ready = self._members(number), self._ready[number]
        params = [p for p in members if p in ready]  # in one order, whatever came first on this rank
        self._ready[number], self._left[number] = {}, {p for p in members if p.requires_grad}
        for param in params:
            if param in self._guards:
                self._guards.pop(param).end()
        self._sum(number, [p for p in params if self._is_due(p)], later and self._overlap)

    def _is_due(self, param: DistTensor) -> bool:
        if param in self._kept or _pending(param.grad):
            return True
        cut = self._cut(param) if self._cut is not None and isinstance(param.grad, DistTensor) else None
        return cut is not None and param.grad._spec.layout is not cut.layout  # type: ignore[union-attr]

    def _sum(self, number: int, params: list[DistTensor], later: bool) -> None:
        if not params:
            return
        with torch.no_grad():
            started = _Sum(self._begin(params, later, f"bucket {number}"), params)
        if not later:
            self._end(started)
            return
        started.guards = [memory.UnderWay(p.grad, partial(self._arrive, started)) for p in params]  # type: ignore[arg-type]
        self._started.append(started)
        if len(self._started) > AT_ONCE:
            self._arrive(self._started[0])

    def _end(self, started: _Sum) -> None:
        with torch.no_grad():
            started.end()
            for param in started.params:
                kept, now = self._kept.pop(param, None), param.grad
                if kept is None:
                    continue
                if _are_alike(kept, now):
                    param.grad = kept.add_(now)  # type: ignore[arg-type]  # the program may have it in a list
                    # Whoever waited, a hook, has the other one.
                    now._local, now._spec, now._memory = kept._local, kept._spec, kept._memory  # type: ignore[union-attr]
                else:
                    now.add_(kept)  # type: ignore[union-attr]

    def _begin(self, params: list[DistTensor], later: bool, label: str) -> Callable[[], None]:
        """Start the sums of these parameters' gradients; what it gives awaits them."""
        cuts = [(p, self._cut(p) if self._cut is not None else None) for p in params]
        whole: list[Any] = [p.grad for p, cut in cuts if cut is None]
        given = [self._widened(_of_gradient(p, cut)) for p, cut in cuts if cut is not None]
        due = [p for p, cut in cuts if cut is not None]
        parts = start_scatter(given, "gradients", later, label, self._room)
        summed = start_reduce(whole, "gradients", later=later, label=label)

        def end() -> None:
            for param, cut, part in zip(due, given, parts(), strict=True):
                take(param, cut, part.to(cut.x.dtype))
            summed()

        return end

    def _widened(self, cut: Cut) -> Cut:
        return cut if self._dtype is None else replace(cut, whole=cut.whole.to(self._dtype))

    def _arrive(self, started: _Sum) -> None:
        if started in self._started:
            self._started.remove(started)
            for guard in started.guards:
                guard.end()
            self._end(started)

    def _await(self) -> None:
        while self._started:
            self._arrive(self._started[0])


@dataclass(frozen=True, slots=True)
class _Added:
    """A hook of ours: several of one parameter keep their order."""

    call: Callable[[Any], None]

    def __call__(self, param: Any) -> None:
        self.call(param)


def hook(param: Any, before: Callable[[Any], None] | None, after: Callable[[Any], None]) -> None:
    """Call before and after a gradient is added to a parameter, also to one that is frozen for now.

    ``after`` comes before the program's own hooks of that kind: they read the gradient that one card would have.
    """
    trained = param.requires_grad
    if not (param.is_floating_point() or param.is_complex()):
        return
    param.requires_grad_(True)
    if before is not None:
        Tensor.register_hook(param, before)  # not what a subclass makes of it for users
    leaves.hook_first_behind(param, _Added(after), _Added)
    param.requires_grad_(trained)


def _anywhere(params: list[DistTensor]) -> list[bool]:
    """For each parameter of a mesh whether any rank has a gradient of it."""
    mesh = params[0].mesh
    line = of_ranks(mesh.neighbours(0), mesh.dim_names[0])
    return [there for (there,) in anywhere([[_pending(p.grad)] for p in params], line, params[0].device)]


def _pending(grad: Any) -> bool:
    return isinstance(grad, DistTensor) and bool(grad._spec.layout.pending)


def _are_alike(kept: Any, now: Any) -> bool:
    return (
        isinstance(kept, DistTensor)
        and isinstance(now, DistTensor)
        and kept._spec.layout is now._spec.layout
        and kept.dtype == now.dtype
    )


def _of_gradient(param: DistTensor, cut: Cut) -> Cut:
    """How a parameter's gradient is cut as the parameter is."""
    grad: Any = param.grad
    return Cut(grad, grad._local, cut.layout, cut.axis, cut.dim)


def take(param: DistTensor, cut: Cut, part: Tensor) -> None:
    """A gradient becomes its part under the layout with the cut."""
    grad = cut.x
    spec = grad._spec
    if spec.stride == contiguous_stride(spec.shape):
        local = strides.place(spec)(part) if spec.here else part
        grad._local, grad._spec, grad._memory = local, spec.with_layout(cut.layout), None
    elif param.grad is grad:
        made = Spec.make(cut.layout, spec.shape, contiguous_stride(spec.shape), spec.dtype, spec.device)
        param.grad = wrap(part.contiguous(), made)


def reduce_gradients(cuts: Sequence[Cut]) -> None:
    """Give the gradients of parameters the layouts with the cut, those that are pending in few large messages."""
    for x in {id(cut.x): cut.x for cut in cuts if not isinstance(cut.x.grad, DistTensor)}.values():
        # A program has put it there: what each rank has whole, as one card does.
        x.grad = shard_tensor(x.grad, x.mesh, [Replicate()] * x.mesh.ndim)
    due = [cut for cut in cuts if cut.x.grad._spec.layout is not cut.layout]  # type: ignore[union-attr]
    given = [_of_gradient(cut.x, cut) for cut in due]
    for cut, gradient, part in zip(due, given, start_scatter(given, "gradients", later=False)(), strict=True):
        take(cut.x, gradient, part)
