"""Whether a loss of microbatches is that of their batch: a look at a step, as it runs on the first of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from onecard._torch import fakes
from onecard._torch.modes import DispatchMode
from onecard._torch.names import in_backward, no_dispatch, tree_leaves
from onecard.comm.base import record
from onecard.comm.base.state import faked
from onecard.rules.call import Call, Schema, schema_of
from onecard.static.passes.dependence import (
    ADDS,
    ALIKE,
    MIXED,
    PLACES,
    ROWS,
    SINGLE,
    UNKNOWN,
    Drawn,
    Kind,
    Verdict,
    placed,
    told,
)
from onecard.static.passes.elements import are_apart, moves_nothing, same_elements
from onecard.static.passes.row_alike import EXPANDS
from onecard.static.passes.row_gradients import Passes
from onecard.static.passes.row_kinds import Kinds, tensors_of
from onecard.static.passes.row_linear import lifts, makes_alike
from onecard.static.passes.row_numbers import SCALES, TERMS, is_real, value_of
from onecard.static.passes.shadows import Shadows, memory_of
from onecard.static.step.nodes import draws_by
from onecard.tensor.convert import telling
from onecard.tensor.dispatch.build import meta_of
from onecard.tensor.dist_tensor import DistTensor


class Additive(DispatchMode):
    """Looks on while a step runs on ``rows`` rows.

    Args:
        leaves: its arguments; those that are tensors with dims are the batch.
        before: what a run on a k-th of the rows has shown, so that numbers which follow the rows are known by comparison.
        backward: whether operators of backward are looked at, too: else they are known by what it begins with.

    Attributes:
        joined: is told how microbatches give each value together: their sum (1), or mean (0); None: in no such way.
        draws: what draws random numbers, and of which shape; ``drawn``: where these have the rows of what they are made for.
    """

    def __init__(
        self, leaves: Sequence[Any], before: Verdict | None = None, k: int = 1, backward: bool = False
    ) -> None:
        super().__init__()
        self.known: Any = WeakIdKeyDictionary()
        self.shadows = Shadows(self.known)
        self.memory: dict[int, list[weakref.ref[Tensor]]] = {}
        batch = [x for x in leaves if isinstance(x, Tensor) and x.dim()]
        self.rows = batch[0].shape[0] if batch else 0
        self.kinds = Kinds(self.rows, before, k)
        self.verdict, self.first, self.backward = self.kinds.verdict, before is None, backward
        self.draws: list[tuple[str, tuple[int, ...]]] = []
        self.drawn: list[Drawn | None] = []
        self._like: Any = WeakIdKeyDictionary()
        self._columns: Any = WeakIdKeyDictionary()
        self.joined: Callable[[Tensor, int | None], None] | None = None
        self.passes = Passes(self._kind_of, self._keep, lambda: iter([*self.known]))
        for x in batch:
            self.given(x)

    def __enter__(self) -> Additive:
        self._told = ExitStack()
        self._told.enter_context(telling(self._moved))
        self.passes.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *fault: Any) -> None:
        super().__exit__(*fault)
        self.passes.__exit__(*fault)
        self._told.close()

    @property
    def unsure(self) -> bool:
        """Whether another number of rows would tell more."""
        return self.first and (self.rows == 1 or self.verdict.unsure)

    @property
    def moved(self) -> bool:
        """Whether a number in the step, or in what it returns, is another one than before."""
        before = {} if self.kinds.before is None else self.kinds.before.values
        return bool(self.kinds.strays) or any(i in before and before[i] != v for i, v in self.verdict.values.items())

    def forget_strays(self) -> None:
        """What was another one in this look than before, in a look at as many rows, is compared with no further look."""
        if (before := self.kinds.before) is not None:
            for key, i in self.kinds.strays:
                before.noted[key][i] = None
            before.values = {i: v for i, v in before.values.items() if self.verdict.values.get(i) == v}

    def given(self, x: Tensor) -> None:
        """A tensor is a part of the batch, too: it has a row for each of the batch's."""
        self._keep(x, Kind(ROWS, size=self.rows))

    def of(self, x: Tensor) -> Kind | None:
        """How a tensor depends on the rows; None: the batch is not in it, or it is a single row."""
        return _unless_single(self._kind_of(x))

    def returned(self, results: Any) -> Verdict:
        """The verdict, once the step has ended."""
        leaves = tree_leaves(results)
        self.verdict.results = [_unless_single(self.known.get(x)) for x in leaves if isinstance(x, Tensor)]
        self.verdict.values = {i: v for i, x in enumerate(leaves) if (v := self._fixed(x)) is not None}
        before = {} if self.kinds.before is None else self.kinds.before.values
        tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        for i in tensors:
            now, then = self.verdict.values.get(i), before.get(i)
            if None not in (now, then) and now != then:
                where = (
                    f"it holds {then:g} for a microbatch of {self.rows // self.kinds.k} rows, and {now:g} for the batch"
                )
                self.verdict.results[tensors.index(i)] = Kind(MIXED, where=where)
        self._compare_made(leaves, tensors)
        if not self.first:
            self.verdict.noted.clear()  # nobody compares with it
            self.verdict.held.clear()
        return self.verdict

    def _compare_made(self, leaves: Sequence[Any], tensors: Sequence[int]) -> None:
        """What the step makes without the batch, and gives back: it may go by the batch's length."""
        for i in tensors:
            x = leaves[i]
            if told(self.known.get(x)) or x.numel() == 1 or not self.shadows.has(x):
                continue
            now, then = self.shadows.of(x), None if self.kinds.before is None else self.kinds.before.held.get(i)
            if not is_real(now):
                continue
            self.verdict.held[i] = now.detach().clone()
            if then is None or torch.equal(now, then):
                continue
            self.verdict.results[tensors.index(i)] = Kind(
                MIXED, where="what it holds goes by the length of a microbatch"
            )

    def _fixed(self, x: Any) -> int | float | None:
        """The number that a result is, or holds, if nothing of the batch is in it."""
        if isinstance(x, Tensor):
            return None if told(self.known.get(x)) else value_of(x)
        return x if type(x) in (int, float) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if fakes.asks_device(func, args):
            return args[0].fake_device
        if func is torch.ops.aten.as_strided_.default and moves_nothing(args[0], *args[1:]):
            return func(*args, **(kwargs or {}))  # as a pool in channels_last says where its one element lies
        result = func(*args, **(kwargs or {}))
        if self.rows and (self.backward or not in_backward()):
            with no_dispatch(), torch.no_grad():
                self._look(func, args, kwargs or {}, result)
        return result

    # -- what is kept ------------------------------------------------------------------------------------------------------

    def _keep(self, x: Tensor, kind: Kind) -> None:
        self.known[x] = kind
        if isinstance(x, DistTensor) and kind.how != PLACES and (here := _scaled(kind, x.shape, x._local.shape)):
            self.known[x._local] = here  # for what makes it a plain tensor, and for layers that run on parts
            self.kinds.lengths |= {here.size} if here.how == ROWS else set()

    def _moved(self, x: Tensor, now: Tensor) -> None:
        """A value that comes to lie otherwise has the same rows."""
        if x is now or not self.rows or in_backward():
            return
        with no_dispatch(), torch.no_grad():
            if (kind := self._kind_of(x)) is not None:
                self._now(now, kind, False)
                self._tell_joined(now, kind)

    def _tell_joined(self, x: Tensor, kind: Kind | None) -> None:
        if self.joined is not None:
            self.joined(x, kind.degree if kind is not None and kind.how == ADDS else None)

    def _look(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        schema = schema_of(func)
        if not (faked.here or schema.effects):
            self.shadows.look(func, schema, args, kwargs, given, made)
        writes = bool(schema.written)
        try:
            found = [None] * len(made) if self._is_apart(schema, given, made) else self._found(func, args, kwargs, made)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):  # a call that no rule was made for
            lost = Kind(UNKNOWN, where=f"{schema.functional} at {record.user_line()}")
            found = [lost if any(map(told, map(self.known.get, given))) else None] * len(made)
        draws = draws_by(func, args, kwargs)
        place = next((at for x in given if (at := self._place(x)) is not None), None) if draws else None
        if draws and made:
            rows = self._drawn_in_rows(schema, made[0], place)
            found = [kind if told(kind) or rows is None else rows for kind in found]
        for x, kind in zip(made, found, strict=True):
            self._now(x, kind, writes)
            self._tell_joined(x, kind)
            of_columns = schema.functional == "arange" or (given and all(g in self._columns for g in given if g.dim()))
            if kind is None and of_columns:
                self._columns[x] = True  # which there are as many of as rows, by chance
        if draws:
            self.draws.append((f"{schema.functional} at {record.user_line()}", tuple(made[0].shape)))
            self.verdict.draws.append(tuple(made[0].shape))
            self.drawn.append(place)
        elif makes_alike(schema) and len(given) == len(made) == 1 and given[0].shape == made[0].shape:
            self._like[made[0]] = self._place(given[0])  # memory for what is drawn for each element of it

    def _drawn_in_rows(self, schema: Schema, x: Tensor, place: Drawn | None) -> Kind | None:
        """What is drawn without the batch: each row has its own if the whole batch draws as many times as much."""
        before = self.kinds.before
        if before is None or len(self.draws) >= len(before.draws):
            return None
        then, rows = before.draws[len(self.draws)], self.rows // self.kinds.k
        here = None if place is None else replace(place, rows=rows)
        if (found := placed(then, x.shape, rows, self.kinds.k, here)) is None:
            return Kind(UNKNOWN, where=f"{schema.functional} at {record.user_line()}")
        return None if found.dim < 0 else Kind(ROWS, found.dim, found.before, self.rows)

    def _place(self, x: Tensor) -> Drawn | None:
        """Where a tensor, or what it was made like, has each row of the batch."""
        kind = self._kind_of(x)
        if kind is None or kind.how != ROWS:
            found: Drawn | None = self._like.get(x)
            return found
        return Drawn(kind.dim, kind.before, self.rows) if kind.size == self.rows and not kind.order else None

    def _is_apart(self, schema: Schema, given: list[Tensor], made: list[Tensor]) -> bool:
        """Whether a call has nothing to do with the batch: an optimizer's, most of all, of which there are many."""
        if (
            not given
            or makes_alike(schema)
            or schema.functional in (*SCALES, *TERMS, *EXPANDS)
            or any(lifts(schema, x) for x in made)
        ):
            return False
        return all(self._kind_of(x) is None for x in given) and all(
            map(self.kinds.lengths.isdisjoint, (x.shape for x in made))
        )

    def _found(self, func: Any, args: Any, kwargs: Any, made: list[Tensor]) -> list[Kind | None]:
        call = Call(func, [meta_of(a) for a in args], {name: meta_of(v) for name, v in kwargs.items()})
        given = tensors_of(call, args, kwargs)
        kinds = [self._kind_of(x) for x in given]
        seen = [*map(self.shadows.of, given)]
        self.kinds.look(call, seen, kinds, [*map(self.shadows.made, given)])
        if self.rows == 1:  # a dim of one row is no factor: the whole batch tells
            lone = Kind(SINGLE) if any(map(told, kinds)) and not makes_alike(call.schema) else None
            return [lone] * len(made)
        begins = call.schema.name == "ones_like" and given and given[0].numel() == 1 and not self.passes.aside
        if begins and kinds[0] is not None:
            self.verdict.losses.append(kinds[0])  # what backward() begins with
        call.results = [meta_of(x) for x in made]
        return self.kinds.found(call, given, kinds, made, [*map(self.shadows.has, made)], seen)

    def _now(self, x: Tensor, kind: Kind | None, written: bool) -> None:
        """What a tensor is from now on, and what shares memory with it, where it was written to."""
        if kind is None and not written:
            return
        seen = [r for r in self.memory.get(memory_of(x), ()) if r() is not None]
        others = [o for r in seen if (o := r()) is not None]
        if kind is None:
            for other in (x, *others, *_bases(x)):
                was = self.known.get(other)
                if other is x or (was is not None and was.how == PLACES):  # numbers of rows no longer
                    self.known.pop(other, None)
            return
        if written:
            was = self.known.get(x)
            for other in {id(o): o for o in [*others, *_bases(x)] if not (o is x or are_apart(o, x))}.values():
                before = self.known.get(other)
                if before is not None and before.how == kind.how == ALIKE:
                    self._written_alike(other, before, x, kind)
                elif before != kind and not (kind.how == ALIKE and before is None):
                    self._keep(other, self._written(other, before, x, was, kind))
        self._keep(x, kind)
        if all(o is not x for o in others):
            seen.append(weakref.ref(x))  # autograd takes a gradient over only if nobody else has it
        self.memory[memory_of(x)] = seen

    def _written_alike(self, x: Tensor, before: Kind, part: Tensor, kind: Kind) -> None:
        """A part of what was the same for all rows was written to: it is so still along dims that the part has whole."""
        mine = [*zip(x.shape, x.stride(), strict=True)]
        theirs = {at: d for d, at in enumerate(zip(part.shape, part.stride(), strict=True)) if kind.alike(d)}
        whole = [d for d, at in enumerate(mine) if at in theirs or at[0] == 1]
        if len(whole) == x.dim() or (x.numel() == part.numel() and kind.dims is None):
            self.known[x] = replace(before, zero=before.zero and kind.zero)
        elif dims := frozenset(filter(before.alike, whole)):
            self.known[x] = replace(before, dims=dims, size=0, zero=False)
        else:
            self.known.pop(x, None)

    def _written(self, x: Tensor, before: Kind | None, part: Tensor, was: Kind | None, kind: Kind) -> Kind:
        """What memory is that was of a kind, once it was written to by way of a view. ``was``: the view's kind until then."""
        if (x.shape, x.stride(), x.storage_offset()) == (part.shape, part.stride(), part.storage_offset()):
            return kind
        if before is None or same_elements(x, part):
            return self._seen_in(x, kind)
        if before.how == MIXED:
            return kind if kind.how == ALIKE and part.numel() > x.numel() else before
        if before.how == ROWS and was is not None and was.how in (MIXED, UNKNOWN):
            return was  # some rows were written to, by their number
        of_rows = before.how == ROWS and was is not None and was.how == ROWS and kind.how in (ROWS, ALIKE)
        if of_rows and before.degree == kind.degree and (kind.how == ALIKE or kind.order == before.order):
            return replace(before, learns=before.learns or kind.learns)
        return self._seen_in(x, kind)

    def _seen_in(self, x: Tensor, kind: Kind) -> Kind:
        """What memory is of which a part was written."""
        dims = [d for d, n in enumerate(x.shape) if n == kind.size]
        if kind.how == ROWS and len(dims) == 1:
            return replace(kind, dim=dims[0], before=1, degree=0, where="")
        return kind if kind.how == MIXED else Kind(UNKNOWN, where=f"memory written to at {record.user_line()}")

    def _kind_of(self, x: Tensor) -> Kind | None:
        kind: Kind | None = self.known.get(x)
        if kind is None and isinstance(x, DistTensor):
            part: Kind | None = self.known.get(x._local)
            if part is not None and part.how == ROWS:  # a layer that ran on parts made it
                return _scaled(part, x._local.shape, x.shape)
        if kind is None and x in self._columns:
            return None
        if kind is None and tuple(x.shape) == (self.rows,) and not x.is_floating_point() and is_real(x):
            return Kind(PLACES, size=self.rows) if torch.equal(x, torch.arange(self.rows, device=x.device)) else None
        return kind


def _scaled(kind: Kind, shape: Sequence[int], to: Sequence[int]) -> Kind | None:
    """A kind of a tensor as one of its part on a rank, or the other way: that has another number of rows."""
    if kind.how != ROWS and not (kind.how == ALIKE and kind.size):
        return kind
    size, rest = divmod(kind.size * to[kind.dim], shape[kind.dim] or 1)
    if rest or not size:
        return None if kind.how == ROWS else replace(kind, size=0)
    return replace(kind, size=size)


def _bases(x: Tensor) -> list[Tensor]:
    return [x._base] if x._base is not None else []


def _unless_single(kind: Kind | None) -> Kind | None:
    return None if kind is not None and kind.how == SINGLE else kind
