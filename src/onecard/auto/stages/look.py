"""A look at a plain model ahead of its microbatches, without data: whether each row of its batch stands for itself."""

from __future__ import annotations

import gc
import operator
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from onecard._torch import fakes
from onecard._torch.hooks import without_cached_weights
from onecard._torch.modes import DispatchMode
from onecard._torch.names import tree_flatten, tree_leaves, tree_map, tree_unflatten
from onecard.comm.base.record import user_line
from onecard.errors import PlanError
from onecard.static.capture.sketch import Sketch
from onecard.static.guards.held import NOTHING, HeldValues
from onecard.static.guards.results import in_parts, tensors_inside
from onecard.static.guards.unchanged import is_plain
from onecard.static.passes.additive import Additive
from onecard.static.passes.dependence import ADDS, ALIKE, MIXED, ROWS, UNKNOWN, Kind, Verdict, placed
from onecard.static.passes.row_numbers import is_real
from onecard.tensor.dist_tensor import DistTensor
from onecard.tensor.random_operators.one_card import draws_as_one_card

_PLAIN = (bool, int, float, str, type(None))
_OF_ROWS = (ROWS, ADDS, MIXED, UNKNOWN)


class _Shape(tuple[int, ...]):
    """A tensor's, in its place."""


class RowLook:
    """Looks at the forward of a model with the rows of one of ``count`` microbatches, then with all.

    Args:
        module: is called with fake tensors in place of its own.
        leaves: of what it is called with, ``tree`` its structure; ``cut``: which of them are the batch.

    Attributes:
        lies: where the batch's rows lie in what is drawn, by its shape (``OfBatch``).
    """

    def __init__(self, module: nn.Module, count: int, leaves: Sequence[Any], cut: Sequence[int], tree: Any) -> None:
        self.module, self.count, self.leaves, self.cut, self.tree = module, count, leaves, cut, tree
        self.sketch = Sketch(lambda _: False, lambda _: None)
        self.lies: dict[tuple[int, ...], tuple[int, int] | None] = {}
        self._looked: list[Additive] = []

    def joins(self) -> list[bool]:
        """Which results have rows; the others are the same for all microbatches.

        Raises:
            PlanError: rows do not stand for themselves.
        """
        try:
            with without_cached_weights(), _held(self.module) as held:
                state = {name: self._without_data(x, len(x) if x.ndim else None) for name, x in _state(self.module)}
                found = self._pair(state, held)
                if held.changes():
                    self._again(state, found)
            self._check_left()
        except PlanError:
            raise
        except Exception as why:
            if isinstance(why, fakes.values_needed()) or isinstance(why.__cause__, fakes.values_needed()):
                raise self._refused(f"{_line(why)} reads a value, which may be another one for each") from why
            raise self._refused(f"a look at one of them ends at {_line(why)} in {type(why).__name__}: {why}") from why
        for name, x in state.items():
            if x._version:
                what = "parameter" if isinstance(x, nn.Parameter) else "buffer"
                raise self._refused(f"it writes to its {what} {name!r}, once for each microbatch")
        return found

    def _again(self, state: Any, found: list[bool]) -> None:
        """Another call may go another way than the first one."""
        now = HeldValues([self.module])
        if self._pair(state, now) != found:
            raise self._refused("its second call gives other results than the first one")
        self._check_changed(now)

    def _pair(self, state: Any, held: HeldValues) -> list[bool]:
        """What a look at a microbatch and one at the batch tell, both of a model as it is before them."""
        rows = len(self.leaves[self.cut[0]])
        part, first = self._run(state, rows // self.count, None)
        noted = {key: _noted(now) for key, (_, now) in held.changes().items()}
        held.all_back()
        whole, results = self._run(state, rows, part.verdict)
        self._looked.append(whole)
        self._check_kept(whole, held)
        self._check_objects(first, results)
        self._check_noted(held, noted)
        self._look_at_draws(part, whole)
        seen = whole.verdict
        if seen.normalized:
            raise self._refused(f"batch norm at {seen.normalized[0]} takes the mean and variance of the batch")
        if seen.open or seen.unsure:
            raise self._refused("a number in it may count rows")
        kinds = iter(seen.results)
        return [isinstance(x, _Shape) and self._has_rows(i, next(kinds), x) for i, x in enumerate(results)]

    def _run(self, state: Any, rows: int, before: Verdict | None) -> tuple[Additive, list[Any]]:
        """What a look at so many rows shows, and what the model gives back: of tensors their shapes."""
        given = [self._without_data(x, rows if i in self.cut else None) for i, x in enumerate(self.leaves)]
        looker = Additive([given[i] for i in self.cut], before, 1 if before is None else self.count, backward=True)
        hooks = _Hooks()
        args, kwargs = tree_unflatten(given, self.tree)
        with (
            numbers_kept(),
            _generators_kept() as kept,
            _Sketched(self.sketch, self._without_data, kept),
            looker,
            hooks,
        ):
            out = in_parts(functional_call(self.module, state, args, kwargs, strict=False), "a model")
            self._check_given(given, args, kwargs)
            results = tree_leaves(out)
            looker.returned(out)
            if hooks.heard or _has_own_backward(results):
                self._check_gradients(looker, state, results)
        return looker, [_Shape(x.shape) if isinstance(x, Tensor) else x for x in results]

    def _check_kept(self, looker: Additive, held: HeldValues) -> None:
        """Whether the forward, or a hook, puts a value aside, which then is that of one microbatch: in an attribute, a list."""
        for key, (_, now) in held.changes().items():
            for x in tensors_inside(now, set()):
                if isinstance(x, Tensor) and _is_of_rows(looker, x):
                    raise self._refused(
                        f"{held.path(key)} keeps a value of its forward, {list(x.shape)}, which would be one microbatch's"
                    )

    def _check_left(self) -> None:
        """Whether a value lives on where nobody has looked."""
        for looker in self._looked:
            # What is drawn without the batch has data, which the look itself keeps.
            rows = lambda known: [x for x in known if _is_of_rows(looker, x) and not is_real(x)]  # noqa: B023, E731
            if rows(looker.known) and gc.collect() is not None and (kept := rows(looker.known)):
                raise self._refused(
                    f"a hook, or a list outside of it keeps a value of its forward, {list(kept[0].shape)}, which would be one "
                    "microbatch's"
                )

    def _look_at_draws(self, part: Additive, whole: Additive) -> None:
        """Where rows have random numbers of their own."""
        for (words, now), (_, then), known in zip(part.draws, whole.draws, part.drawn, strict=False):
            found = placed(now, then, part.rows, self.count, known)
            if found is None or (words.startswith("randperm") and found.dim >= 0):
                raise self._refused(f"in what {words} draws, {list(now)}, nobody can tell where the batch's rows are")
            if found.dim < 0 and not draws_as_one_card():
                raise self._refused(
                    f"{words} draws for the batch, not for each of its rows, which is one card's under oc.one_card_random() alone"
                )
            place = (found.dim, found.before) if found.dim >= 0 else None
            if self.lies.setdefault(now, place) != place:
                raise self._refused(
                    f"{words} draws {list(now)}, where the batch's rows lie otherwise than in another draw"
                )

    def _check_gradients(self, looker: Additive, state: dict[str, Tensor], results: list[Any]) -> None:
        """Whether what rows send back adds up, where hooks of activations, or a program's own functions, have a part in it."""
        ends = [x for x in results if isinstance(x, Tensor) and x.requires_grad and x.ndim and len(x) == looker.rows]
        learns = {name: x for name, x in state.items() if x.requires_grad}
        if not ends or not learns:
            return
        seeds = [torch.empty_like(x) for x in ends]
        for seed in seeds:
            looker.given(seed)
        grads = torch.autograd.grad(ends, [*learns.values()], seeds, allow_unused=True)
        for name, grad in zip(learns, grads, strict=True):
            kind = None if grad is None else looker.of(grad)
            if kind is not None and (kind.how, kind.degree) != (ADDS, 1):
                raise self._refused(
                    f"a hook, or a backward of its own, has a part in the gradient of {name!r}, which then is no sum over rows"
                    + (f": {kind.where}" if kind.where else "")
                )

    def _without_data(self, x: Any, rows: int | None = None) -> Any:
        """What stands for a tensor, with so many rows. What a forward makes of none of these has data."""
        if not isinstance(x, Tensor):
            return x
        if rows is None and type(x) is Tensor and not x.requires_grad:  # a mask, which may be read
            return x.clone()
        shape = x.shape if rows is None else (rows, *x.shape[1:])
        with self.sketch.mode:
            made = torch.empty(shape, dtype=x.dtype, device=fakes.device_of(x))
        return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made

    def _check_objects(self, part: list[Any], whole: list[Any]) -> None:
        """Whether what it gives back beside tensors is the same for all microbatches."""
        for x, before in zip(whole, part, strict=True):
            same = x is before or (type(x) is type(before) and (isinstance(x, _Shape) or (is_plain(x) and x == before)))
            if not same:
                raise self._refused(
                    f"what it gives back, {type(x).__name__}, is no tensor, or goes by the number of rows"
                )

    def _has_rows(self, i: int, kind: Kind | None, x: _Shape) -> bool:
        """Whether a result has a row for each of the batch, and not the same for all microbatches."""
        if kind is None or (kind.how == ALIKE and kind.dims is None):
            return False
        outermost = kind.how == ROWS and (kind.dim, kind.before) == (0, 1) and x[0] % kind.size == 0
        if outermost and not kind.degree and not kind.order:
            return True
        raise self._refused(
            f"result {i} of its forward, {list(x)}, is no row for each of the batch"
            + (f": {kind.where}" if kind.where else "")
            + (" (a loss that the model computes itself: return the outputs, and compute it outside)" if not x else "")
        )

    def _refused(self, why: str) -> PlanError:
        return PlanError(
            f"parallelize: microbatches={self.count}: {type(self.module).__name__} goes through its stages in microbatches, and "
            f"{why}. Its numbers would not be one card's: microbatches=1, or oc.to_static(step, plan=plan), which knows the loss",
            "microbatches",
        )

    def _check_given(self, given: list[Any], args: Any, kwargs: Any) -> None:
        """Whether a forward writes to what it is given, of which each microbatch has its own."""
        leaves, tree = tree_flatten((args, kwargs))
        if tree != self.tree or not all(map(operator.is_, leaves, given)):
            raise self._refused("it writes to a list or a dict that it is given")
        for x in given:
            if isinstance(x, Tensor) and x._version:
                raise self._refused(f"it writes to a tensor that it is given, {list(x.shape)}")

    def _check_noted(self, held: HeldValues, part: dict[tuple[int, Any], Any]) -> None:
        """Whether what a forward or its hooks write down outside is the same for a microbatch and for the batch."""
        whole = {key: _noted(now) for key, (_, now) in held.changes().items()}
        for key in {**part, **whole}:
            if part.get(key, NOTHING) != whole.get(key, NOTHING):
                raise self._refused(f"it writes a number to {held.path(key)} that is not the same for a microbatch")

    def _check_changed(self, held: HeldValues) -> None:
        """Whether a forward or its hooks count calls: between two looks nothing that they write down may change."""
        for key, (was, now) in held.changes().items():
            if _noted(was) != _noted(now):
                raise self._refused(f"it changes {held.path(key)}, once for each microbatch")


def _line(fault: Exception) -> str:
    """The innermost line of the program at which something ended."""
    at, found = fault.__traceback__, None
    while at is not None:
        found, at = at.tb_frame, at.tb_next
    return user_line(found)


def _is_of_rows(looker: Additive, x: Tensor) -> bool:
    kind = looker.of(x)
    return kind is not None and kind.how in _OF_ROWS


@contextmanager
def _held(module: nn.Module) -> Iterator[HeldValues]:
    """What a forward and its hooks can reach; what they leave there is taken out: tables made once would have no data."""
    held = HeldValues([module])
    try:
        yield held
    finally:
        held.all_back()


def _noted(x: Any) -> Any:
    """What of a value can tell one call from another: numbers, words, how many there are."""
    if x is NOTHING or isinstance(x, _PLAIN):
        return x
    if isinstance(x, list | tuple | deque):
        return [len(x), *map(_noted, x)]
    if isinstance(x, dict):
        return [*x, *map(_noted, x.values())]
    return len(x) if isinstance(x, set | frozenset) else type(x)


@contextmanager
def numbers_kept() -> Iterator[None]:
    """Python's and NumPy's random numbers are drawn inside as if they were not."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def _generators_kept() -> Iterator[Callable[[Any], None]]:
    """torch's random numbers likewise, of each generator that is said, also those of the program's own."""
    states: dict[torch.Generator, Tensor] = {}

    def keep(found: Any) -> None:
        if isinstance(found, torch.Generator) and found not in states:
            states[found] = found.get_state()

    keep(torch.default_generator)
    try:
        yield keep
    finally:
        for generator, state in states.items():
            generator.set_state(state)


class _Sketched(DispatchMode):
    """Runs operators without data where a tensor has none, nor where it is laid out: a table of an earlier forward."""

    def __init__(self, sketch: Sketch, stand_in: Callable[[Any], Any], draws_from: Callable[[Any], None]) -> None:
        super().__init__()
        self._sketch, self._stand_in, self._draws_from = sketch, stand_in, draws_from

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DistTensor) for kind in types):
            args, kwargs = tree_map(
                lambda x: self._stand_in(x) if isinstance(x, DistTensor) else x, (args, kwargs or {})
            )
        if fakes.asks_device(func, args):
            return args[0].fake_device
        if kwargs and "generator" in kwargs:
            self._draws_from(kwargs["generator"])
        return self._sketch.run(func, args, kwargs or {})


class _Hooks(TorchFunctionMode):
    """Whether a forward registers a hook of a gradient."""

    heard = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard |= func is Tensor.register_hook
        return func(*args, **(kwargs or {}))


def _has_own_backward(results: Sequence[Any]) -> bool:
    """Whether a function with a backward in Python has a part in results: a program's, or a hook of a module."""
    waiting = [x.grad_fn for x in results if isinstance(x, Tensor) and x.grad_fn is not None]
    seen = {*waiting}
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            return True
        more = [before for before, _ in node.next_functions if before is not None and before not in seen]
        seen.update(more)
        waiting += more
    return False


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=True)
    yield from module.named_buffers(remove_duplicate=True)
